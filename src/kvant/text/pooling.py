"""How a model's vectors of texts are made, as the sentence-transformers files of its folder say."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from kvant.errors import ArgumentError, ModelError
from kvant.files import MAX_CONFIG_BYTES, parse_json, read_bytes, read_json, read_optional

PoolingKind = Literal["last", "mean"]  # what a caller may ask for
Kind = Literal["last", "mean", "first"]
MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LIMITS = "sentence_bert_config.json"
FOLDER = re.compile(r"[0-9]{1,2}_Pooling")
# The ways to pool, which a Pooling module's settings name by a word, or in older files by a flag for each.
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
        kind: the last token's, the mean of all, or the first token's.
        normalizes: the vector is divided by its length.
        prompt: text that is put before every text.
        max_tokens: tokens that a text may have; None: as many as the model's context.
    """

    kind: Kind
    normalizes: bool = True
    prompt: str = ""
    max_tokens: int | None = None


def choose_pooling(folder: Path | None, asked: PoolingKind | None) -> Pooling:
    """Return how the model of a folder pools. ``asked`` overrides the way that its files name.

    Raises:
        ArgumentError: an unknown ``pooling``, or none where the folder has no files that name one.
        ModelError: files that ask for something that kvant does not compute.
    """
    if asked is not None and asked not in get_args(PoolingKind):
        raise ArgumentError("pooling", f"is {asked!r:.80}; expected 'last' or 'mean'")
    pooling_of_files = None if folder is None else read_pooling(folder)
    if pooling_of_files is not None:
        return pooling_of_files if asked is None else replace(pooling_of_files, kind=asked)
    if asked is None:
        reason = f"the model has no {MODULES} of sentence-transformers, which says how it pools"
        raise ArgumentError("pooling", f"is not given, and {reason}; expected 'last' or 'mean'")
    return Pooling(asked)


def read_pooling(folder: Path) -> Pooling | None:
    """Read a folder's sentence-transformers files; None: it has none.

    Raises:
        ModelError: files that cannot be read, or that ask for something that kvant does not compute.
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
    """Return the class and the folder of each module of modules.json, whose content is a list."""
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
    """Return the prompt that is put before a text if a caller names none."""
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
    """Return the way to pool that a Pooling module's settings name."""
    word = raw.get("pooling_mode")
    flags = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]
    named = [word] if isinstance(word, str) else flags
    kinds = [WORDS.get(FLAGS.get(name, name)) for name in named]
    if len(kinds) != 1 or kinds[0] is None:
        said = ", ".join(named)[:120] or "nothing"
        raise ModelError(f"{path}: it pools by {said}; expected one of {', '.join(WORDS)}")
    return kinds[0]
