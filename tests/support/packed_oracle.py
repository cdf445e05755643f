"""NumPy oracle of PMX's dynamic operators: the static oracle's arithmetic, with the cache's rows found token by token.

N new tokens of all sequences, T all their tokens, K kv heads, D head_dim, MaxT rows of the cache. Written from the
specification alone and on purpose slow and plain. Nothing is changed in place.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from support import oracle
from support.oracle import KEY, VALUE, Array, Spec


class Packing(NamedTuple):
    """Where the sequences of a call are."""

    seqstarts: list[int]
    kvstarts: list[int]
    cachestarts: list[list[int]]  # cache_mode 0: one entry each
    start_pos: list[int]
    cache_mode: int = 0
    page_size: int = 128

    @property
    def batch(self) -> int:
        return len(self.start_pos)

    def row(self, b: int, t: int) -> int:
        """The row of the cache that holds token t of sequence b."""
        if self.cache_mode == 0:
            return self.cachestarts[b][0] + t
        return self.cachestarts[b][t // self.page_size] + t % self.page_size

    def new_tokens(self) -> Iterator[tuple[int, int]]:
        """For each of the N tokens: its place among them, and its row."""
        for b in range(self.batch):
            for i, n in enumerate(range(self.seqstarts[b], self.seqstarts[b + 1])):
                yield n, self.row(b, self.start_pos[b] + i)

    def all_rows(self) -> list[int]:
        """The row of each of the T tokens."""
        lengths = [self.kvstarts[b + 1] - self.kvstarts[b] for b in range(self.batch)]
        return [self.row(b, t) for b in range(self.batch) for t in range(lengths[b])]


def token(x: Array, kind: int, row: int, spec: Spec) -> Array:
    """The writable view (K, last) of one row of a cache or a scale."""
    layer = spec.layer_idx
    if spec.cache_layout == 0:
        return x[row, layer, kind]  # (MaxT, L, 2, K, last)
    if spec.cache_layout == 1:
        return x[layer, row, kind]  # (L, MaxT, 2, K, last)
    if spec.cache_layout == 2:
        return x[layer, kind, row]  # (L, 2, MaxT, K, last)
    return x[layer, kind, :, row]  # (L, 2, K, MaxT, last)


def store(
    key: Array, value: Array, packing: Packing, cache: Array, scale: Array | None, spec: Spec
) -> tuple[Array, Array | None]:
    """Copies of cache and scale with key and value (N, K, D) written."""
    cache, scale = cache.copy(), None if scale is None else scale.copy()
    for n, row in packing.new_tokens():
        for kind, x in ((KEY, key), (VALUE, value)):
            if scale is None:
                token(cache, kind, row, spec)[...] = oracle.cast(x[n], spec.cache_dtype)
            else:
                quantized, group_scale = oracle.quantize(x[n], spec)
                token(cache, kind, row, spec)[...] = quantized
                token(scale, kind, row, spec)[...] = group_scale
    return cache, scale


def fetch(packing: Packing, cache: Array, scale: Array | None, spec: Spec) -> tuple[Array, Array]:
    """Keys and values (T, K, D) of all tokens in T1."""

    def one(kind: int) -> Array:
        stored = np.stack([token(cache, kind, row, spec) for row in packing.all_rows()])
        if scale is None:
            return oracle.cast(stored, spec.dtype)
        scales = np.stack([token(scale, kind, row, spec) for row in packing.all_rows()])
        return oracle.dequantize(stored, scales, spec)

    return one(KEY), one(VALUE)


def attend(
    query: Array,
    key: Array,
    value: Array,
    packing: Packing,
    *,
    decoding_batches: int,
    is_causal: bool,
    is_alibi: bool = False,
    attn_mask: Array | None = None,
) -> Array:
    """Attention in float64: query (N, H, D), key and value (T, K, D) -> (N, H, D), sequence by sequence."""
    output = np.full(query.shape, np.nan)
    for b in range(packing.batch):
        new = slice(packing.seqstarts[b], packing.seqstarts[b + 1])
        all_tokens = slice(packing.kvstarts[b], packing.kvstarts[b + 1])
        if new.start == new.stop:
            continue
        output[new] = oracle.attend(
            query[None, new],
            key[None, all_tokens],
            value[None, all_tokens],
            is_causal=is_causal and not b < decoding_batches,
            is_alibi=is_alibi,
            attn_mask=None if attn_mask is None or attn_mask.size == 0 else attn_mask[..., new, all_tokens],
        )[0]
    return output
