"""Check and read the config.json of a model that mlx-lm's class computes."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvant.errors import ModelError
from kvant.fields import MAX_SIZE, check_lengths, shown, size, token_ids
from kvant.files import read_json, refuse_code
from kvant.models.architectures import ARCHITECTURES

# mlx-lm's classes create their layers, and some an object for each expert or a number for each head, before
# any tensor is read. These limits keep such loops short; no published model reaches a quarter of them.
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_HEADS = 4096
MAX_OF_ALL_LAYERS = 2**17
MAX_KEYS = 4096  # of an object: mlx-lm's classes loop over them
MAX_COUNT = 64  # of everything else that classes loop over
COUNTS = ("altup_num_inputs", "emb_neighbor_num", "emb_split_num", "num_loops", "loop_num")
LONG = ("quantization", "quantization_config", "chat_template")  # no class reads these
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_context_length")
EXPERTS_USED_KEYS = ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token", "top_k_experts")


@dataclass(frozen=True, slots=True)
class BridgedConfig:
    """The facts of a bridged model: a :class:`kvant.models.language_model.LanguageModelConfig`."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int | None  # from config.json or the class's default; None: neither has one
    eos_token_ids: tuple[int, ...] = ()
    # experts per token in each layer; None: unknown, or no experts
    experts_used: int | None = None


def is_bridged(raw: Mapping[str, Any]) -> bool:
    """Return whether mlx-lm's class computes a model, rather than kvant's decoder."""
    kind = raw.get("model_type")
    return isinstance(kind, str) and kind not in ARCHITECTURES


def read_folder(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json. End-of-text tokens in generation_config.json override it."""
    raw = dict(read_json(folder / "config.json"))
    generation_file = folder / "generation_config.json"
    try:
        check(raw)
        if os.path.lexists(generation_file):
            eos = token_ids(read_json(generation_file), generation_file.name)
            if eos:
                raw["eos_token_id"] = list(eos)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    return raw


def check(raw: Mapping[str, Any]) -> None:
    """Refuse a config.json that names code, or that would make mlx-lm's class loop or allocate too much."""
    read = {key: value for key, value in raw.items() if key not in LONG}
    check_lengths(read, lists=MAX_LAYERS, objects=MAX_KEYS)
    refuse_code(raw, "config.json")
    most = {"layer": ("", 1), "expert": ("", 1), "head": ("", 1)}
    for key, value in _values(read):
        if isinstance(value, str):  # may have a letter for each layer
            if len(value) > MAX_LAYERS:
                raise ModelError(
                    f"config.json: {key} has a length of {len(value)}; expected at most {MAX_LAYERS}"
                )
            continue
        if "theta" in key or "token" in key:  # a base of angles, or an id
            continue
        if not -MAX_SIZE <= value <= MAX_SIZE:
            raise ModelError(f"config.json: {key} is {shown(value)}; expected at most {MAX_SIZE}")
        if key in COUNTS and value > MAX_COUNT:
            raise ModelError(f"config.json: {key} is {value}; expected at most {MAX_COUNT}")
        if "size" in key or "dim" in key:
            continue
        for kind in most:
            if kind in key.replace("block", "layer"):
                most[kind] = max(most[kind], (key, value), key=itemgetter(1))
    layers, experts, heads = most.values()
    for key, number, limit in (
        (*layers, MAX_LAYERS),
        (*experts, MAX_EXPERTS),
        (*heads, MAX_HEADS),
        (f"{layers[0]} x {experts[0]}", layers[1] * experts[1], MAX_OF_ALL_LAYERS),
        (f"{layers[0]} x {heads[0]}", layers[1] * heads[1], MAX_OF_ALL_LAYERS),
    ):
        if number > limit:
            raise ModelError(f"config.json: {key} is {number}; expected at most {limit}")


def read_config(raw: Mapping[str, Any], args: Any) -> BridgedConfig:
    """Return a model's config from config.json and the ModelArgs that mlx-lm made of it."""
    all_facts = [vars(args), _text(vars(args)), raw, _text(raw)]

    def first_of(*keys: str) -> dict[str, Any]:
        known = ({key: facts[key]} for facts in all_facts for key in keys if facts.get(key) is not None)
        return next(known, {})

    def number(*keys: str) -> int | None:
        value = first_of(*keys)
        return size(value, next(iter(value))) if value else None

    vocabulary = number("vocab_size", "num_vocab")
    if vocabulary is None:
        raise ModelError("config.json: vocab_size is missing")
    used = first_of(*EXPERTS_USED_KEYS)
    return BridgedConfig(
        model_type=str(raw["model_type"]),
        vocab_size=vocabulary,
        max_position_embeddings=number(*CONTEXT_KEYS),
        eos_token_ids=token_ids(first_of("eos_token_id"), "config.json"),
        experts_used=next((value for value in used.values() if type(value) is int and value > 0), None),
    )


def _text(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text_config of a multimodal model, or an empty mapping."""
    text_config = holder.get("text_config") or {}
    if isinstance(text_config, dict):
        return text_config
    return vars(text_config) if hasattr(text_config, "__dict__") else {}


def _values(raw: Mapping[str, Any]) -> Iterator[tuple[str, int | str]]:
    """Yield each integer and string of a JSON object with its key, or the key of its list."""
    left: list[tuple[str, Any]] = list(raw.items())
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif type(value) is int or isinstance(value, str):
            yield key, value
        if isinstance(value, list):
            # A list of layer numbers is not a number of layers.
            left += [(key if isinstance(item, dict) else "an item", item) for item in value]


def for_mlx_lm(value: Any) -> Any:
    """Copy JSON for mlx-lm's class, which may change it. transformers' objects for infinity become floats."""
    if isinstance(value, list):
        return [for_mlx_lm(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: for_mlx_lm(item) for key, item in value.items()}
