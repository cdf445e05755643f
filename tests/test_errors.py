"""An error's text: one printable line of bounded width, with the start and the end of what it quotes."""

import pickle
import unicodedata

import pytest
from rich.cells import cell_len

from kvant.errors import (
    ArgumentError,
    CheckpointError,
    KvantError,
    ModelError,
    PromptError,
    WeightsError,
    did_you_mean,
    library_errors,
    one_line,
    printable,
)

ROOM = 3 * 79  # a character of two columns may leave a line's last one empty
HOSTILE = {
    "long": "x" * 100_000,
    "many words": "word " * 100_000,
    "wide": "\N{CJK UNIFIED IDEOGRAPH-6F22}" * 10_000,
    "escapes of a terminal": "\x1b]52;c;aGVsbG8=\x07\x1b[2J\x9b31m" * 1000,
    "marks of direction": "\N{RIGHT-TO-LEFT OVERRIDE}\N{LEFT-TO-RIGHT ISOLATE}gnp.exe" * 1000,
    "of no width": "\N{ZERO WIDTH SPACE}\N{ZERO WIDTH JOINER}\N{WORD JOINER}\ufeff" * 1000,
    "lines": "one\ntwo\r\nthree\u2028four\u2029five\x0bsix\x85seven" * 1000,
    "half a character": "\ud800\udfff" * 1000,
    "combining": "e" + "\N{COMBINING ACUTE ACCENT}" * 10_000,
    "tags": "\U000e0041\U000e007f" * 1000,
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_name(name: str) -> None:
    for kind in (KvantError, ModelError, CheckpointError):
        text = str(kind(f"START {name}: a reason END"))
        assert text.isprintable()
        assert not {unicodedata.category(c) for c in text} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
        assert text.startswith("START ")
        assert text.endswith(" a reason END")
        assert cell_len(f"kvant: error: {text}") <= ROOM
    text = one_line(RuntimeError(name))  # a library's
    assert text.isprintable()
    assert 0 < cell_len(text) <= ROOM
    assert all(cell_len(printable(name, columns)) <= columns for columns in (40, 41, 100))


def test_what_fits_stays() -> None:
    assert one_line(RuntimeError("\n \n")) == "RuntimeError"
    wide = "Zo\u00eb: \N{CJK UNIFIED IDEOGRAPH-6F22} is 5; expected 'a b'"
    for text in ("", "plain", "x" * 223, wide, "a" * 100 + " " + "b" * 100):
        assert printable(text) == str(KvantError(text)) == text


def test_a_path_keeps_its_ends_and_the_reason_stays_whole() -> None:
    path = "/Users/somebody/" + "folder/" * 50 + "config.json"
    text = str(ModelError(f"{path}: num_hidden_layers is 'x'; expected an int"))
    assert text.startswith("/Users/somebody/")
    assert text.endswith("/config.json: num_hidden_layers is 'x'; expected an int")
    path, digests = "/Users/somebody/" + "folder/" * 30, ("a" * 64, "b" * 64)
    text = f"{path}: sha256 {digests[0]}; expected {digests[1]}; remove {path} and pull again"
    assert str(WeightsError(text)) == text
    assert cell_len(str(WeightsError("word " * 10_000))) <= 1000


def test_names_that_look_like_one_or_begin_with_it() -> None:
    names = ["Qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-90b", "pocket"]
    assert did_you_mean("Poket", names) == "; did you mean 'pocket'?"
    assert did_you_mean("qwen3", names[:1] + names[3:]).count("'") == 2 * 4
    assert did_you_mean("qwen3", names).count("'") == 2 * 5
    assert did_you_mean("POCKET", names) == "; did you mean 'pocket'?"
    assert did_you_mean("qwe", names) == did_you_mean("gemma3", names) == ""


def test_a_wrong_argument_is_worded_in_the_callers_names() -> None:
    error = pickle.loads(pickle.dumps(ArgumentError("top_p", "is 0.5, which has no effect without", "temp")))
    assert isinstance(error, ValueError)
    assert str(error) == "top_p is 0.5, which has no effect without temp"
    assert error.worded(lambda name: f"<{name}>") == "<top_p> is 0.5, which has no effect without <temp>"
    assert str(ArgumentError("bits", "is 3; expected 4")) == "bits is 3; expected 4"


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (RuntimeError("no\nmore"), PromptError, "it failed: no"),
        (type("PanicException", (BaseException,), {})("of Rust"), PromptError, "it failed: of Rust"),
        (ModelError("ours"), ModelError, "ours"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (SystemExit(3), SystemExit, "3"),
    ],
)
def test_other_libraries_errors(raised: BaseException, expected: type[BaseException], message: str) -> None:
    with pytest.raises(expected) as caught, library_errors(PromptError, "it failed"):
        raise raised
    assert str(caught.value) == message
