"""mlx-lm's keywords that kvant honours in part or not at all. What it cannot do is refused by name, before any work.

docs/python.md has the whole table.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvant.cache import KVCache
from kvant.cache.options import DEFAULT_KV_BITS, DEFAULT_KV_GROUP_SIZE, CacheOptions
from kvant.engine.limits import check_count, reservation
from kvant.errors import ArgumentError
from kvant.files import read_json, read_optional
from kvant.models import LanguageModel
from kvant.text.tokenizer import Tokenizer

TOKENIZER_KEYS = ("eos_token", "chat_template", "trust_remote_code")


def one_path(path_or_hf_repo: str | Path | None, path_or_name: str | Path | None) -> str | Path:
    """The model that was named: by mlx-lm's keyword, or by kvant's."""
    if path_or_hf_repo is None:
        if path_or_name is None:
            raise ArgumentError("path_or_hf_repo", "is missing; expected a folder, a name or 'pocket'")
        return path_or_name
    if path_or_name is not None:
        raise ArgumentError("path_or_hf_repo", "is given beside path_or_name; expected one of them")
    return path_or_hf_repo


def check_load(
    tokenizer_config: Mapping[str, Any] | None,
    model_config: Mapping[str, Any] | None,
    *,
    lazy: bool,
    trust_remote_code: bool,
) -> None:
    """Refuse what :func:`kvant.load` cannot do."""
    for name, given in (("tokenizer_config", tokenizer_config), ("model_config", model_config)):
        if not isinstance(given, Mapping | None):
            raise ArgumentError(name, f"is a {type(given).__name__}; expected a dict")
    if model_config:
        raise ArgumentError("model_config", f"has {_names(model_config)}; a model is as its folder's config.json says")
    if lazy:
        raise ArgumentError("lazy", "is True; every weight is read and checked at load, one layer after the other")
    settings = dict(tokenizer_config or {})
    for name, value in (
        ("trust_remote_code", trust_remote_code),
        ("tokenizer_config['trust_remote_code']", settings.get("trust_remote_code")),
    ):
        if value:
            raise ArgumentError(name, "is True; nothing in a model folder is executed")
    if unknown := {key: value for key, value in settings.items() if key not in TOKENIZER_KEYS}:
        raise ArgumentError("tokenizer_config", f"has {_names(unknown)}; expected {', '.join(TOKENIZER_KEYS)}")
    for key in ("eos_token", "chat_template"):
        if not isinstance(settings.get(key), str | None):
            raise ArgumentError(f"tokenizer_config[{key!r}]", f"is {settings[key]!r:.80}; expected text")


def configure(tokenizer: Tokenizer, settings: Mapping[str, Any] | None, eos_token_ids: Sequence[int]) -> None:
    """Apply a ``tokenizer_config`` that :func:`check_load` let pass.

    Args:
        tokenizer: changed.
        settings: the tokenizer_config.
        eos_token_ids: of the model; they end a text beside the tokenizer's own.
    """
    settings = settings or {}
    if (template := settings.get("chat_template")) is not None:
        tokenizer.chat_template = template
    if (token := settings.get("eos_token")) is not None:
        try:
            tokenizer.replace_eos_token(token)
        except ValueError as error:
            raise ArgumentError("tokenizer_config['eos_token']", f"is {token!r:.80}; not in the vocabulary") from error
        tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, *eos_token_ids}


def model_config_of(folder: Path) -> dict[str, Any]:
    """A folder's config.json as mlx-lm's ``load`` returns it: with the end-of-text tokens of generation_config.json."""
    config = dict(read_json(folder / "config.json"))
    if eos := read_optional(folder / "generation_config.json").get("eos_token_id"):
        config["eos_token_id"] = eos
    return config


class CacheWanted(NamedTuple):
    """What a caller says of the cache of a request; None: nothing."""

    kv_bits: int | None
    kv_group_size: int | None
    max_kv_size: int | None

    @property
    def options(self) -> CacheOptions:
        """How the cache stores tokens, with the defaults of what is not said."""
        return CacheOptions(
            DEFAULT_KV_BITS if self.kv_bits is None else self.kv_bits,
            DEFAULT_KV_GROUP_SIZE if self.kv_group_size is None else self.kv_group_size,
        )

    def check(self) -> None:
        """Refuse what no cache that is reserved can have."""
        _ = self.options
        if self.max_kv_size is not None:
            check_count("max_kv_size", self.max_kv_size)


def check_generate(
    wanted: CacheWanted, quantized_kv_start: int | None, *, input_embeddings: object, stream: object
) -> None:
    """Refuse what :func:`kvant.stream_generate` cannot do."""
    for name, value, reason in (
        ("input_embeddings", input_embeddings, "a prompt is text or token ids"),
        ("stream", stream, "kvant computes on MLX's default stream"),
    ):
        if value is not None:
            raise ArgumentError(name, f"is a {type(value).__name__}; expected None: {reason}")
    wanted.check()
    if quantized_kv_start is not None and quantized_kv_start != 0 and wanted.kv_bits != 0:
        raise ArgumentError(
            "quantized_kv_start", f"is {quantized_kv_start!r}; a cache is quantized from the first token: expected 0"
        )


def cache_for(
    model: LanguageModel,
    prompt_tokens: int,
    max_tokens: int,
    given: Sequence[KVCache] | None,
    wanted: CacheWanted,
) -> Sequence[KVCache]:
    """The cache of a request: the caller's, or one reserved for prompt and answer."""
    kv_bits, kv_group_size, max_kv_size = wanted
    if given is None:
        return model.make_cache(reservation(model, prompt_tokens, max_tokens, max_kv_size), **wanted.options.fields)
    cache = model.check_cache(given)
    if max_kv_size not in (None, cache.max_seq_len):
        raise ArgumentError("max_kv_size", f"is {max_kv_size}; {cache.max_seq_len} is that of the", "prompt_cache")
    formats = [layer.format for layer in cache.pool.layers]
    for bits in {own.kv_bits for own in formats} or {0}:
        if kv_bits not in (None, bits):
            raise ArgumentError("kv_bits", f"is {kv_bits}; {bits} is that of the", "prompt_cache")
    for own in formats:
        # A bridged layer whose widths the group does not divide has a smaller one.
        group = math.gcd(kv_group_size or 0, own.head_dim, own.value_head_dim)
        if kv_group_size is not None and own.kv_bits and own.kv_group_size != group:
            raise ArgumentError(
                "kv_group_size", f"is {kv_group_size}; {own.kv_group_size} is that of the", "prompt_cache"
            )
    return cache


def _names(settings: Mapping[str, Any]) -> str:
    return ", ".join(str(key)[:80] for key in settings)
