"""Read how a model pools embeddings from the sentence-transformers files of its folder."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from kvant.errors import ArgumentError, ModelError
from kvant.files import MAX_CONFIG_BYTES, parse_json, read_bytes, read_json, read_optional

PoolingKind = Literal["last", "mean"]  # what a caller may choose
Kind = Literal["last", "mean", "first"]
MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LIMITS = "sentence_bert_config.json"
FOLDER = re.compile(r"[0-9]{1,2}_Pooling")
# A Pooling module's settings have a word for the kind, or in older files a flag for each kind.
WORDS: Mapping[str, Kind] = {"lasttoken": "last", "mean": "mean", "cls": "first"}
FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the hidden states of a text's tokens become one vector.

    Attributes:
        kind: the last token's state, the mean of all, or the first token's state.
        normalizes: whether vectors are normalized to length 1.
        prompt: a prefix for every text.
        max_tokens: the maximum number of tokens in a text; None: the model's context.
    """

    kind: Kind
    normalizes: bool = True
    prompt: str = ""
    max_tokens: int | None = None


def choose_pooling(folder: Path | None, asked: PoolingKind | None) -> Pooling:
    """Return how the model of a folder pools. ``asked`` overrides the kind in its files.

    Raises:
        ArgumentError: ``asked`` is unknown, or None and the folder has no such files.
        ModelError: the files need something that kvant does not support.
    """
    if asked is not None and asked not in get_args(PoolingKind):
        raise ArgumentError("pooling", f"is {asked!r:.80}; expected 'last' or 'mean'")
    pooling_of_files = None if folder is None else read_pooling(folder)
    if pooling_of_files is not None:
        return pooling_of_files if asked is None else replace(pooling_of_files, kind=asked)
    if asked is None:
        reason = f"the model has no {MODULES} of sentence-transformers, which would define it"
        raise ArgumentError("pooling", f"is not given, and {reason}; expected 'last' or 'mean'")
    return Pooling(asked)


def read_pooling(folder: Path) -> Pooling | None:
    """Read a folder's sentence-transformers files; return None if it has none.

    Raises:
        ModelError: the files cannot be read, or need something that kvant does not support.
    """
    path = folder / MODULES
    if not os.path.lexists(path):
        return None
    modules = _modules(path)
    names = [name for name, _ in modules]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        expected = "Transformer, Pooling and perhaps Normalize"
        raise ModelError(f"{path}: the modules are {', '.join(names)[:120]}; expected {expected}")
    model = read_json(folder / "config.json")
    if model.get("is_causal") is False or model.get("use_bidirectional_attention"):
        raise ModelError(f"{folder}: the model attends in both directions; kvant's attention is causal")
    limits = read_optional(folder / LIMITS)
    if limits.get("do_lower_case"):
        raise ModelError(f"{folder / LIMITS}: do_lower_case is true; kvant reads texts as they are")
    place = modules[1][1]
    if FOLDER.fullmatch(place) is None:
        raise ModelError(f"{path}: the path of Pooling is {place[:80]!r}; expected 1_Pooling")
    config = folder / place / "config.json"
    raw = parse_json(read_bytes(config, MAX_CONFIG_BYTES, folder), config)
    prompt = _default_prompt(folder / SETTINGS)
    if prompt and raw.get("include_prompt") is False:
        raise ModelError(f"{config}: include_prompt is false; kvant pools the tokens of the prompt too")
    most = limits.get("max_seq_length")
    return Pooling(
        _kind(config, raw),
        normalizes="Normalize" in names,
        prompt=prompt,
        max_tokens=most if type(most) is int and most > 0 else None,
    )


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module in modules.json, which is a list."""
    content = read_bytes(path, MAX_CONFIG_BYTES)
    listed = parse_json(b'{"modules": %b}' % content, path)["modules"]
    entries = listed if isinstance(listed, list) else [listed]
    for each in entries:
        if not (
            isinstance(each, dict) and isinstance(each.get("type"), str) and isinstance(each.get("path"), str)
        ):
            raise ModelError(f"{path}: expected a list of objects with a type and a path")
    return [(each["type"].rpartition(".")[2], each["path"]) for each in entries]


def _default_prompt(path: Path) -> str:
    """Return the default prompt, or an empty string."""
    settings = read_optional(path)
    name = settings.get("default_prompt_name")
    prompts = settings.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise ModelError(f"{path}: default_prompt_name is {name!r:.80}; prompts has no such text")
    return prompt


def _kind(path: Path, raw: Mapping[str, Any]) -> Kind:
    """Return the kind that a Pooling module's settings select."""
    word = raw.get("pooling_mode")
    flags = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]
    named = [word] if isinstance(word, str) else flags
    kinds = [WORDS.get(FLAGS.get(name, name)) for name in named]
    if len(kinds) != 1 or kinds[0] is None:
        shown = ", ".join(named)[:120] or "nothing"
        raise ModelError(f"{path}: it pools by {shown}; expected one of {', '.join(WORDS)}")
    return kinds[0]
