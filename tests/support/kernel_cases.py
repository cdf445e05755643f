"""Calls of the fused kernel that together cover pairs of options; how they run on the host, and what they
must give.

B batch, S new tokens, T cached tokens read, H query heads, K kv heads, D head_dim, G group size, P rotary
pairs.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from kvant.operators import paged_kernel
from kvant.operators.bias_split import BiasSplit
from kvant.operators.exact_rows import RING, SINKS, TAIL_WINDOW
from kvant.operators.kernels import attend as attend_module
from kvant.operators.kernels import launch as launch_module
from kvant.operators.kernels.attend import (
    GROUPS,
    HEAD_DIMS,
    PAGE_SIZE,
    SPLIT_ROWS,
    ExactInput,
    threadgroup_shape,
)
from kvant.operators.quantization import quantized_dtype
from kvant.operators.stored_tokens import stored_tokens
from support import attend_stand_in, oracle
from support.counts import count
from support.fused_path import quantized_sides
from support.metal_host import FORWARD, REVERSE, on_host
from support.operator_cases import FLOATS, check_output, poisoned, random_mask, to_mx
from support.oracle import Array, Spec

MOST_WORK = count(40_000, 100_000)  # elements of queries times tokens; 100,000 take about 0.2 s
FORMATS = [(bits, bits, group) for bits in (8, 4) for group in GROUPS] + [(0, 0, 0)]
FORMATS += [(8, 4, 32), (4, 8, 32), (8, 4, 8), (4, 8, 16)]  # bits of keys and of values
STEPS = (8, 32)  # rows that threadgroups read between two updates of the maximum
WIDTHS = [(width, width) for width in HEAD_DIMS] + [(192, 128), (64, 128)]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call. It prints as what a failure message needs; its arrays come from its seed.

    splits replaces the module's own number, so that a few hundred tokens are divided as many are. backend:
    for whose registers the queries are distributed. The text is Metal's in both cases.
    """

    seed: int = 0
    batch: int = 1
    ratio: int = 4  # H / K
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 0  # 0: head_dim
    new_tokens: int = 1
    offset: int = 5  # of the first sequence
    shorter: int = 0  # cached tokens that each sequence has fewer than the one before, down to none
    max_tokens: int = 37  # rows of a sequence
    layout: str = "rows"  # rows, pages
    dtype: str = "float32"
    quant_bit: int = 8
    value_bit: int = 0  # 0: quant_bit
    quant_group: int = 32
    cache_dtype: str = "float16"  # at 0 bits
    scale_dtype: str = "float16"
    is_causal: bool = True
    is_alibi: bool = False
    mask: str = "none"  # none, bool, float
    mask_rank: int = 4
    window: int | None = None
    sinks: bool = False
    softcap: float = 0.0
    score_scale: float | None = None
    pairs: int | None = None  # None: no bias split
    backend: str = "metal"
    splits: int | None = 4
    knows_rows: bool = False  # the caller says how many rows the longest sequence has
    tail: str = ""  # dtype of an exact tail
    tail_sinks: int = SINKS
    tail_tokens: int = TAIL_WINDOW  # cached tokens that have exact rows, at most

    @property
    def num_heads(self) -> int:
        return self.ratio * self.num_kv_heads

    @property
    def values(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def num_keys(self) -> int:
        return self.offset + self.new_tokens

    @property
    def offsets(self) -> list[int]:
        return [max(0, self.offset - self.shorter * b) for b in range(self.batch)]

    @property
    def ends(self) -> list[int]:
        """Tokens of each sequence, the new ones included."""
        return [offset + self.new_tokens for offset in self.offsets]

    @property
    def firsts(self) -> list[int]:
        """The position of each sequence's row 0: with pages those that nobody sees any more are left out."""
        if self.layout == "rows" or self.window is None:
            return [0] * self.batch
        return [max(0, offset + 1 - self.window) // PAGE_SIZE * PAGE_SIZE for offset in self.offsets]

    @property
    def bits(self) -> tuple[int, int]:
        """Of keys and of values."""
        return self.quant_bit, self.value_bit or self.quant_bit

    @property
    def spec(self) -> Spec:
        stored = {8: "int8", 4: "uint8", 0: self.cache_dtype}[min(self.bits)]
        return Spec(
            self.dtype, stored, self.scale_dtype, 1, 0, self.quant_bit, self.quant_group, cache_layout=1
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        width = max(self.head_dim, self.values)
        return threadgroup_shape(self.ratio * self.new_tokens, self.pairs or 0, self.backend, width)

    def positions(self, b: int) -> range:
        """The positions that the rows of sequence b hold, once all tokens are written."""
        return range(self.firsts[b], self.ends[b])

    def readable(self, b: int) -> range:
        """The rows of sequence b that may be read: without a window all it has; of a sequence with a tail
        those that are not exact for its last query.
        """
        first = 0 if self.window is None else max(0, self.offsets[b] + 1 - self.window)
        last = self.ends[b]
        if self.tail:
            first = max(first, min(self.tail_sinks, last))
            last = min(last, max(last - TAIL_WINDOW, self.tail_start(b)))
        return range(len(self.positions(b)))[max(0, first - self.firsts[b]) : max(0, last - self.firsts[b])]

    def tail_start(self, b: int) -> int:
        """The first position behind the first tokens that has an exact row."""
        start = max(SINKS, self.offsets[b] + 1 - TAIL_WINDOW, self.offsets[b] - self.tail_tokens)
        return min(start, self.ends[b])

    def exact(self, b: int) -> list[int]:
        """The positions of sequence b whose exact rows may be read. The last one has a row in any case."""
        seen = 0 if self.window is None else max(0, self.offsets[b] + 1 - self.window)
        held = {*range(min(self.tail_sinks, self.ends[b])), *range(self.tail_start(b), self.ends[b])}
        return sorted({self.ends[b] - 1, *(position for position in held if position >= seen)})


class ExactArrays(NamedTuple):
    """The fields of :class:`kvant.operators.kernels.attend.ExactInput` in NumPy."""

    rows: Array
    pages: Array
    spans: Array


@dataclass(frozen=True, slots=True)
class Drawn:
    """A case's arrays in NumPy. Rows that hold nothing are poison, in cache and scale, rotation and mask; and
    those that an exact tail stands for.
    """

    query: Array  # (B, H, S, D)
    cache: Array  # (1, B, 2, K, MaxS, D'), or a pool's (2, K, rows, D')
    scale: Array | None
    pages: Array | None  # (B, N)
    mask: Array | None
    sinks: Array | None
    split: BiasSplit | None
    tail: ExactArrays | None


def draw(case: KernelCase) -> Drawn:
    rng = np.random.default_rng(case.seed)
    spec, (B, K, T) = case.spec._replace(dtype="float32"), (case.batch, case.num_kv_heads, case.num_keys)
    stored, scales, exact = [], [], []
    for width, bits in zip((case.head_dim, case.values), case.bits, strict=True):
        x = oracle.cast(
            rng.standard_normal((B, T, K, width)), "float32" if case.quant_bit else case.cache_dtype
        )
        exact.append(oracle.cast(x, case.tail or "float16"))
        if case.quant_bit:
            x, scale = oracle.quantize(x, spec._replace(quant_bit=bits))
            scales.append(scale)
        stored.append(x)
    pages = None
    if case.layout == "pages":
        counts = [-(-(end - first) // PAGE_SIZE) for end, first in zip(case.ends, case.firsts, strict=True)]
        numbers = rng.permutation(sum(counts) + 2).tolist()
        pages = np.full((B, max(counts) + 1), 1_000_000, np.int32)  # read, it would be far outside
        for b, own in enumerate(counts):
            pages[b, :own], numbers = numbers[:own], numbers[own:]
    split = None
    if case.pairs is not None:
        pairs = tuple(sorted(rng.permutation(case.head_dim // 2)[: case.pairs].tolist()))
        rotation = rotations(case, 10.0 ** rng.uniform(-3, 0, len(pairs)))
        biases = [
            rng.standard_normal(shape).astype(np.float32) for shape in ((K, 2, len(pairs)), (K, case.values))
        ]
        split = BiasSplit(mx.array(biases[0] * 3), pairs, mx.array(rotation), mx.array(biases[1]))
    return Drawn(
        query=oracle.cast(
            rng.standard_normal((B, case.num_heads, case.new_tokens, case.head_dim)), case.dtype
        ),
        cache=place(case, stored, spec.cache_dtype, pages),
        scale=place(case, scales, spec.scale_dtype, pages) if case.quant_bit else None,
        pages=pages,
        mask=draw_mask(case, rng),
        sinks=rng.standard_normal(case.num_heads).astype(np.float32) if case.sinks else None,
        split=split,
        tail=draw_tail(case, exact, rng) if case.tail else None,
    )


def draw_tail(case: KernelCase, sides: Sequence[Array], rng: np.random.Generator) -> ExactArrays:
    """The exact rows of keys and values (B, T, K, last)."""
    B, K = case.batch, case.num_kv_heads
    parts = np.stack(sides, axis=1) if case.head_dim == case.values else np.concatenate(sides, -1)[:, None]
    num_sides, last = parts.shape[1], parts.shape[-1]
    rows = poisoned((num_sides, K, (B + 2) * PAGE_SIZE, last), case.tail)
    pages = np.full((B, 3), 1_000_000, np.int32)
    pages[:, 0] = rng.permutation(B + 2)[:B]
    spans = np.full((max(B, 2), 4), 1_000_000, np.int32)
    for b, end in enumerate(case.ends):
        positions = case.exact(b)
        rows[:, :, exact_rows_at(case, pages, b)] = parts[b][:, positions].swapaxes(1, 2)
        spans[b, :3] = min(case.tail_sinks, end), case.tail_start(b), end
    return ExactArrays(rows, pages, spans)


def exact_rows_at(case: KernelCase, pages: Array, b: int) -> list[int]:
    """The rows of the positions that ``case.exact`` names."""
    page = int(pages[b, 0]) * PAGE_SIZE
    positions = case.exact(b)
    return [page + (p if p < SINKS else SINKS + (p - SINKS) % RING) for p in positions]


def rows_in(array: Array, pages: Array | None, b: int, rows: Iterable[int]) -> tuple[Array, Array]:
    """The view (2, K, rows, last) of a cache or a pool in which sequence b's rows are, and where in it."""
    at = np.array(list(rows), int)
    if pages is None:
        return array[0, b], at
    return array, pages[b, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE


def place(case: KernelCase, sides: Sequence[Array], dtype: str, pages: Array | None) -> Array:
    """Stored keys and values (B, T, K, last) of every position in the rows where the kernel finds them."""
    alike = case.head_dim == case.values and len({*case.bits}) == 1
    parts = np.stack(sides, axis=1) if alike else oracle.beside(*sides)[:, None]
    num_sides, K, last = parts.shape[1], *parts.shape[3:]
    pool = num_sides, K, (case.batch * (-(-case.num_keys // PAGE_SIZE)) + 2) * PAGE_SIZE, last
    array = poisoned((1, case.batch, num_sides, K, case.max_tokens, last) if pages is None else pool, dtype)
    for b in range(case.batch):
        rows = case.readable(b) if case.tail else range(len(case.positions(b)))
        own, at = rows_in(array, pages, b, rows)
        own[:, :, at] = parts[b][:, [case.firsts[b] + row for row in rows]].swapaxes(1, 2)
    return array


def rotations(case: KernelCase, angle: Array) -> Array:
    """Of the positions that are in rows; others are poison."""
    table = np.full((2, len(angle), max(case.max_tokens, case.num_keys)), np.nan, np.float32)
    held = sorted({position for b in range(case.batch) for position in case.positions(b)})
    table[..., held] = np.cos(np.outer(angle, held)), np.sin(np.outer(angle, held))
    return table


def draw_mask(case: KernelCase, rng: np.random.Generator) -> Array | None:
    """Columns past the rows must not be read."""
    if case.mask == "none":
        return None
    batch = int(rng.choice([1, case.batch]))
    rows = max(len(case.positions(b)) for b in range(case.batch))
    shape = (batch, case.num_heads, case.new_tokens, rows + int(rng.integers(3)))[-case.mask_rank :]
    mask = random_mask(rng, shape, case.mask)
    if case.mask == "float":
        mask[..., rows:] = np.nan
    return mask


def expected(case: KernelCase, drawn: Drawn) -> Array:
    """(B, H, S, Dv) in float64. The kernel multiplies by scales in float32 and rounds no key or value to
    the dtype.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_kernel, "attend", attend_stand_in.exact)
        return attended(case, drawn)


@contextmanager
def kernels_on_host(
    forbidden: Mapping[str, Array] | None = None,
    exact_forbidden: Mapping[str, Array] | None = None,
    texts: Mapping[str, str] | None = None,
    orders: Sequence[int] = (FORWARD, REVERSE),
) -> Iterator[None]:
    """Launches are host runs of Metal's text, whose loops are not unrolled: that takes a compiler twice the
    time.

    forbidden: for an input of the first pass, where it must not be read; exact_forbidden: the same of its
        launch for exact rows. texts: in place of a file's own, by name.
    """

    def plain(file: str) -> str:
        own = (texts or {}).get(file) or text(file)
        return re.sub(r"(#define KVANT_UNROLL\w*) .*", r"\1", own)

    def kernel(name: str, backend: str) -> Any:  # anew: the text may be another
        def call(*, template: list[tuple[str, Any]], **given: Any) -> list[mx.array]:
            of_exact_rows = name == "attend" and dict(template)["TAIL"] == 2
            unreadable = exact_forbidden if of_exact_rows else forbidden
            own = dict(unreadable or {}) if name == "attend" else {}
            return on_host(made, orders=orders, unreadable=own)(template=template, **given)

        made = make_kernel(name, "metal")
        return call

    make_kernel, text = launch_module._kernel.__wrapped__, launch_module._text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_module, "_kernel", kernel)
        patch.setattr(launch_module, "_text", plain)
        yield


def run(case: KernelCase, drawn: Drawn, **how: Any) -> mx.array:
    """The kernel's output; how: texts and orders of kernels_on_host. Raises a HostError."""
    unreadable = forbidden(case, drawn), exact_forbidden(case, drawn)
    with kernels_on_host(*unreadable, **how), pytest.MonkeyPatch.context() as patch:
        if case.splits is not None:
            patch.setattr(attend_module, "num_splits", lambda *_: case.splits)
        return attended(case, drawn)


def attended(case: KernelCase, drawn: Drawn) -> Any:
    names = (
        "quant_bit",
        "value_bit",
        "quant_group",
        "is_causal",
        "is_alibi",
        "window",
        "softcap",
        "score_scale",
        "backend",
    )
    given = {name: getattr(drawn, name) for name in ("mask", "sinks", "pages")}
    return paged_kernel.attend_fused(
        to_mx(drawn.query, case.dtype),
        to_mx(drawn.cache, case.spec.cache_dtype),
        None if drawn.scale is None else mx.array(drawn.scale),
        mx.array(case.offsets) if case.shorter else mx.array(case.offset),
        first=None if drawn.pages is None else mx.array(case.firsts, mx.int32),
        rows=max(len(case.positions(b)) for b in range(case.batch)) if case.knows_rows else None,
        bias_split=drawn.split,
        tail=None if drawn.tail is None else exact_input(case, drawn.tail),
        **{name: getattr(case, name) for name in names},
        **{name: None if x is None else mx.array(x) for name, x in given.items()},
    )


def exact_input(case: KernelCase, arrays: ExactArrays) -> ExactInput:
    return ExactInput(to_mx(arrays.rows, case.tail), mx.array(arrays.pages), mx.array(arrays.spans))


def forbidden(case: KernelCase, drawn: Drawn) -> dict[str, Array]:
    """Where inputs of the first pass must not be read: True."""
    dead = np.ones((*drawn.cache.shape[:-1], 1), bool)
    for b in range(case.batch):
        own, at = rows_in(dead, drawn.pages, b, case.readable(b))
        own[:, :, at] = False
    found = {"cache": dead}
    if case.quant_bit:
        found["scale"] = dead
    if drawn.split is not None and drawn.split.pairs:
        found["rotation"] = np.isnan(np.array(drawn.split.rotation))
    if drawn.mask is not None:
        own_mask = drawn.mask.ndim == 4 and len(drawn.mask) > 1
        counts = np.array([len(case.positions(b)) for b in range(case.batch)]).reshape(-1, 1, 1, 1)
        found["mask"] = np.arange(drawn.mask.shape[-1]) >= (counts if own_mask else counts.max())
    return found


def exact_forbidden(case: KernelCase, drawn: Drawn) -> dict[str, Array]:
    """The same of the first pass over exact rows."""
    if drawn.tail is None:
        return {}
    dead = np.ones((*drawn.tail.rows.shape[:-1], 1), bool)
    for b in range(case.batch):
        dead[:, :, exact_rows_at(case, drawn.tail.pages, b)] = False
    unused = np.arange(4) == 3
    found = {"cache": dead, "spans": unused | (np.arange(len(drawn.tail.spans)) >= case.batch)[:, None]}
    if drawn.split is not None and drawn.split.pairs:
        held = {position for b in range(case.batch) for position in case.exact(b)}
        columns = range(drawn.split.rotation.shape[-1])
        found["rotation"] = np.array([column not in held for column in columns])
    return found


def check(case: KernelCase, **how: Any) -> None:
    """The kernel's output is float64's, to the dtype's tolerance."""
    drawn = draw(case)
    check_output(run(case, drawn, **how), expected(case, drawn), case.dtype)


def check_append(
    key: mx.array,
    value: mx.array,
    scale_dtype: str = "float16",
    *,
    quant_bit: int,
    quant_group: int,
    value_bit: int = 0,
    fit: bool = False,
    **how: Any,
) -> tuple[mx.array, mx.array]:
    """What the kernel stores is the operator's to the bit. Values beside a NaN or an infinity are
    anything.
    """
    bits: dict[str, int] = {"quant_bit": quant_bit, "value_bit": value_bit or quant_bit}
    dtype = getattr(mx, scale_dtype)
    arrays = [mx.zeros(0, quantized_dtype(**bits)), mx.zeros(0, dtype)]
    form: dict[str, Any] = bits | {"quant_group": quant_group, "fit": fit}
    with kernels_on_host(**how):
        stored = stored_tokens(key, value, arrays, **form, backend="metal")
    wanted = quantized_sides(key, value, (*bits.values(),), quant_group, dtype, fit=fit)
    unfused = stored_tokens(key, value, arrays, **form)
    assert all(mx.array_equal(*pair, equal_nan=True) for pair in zip(unfused[1:], wanted[1:], strict=True))
    assert [(x.shape, x.dtype) for x in stored] == [(x.shape, x.dtype) for x in wanted]
    given, expected = ([np.array(array) for array in pair] for pair in (stored, wanted))
    oracle.check_scales(given[1], expected[1], fit=fit)
    if np.isfinite(expected[1]).all():
        np.testing.assert_array_equal(given[0], expected[0])
    quantized, scale = stored
    return quantized, scale


# What a compiled instance depends on. Every two values of two options meet in one of the instances.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "widths": tuple(WIDTHS),
    "format": tuple(FORMATS),
    "dtype": FLOATS,
    "cache_dtype": FLOATS,
    "scale_dtype": ("float32", "float16"),
    "new_tokens": (1, 2, 3, 5, 8),
    "ratio": (1, 2, 4, 7, 8),
    "is_causal": (True, False),
    "is_alibi": (False, True),
    "mask": ("none", "bool", "float"),
    "pairs": (None, 0, 1, 9, 32),
    "place": ("rows", "pages", "window", "window in pages"),
    "sinks": (False, True),
    "softcap": (0.0, 5.0),
    "score_scale": (None, 0.3),
    "backend": ("metal", "cuda"),
    "splits": (1, 2, 4),
}


def instances() -> list[KernelCase]:
    """Cases that together hold every pair of values of two options, but for groups that don't divide the
    head.
    """
    rng = np.random.default_rng(22)
    names = list(OPTIONS)

    def pairs_of(values: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, values[a], b, values[b]) for a, b in combinations(names, 2)}

    every = ((a, x, b, y) for a, b in combinations(names, 2) for x, y in product(OPTIONS[a], OPTIONS[b]))
    missing = {(a, x, b, y) for a, x, b, y in every if fits({a: x, b: y})}
    chosen: list[dict[str, Any]] = []
    while missing:
        a, x, b, y = min(missing, key=repr)
        best: dict[str, Any] = {}
        most = -1
        for _ in range(100):
            values = {name: OPTIONS[name][rng.integers(len(OPTIONS[name]))] for name in names} | {a: x, b: y}
            if fits(values) and (new := len(pairs_of(values) & missing)) > most:
                best, most = values, new
        missing -= pairs_of(best)
        chosen.append(best)
    return [case_of(values, number) for number, values in enumerate(chosen)]


def fits(values: Mapping[str, Any]) -> bool:
    """Groups divide keys and values; a window is causal."""
    group, widths = values.get("format", (0, 0, 0))[2], values.get("widths", (128, 128))
    causal = values.get("is_causal", True) or values.get("place", "rows") in ("rows", "pages")
    return causal and (not group or not any(width % group for width in widths))


def case_of(values: Mapping[str, Any], seed: int) -> KernelCase:
    """The instance of a value of each option."""
    own = dict(values)
    (bits, values_at, group), (head_dim, value_dim), where = (
        own.pop("format"),
        own.pop("widths"),
        own.pop("place"),
    )
    own |= {"quant_bit": bits, "quant_group": group, "head_dim": head_dim, "value_dim": value_dim}
    own |= {"value_bit": values_at}
    own |= {
        "layout": "pages" if "pages" in where else "rows",
        "window": None if where in ("rows", "pages") else 20,
    }
    return KernelCase(seed=seed, **own)


def runs(case: KernelCase) -> list[KernelCase]:
    """Calls of one instance: at offset 0 or 1, and two about the ends of splits, steps and pages; of other
    sizes.
    """
    rng = np.random.default_rng(case.seed)
    edges = {SPLIT_ROWS, 2 * SPLIT_ROWS, (case.splits or 1) * SPLIT_ROWS, *STEPS}
    edges |= {PAGE_SIZE + case.window} if case.window else set()
    num_keys = {edge + beside for edge in edges for beside in (-1, 0, 1)}
    offsets = sorted(n - case.new_tokens for n in num_keys if n >= case.new_tokens)
    cases = []
    for offset in (case.seed % 2, *(int(x) for x in rng.choice(offsets, 2, replace=False))):
        batch, num_kv_heads = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 3]))
        work = max(case.head_dim, case.values) * case.ratio * case.new_tokens
        if work * offset > 4 * MOST_WORK:
            offset = 4 * MOST_WORK // work
        work *= offset + case.new_tokens
        if batch * num_kv_heads * work > MOST_WORK:  # a host runs a thread at a time
            batch = max(1, MOST_WORK // work // num_kv_heads)
            num_kv_heads = min(num_kv_heads, max(1, MOST_WORK // work))
        tokens = offset + case.new_tokens
        own = replace(case, seed=1000 * case.seed + offset, offset=offset, knows_rows=offset % 2 == 1)
        most = tokens + int(rng.choice([0, 1, 6]))
        shorter, rank = 0 if len(cases) % 2 else offset // 2 + 1, int(rng.integers(2, 5))
        sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "max_tokens": most}
        cases.append(replace(own, **sizes, shorter=shorter, mask_rank=rank))
    return cases
