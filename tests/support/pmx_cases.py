"""Seeded calls over the parameter space of PMX's operators, static and packed, and how each is held to the
oracle.

B batch, N new tokens and T tokens of all sequences, H query heads, K kv heads, D head_dim, MaxT rows of a
packed cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from kvant import operators
from kvant.operators import dynamic_batching
from support import oracle
from support.numbers import normal
from support.operator_cases import (
    FLOATS,
    QuantizedTally,
    check_output,
    check_returned,
    check_stored,
    poisoned,
    random_mask,
    same_bits,
    to_mx,
    to_numpy,
)
from support.oracle import KEY, VALUE, Array, Sequences, Spec

# dtype:rank
START_FORMS = ("int", "int32:0", "int32:1", "int64:0", "uint32:1", "int8:1", "uint16:0", "int32:2")
FORMS = (
    "list",
    "tuple",
    "numpy ints",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
)
MASKS = ("none", "empty", "float", "bool")
PAGE_SIZES = (1, 2, 3, 4, 8, 128)
PADDING_ENTRIES = (-1, 0, 10**4, 2**62)  # of a page table behind the last token: never looked at


@dataclass(frozen=True, slots=True)
class Case:
    """One call. It prints as what a failure message needs; its arrays come from its seed."""

    seed: int
    attends: bool  # whether it is of multi_head_cache_attention
    sequences: Sequences
    max_rows: tuple[int, int]  # MaxB and MaxS, or 1 and MaxT
    num_kv_heads: int
    head_dim: int
    data: str  # what the values are like
    spec: Spec
    forms: tuple[str, ...]  # how start_pos, or each index argument, is passed
    tables: list[list[int]] | None = None  # of a packed call: where pages begin
    page_size: int | None = None  # None: cache_mode 0
    num_repeat: int = 1
    ratio: int = 1  # H / K
    decoding_batches: int = 0
    is_causal: bool = False
    is_alibi: bool = False
    mask: str = "none"
    mask_rank: int = 2
    mask_batch: int = 1
    mask_padding: int = 0
    mask_dtype: str = "float32"

    @property
    def packed(self) -> bool:
        return self.sequences.rows is not None

    @property
    def num_heads(self) -> int:
        return self.ratio * self.num_kv_heads

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        return [0, *accumulate(self.sequences.new)], [0, *accumulate(self.sequences.tokens)]

    def options(self) -> dict[str, Any]:
        spec, sequences = self.spec, self.sequences
        names = ("num_layer", "layer_idx", "quant_bit", "quant_group", "cache_layout")
        found: dict[str, Any] = {name: getattr(spec, name) for name in names}
        if self.attends:
            kv_heads = 0 if self.ratio == 1 and self.seed % 3 else self.num_kv_heads
            found |= {"num_heads": self.num_heads, "num_kv_heads": kv_heads, "head_dim": self.head_dim}
            found |= {"is_causal": self.is_causal, "is_alibi": self.is_alibi}
            found |= {"decoding_batches": self.decoding_batches} if self.packed else {}
        else:
            found["num_repeat"] = self.num_repeat
        if self.tables is None:
            return found | {"start_pos": start_in_form(sequences.earlier[0], self.forms[0])}
        seq, kv = self.starts
        tables: list[Any] = self.tables if self.page_size else [entry for (entry,) in self.tables]
        given = {"seqstarts": seq, "kvstarts": kv, "cachestarts": tables, "start_pos": sequences.earlier}
        found |= {name: in_form(x, form) for (name, x), form in zip(given.items(), self.forms, strict=True)}
        found |= {"max_seqlen": max(sequences.new), "max_kvlen": max(sequences.tokens)}
        return found | {"cache_mode": int(self.page_size is not None), "page_size": self.page_size or 128}


def start_in_form(position: int, form: str) -> int | mx.array:
    if form == "int":
        return position
    dtype, rank = form.split(":")
    return mx.array(position, dtype=getattr(mx, dtype)).reshape([1] * int(rank))


def in_form(values: list[Any], form: str) -> Any:
    """Integers, or rows of integers, in the form in which a case passes them."""
    nested = bool(values) and isinstance(values[0], list)
    if form == "list":
        return values
    if form in ("tuple", "numpy ints"):
        kind = int if form == "tuple" else np.int64
        return tuple(tuple(map(kind, x)) if nested else kind(x) for x in values)
    if nested:  # of an array all rows are of one length
        width = max(map(len, values))
        values = [x + [PADDING_ENTRIES[len(x) % 3]] * (width - len(x)) for x in values]
    table, limits = np.array(values, np.int64), np.iinfo(form)
    fits = table.min() >= limits.min and table.max() <= int(limits.max)
    return mx.array(table.astype(form if fits else np.int64))


def draw_case(seed: int) -> Case:
    """The seed's lower bits are the operator, static or packed, the layout and the mode; the rest is
    drawn.
    """
    rng = np.random.default_rng((seed, 30))
    attends, packed, layout, paged = seed % 2 == 1, seed // 2 % 2 == 1, seed // 4 % 4, seed // 16 % 2 == 1
    spec, head_dim = draw_spec(rng, layout if packed else layout % 2)
    data = str(
        rng.choice(["unit", "unit", "zeros"] if attends else ["unit", "ties", "tiny", "zeros", "large"])
    )
    if not attends and spec.quant_bit == 0 and rng.integers(6) == 0:
        spec, data = spec._replace(dtype="int8", cache_dtype="int8"), "int8"
    tables = None
    if packed:
        batch = int(rng.integers(1, 5))
        new = [int(x) for x in rng.choice([0, 1, 1, 1, 2, 3, 6], batch)]
        new[0] += not any(new)
        earlier = [int(x) for x in rng.choice([0, 0, 1, 2, 5, 9], batch)]
        page_size = int(rng.choice(PAGE_SIZES)) if paged else None
        tables, end = draw_tables(rng, earlier, new, page_size)
        page = page_size or 10**9
        every = zip(tables, earlier, new, strict=True)
        rows = [[table[t // page] + t % page for t in range(a + b)] for table, a, b in every]
        sequences, max_rows = Sequences(earlier, new, rows), (1, end + int(rng.choice([0, 0, 1, 5])))
    else:
        batch, page_size = int(rng.integers(1, 4)), None
        new, earlier = (
            [int(rng.choice([1, 1, 1, 2, 3, 5, 8]))] * batch,
            [int(rng.choice([0, 0, 1, 2, 5, 9]))] * batch,
        )
        spare = int(rng.integers(3)), int(rng.choice([0, 1, 6]))
        sequences, max_rows = Sequences(earlier, new), (batch + spare[0], earlier[0] + new[0] + spare[1])
    mask = str(rng.choice(["none", "none", "empty", "float", "float", "bool"]))
    return Case(
        seed=seed,
        attends=attends,
        sequences=sequences,
        max_rows=max_rows,
        num_kv_heads=int(rng.integers(1, 4)),
        head_dim=head_dim,
        data=data,
        spec=spec,
        forms=tuple(str(form) for form in rng.choice(FORMS if packed else START_FORMS, 4)),
        tables=tables,
        page_size=page_size,
        num_repeat=int(rng.choice([1, 1, 2, 3])),
        ratio=int(rng.integers(1, 5)),
        decoding_batches=int(rng.integers(batch + 1)) if packed else 0,
        is_causal=bool(rng.integers(2)),
        is_alibi=bool(rng.integers(3) == 0),
        mask=mask,
        mask_rank=int(rng.integers(2, 4 if packed else 5)),
        mask_batch=int(rng.choice([1, batch])),
        mask_padding=int(rng.choice([0, 1, 7])),
        mask_dtype="bool_" if mask == "bool" else str(rng.choice(["float32", "float16", "bfloat16"])),
    )


def plain_case(quant_bit: int, past: int, new_tokens: int, batch: int = 1, **changes: Any) -> Case:
    """A static call of attention in float32, causal, with a cache that has three rows more."""
    spec = Spec(
        cache_dtype={8: "int8", 4: "uint8", 0: "float32"}[quant_bit], quant_bit=quant_bit, cache_layout=1
    )
    sequences, max_rows = Sequences([past] * batch, [new_tokens] * batch), (batch, past + new_tokens + 3)
    case = Case(
        1, True, sequences, max_rows, num_kv_heads=2, head_dim=16, data="unit", spec=spec, forms=("int",)
    )
    return replace(case, **({"ratio": 2, "is_causal": True} | changes))


def draw_spec(rng: np.random.Generator, layout: int) -> tuple[Spec, int]:
    quant_bit, num_layer = int(rng.choice([0, 8, 4])), int(rng.integers(1, 4))
    head_dim = int(rng.choice([1, 2, 3, 5, 6, 8, 12, 16, 20, 32, 64, 128]))
    head_dim += head_dim % 2 if quant_bit == 4 else 0
    dtype, stored, scales = (str(rng.choice(kinds)) for kinds in (FLOATS, FLOATS, ("float32", "float16")))
    stored = {8: "int8", 4: "uint8"}.get(quant_bit, stored)
    group = int(rng.choice([g for g in range(1, head_dim + 1) if head_dim % g == 0]))
    return Spec(
        dtype, stored, scales, num_layer, int(rng.integers(num_layer)), quant_bit, group, layout
    ), head_dim


def draw_tables(
    rng: np.random.Generator, earlier: list[int], new: list[int], page_size: int | None
) -> tuple[list[list[int]], int]:
    """A page table for each sequence, and the end of their rows; without a page size one page each.

    Whole pages that are only read may be shared. Entries behind the last token are noise.
    """
    tokens = [a + b for a, b in zip(earlier, new, strict=True)]
    page = page_size or max(1, *tokens)
    tables = [[-1] * (-(-count // page) if page_size else 1) for count in tokens]
    shared = [0] * len(tokens)  # pages at the beginning that are those of sequence 0
    for b in range(1, len(tokens)):
        limit = (
            min(earlier[0], earlier[b]) // page if page_size else int(new[b] == 0 < earlier[b] <= earlier[0])
        )
        shared[b] = int(rng.integers(limit + 1))
    own = [(b, i) for b in range(len(tables)) for i in range(shared[b], len(tables[b]))]
    row = int(rng.integers(4))
    # side by side they are one run
    for k in range(len(own)) if rng.integers(3) == 0 else rng.permutation(len(own)):
        b, i = own[k]
        tables[b][i] = row if tokens[b] else int(rng.choice(PADDING_ENTRIES))
        row += min(page, tokens[b] - i * page) + int(rng.choice([0, 0, 0, 1]))
    for b, table in enumerate(tables):
        table[: shared[b]] = tables[0][: shared[b]]
        table += [int(x) for x in rng.choice(PADDING_ENTRIES, int(rng.integers(3)))] if page_size else []
    return tables, max(row, 1)


def draw_values(rng: np.random.Generator, shape: tuple[int, ...], data: str, spec: Spec) -> Array:
    if data == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    x = rng.standard_normal(shape)
    if data == "ties":  # with one element at the limit the scale is 1 and every other half is a tie
        limit = oracle.max_quantized(spec.quant_bit or 8)
        x = rng.integers(-2 * limit, 2 * limit + 1, shape) / 2
        x[..., :: spec.quant_group] = limit
    elif data == "tiny":  # about the least scale
        x = x * 1e-3 * rng.choice([1e-3, 0.1, 1.0], (*shape[:-1], 1))
    elif data == "zeros":  # whole groups of zeros among the others
        group = spec.quant_group
        x = x * rng.integers(0, 2, (*shape[:-1], shape[-1] // group)).repeat(group, axis=-1)
    elif data == "large":
        x = np.clip(x * 1e4, -5e4, 5e4)
    return oracle.cast(x, spec.dtype)


class Call:
    """The arrays of a case, in NumPy for the oracle and in MLX for the operators."""

    def __init__(self, case: Case) -> None:
        self.case, spec, sequences = case, case.spec, case.sequences
        self.more: dict[str, Any] = {}  # keywords that a case does not have
        rng = np.random.default_rng((case.seed, 1))
        N, K, D = sum(sequences.new), case.num_kv_heads, case.head_dim
        self.key, self.value = (draw_values(rng, (N, K, D), case.data, spec) for _ in range(2))
        dtype = "float32" if case.data == "int8" else spec.dtype
        self.query = oracle.cast(rng.standard_normal((N, case.num_heads, D)), dtype)
        self.cache = poisoned(self.shape(D // 2 if spec.quant_bit == 4 else D), spec.cache_dtype)
        self.scale = poisoned(self.shape(D // spec.quant_group), spec.scale_dtype) if spec.quant_bit else None
        if any(sequences.earlier):  # the earlier tokens of the call's own layer and sequences
            before = Sequences([0] * len(sequences.new), sequences.earlier, sequences.rows)
            past = (draw_values(rng, (sum(sequences.earlier), K, D), case.data, spec) for _ in range(2))
            self.cache, self.scale = oracle.store(*past, before, self.cache, self.scale, spec)
        self.mask = self._mask(rng)
        self.mx_cache = to_mx(self.cache, spec.cache_dtype)
        self.mx_scale = None if self.scale is None else to_mx(self.scale, spec.scale_dtype)

    def shape(self, last: int) -> tuple[int, ...]:
        (B, S), L, K = self.case.max_rows, self.case.spec.num_layer, self.case.num_kv_heads
        outer = ((B, L, 2, S, K), (L, B, 2, K, S))
        if self.case.packed:
            outer = ((S, L, 2, K), (L, S, 2, K), (L, 2, S, K), (L, 2, K, S))
        return (*outer[self.case.spec.cache_layout], last)

    def _mask(self, rng: np.random.Generator) -> Array | None:
        """What is no sequence's own block is poison."""
        case = self.case
        if case.mask == "none":
            return None
        if case.mask == "empty":
            return np.zeros(((0,), (0, 0))[case.seed % 3 % 2], np.float32)
        seq, kv = case.starts
        rows, columns = (seq[-1], kv[-1]) if case.packed else (seq[1], kv[1])
        shape = (case.mask_batch, case.num_heads, rows, columns + case.mask_padding)[-case.mask_rank :]
        keep = random_mask(rng, shape, case.mask, case.mask_dtype)
        # loud: read, it would let poison in
        mask = np.full(shape, np.nan if case.mask == "float" else True, keep.dtype)
        for b in range(len(seq) - 1 if case.packed else 1):
            own = (..., slice(seq[b], seq[b + 1]), slice(kv[b], kv[b + 1]))
            mask[own] = keep[own]
        return mask

    def given(self, x: Array) -> mx.array:
        """New tokens as an array of its own, or in every third case as a transposed view."""
        x, dtype = self.in_batch(x), self.case.spec.dtype
        if self.case.seed % 3:
            return to_mx(x, dtype)
        return to_mx(np.ascontiguousarray(x.swapaxes(-3, -2)), dtype).swapaxes(-3, -2)

    def in_batch(self, x: Array) -> Array:
        """(N, heads, D) -> (B, S, heads, D) of a static call."""
        return x if self.case.packed else x.reshape(len(self.case.sequences.new), -1, *x.shape[1:])

    def run(self) -> Any:
        case = self.case
        arrays = {"current_key": self.given(self.key), "current_value": self.given(self.value)}
        arrays |= {"cache": self.mx_cache} | ({} if self.mx_scale is None else {"scale": self.mx_scale})
        if case.attends:
            arrays |= {"query": self.given(self.query)}
            arrays |= {} if self.mask is None else {"attn_mask": to_mx(self.mask, case.mask_dtype)}
        name = "multi_head_cache_attention" if case.attends else "key_value_cache"
        operator = getattr(dynamic_batching if case.packed else operators, name)
        given = arrays | case.options() | self.more
        alone = {
            name: x for name, x in given.items() if isinstance(x, mx.array) and name not in ("cache", "scale")
        }
        before = {name: to_numpy(x).copy() for name, x in alone.items()}
        result = operator(**given)
        mx.eval(result)
        for name, x in alone.items():
            assert same_bits(to_numpy(x), before[name]), f"{name}, an input, changed"
        return result

    def check_stored(self, tally: QuantizedTally) -> None:
        case = self.case
        expected = oracle.store(self.key, self.value, case.sequences, self.cache, self.scale, case.spec)

        def written(x: Array) -> list[Array]:
            places = [
                (kind, *place) for place in case.sequences.places(only_new=True) for kind in (KEY, VALUE)
            ]
            return [oracle.token(x, *place, case.sequences, case.spec) for place in places]

        check_stored((self.mx_cache, self.mx_scale), expected, case.spec, written, tally)

    def expected(self, cache: Array, scale: Array | None) -> list[Array]:
        """Key and value, or the output in float64, of a call after which cache and scale hold this."""
        case = self.case
        key, value = oracle.fetch(case.sequences, cache, scale, case.spec)
        if not case.attends:  # head 0, 0, 1, 1 and not 0, 1, 0, 1
            return [self.in_batch(np.repeat(x, case.num_repeat, axis=1)) for x in (key, value)]
        seq, kv = case.starts
        output = np.full(self.query.shape, np.nan)
        for b, new_tokens in enumerate(case.sequences.new):
            new, every, mask = slice(seq[b], seq[b + 1]), slice(kv[b], kv[b + 1]), self.mask
            if mask is not None and mask.size:
                mask = (
                    mask[..., new, every] if case.packed else mask[b % len(mask)] if mask.ndim == 4 else mask
                )
            if new_tokens:
                causal = case.is_causal and b >= case.decoding_batches
                one = (x[None] for x in (self.query[new], key[every], value[every]))
                output[new] = oracle.attend(*one, is_causal=causal, is_alibi=case.is_alibi, attn_mask=mask)[0]
        return [self.in_batch(output)]

    def check_result(self, result: Any) -> None:
        """Against what follows from what is stored now, whatever value rounded the other way."""
        expected = self.expected(
            to_numpy(self.mx_cache), None if self.mx_scale is None else to_numpy(self.mx_scale)
        )
        if self.case.attends:
            check_output(result, expected[0], self.case.spec.dtype)
            return
        for actual, wanted, name in zip(result, expected, ("key", "value"), strict=True):
            check_returned(actual, wanted, self.case.spec.dtype, name)


def check_cases(seeds: range) -> None:
    """Check every call, and say which one failed: draw_case(seed) makes it again."""
    tally = QuantizedTally()
    for case in map(draw_case, seeds):
        try:
            call = Call(case)
            result = call.run()
            call.check_stored(tally)
            call.check_result(result)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} in {case}\n{error}") from error
    tally.check()


# A good call, to change one thing of. Its sizes differ, so that a size in a message can mean one thing only.
B, S, START, H, K, D, G, L = 2, 3, 4, 6, 2, 8, 4, 3
MAX_B, MAX_S, MAX_ROWS = 5, 11, 29
SEQSTARTS, KVSTARTS, START_POS = [0, 1, 5, 7], [0, 10, 14, 21], [9, 0, 5]
N, T, PAGE = 7, 21, 4
CACHESTARTS: tuple[Any, ...] = ([16, 12, 5], [[16, 3, 8], [12, -1, 99], [20, 24, -9]])  # of each cache_mode
CACHE, ATTENTION = BOTH = ("key_value_cache", "multi_head_cache_attention")


def good_call(
    operator: str, packed: bool, quant_bit: int, layout: int, mode: int = 0
) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Every argument by name, and the operator. The cache is full of values that no call writes: a change
    shows.
    """
    tokens = (N,) if packed else (B, S)
    outer = (
        (MAX_ROWS, L, 2, K), (L, MAX_ROWS, 2, K), (L, 2, MAX_ROWS, K), (L, 2, K, MAX_ROWS)
    )[layout] if packed else ((MAX_B, L, 2, MAX_S, K), (L, MAX_B, 2, K, MAX_S))[layout]  # fmt: skip
    fill = {0: (D, mx.nan, mx.float32), 8: (D, -128, mx.int8), 4: (D // 2, 0x88, mx.uint8)}[quant_bit]
    given: dict[str, Any] = {
        "current_key": normal(1, *tokens, K, D),
        "current_value": normal(1, *tokens, K, D),
        "cache": mx.full((*outer, fill[0]), fill[1], fill[2]),
        "scale": mx.full((*outer, D // G), mx.nan) if quant_bit else None,
    }
    given |= {
        "num_layer": L,
        "layer_idx": 1,
        "quant_bit": quant_bit,
        "quant_group": G,
        "cache_layout": layout,
    }
    given |= {"start_pos": START_POS if packed else START}
    if packed:
        given |= {"seqstarts": SEQSTARTS, "kvstarts": KVSTARTS, "cachestarts": CACHESTARTS[mode]}
        given |= {"max_seqlen": 4, "max_kvlen": 10, "cache_mode": mode, "page_size": PAGE}
    if operator == ATTENTION:
        given |= {"query": normal(1, *tokens, H, D), "attn_mask": None, "is_causal": True}
        given |= {"num_heads": H, "num_kv_heads": K, "head_dim": D} | (
            {"decoding_batches": 1} if packed else {}
        )
    return given, getattr(dynamic_batching if packed else operators, operator)
