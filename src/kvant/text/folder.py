"""Read a model folder's tokenizer files, which may come from a stranger. The worker parses tokenizer.json."""

import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from kvant.errors import ModelError
from kvant.files import read_bytes, read_optional, read_text, refuse_code

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_TEMPLATE_BYTES = 1024 * 1024  # the longest published templates have about 30,000
TOKEN_KEYS = {"content", "single_word", "lstrip", "rstrip", "normalized", "special"}  # of a token in any file
TEMPLATES = "additional_chat_templates"  # a folder of further templates


def read_tokenizer_files(folder: Path) -> tuple[bytes, dict[str, Any], dict[str, str]]:
    """Read a folder's tokenizer files and no others.

    Returns the bytes of tokenizer.json; the other files' contents as arguments of
    :class:`kvant.text.encoding.Encoder`; and chat templates by name, "default" being the one that is used if
    none is named.
    """
    if not os.path.lexists(folder / "tokenizer.json"):
        raise ModelError(
            f"{folder}: no tokenizer.json; transformers can make one: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    path = folder / "tokenizer_config.json"
    config = dict(read_optional(path))
    refuse_code(config, str(path))
    if config.get("fast_tokenizer_files"):
        raise ModelError(f"{path}: fast_tokenizer_files names other files; expected tokenizer.json")
    special = read_optional(folder / "special_tokens_map.json")
    added = read_optional(folder / "added_tokens.json")
    _check_tokens(path, config)
    _check_tokens(folder / "special_tokens_map.json", special)
    if not all(type(value) is int for value in added.values()):
        raise ModelError(f"{folder / 'added_tokens.json'}: expected an id for every token")
    templates = _templates(folder, path, config.pop("chat_template", None))
    model = read_optional(folder / "config.json")
    words = {
        key: value for key in ("model_type", "tokenizer_class") if isinstance(value := model.get(key), str)
    }
    settings = {"config": config, "special_tokens": special, "added_tokens": added, "model": words}
    return read_bytes(folder / "tokenizer.json", MAX_TOKENIZER_BYTES), settings, templates


def _templates(folder: Path, config: Path, stored: object) -> dict[str, str]:
    """Return templates from separate files, or else those ``stored`` in the file ``config``."""
    by_name = {}
    if os.path.lexists(folder / "chat_template.jinja"):
        by_name["default"] = read_text(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES)
    more = folder / TEMPLATES
    if more.is_symlink():
        raise ModelError(f"{more}: a link; expected a folder")
    if more.is_dir():
        for path in sorted(more.glob("[!.]*.jinja")):
            by_name[path.stem] = read_text(path, MAX_TEMPLATE_BYTES, folder)
    if isinstance(stored, str):
        stored = [{"name": "default", "template": stored}]
    if not isinstance(stored, list | None):
        raise ModelError(f"{config}: chat_template is a JSON {type(stored).__name__}; expected a string")
    entries = [entry if isinstance(entry, dict) else {} for entry in stored or ()]
    if not all(isinstance(entry.get(key), str) for entry in entries for key in ("name", "template")):
        raise ModelError(f"{config}: chat_template is a list; expected objects of a name and a template")
    return by_name or {entry["name"]: entry["template"] for entry in entries}


def _check_tokens(path: Path, raw: Mapping[str, Any]) -> None:
    """Check the tokens among settings, wherever they are: by role, in lists, by id."""
    listed = raw.get("added_tokens_decoder")
    if listed is not None and not (isinstance(listed, dict) and all(key.isdecimal() for key in listed)):
        raise ModelError(f"{path}: added_tokens_decoder is not an object of tokens by id")
    more = raw.get("extra_special_tokens"), raw.get("additional_special_tokens")
    if not all(isinstance(group, dict | list | None) for group in more):
        raise ModelError(f"{path}: extra_special_tokens is not a list of tokens")
    groups = [group.values() if isinstance(group, dict) else group for group in (listed, *more) if group]
    roles = (value for key, value in raw.items() if key.endswith("_token"))
    for token in chain(roles, *groups):
        if isinstance(token, dict):
            check_token(path, token, {"__type", "id"})
        elif isinstance(token, int | float | list) and not isinstance(token, bool):
            raise ModelError(f"{path}: a token is a JSON {type(token).__name__}; expected a string")


def check_token(shown: object, token: Mapping[str, Any], more: set[str]) -> None:
    """Refuse a token's description with keys other than the usual ones and ``more``."""
    known = TOKEN_KEYS | more
    unknown = sorted(token.keys() - known)
    if unknown or not isinstance(token.get("content"), str):
        what = repr(unknown[0]) if unknown else "no content"
        raise ModelError(f"{shown}: a token has {what}; expected {', '.join(sorted(known))}")
