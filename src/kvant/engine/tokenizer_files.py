"""The files a tokenizer is loaded from, checked before transformers, mlx-lm and tokenizers open them."""

import math
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from kvant.errors import ModelError
from kvant.models.fields import MAX_SIZE
from kvant.models.files import check_file, read_json, read_text, refuse_code

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_TEMPLATE_BYTES = 1024 * 1024  # the longest published ones have some 30,000
SETTINGS = ("special_tokens_map.json", "added_tokens.json", "chat_template.json")
OTHERS = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json")
TOKEN_KEYS = {"__type", "id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}
MAX_GROWTH = 64  # of a text by all replacements one after another; published tokenizers have 1
TEMPLATES = "additional_chat_templates"  # a folder of further ones


def check_tokenizer(folder: Path) -> None:
    """Refuse a tokenizer whose files are not what a tokenizer's are, or would make a library take all memory.

    Raises:
        ModelError: no tokenizer, or such a file.
    """
    if not os.path.lexists(folder / "tokenizer.json"):
        raise ModelError(f"{folder}: no tokenizer.json")
    for name in OTHERS:
        if os.path.lexists(folder / name):
            check_file(folder / name)
    _check_settings(folder)
    for name in SETTINGS:
        if os.path.lexists(folder / name):
            _check_tokens(folder / name, read_json(folder / name))
    _check_templates(folder)
    try:
        _check_vocabulary(folder / "tokenizer.json")
    except RecursionError as error:
        raise ModelError(f"{folder / 'tokenizer.json'}: nested too deeply") from error


def _check_settings(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    if not os.path.lexists(path):
        return
    raw = read_json(path)
    refuse_code(raw, str(path))
    _check_tokens(path, raw)
    if raw.get("fast_tokenizer_files"):
        raise ModelError(f"{path}: fast_tokenizer_files names other files; expected tokenizer.json")
    templates = raw.get("chat_template")
    if isinstance(templates, list):
        entries = [entry if isinstance(entry, dict) else {} for entry in templates]
        if not all(isinstance(entry.get(key), str) for entry in entries for key in ("name", "template")):
            raise ModelError(f"{path}: chat_template is a list; expected objects of a name and a template")
    elif not isinstance(templates, str | None):
        raise ModelError(f"{path}: chat_template is a JSON {type(templates).__name__}; expected a string")


def _check_templates(folder: Path) -> None:
    """A template of its own file, and further ones in a folder."""
    if os.path.lexists(folder / "chat_template.jinja"):
        read_text(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES)
    more = folder / TEMPLATES
    if more.is_symlink():
        raise ModelError(f"{more}: a link; expected a folder")
    if more.is_dir():
        for path in sorted(more.iterdir()):
            read_text(path, MAX_TEMPLATE_BYTES, folder)


def _check_vocabulary(path: Path) -> None:
    """A token's id is a place in a table: one absurd id would make a table of that many places."""
    raw = read_json(path, MAX_TOKENIZER_BYTES)
    model, added = raw.get("model"), raw.get("added_tokens") or []
    if not isinstance(model, dict):
        raise ModelError(f"{path}: no model; expected a tokenizer as the tokenizers library writes it")
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ModelError(f"{path}: added_tokens is not a list of objects")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (growth := _growth(raw.get(part))) > MAX_GROWTH:
            raise ModelError(f"{path}: {part} makes a text up to {growth:.3g} times as long; expected {MAX_GROWTH}")
    vocabulary = model.get("vocab")
    _check_ids(path, vocabulary.values() if isinstance(vocabulary, dict) else ())
    _check_ids(path, (token.get("id") for token in added))
    for token in added:
        _check_token(path, token)


def _check_tokens(path: Path, raw: Mapping[str, Any]) -> None:
    """The tokens among settings, wherever they are: by their role, in lists, by id."""
    more = raw.get("added_tokens_decoder"), raw.get("extra_special_tokens"), raw.get("additional_special_tokens")
    groups = [group.values() if isinstance(group, dict) else group for group in more if isinstance(group, dict | list)]
    for token in chain((value for key, value in raw.items() if key.endswith("_token")), *groups):
        _check_token(path, token)


def _check_token(path: Path, token: object) -> None:
    """The tokenizers library would name what it does not know on standard output."""
    unknown = sorted(token.keys() - TOKEN_KEYS) if isinstance(token, dict) else []
    if unknown:
        raise ModelError(f"{path}: a token has {unknown[0]!r}; expected {', '.join(sorted(TOKEN_KEYS))}")


def _growth(step: object) -> float:
    """How much longer a text can become: twenty replacements of a by aa would make a million of it."""
    if not isinstance(step, dict):
        return 1.0
    lists = [step[key] for key in ("normalizers", "pretokenizers", "decoders") if isinstance(step.get(key), list)]
    parts = math.prod(_growth(part) for part in chain(*lists))
    pattern, content = step.get("pattern"), step.get("content")
    old = pattern.get("String") if isinstance(pattern, dict) else None
    own = len(content) / (len(old) if isinstance(old, str) and old else 1) if isinstance(content, str) else 1.0
    return min(max(own, 1.0) * parts, 1e300)


def _check_ids(path: Path, ids: Iterable[object]) -> None:
    for token in ids:
        if type(token) is not int or not 0 <= token < MAX_SIZE:
            raise ModelError(f"{path}: token id {token!r}; expected an int from 0 to {MAX_SIZE - 1}")
