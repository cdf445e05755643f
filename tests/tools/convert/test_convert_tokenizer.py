"""``kvant convert --tokenizer``: the same ids as transformers' own class on the same files; nothing else is run."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sentencepiece
import transformers
from sentencepiece import sentencepiece_model_pb2
from support import vocabularies
from support.checkpoints import llama_config, qwen2_config, reference_model, save_checkpoint
from support.command import COMMAND, call, run
from support.counts import count
from tokenizers import Tokenizer

import kvant
from kvant.errors import ConvertError, KvantError, ModelError
from kvant.tools.convert import make_tokenizer as making
from kvant.tools.convert import make_tokenizer_process as program
from kvant.tools.convert.make_tokenizer import make_tokenizer
from kvant.tools.convert.tokenizer import convert_tokenizer

COUNT = count(300, 10_000)
BPE_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LLAMA_TOKENS = ["<s>", "</s>", "<unk>", "[INST]", "<fim>"]


def _bpe(folder: Path) -> None:
    vocabularies.byte_level(folder, BPE_TOKENS)


def _bert(folder: Path) -> None:
    vocabularies.word_piece(folder, BERT_TOKENS)


def _llama(folder: Path) -> None:
    vocabularies.sentence_piece(folder, control_symbols=["[INST]"], user_defined_symbols=["<fim>"])


MAKERS = {"Qwen2Tokenizer": _bpe, "GPT2Tokenizer": _bpe, "LlamaTokenizer": _llama, "BertTokenizer": _bert}
END = {
    "__type": "AddedToken",
    "content": "<|im_end|>",
    "lstrip": False,
    "rstrip": True,
    "normalized": False,
    "single_word": False,
}
ADDED = {
    "340": END | {"content": "<|box|>", "special": True, "lstrip": True},
    "341": END | {"content": "<tool>", "special": False, "normalized": True, "rstrip": False},
}


@contextmanager
def _made_here() -> Iterator[None]:
    """The program that makes a tokenizer runs in this process, without limits: another would import transformers."""

    def run(private: Path) -> int:
        with contextlib.chdir(private):
            return program.main(0, 0, 0)

    with patch.object(program, "limit"), patch.object(making, "_run", run):
        yield


@pytest.fixture
def made_here() -> Iterator[None]:
    """For a test of what is made, and not of the process."""
    with _made_here():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each class, with its vocabulary."""
    root = tmp_path_factory.mktemp("trained")
    for name, make in MAKERS.items():
        (root / name).mkdir()
        make(root / name)
    return root


@pytest.fixture
def vocabulary(trained: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function (class, settings) -> a folder with a vocabulary and a tokenizer_config.json."""

    def make(name: str, **settings: Any) -> Path:
        folder = tmp_path / "source"
        shutil.copytree(trained / name, folder)
        vocabularies.settings(folder, **{"tokenizer_class": name} | settings)
        return folder

    return make


@pytest.fixture(scope="module")
def plain(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """A function (class) -> the tokenizer of its vocabulary without other settings, made once."""

    @cache
    def make(name: str) -> bytes:
        folder = tmp_path_factory.mktemp("plain") / name
        shutil.copytree(trained / name, folder)
        vocabularies.settings(folder, tokenizer_class=name)
        with _made_here():
            return make_tokenizer(folder)

    return make


def _same(folder: Path, tokens: list[str], size: int = COUNT, data: bytes | None = None) -> Tokenizer:
    """Ids, and text of them, are those of transformers' class for the folder. The tokenizer made, or ``data``."""
    made = Tokenizer.from_str((data or make_tokenizer(folder)).decode())
    name = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class", "LlamaTokenizer")
    reference = getattr(transformers, name.removesuffix("Fast")).from_pretrained(folder)
    texts = vocabularies.strings(size, tokens)
    for special in (True, False):
        encoded = [e.ids for e in made.encode_batch(texts, add_special_tokens=special)]
        assert encoded == reference(texts, add_special_tokens=special)["input_ids"]
    for skip in (True, False):
        expected = reference.batch_decode(encoded, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert made.decode_batch(encoded, skip_special_tokens=skip) == expected
    assert made.get_vocab() == reference.get_vocab()
    return made


SAME: list[tuple[str, list[str], dict[str, Any]]] = [
    ("Qwen2Tokenizer", BPE_TOKENS, {}),
    (
        "Qwen2TokenizerFast",
        [*BPE_TOKENS, "<|box|>", "<tool>"],
        {"eos_token": "<|im_end|>", "added_tokens_decoder": ADDED},
    ),
    ("GPT2Tokenizer", BPE_TOKENS, {"add_prefix_space": True, "add_bos_token": True, "pad_token": None}),
    ("GPT2Tokenizer", BPE_TOKENS, {"eos_token": END, "additional_special_tokens": ["<|im_start|>", END]}),
    ("LlamaTokenizer", LLAMA_TOKENS, {}),
    ("LlamaTokenizer", LLAMA_TOKENS, {"legacy": True, "add_bos_token": True, "add_eos_token": True}),
    ("LlamaTokenizerFast", [*LLAMA_TOKENS, "<pad>"], {"legacy": False, "pad_token": "<pad>", "add_bos_token": False}),
    ("BertTokenizer", BERT_TOKENS, {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False}),
    ("BertTokenizer", BERT_TOKENS, {}),
]


@pytest.mark.usefixtures("made_here")
@pytest.mark.parametrize(("name", "tokens", "settings"), SAME)
def test_the_same_as_transformers(
    vocabulary: Callable[..., Path],
    plain: Callable[[str], bytes],
    name: str,
    tokens: list[str],
    settings: dict[str, Any],
) -> None:
    folder = vocabulary(name.removesuffix("Fast"), **{"tokenizer_class": name} | settings)
    made = _same(folder, tokens, data=None if settings else plain(name))
    if "added_tokens_decoder" in settings:
        assert (made.token_to_id("<|box|>"), made.token_to_id("<tool>")) == (340, 341)


@pytest.mark.usefixtures("made_here")
def test_tokens_of_the_older_files(vocabulary: Callable[..., Path]) -> None:
    folder = vocabulary("Qwen2Tokenizer", eos_token="<|endoftext|>")
    (folder / "added_tokens.json").write_text('{"<|box|>": 340, "<tool>": 341}')
    more = {"eos_token": END, "additional_special_tokens": ["<|box|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(more))
    made = _same(folder, [*BPE_TOKENS, "<|box|>", "<tool>"])
    assert made.decode([340, 341]) == "<tool>"  # the other one is special


def test_a_class_from_the_model_type(vocabulary: Callable[..., Path], plain: Callable[[str], bytes]) -> None:
    folder = vocabulary("LlamaTokenizer", tokenizer_class=None)
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    (folder / "tokenizer_config.json").unlink()
    assert make_tokenizer(folder) == plain("LlamaTokenizer")


def test_the_same_as_sentencepiece(vocabulary: Callable[..., Path], plain: Callable[[str], bytes]) -> None:
    """But at the start of a text: before a space or a token, transformers adds no other space."""
    folder = vocabulary("LlamaTokenizer")
    made = Tokenizer.from_str(plain("LlamaTokenizer").decode())
    reference = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    texts = [text for text in vocabularies.strings(COUNT, ["<fim>"]) if not text.startswith((" ", "▁", "<fim>"))]
    assert len(texts) > COUNT / 2
    assert [made.encode(text, add_special_tokens=False).ids for text in texts] == reference.encode(texts)


@pytest.mark.usefixtures("made_here")
def test_a_sentencepiece_model_without_a_first_space(vocabulary: Callable[..., Path]) -> None:
    folder = vocabulary("LlamaTokenizer", add_prefix_space=False)
    _change_model(folder, lambda model: setattr(model.normalizer_spec, "add_dummy_prefix", False))
    _same(folder, LLAMA_TOKENS, 200)
    vocabularies.settings(folder, tokenizer_class="LlamaTokenizer")
    _refused(folder, "add_dummy_prefix is False; expected True")


def _change_model(folder: Path, change: Callable[[Any], object]) -> None:
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((folder / "tokenizer.model").read_bytes())
    change(model)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())


def _refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        make_tokenizer(folder)
    assert str(caught.value).isprintable()


SPOILED: list[tuple[Callable[[Any], object], str]] = [
    (lambda model: setattr(model.trainer_spec, "model_type", 1), "model_type is 1; expected 2"),
    (lambda model: setattr(model.normalizer_spec, "precompiled_charsmap", b"x"), "normalizer is True; expected False"),
    (
        lambda model: setattr(model.normalizer_spec, "remove_extra_whitespaces", True),
        "remove_extra_whitespaces is True",
    ),
    (lambda model: model.pieces.pop(10), "bytes is 255; expected 256"),
    (lambda model: setattr(model.pieces[-1], "score", 0.0), "scores that fall is False"),
]


@pytest.mark.usefixtures("made_here")
@pytest.mark.parametrize(("change", "message"), SPOILED)
def test_other_sentencepiece_models(
    vocabulary: Callable[..., Path], change: Callable[[Any], object], message: str
) -> None:
    folder = vocabulary("LlamaTokenizer")
    _change_model(folder, change)
    _refused(folder, message)


@pytest.mark.usefixtures("made_here")
@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"IQ== 0\nIg== 1\n", b"\x0a" * 10000])
def test_files_that_are_no_sentencepiece_model(vocabulary: Callable[..., Path], data: bytes) -> None:
    folder = vocabulary("LlamaTokenizer")
    (folder / "tokenizer.model").write_bytes(data)
    _refused(folder, "LlamaTokenizer cannot be made of tokenizer.model: .*(no SentencePiece model|expected)")


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    (
        {"tokenizer_class": "AutoProcessor"},
        "tokenizer_class is 'AutoProcessor'; expected Qwen2Tokenizer, GPT2Tokenizer",
    ),
    ({"tokenizer_class": "MusicgenProcessor"}, "tokenizer_class is 'MusicgenProcessor'; expected"),
    ({"tokenizer_class": "evil.Tokenizer"}, "tokenizer_class is 'evil.Tokenizer'; expected"),
    ({"tokenizer_class": ["Qwen2Tokenizer"]}, "tokenizer_class is .'Qwen2Tokenizer'.; expected"),
    ({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}, "auto_map names code"),
    ({"eos_token": 5}, "eos_token is 5; expected text"),
    ({"eos_token": ""}, "eos_token is ''; expected text"),
    ({"eos_token": {"content": "x", "color": True}}, "eos_token has 'color': True; expected bools of lstrip"),
    ({"eos_token": {"content": "x", "lstrip": 1}}, "eos_token has 'lstrip': 1"),
    ({"image_token": "<image>"}, "image_token is no token of Qwen2Tokenizer; expected bos_token"),
    ({"additional_special_tokens": "<x>"}, "additional special tokens are '<x>'; expected a list"),
    ({"extra_special_tokens": {"a_token": "<x>"}}, "additional special tokens are .*; expected a list"),
    ({"added_tokens_decoder": ["<x>"]}, "added_tokens_decoder is .*; expected an object"),
    ({"added_tokens_decoder": {"x": "<x>"}}, "token id 'x'; expected an int from 0"),
    ({"added_tokens_decoder": {"9" * 5000: "<x>"}}, "token id '99.*; expected an int from 0"),
    ({"added_tokens_decoder": {"700": "<x>"}}, "token '<x>' is 340; 700 is asked for"),
    ({"add_bos_token": "yes"}, "add_bos_token is 'yes'; expected true or false"),
    ({"split_special_tokens": True}, "split_special_tokens is not supported"),
]


@pytest.mark.usefixtures("made_here")
@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_bad_settings(vocabulary: Callable[..., Path], settings: dict[str, Any], message: str) -> None:
    _refused(vocabulary("Qwen2Tokenizer", **settings), message)


def test_settings_that_name_files_are_not_read(vocabulary: Callable[..., Path], plain: Callable[[str], bytes]) -> None:
    folder = vocabulary("Qwen2Tokenizer")
    names = ("vocab_file", "merges_file", "tokenizer_file", "vocab", "merges", "gguf_file", "name_or_path")
    named: dict[str, Any] = dict.fromkeys(names, "/dev/zero")
    vocabularies.settings(folder, tokenizer_class="Qwen2Tokenizer", init_inputs=["/dev/zero"], **named)
    assert make_tokenizer(folder) == plain("Qwen2Tokenizer")


BAD_FILES: list[tuple[str, Any, str]] = [
    ("vocab.json", b"{", "Qwen2Tokenizer cannot be made of vocab.json and merges.txt: "),
    ("vocab.json", b'{"a": -1}', "Qwen2Tokenizer cannot be made of"),
    ("merges.txt", b"a b c d\n", "Qwen2Tokenizer cannot be made of"),
    ("merges.txt", b"never seen\n", "Qwen2Tokenizer cannot be made of"),
    ("vocab.json", os.mkfifo, "vocab.json: not a regular file"),
    ("merges.txt", lambda path: path.symlink_to("/dev/zero"), "merges.txt: a link out of the model folder"),
    ("vocab.json", lambda path: None, "vocab.json: no such file"),
    ("merges.txt", lambda path: (path.touch(), os.truncate(path, 2**40)), "1099511627776 bytes; expected at most"),
]


@pytest.mark.usefixtures("made_here")
@pytest.mark.parametrize(("name", "data", "message"), BAD_FILES)
def test_bad_files(vocabulary: Callable[..., Path], name: str, data: Any, message: str) -> None:
    path = vocabulary("Qwen2Tokenizer") / name
    path.unlink()
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        data(path)
    _refused(path.parent, message)


# Limits.


def _endless(folder: Path) -> Path:
    """A piece of which transformers looks at every pair of parts."""
    _change_model(folder, lambda model: setattr(model.pieces[-1], "piece", "a" * 10_000_000))
    return folder


def test_time(vocabulary: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "TIME_LIMIT_S", 2.0)
    start = time.monotonic()
    _refused(_endless(vocabulary("LlamaTokenizer")), "the tokenizer takes longer than 2 s to make")
    assert time.monotonic() - start < 20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is looked at from time to time")
def test_memory(vocabulary: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "ADDRESS_LIMIT", 300_000_000)
    folder = vocabulary("Qwen2Tokenizer")
    (folder / "vocab.json").write_text(json.dumps({str(number): number for number in range(1_000_000)}))
    _refused(folder, "Qwen2Tokenizer cannot be made of .*memory")


def test_memory_is_looked_at(vocabulary: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.setattr(making, "ADDRESS_LIMIT", 0)
    monkeypatch.setattr(making, "MEMORY_LIMIT", 50_000_000)
    _refused(_endless(vocabulary("LlamaTokenizer")), "needs too much memory")


def test_ctrl_c(vocabulary: Callable[..., Path], tmp_path: Path) -> None:
    folder, private = _endless(vocabulary("LlamaTokenizer")), tmp_path / "private"
    private.mkdir()
    config = llama_config(vocab_size=512)
    save_checkpoint(tmp_path / "model", config, reference_model(config))
    shutil.copytree(tmp_path / "model", folder, dirs_exist_ok=True)
    process = subprocess.Popen(
        [*COMMAND, "convert", "--tokenizer", str(folder), str(tmp_path / "dest")],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(private)},
    )
    while not list(private.glob("*/request.json")):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, told = process.communicate(timeout=60)
    assert time.monotonic() - start < 10
    assert (process.returncode, told) == (130, "")
    assert list(private.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "private", "source"]


# Folders.


@pytest.fixture
def source(vocabulary: Callable[..., Path], tmp_path: Path) -> Path:
    """A whole model folder without tokenizer.json, with things in it that are none of kvant's."""
    folder = vocabulary("Qwen2Tokenizer", chat_template="{{ messages[0]['content'] }}", eos_token="<|im_end|>")
    config = qwen2_config(vocab_size=512)
    save_checkpoint(tmp_path / "model", config, reference_model(config), 2)
    for path in (tmp_path / "model").iterdir():
        path.rename(folder / path.name)
    (tmp_path / "model").rmdir()
    code = f"import os; os.mkdir({str(tmp_path / 'executed')!r})\n"
    for name in ("evil", "json", "transformers", "tokenizers", "sitecustomize", "resource"):
        (folder / f"{name}.py").write_text(code)
    return folder


def test_the_command(source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    done = run("convert", "--tokenizer", str(source), str(dest))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    size = (dest / "tokenizer.json").stat().st_size
    assert done.stderr == f"{dest}: the same weights, with a tokenizer.json of {size / 1000:.2f} kB\n"
    left_out = {path.name for path in source.glob("*.py")}
    for path in source.iterdir():
        assert path.name in left_out or (dest / path.name).read_bytes() == path.read_bytes()
    made = {path.name for path in dest.iterdir()} - {path.name for path in source.iterdir()}
    assert made == {"tokenizer.json"}
    assert not left_out & {path.name for path in dest.iterdir()}
    model, tokenizer = kvant.load(dest)
    reference = transformers.Qwen2Tokenizer.from_pretrained(source)
    for text in vocabularies.strings(100, BPE_TOKENS):
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    assert kvant.generate(model, tokenizer, "the fox", max_tokens=2) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "source"]  # nothing was executed
    again = call("convert", "--tokenizer", str(dest), str(tmp_path / "more"))
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "tokenizer.json is there already; expected a folder without it" in again.stderr


@pytest.mark.usefixtures("made_here")
def test_nothing_is_left_of_a_failure(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: type[KvantError], message: str) -> None:
        with pytest.raises(kind, match=message):
            convert_tokenizer(source, tmp_path / "dest")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]

    usage = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda folder: usage)
        refuse(ConvertError, "are needed, 1.00 kB are free")
    with monkeypatch.context() as patched:
        patched.setattr("kvant.tools.convert.tokenizer.make_tokenizer", lambda folder: b"{}")
        refuse(ConvertError, "the tokenizer that was made cannot be loaded: .*dest: .*tokenizer.json: no model")
    (source / "merges.txt").unlink()
    refuse(ModelError, "merges.txt: no such file")


@pytest.mark.parametrize("option", ["--bits=4", "--group-size=64", "--mode=affine", "--dtype=float16"])
def test_options_that_do_not_go_with_it(option: str, tmp_path: Path) -> None:
    done = call("convert", "--tokenizer", "pocket", str(tmp_path / "dest"), option)
    name, _, value = option.partition("=")
    assert done.returncode == 2
    assert f"{name} is {value} with --tokenizer, which copies the weights" in done.stderr
