"""The caches and pools that a decoder makes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from kvant.cache import ModelCache, QuantizedKVCache, WindowKVCache
from kvant.cache.identity import Identity
from kvant.cache.pool import Pool, pool_bytes
from kvant.models.config import ModelConfig
from kvant.models.pool import longest_sequence, narrow_window, pool_formats
from kvant.models.reservation import check_memory, default_reservation
from kvant.operators.rotary import Rotary
from kvant.threads import check_process


class DecoderCaches:
    """A part of :class:`kvant.models.Decoder`.

    Attributes:
        config, dtype, identity: as the decoder has them.
        layers: its blocks.
        all_windows: of the whole model's layers, where these are a rank's alone; else nothing.
    """

    config: ModelConfig
    dtype: mx.Dtype
    layers: Sequence[Any]
    identity: Identity | None
    all_windows: Sequence[int | None] = ()
    _rotary: Rotary

    def make_cache(
        self,
        max_seq_len: int | None = None,
        *,
        batch: int = 1,
        quant_bit: int = 8,
        quant_group: int = 32,
        bias_split: bool = True,
        kernels: str | None = None,
    ) -> ModelCache:
        """Reserve a cache for ``max_seq_len`` tokens of each sequence; at 0 bits they keep the compute dtype.

        Args:
            max_seq_len: the reservation; None, as mlx-lm calls it: the model's context, at most 4,096 tokens.
            batch: sequences side by side, with a length each.
            bias_split: keys and values are stored without their biases, which attention adds exactly; a model without
                such biases has nothing to split.
            quant_bit, quant_group, kernels: as in :class:`kvant.cache.QuantizedKVCache`.

        Raises:
            ValueError: a size below 1, an unsupported bit, a group that does not divide the head dimension, a kernel
                forced that cannot be used.
            RuntimeError: a forced kernel that fails on this device when it is tried.
            ContextError: more than this machine's memory; nothing was allocated.
        """
        check_process()
        config = self.config
        if max_seq_len is None:
            max_seq_len = default_reservation(config)
        row_bits = config.head_dim * (quant_bit or 8 * self.dtype.size)  # without scales: a lower bound is enough here
        least = max_seq_len * batch * len(self.layers) * 2 * config.num_key_value_heads * row_bits // 8
        check_memory(max_seq_len, least)
        options: dict[str, Any] = {
            "batch": batch,
            "quant_bit": quant_bit,
            "quant_group": quant_group,
            "dtype": self.dtype,
            "kernels": kernels,
            "num_heads": config.num_attention_heads,
        }
        cache = ModelCache(
            [_layer_cache(config, layer.self_attn, max_seq_len, bias_split, options) for layer in self.layers]
        )
        cache.identity, cache.rotary = self.identity, self._rotary
        return cache

    def make_pool(
        self,
        tokens: int,
        *,
        sequences: int,
        quant_bit: int = 8,
        quant_group: int = 32,
        bias_split: bool = True,
        kernels: str | None = None,
        max_seq_len: int | None = None,
        prefill_step_size: int = 512,
    ) -> Pool:
        """Reserve a pool for many sequences; at 0 bits they keep the compute dtype.

        Args:
            tokens: of all sequences together. Whole pages of 128 are made of them, and a page is one sequence's.
            sequences: that can be open at once.
            quant_bit, quant_group, bias_split, kernels: as in :meth:`make_cache`.
            max_seq_len: tokens that one sequence can have; None: all of the pool's, at most the model's context.
            prefill_step_size: new tokens of one sequence in a step, at most.

        Raises:
            ValueError: a size below 1, a cache format that the model cannot have, a kernel forced that cannot be used.
            RuntimeError: a forced kernel that fails on this device when it is tried.
            ContextError: more than this machine's memory; nothing was allocated.
        """
        check_process()
        for name, number in (("tokens", tokens), ("sequences", sequences), ("prefill_step_size", prefill_step_size)):
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} is {number!r}; expected a positive int")
        max_seq_len = longest_sequence(self.config, tokens, max_seq_len)
        biases = [layer.self_attn.qkv_bias for layer in self.layers] if bias_split else []
        split = [bias for bias in biases if bias is not None]
        formats = pool_formats(
            self.config,
            dtype=self.dtype,
            quant_bit=quant_bit,
            quant_group=quant_group,
            max_seq_len=max_seq_len,
            split_pairs=[bias.pairs for bias in split] if split else None,
        )
        sizes = {"tokens": tokens, "sequences": sequences, "max_seq_len": max_seq_len}
        sizes["prefill_step_size"] = prefill_step_size
        check_memory(tokens, pool_bytes(formats, **sizes))
        splits = [bias.split(self.config, max_seq_len) for bias in split]
        stored: dict[str, Any] = {"quant_bit": quant_bit, "quant_group": quant_group, "bias_split": bias_split}
        stored["kernels"] = kernels
        return Pool(
            formats,
            splits or [None] * len(formats),
            **sizes,
            make_cache=partial(self.make_cache, **stored),
            identity=self.identity,
            kernels=kernels,
            dtype=self.dtype,
            num_heads=self.config.num_attention_heads,
            windows=[narrow_window(window, max_seq_len) for window in self.all_windows],
        )

    def can_compile(self, cache: ModelCache, new_tokens: int = 1) -> bool:
        """See :class:`kvant.models.LanguageModel`. No array of the cache may change its shape.

        A window with a bias split is not compiled: the angles of a new token are computed in Python. More new tokens
        than its slack and one would overwrite rows that they, or a step in their place, need.
        """
        return all(
            isinstance(layer, QuantizedKVCache)
            and (not isinstance(layer, WindowKVCache) or (layer.bias_split is None and new_tokens <= layer.slack + 1))
            for layer in cache
        )


def _layer_cache(
    config: ModelConfig, attention: Any, max_seq_len: int, bias_split: bool, options: Mapping[str, Any]
) -> QuantizedKVCache:
    """An empty cache for a layer, with ``options`` of :class:`kvant.cache.QuantizedKVCache`."""
    sizes = (max_seq_len, config.num_key_value_heads, config.head_dim)
    bias, window = attention.qkv_bias if bias_split else None, attention.window
    if window is None or window >= max_seq_len:
        split = None if bias is None else bias.split(config, max_seq_len)
        return QuantizedKVCache(*sizes, bias_split=split, **options)
    split = None if bias is None else bias.split(config, 0)  # the ring has angles of its own
    rotary = config.rope.rotary(config.head_dim)
    return WindowKVCache(*sizes, window=window, bias_split=split, rotary=rotary, **options)
