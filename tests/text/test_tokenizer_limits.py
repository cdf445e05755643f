"""Tokenizers made to do harm: one line within seconds, no memory of kvant's own process, and the next text
works.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.counts import count
from support.processor_time import at_most
from support.tokenizers_made import write_tokenizer

import kvant
from kvant.errors import KvantError, ModelError, PromptError
from kvant.text import process as bounded
from kvant.text.tokenizer import Tokenizer, load_tokenizer

# bytes: copies of the file or of a text of 32 million characters; not what is made of them
GROWTH = 250_000_000


@contextmanager
def harmless(kind: type[KvantError], message: str) -> Iterator[None]:
    """One printable line of this kind, within the limit of processor time, while this process stays small."""
    watched = sys.platform == "linux"
    if watched:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak_bytes() if watched else 0
    # with a process's start
    with at_most(bounded.TIME_LIMIT_S + 5), pytest.raises(kind, match=message) as caught:
        yield
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1100
    assert not watched or _peak_bytes() - before < GROWTH


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def spoiled(folder: Path, family: str, spoil: Callable[[dict[str, Any]], object], **config: Any) -> Path:
    """A family's folder with another tokenizer.json; ``llama3`` and ``unigram`` are taken as the file
    says.
    """
    path = write_tokenizer(folder, family, **config) / "tokenizer.json"
    raw = json.loads(path.read_text())
    spoil(raw)
    path.write_text(json.dumps(raw))
    return folder


def normalizer(*steps: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.update(normalizer={"type": "Sequence", "normalizers": list(steps)})


def split(pattern: str) -> Callable[[dict[str, Any]], None]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return lambda raw: raw.update(pre_tokenizer=step)


def replace(text: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def pieces_of_a(raw: dict[str, Any]) -> None:
    """Every run of the letter is a piece."""
    named = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0]]
    raw["model"] |= {"vocab": named + [["a" * n, -1.0 * n] for n in range(1, 3000)], "byte_fallback": False}
    raw["pre_tokenizer"] = None


TOO_MUCH = "it takes longer than 0.5 s|it needs too much memory"
# What is done to a family's file, the text, and one that still works.
TEXTS: dict[str, tuple[str, Callable[[dict[str, Any]], None], str, str]] = {
    "prepending": ("llama3", normalizer(*[{"type": "Prepend", "prepend": "a" * 200_000}] * 300), "é", ""),
    "doubling": ("llama3", normalizer(*[replace("a", "aa")] * 40), "a", "z"),
    "nested repeats": ("llama3", split("(a+)+$"), "a" * 1_000_000 + "b", "z"),
    "quadratic repeats": ("llama3", split("a*a*a*b|a*c"), "a" * 8_000_000, "z"),
    "long pieces": ("unigram", pieces_of_a, "a" * 1_000_000, "aaa z"),
}


@pytest.mark.parametrize(("family", "spoil", "text", "harmless_text"), TEXTS.values(), ids=TEXTS)
def test_a_text_that_takes_too_much(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, spoil: Any, text: str, harmless_text: str
) -> None:
    tokenizer = load_tokenizer(spoiled(tmp_path, family, spoil))
    expected = tokenizer.encode(harmless_text)
    monkeypatch.setattr(bounded, "TIME_LIMIT_S", 0.5)
    with harmless(PromptError, f"the prompt cannot be encoded: .*({TOO_MUCH}|retry-limit-in-match over)"):
        tokenizer.encode(text)
    monkeypatch.undo()
    assert tokenizer.encode(harmless_text) == expected


def test_a_decoder_that_grows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pocket: tuple[Any, Tokenizer]
) -> None:
    def grow(raw: dict[str, Any]) -> None:
        raw["decoder"] = {"type": "Sequence", "decoders": [raw["decoder"], *[replace("a", "aa")] * 40]}

    tokenizer = load_tokenizer(spoiled(tmp_path, "llama3", grow))
    letter = tokenizer.convert_tokens_to_ids("a")
    cache = pocket[0].make_cache(64)
    fields: Any = {"sampler": lambda _: mx.array([letter]), "prompt_cache": cache}
    run = kvant.stream_generate(pocket[0], tokenizer, [1, 2, 3], **fields)
    monkeypatch.setattr(bounded, "TIME_LIMIT_S", 0.5)
    with harmless(ModelError, "the tokenizer cannot decode: "):
        tokenizer.decode([letter])
    with harmless(ModelError, "the tokenizer cannot decode"):
        next(run)
    monkeypatch.undo()
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(["z", "y"])) == "zy"
    assert len(list(kvant.stream_generate(*pocket, [1, 2, 3], max_tokens=2, prompt_cache=cache))) <= 2


def test_many_empty_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an eighth of the memory, to spare time. The full count is for all of it."""
    folder = write_tokenizer(tmp_path, "llama3")
    number, share = count(1_200_000, 20_000_000), count(8, 1)
    for name in ("ADDRESS_LIMIT", "MEMORY_LIMIT"):
        monkeypatch.setattr(bounded, name, getattr(bounded, name) // share)
    (folder / "tokenizer.json").write_bytes(b'{"model": [' + b"{}," * number + b"{}]}")
    with harmless(ModelError, "the tokenizer cannot be loaded: it needs too much memory"):
        load_tokenizer(folder)


def test_a_limit_that_no_parent_switches_off() -> None:
    """A process has its parent's blocked and ignored signals."""
    usual = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        process = bounded.TextProcess(time_limit_s=0.5)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGPROF, usual)
    loop = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(bounded.TextError, match="takes longer"):
        process.ask({"do": "render", "template": loop, "variables": {}})
    process.close()


def test_ctrl_c_during_a_long_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(spoiled(tmp_path, "unigram", pieces_of_a))
    expected = tokenizer.encode("aaa z")
    # also where whoever runs the tests ignores it
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            tokenizer.encode("a" * 1_000_000)
    finally:
        interrupt.cancel()
        interrupt.join()
        signal.signal(signal.SIGINT, usual)
    assert tokenizer.encode("aaa z") == expected


def test_long_texts_that_are_none_the_worse(pocket: tuple[Any, Tokenizer], tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog, isn't it? \n" * count(4_000, 18_000)
    for tokenizer in (pocket[1], load_tokenizer(write_tokenizer(tmp_path, "llama3"))):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert len(
            tokenizer.apply_chat_template([{"role": "user", "content": text}], chat_template="{{ messages }}")
        )
