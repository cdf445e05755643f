"""Seeded cases over the parameter space of the dynamic operators.

N new tokens of all sequences, T all their tokens, H query heads, K kv heads, D head_dim, MaxT rows of the cache.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from support import oracle, packed_oracle
from support.operator_cases import draw_spec, draw_values, poisoned
from support.oracle import Array, Spec
from support.packed_oracle import Packing

FORMS = ("list", "tuple", "numpy ints", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
MASKS = ("none", "empty", "float", "bool")
PAGE_SIZES = (1, 2, 3, 4, 8, 128)
PADDING_ENTRIES = (-1, 0, 10**4, 2**62)  # of a page table behind the last token: never looked at


@dataclass(frozen=True, slots=True)
class PackedCase:
    """One call. It prints as what a failure message needs; its arrays come from its seed."""

    seed: int
    attends: bool  # whether it is for multi_head_cache_attention
    packing: Packing
    max_rows: int
    num_kv_heads: int
    head_dim: int
    data: str  # what the values are like
    forms: tuple[str, ...]  # how seqstarts, kvstarts, cachestarts and start_pos are passed
    spec: Spec
    # key_value_cache only
    num_repeat: int = 1
    # attention only
    num_heads: int = 1
    decoding_batches: int = 0
    is_causal: bool = False
    is_alibi: bool = False
    mask: str = "none"
    mask_rank: int = 2
    mask_padding: int = 0
    mask_dtype: str = "float32"

    @property
    def new_tokens(self) -> int:
        return self.packing.seqstarts[-1]

    @property
    def tokens(self) -> int:
        return self.packing.kvstarts[-1]

    @property
    def seqlens(self) -> list[int]:
        return lengths(self.packing.seqstarts)

    @property
    def index_arguments(self) -> dict[str, Any]:
        packing = self.packing
        cachestarts: Any = packing.cachestarts if packing.cache_mode else [entry for (entry,) in packing.cachestarts]
        given = (packing.seqstarts, packing.kvstarts, cachestarts, packing.start_pos)
        names = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
        arguments = {name: passed(x, form) for name, x, form in zip(names, given, self.forms, strict=True)}
        return {**arguments, "max_seqlen": max(self.seqlens), "max_kvlen": max(lengths(packing.kvstarts))}

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that both operators take."""
        spec = self.spec
        return {
            "num_layer": spec.num_layer,
            "layer_idx": spec.layer_idx,
            "quant_bit": spec.quant_bit,
            "quant_group": spec.quant_group,
            "cache_mode": self.packing.cache_mode,
            "cache_layout": spec.cache_layout,
            "page_size": self.packing.page_size,
        }

    @property
    def attention_options(self) -> dict[str, Any]:
        num_kv_heads = 0 if self.num_kv_heads == self.num_heads and self.seed % 2 else self.num_kv_heads
        heads = {"num_heads": self.num_heads, "num_kv_heads": num_kv_heads, "head_dim": self.head_dim}
        return {**self.options, **heads, "is_causal": self.is_causal, "is_alibi": self.is_alibi}


def lengths(starts: list[int]) -> list[int]:
    return [b - a for a, b in pairwise(starts)]


def passed(values: list[Any], form: str) -> Any:
    """Integers, or rows of integers, in the form in which a case passes them."""
    nested = bool(values) and isinstance(values[0], list)
    if form == "list":
        return values
    if form in ("tuple", "numpy ints"):
        kind = int if form == "tuple" else np.int64
        return tuple(tuple(map(kind, x)) for x in values) if nested else tuple(map(kind, values))
    if nested:  # of an array all rows are of one length
        width = max(map(len, values))
        values = [x + [PADDING_ENTRIES[len(x) % 3]] * (width - len(x)) for x in values]
    table = np.array(values, np.int64)
    limits = np.iinfo(form)
    fits = table.min() >= limits.min and table.max() <= int(limits.max)
    return mx.array(table.astype(form if fits else np.int64))


# ---- a call ----------------------------------------------------------------------------------------------------------


def draw_packed_case(seed: int) -> PackedCase:
    """The seed's lower bits are the cache_layout, the cache_mode and the operator; the rest is drawn."""
    rng = np.random.default_rng((seed, 15))
    spec, head_dim = draw_spec(rng)
    spec = spec._replace(cache_layout=seed % 4)
    cache_mode = seed // 4 % 2
    packing, max_rows = draw_packing(rng, cache_mode)
    num_kv_heads = int(rng.integers(1, 4))
    mask = str(rng.choice(["none", "none", "empty", "float", "float", "bool"]))
    attends = seed // 8 % 2 == 1
    data = str(rng.choice(["unit", "unit", "zeros"] if attends else ["unit", "ties", "tiny", "zeros", "large"]))
    if not attends and spec.quant_bit == 0 and rng.integers(8) == 0:
        spec, data = spec._replace(dtype="int8", cache_dtype="int8"), "int8"
    return PackedCase(
        seed=seed,
        attends=attends,
        packing=packing,
        max_rows=max_rows,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        data=data,
        forms=tuple(str(form) for form in rng.choice(FORMS, 4)),
        spec=spec,
        num_repeat=int(rng.choice([1, 1, 2, 3])),
        num_heads=num_kv_heads * int(rng.integers(1, 5)),
        decoding_batches=int(rng.integers(packing.batch + 1)),
        is_causal=bool(rng.integers(2)),
        is_alibi=bool(rng.integers(3) == 0),
        mask=mask,
        mask_rank=int(rng.integers(2, 4)),
        mask_padding=int(rng.choice([0, 1, 7])),
        mask_dtype="bool_" if mask == "bool" else str(rng.choice(["float32", "float16", "bfloat16"])),
    )


def draw_packing(rng: np.random.Generator, cache_mode: int) -> tuple[Packing, int]:
    """Sequences and their rows: apart, side by side or with a shared beginning; and how many rows the cache has."""
    batch = int(rng.integers(1, 5))
    seqlens = [int(x) for x in rng.choice([0, 1, 1, 1, 2, 3, 6], batch)]
    if not any(seqlens):
        seqlens[int(rng.integers(batch))] = 1
    start_pos = [int(x) for x in rng.choice([0, 0, 1, 2, 5, 9], batch)]
    kvlens = [start + new for start, new in zip(start_pos, seqlens, strict=True)]
    page_size = int(rng.choice(PAGE_SIZES)) if cache_mode else 128
    first_row = int(rng.integers(4))
    if cache_mode:
        tables, end = draw_tables(rng, start_pos, kvlens, page_size, first_row)
    else:
        tables, end = draw_contiguous(rng, start_pos, seqlens, first_row)
    packing = Packing(
        seqstarts=[0, *accumulate(seqlens)],
        kvstarts=[0, *accumulate(kvlens)],
        cachestarts=tables,
        start_pos=start_pos,
        cache_mode=cache_mode,
        page_size=page_size,
    )
    return packing, end + int(rng.choice([0, 0, 1, 5]))


def draw_contiguous(
    rng: np.random.Generator, start_pos: list[int], seqlens: list[int], row: int
) -> tuple[list[list[int]], int]:
    """The first row of each sequence. One that writes nothing may lie in what another only reads."""
    first = [0] * len(seqlens)
    for b in rng.permutation(len(seqlens)):
        first[b] = row
        row += start_pos[b] + seqlens[b] + int(rng.choice([0, 0, 2]))
    for b, (start, new) in enumerate(zip(start_pos, seqlens, strict=True)):
        hosts = [c for c in range(len(seqlens)) if c != b and start_pos[c] >= start > 0]
        if new == 0 and hosts:
            host = int(rng.choice(hosts))
            first[b] = first[host] + int(rng.integers(start_pos[host] - start + 1))
        elif new == 0 and start == 0:
            first[b] = int(rng.choice(PADDING_ENTRIES))  # no token, so no row
    return [[x] for x in first], max(row, 1)


def draw_tables(
    rng: np.random.Generator, start_pos: list[int], kvlens: list[int], page_size: int, row: int
) -> tuple[list[list[int]], int]:
    """A page table for each sequence. Pages begin at any row; whole pages that are only read may be shared."""
    tables = [[-1] * -(-kvlen // page_size) for kvlen in kvlens]
    batch = len(kvlens)
    shared = [0] * batch  # pages at the beginning that are those of sequence 0
    for b in range(1, batch):
        shared[b] = int(rng.integers(min(start_pos[0], start_pos[b]) // page_size + 1))
    own = [(b, page) for b in range(batch) for page in range(shared[b], len(tables[b]))]
    order = range(len(own)) if rng.integers(3) == 0 else rng.permutation(len(own))  # pages side by side are one run
    for i in order:
        b, page = own[i]
        tables[b][page] = row
        row += min(page_size, kvlens[b] - page * page_size) + int(rng.choice([0, 0, 0, 1]))
    for b, table in enumerate(tables):
        table[: shared[b]] = tables[0][: shared[b]]
        table += [int(x) for x in rng.choice(PADDING_ENTRIES, int(rng.integers(3)))]
    return tables, max(row, 1)


# ---- the arrays of a case --------------------------------------------------------------------------------------------


def cache_shape(case: PackedCase, last: int) -> tuple[int, ...]:
    L, T, K = case.spec.num_layer, case.max_rows, case.num_kv_heads
    return ((T, L, 2, K, last), (L, T, 2, K, last), (L, 2, T, K, last), (L, 2, K, T, last))[case.spec.cache_layout]


def make_cache(case: PackedCase, rng: np.random.Generator) -> tuple[Array, Array | None]:
    """Poison, but the earlier tokens of the call's own layer and sequences."""
    spec, packing = case.spec, case.packing
    cache = poisoned(cache_shape(case, case.head_dim // 2 if spec.quant_bit == 4 else case.head_dim), spec.cache_dtype)
    scale = None
    if spec.quant_bit:
        scale = poisoned(cache_shape(case, case.head_dim // spec.quant_group), spec.scale_dtype)
    starts = [0, *accumulate(packing.start_pos)]
    earlier = packing._replace(seqstarts=starts, kvstarts=starts, start_pos=[0] * packing.batch)
    shape = (starts[-1], case.num_kv_heads, case.head_dim)
    if not starts[-1]:
        return cache, scale
    return packed_oracle.store(
        draw_values(rng, shape, case), draw_values(rng, shape, case), earlier, cache, scale, spec
    )


def make_mask(case: PackedCase, rng: np.random.Generator) -> Array | None:
    """A mask in which all that is no sequence's own block is poison; most queries keep most keys and some none."""
    if case.mask == "none":
        return None
    if case.mask == "empty":
        return np.zeros(((0,), (0, 0))[case.seed % 2], np.float32)
    shape = (case.num_heads, case.new_tokens, case.tokens + case.mask_padding)[-case.mask_rank :]
    keep = rng.random(shape) > 0.3
    keep[rng.random(shape[:-1]) < 0.15] = False
    mask = np.ones(shape, np.bool_)  # loud: read, it would let poison in
    if case.mask == "float":
        keep = oracle.cast(np.where(keep, rng.standard_normal(shape), -np.inf), case.mask_dtype)
        mask = np.full(shape, np.nan, keep.dtype)
    seq, kv = case.packing.seqstarts, case.packing.kvstarts
    for b in range(case.packing.batch):
        own = (..., slice(seq[b], seq[b + 1]), slice(kv[b], kv[b + 1]))
        mask[own] = keep[own]
    return mask
