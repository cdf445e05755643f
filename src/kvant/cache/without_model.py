"""A cache made of what a snapshot says of itself: no model is needed until it is used."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.cache.full import FullKVCache
from kvant.cache.layer import KVCache
from kvant.cache.layer_format import DTYPES, LayerFormat
from kvant.cache.model import ModelCache
from kvant.cache.quantized import QuantizedKVCache
from kvant.cache.snapshot import nbytes
from kvant.cache.snapshot_header import SnapshotHeader
from kvant.cache.window import WindowKVCache
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.rotary import Rotary
from kvant.sizes import format_bytes, physical_memory


def make_cache(header: SnapshotHeader, max_seq_len: int | None) -> ModelCache:
    """An empty cache for a decoder's snapshot, which is to fill in the biases, too.

    Args:
        header: of the snapshot.
        max_seq_len: the reservation; None: the cache grows.

    Raises:
        ValueError: layers that no cache has, or more than this machine's memory; nothing was allocated.
    """
    check_reservation(header.layers, len(header.lengths), max_seq_len)
    rotary = None if header.rope is None else Rotary(header.rope.frequencies, header.rope.factor)
    cache = ModelCache([_layer(form, len(header.lengths), max_seq_len, rotary) for form in header.layers])
    cache.rotary = rotary
    return cache


def check_reservation(layers: Sequence[LayerFormat], batch: int, max_seq_len: int | None) -> None:
    """Raise a ValueError unless layers of such formats can be reserved on this machine."""
    total = 0
    for form in layers:
        if form.kind not in ("quantized", "chunks"):
            continue
        if max_seq_len is None:
            raise ValueError("reservation is None; expected a number of tokens")
        rows = max_seq_len if form.window is None else min(max_seq_len, form.keep + form.window + form.slack)
        total += batch * sum(map(nbytes, form.arrays(rows).values())) + 8 * rows * len(form.split_pairs or ())
    if total > (memory := physical_memory()):
        raise ValueError(
            f"reservation is {max_seq_len}; that takes {format_bytes(total)} and this machine has "
            f"{format_bytes(memory)}: max_kv_size reserves less"
        )


def layer_options(form: LayerFormat, batch: int) -> dict[str, Any]:
    """Options of :class:`QuantizedKVCache` for a format."""
    options: dict[str, Any] = {"value_head_dim": form.value_head_dim, "batch": batch, "quant_bit": form.quant_bit}
    if form.quant_bit:
        return options | {"quant_group": form.quant_group, "scale_dtype": DTYPES[form.scale_dtype]}
    return options | {"dtype": DTYPES[form.dtype]}


def _layer(form: LayerFormat, batch: int, max_seq_len: int | None, rotary: Rotary | None) -> KVCache:
    if form.kind == "full":
        return FullKVCache(form.window)
    if form.kind != "quantized" or form.shared or max_seq_len is None:
        raise ValueError(f"a layer of kind {form.kind!r} in a decoder's cache")
    options = layer_options(form, batch)
    K, D, pairs = form.num_kv_heads, form.head_dim, form.split_pairs
    if pairs is not None:
        if rotary is None or len(rotary.frequencies) != D // 2:
            raise ValueError(f"rope has other frequencies than those of the {D // 2} pairs of a head")
        table = rotation_table(rotary, pairs, 0 if form.window else max_seq_len)
        options["bias_split"] = BiasSplit(mx.zeros((K, 2, len(pairs))), pairs, table, mx.zeros((K, D)))
    if form.window is None:
        return QuantizedKVCache(max_seq_len, K, D, **options)
    ring: dict[str, Any] = {"window": form.window, "keep": form.keep, "slack": form.slack, "rotary": rotary}
    return WindowKVCache(max_seq_len, K, D, **ring, **options)
