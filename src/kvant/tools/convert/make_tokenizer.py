"""tokenizer.json for a model folder that has none. transformers' class makes it of the vocabulary.

Only classes of a fixed list are used, each with fixed files. Settings are read here, by name, and checked. transformers
runs in a process of its own with limits. The process sees copies of the files and nothing else of the folder.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvant.errors import ModelError, one_line
from kvant.fields import MAX_SIZE, flag, shown
from kvant.files import check_file, read_json, read_optional, refuse_code
from kvant.text.process import resident_bytes

TIME_LIMIT_S = 60.0
MEMORY_LIMIT = 2 * 1024**3
MAX_BYTES = 64 * 1024 * 1024  # of a file read or made
LOOK_S = 0.1
# macOS counts shared memory too, more than any useful limit. There the memory is looked at from time to time.
ADDRESS_LIMIT = MEMORY_LIMIT if sys.platform == "linux" else 0

PROGRAM = Path(__file__).with_name("make_tokenizer_process.py")
ENVIRONMENT = {  # no network, no advice, no thread pools: each thread reserves address space
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
BPE_FLAGS = ("add_prefix_space", "add_bos_token", "add_eos_token")


@dataclass(frozen=True, slots=True)
class Kind:
    """The inputs of a class of transformers: its files, and its settings that are true, false or null."""

    files: tuple[str, ...]
    flags: tuple[str, ...]


KINDS = {
    "Qwen2Tokenizer": Kind(("vocab.json", "merges.txt"), BPE_FLAGS),
    "GPT2Tokenizer": Kind(("vocab.json", "merges.txt"), BPE_FLAGS),
    "LlamaTokenizer": Kind(("tokenizer.model",), (*BPE_FLAGS, "legacy")),
    "BertTokenizer": Kind(("vocab.txt",), ("do_lower_case", "tokenize_chinese_chars", "strip_accents")),
}
KIND_OF_MODEL = {  # where tokenizer_config.json names no class
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "llama": "LlamaTokenizer",
    "mistral": "LlamaTokenizer",
}


def make_tokenizer(folder: Path) -> bytes:
    """The content of a tokenizer.json for the folder.

    Args:
        folder: with config.json, perhaps tokenizer_config.json, special_tokens_map.json and added_tokens.json, and a
            vocabulary: vocab.json and merges.txt, vocab.txt, or SentencePiece's tokenizer.model. Nothing in it is
            executed.

    Raises:
        ModelError: another class than those of :data:`KINDS`, a file or a setting of the wrong kind, or
            a conversion that fails or takes more than 60 s or 2 GiB.
    """
    name, request = _request(folder)
    with TemporaryDirectory(prefix="kvant-tokenizer-") as place:
        private = Path(place)
        for file in KINDS[name].files:
            path = check_file(folder / file)
            if path.stat().st_size > MAX_BYTES:
                raise ModelError(f"{path}: {path.stat().st_size} bytes; expected at most {MAX_BYTES}")
            shutil.copyfile(path, private / file)
        (private / "request.json").write_text(json.dumps(request), encoding="utf-8")
        try:
            code = _run(private)
        except OSError as error:
            raise ModelError(f"the process that makes a tokenizer cannot be started: {one_line(error)}") from error
        if code:
            raise ModelError(f"{folder}: {name} cannot be made of {' and '.join(KINDS[name].files)}: {_why(private)}")
        return (private / "tokenizer.json").read_bytes()


def _run(private: Path) -> int:
    """The exit code of the process. It is ended where it takes too much, or where this one is interrupted."""
    limits = [str(TIME_LIMIT_S), str(ADDRESS_LIMIT), str(MAX_BYTES)]
    process = subprocess.Popen(
        # -P: modules are not looked for beside the program. A session of its own: Ctrl-C ends it through this process.
        [sys.executable, "-P", str(PROGRAM), *limits],
        cwd=private,
        env=os.environ | ENVIRONMENT | {"HF_HOME": str(private)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + TIME_LIMIT_S
    try:
        while True:
            try:
                return process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    raise ModelError(f"the tokenizer takes longer than {TIME_LIMIT_S:g} s to make") from None
                if not ADDRESS_LIMIT and resident_bytes(process.pid) > MEMORY_LIMIT:
                    raise ModelError("the tokenizer needs too much memory to make") from None
    finally:
        process.kill()
        process.wait()


def _why(private: Path) -> str:
    try:
        return (private / "error.txt").read_text(encoding="utf-8") or "its process was ended"
    except OSError:
        return "its process ended; it may need more memory than it is given"


def _request(folder: Path) -> tuple[str, dict[str, Any]]:
    """The class, and the request for the process: values of JSON, each checked."""
    path = folder / "tokenizer_config.json"
    raw = dict(read_optional(path))
    refuse_code(raw, str(path))
    name = _class(folder, raw)
    added = _added_tokens(folder, raw)
    # As transformers does: this file counts where tokenizer_config.json does not list the tokens.
    if not raw.get("added_tokens_decoder"):
        raw |= read_optional(folder / "special_tokens_map.json")
    unknown = sorted(key for key in raw if key.endswith("_token") and key not in (*SPECIAL, *BPE_FLAGS) and raw[key])
    if unknown:
        raise ModelError(f"{path}: {unknown[0]} is no token of {name}; expected {', '.join(SPECIAL)}")
    if raw.get("split_special_tokens"):
        raise ModelError(f"{path}: split_special_tokens is not supported")
    tokens = {key: None if raw[key] is None else _token(path, key, raw[key]) for key in SPECIAL if key in raw}
    more = raw.get("extra_special_tokens") or raw.get("additional_special_tokens") or []
    if not isinstance(more, list):
        raise ModelError(f"{path}: the additional special tokens are {shown(more)}; expected a list")
    return name, {
        "class": name,
        "tokens": tokens,
        "more": [_token(path, "a special token", token) for token in more],
        "added": added,
        "flags": {key: flag(raw, key) for key in KINDS[name].flags if raw.get(key) is not None},
    }


def _class(folder: Path, raw: Mapping[str, Any]) -> str:
    given = raw.get("tokenizer_class")
    if given is None:
        model_type = read_json(folder / "config.json").get("model_type")
        given = KIND_OF_MODEL.get(model_type) if isinstance(model_type, str) else None
        if given is None:
            raise ModelError(
                f"{folder}: tokenizer_config.json names no tokenizer_class, and none is known for "
                f"model_type {shown(model_type)}; expected {', '.join(KINDS)}"
            )
    name = given.removesuffix("Fast") if isinstance(given, str) else given
    if not isinstance(name, str) or name not in KINDS:
        raise ModelError(f"{folder}: tokenizer_class is {shown(given)}; expected {', '.join(KINDS)}")
    return name


def _added_tokens(folder: Path, raw: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Ids and tokens of added_tokens_decoder or, without it, of added_tokens.json, where nothing is special."""
    path, listed = folder / "tokenizer_config.json", raw.get("added_tokens_decoder")
    if listed:
        if not isinstance(listed, dict):
            raise ModelError(f"{path}: added_tokens_decoder is {shown(listed)}; expected an object")
        pairs = [
            (int(key) if key.isdecimal() and len(key) < 10 else key, _token(path, key, token))
            for key, token in listed.items()
        ]
    else:
        path = folder / "added_tokens.json"
        pairs = [(value, _token(path, "a token", key)) for key, value in read_optional(path).items()]
    for number, _ in pairs:
        if type(number) is not int or not 0 <= number < MAX_SIZE:
            raise ModelError(f"{path}: token id {shown(number)}; expected an int from 0 to {MAX_SIZE - 1}")
    return pairs


def _token(path: Path, key: str, value: object) -> Any:
    """A token as text, or as an object of its content and how it is found in a text."""
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, dict) or not isinstance(value.get("content"), str) or not value["content"]:
        raise ModelError(f"{path}: {key[:80]} is {shown(value)}; expected text, or an object with a content")
    allowed = ", ".join(TOKEN_FLAGS)
    for name, setting in value.items():
        if name not in ("content", "__type", "id") and (name not in TOKEN_FLAGS or not isinstance(setting, bool)):
            raise ModelError(f"{path}: {key[:80]} has {name[:80]!r}: {shown(setting)}; expected bools of {allowed}")
    return {name: value[name] for name in ("content", *TOKEN_FLAGS) if name in value}
