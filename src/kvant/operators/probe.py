"""Tries the fused kernel as a layer will call it, when its cache is made, against the unfused operator on the CPU.

MLX compiles an instance of the kernel when it first runs. A text that this device's compiler refuses, a threadgroup
that is too large for it, or a wrong number would otherwise show in an answer. Small arrays show it: an instance depends
on no size, except that MLX keeps inputs of fewer than 8 elements in Metal's constant memory.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import mlx.core as mx

from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit
from kvant.operators.cached_attention import float_tokens, stored_tokens
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernels.attend import MAX_NEW_TOKENS, PAGE_SIZE
from kvant.operators.kernels.launch import Backend
from kvant.operators.masks import alibi_slopes
from kvant.operators.paged_kernel import step_pages
from kvant.operators.quantization import multiply_scale, quantized_dtype

KV_HEADS = 4
ROWS = 512  # so many that the second pass has its largest threadgroup
ANY_HEADS = (1, 8)  # query heads of a kv head, if they are not known: they give every shape of a threadgroup
# Of an output, relative to 1 + its expected magnitude: a few roundings of its dtype.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
# A GPU may divide with an error of some ulps. A quotient halfway between two integers may then round to the other one.
MAX_STEPS_OFF = 1.1  # in scales. The last tenth is for the scale's own rounding
MAX_SHARE_OFF = 0.01


@dataclass(frozen=True, slots=True)
class KernelUse:
    """How a layer calls the kernel. Uses of layers that call it alike are equal.

    Attributes:
        head_dim, value_dim: of keys and of values.
        dtype: of queries, and at 0 bits of keys and values.
        quant_bit, quant_group, scale_dtype: of the cache.
        heads: query heads of a kv head, H/K; None: not known.
        pairs: rotary pairs of a bias split; None: there is none.
        cache_dtype: of stored keys and values at 0 bits; None: ``dtype``.
        mask: whether a mask is given.
        sinks: whether learned sinks may be given, in the queries' dtype. Tried besides.
        paged: whether the cache is a pool.
        options: window, keep and is_alibi of :func:`kvant.operators.fused_attention.attend_fused`, by name.
    """

    head_dim: int
    value_dim: int
    dtype: mx.Dtype
    quant_bit: int
    quant_group: int
    scale_dtype: mx.Dtype = mx.float16
    heads: int | None = None
    pairs: int | None = None
    cache_dtype: mx.Dtype | None = None
    mask: bool = False
    sinks: bool = False
    paged: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        values = "" if self.value_dim == self.head_dim else f" with values of {self.value_dim}"
        kind = f"{self.quant_bit} bits g{self.quant_group}" if self.quant_bit else "floats"
        kinds = (("bias split", self.pairs is not None), ("mask", self.mask), ("pages", self.paged))
        extras = [*(name for name, on in kinds if on), *(name for name, _ in self.options)]
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return ", ".join([f"heads of {self.head_dim}{values}", kind, dtype, *extras])


_tried: dict[tuple[KernelUse, Backend], str | None] = {}


def probe_failure(use: KernelUse, backend: Backend) -> str | None:
    """Why the kernel does not do what a layer needs of it; None: it does. Each use is tried once in a process.

    Every number of new tokens that it takes is tried.
    """
    key = (use, backend)
    if key not in _tried:
        heads = [use.heads] if use.heads else ANY_HEADS
        calls = product(heads, range(1, MAX_NEW_TOKENS + 1), sorted({False, use.sinks}))
        _tried[key] = next(filter(None, (_failure(use, *call, backend) for call in calls)), None)
    return _tried[key]


def _failure(use: KernelUse, heads: int, new_tokens: int, sinks: bool, backend: Backend) -> str | None:
    try:
        problem = Trial(use, heads, new_tokens, sinks).agreement(backend).problem
    except Exception as error:  # of a compiler or a driver: any
        problem = " ".join(str(error).split())[:500] or type(error).__name__
    extra = ", sinks" if sinks else ""
    return problem and f"{use}{extra}, {heads * new_tokens} queries of a kv head: {problem}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of a comparison.

    Attributes:
        error: the output's largest, relative to 1 + the expected magnitude. NaN if either is NaN.
        tolerance: for this dtype.
        problem: the difference that is too large. None: there is none.
    """

    error: float
    tolerance: float
    problem: str | None


class Trial:
    """A call's arrays: one sequence, or two of a pool.

    Rows that hold no token hold NaN, so whoever reads one gives NaN. A window's rows are a ring that is written again;
    in a pool they begin with the second page.
    """

    def __init__(self, use: KernelUse, heads: int, new_tokens: int, sinks: bool = False, rows: int | None = None):
        self.use, self.heads, self.new_tokens = use, heads, new_tokens
        self.options = dict(use.options)
        K, D, S, R = KV_HEADS, use.head_dim, new_tokens, rows or ROWS
        self.form: dict[str, Any] = {"quant_bit": use.quant_bit, "quant_group": use.quant_group}
        keep = self.options.get("keep", 0)
        is_ring = "window" in self.options and not use.paged
        if "window" in self.options:  # it is no constant of an instance, and a ring holds it and the new tokens
            self.options["window"] = min(self.options["window"], R - keep - S)
        first = PAGE_SIZE if use.paged else 0
        # The position of the first row of each sequence, and its tokens before the new ones.
        self.spans = [(first, first + R - S - 7)] + ([(0, R // 2)] if use.paged else [])
        self.spans = [(0, R + R // 3)] if is_ring else self.spans
        self.positions = [list(range(start, offset + S)) for start, offset in self.spans]
        if is_ring:
            newest, ring = self.spans[0][1] + S - 1, R - keep
            self.positions = [[p if p < keep else newest - (newest - p) % ring for p in range(R)]]
        numbers = list(range(len(self.spans) * (R // PAGE_SIZE)))
        random.Random(S).shuffle(numbers)
        own = len(numbers) // len(self.spans)
        self.pages = [numbers[b * own : (b + 1) * own] for b in range(len(self.spans))]
        B, H, Dv = len(self.spans), heads * K, use.value_dim
        with mx.stream(mx.cpu):  # the same numbers wherever it is asked
            keys = iter(mx.random.split(mx.random.key(S), 10))

            def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
                return mx.random.normal(shape, key=next(keys)).astype(dtype)

            self.query = normal(B, H, S, D, dtype=use.dtype)
            self.key, self.value = (normal(B, K, S, width, dtype=use.dtype) for width in (D, Dv))
            self.arrays = self._make_arrays(R)
            past_key, past_value = (normal(B, K, R, width, dtype=use.dtype) for width in (D, Dv))
            self._write(stored_tokens(past_key, past_value, self.arrays, **self.form), range(R))
            self.sinks = normal(max(8, H), dtype=use.dtype) if sinks else None  # not small, as a model's are not
            self.mask = normal(S, R) > -1 if use.mask else None
            self.split: BiasSplit | None = None
            if use.pairs is not None:
                angle = normal(use.pairs, 2 * R)  # of each column
                table = mx.stack([mx.cos(angle), mx.sin(angle)])
                self.split = BiasSplit(3 * normal(K, 2, use.pairs), tuple(range(use.pairs)), table, normal(K, Dv))
            mx.eval(self.query, self.key, self.value, self.arrays, self.sinks, self.mask)

    def run(self, backend: Backend) -> tuple[list[mx.array], mx.array]:
        """What the kernels make of the new tokens: as they are stored, and attention to them and the others."""
        use, (cache, *scales) = self.use, self.arrays
        new = stored_tokens(self.key, self.value, self.arrays, **self.form, backend=backend)
        self._write(new, None)
        offset, options = mx.array([offset for _, offset in self.spans], mx.int32), dict(self.options)
        if use.paged:
            starts, offsets = zip(*self.spans, strict=True)
            pages = step_pages(self.pages, starts, offsets, max(map(len, self.positions)), None)
            options |= {"pages": pages.table, "first": pages.first, "rows": pages.rows}
            offset = pages.offset
        output = attend_fused(
            self.query,
            cache,
            scales[0] if scales else None,
            offset,
            value_dim=None if use.value_dim == use.head_dim else use.value_dim,
            mask=self.mask,
            sinks=self.sinks,
            bias_split=self.split,
            backend=backend,
            **self.form,
            **options,
        )
        mx.eval(new, output)
        mx.synchronize()  # a failure is raised here, or when it was queued
        return new, output

    def run_unfused(self) -> list[mx.array]:
        """The unfused operator's attention to what is stored, sequence by sequence, evaluated."""
        outputs = [self._unfused(b) for b in range(len(self.spans))]
        mx.eval(outputs)
        return outputs

    def agreement(self, backend: Backend) -> Agreement:
        """Run the kernels, and compare what they store and give with what the unfused operators do on the CPU.

        Not on the GPU: some multiply float32 matrices with fewer bits.
        """
        new, output = self.run(backend)
        with mx.stream(mx.cpu):
            expected = mx.concatenate(self.run_unfused()).astype(mx.float32)
            error = _number((mx.abs(output.astype(mx.float32) - expected) / (1 + mx.abs(expected))).max())
            problem = self._stored_problem(new)
        tolerance = TOLERANCE[self.use.dtype]
        if problem is None and not error <= tolerance:  # true for NaN too
            problem = f"the output is off by {error:.2g}; expected at most {tolerance:g}"
        return Agreement(error, tolerance, problem)

    def _unfused(self, b: int) -> mx.array:
        use, S, H = self.use, self.new_tokens, self.query.shape[1]
        held = self.positions[b]
        places = self._places(b, range(len(held)))
        stored = [(array if use.paged else array[0, b])[:, :, places][None] for array in self.arrays]
        tokens = float_tokens(stored, quant_bit=use.quant_bit, dtype=mx.float32, key_dim=use.head_dim)
        position, at = mx.array(held), self.spans[b][1] + mx.arange(S)[:, None]
        seen = position <= at
        if "window" in self.options:
            keep = self.options.get("keep", 0)
            seen = seen & ((position > at - self.options["window"]) | (position < keep))
        if self.mask is not None:
            seen = seen & self.mask[:, : len(held)]
        mask = mx.where(seen, 0.0, -math.inf)
        if self.options.get("is_alibi"):
            mask = mask + mx.array(alibi_slopes(H))[:, None, None] * (position - at)
        split = self.split
        if split is not None:
            split = replace(split, rotation=split.rotation[..., position if use.paged else mx.arange(len(held))])
        sinks = None if self.sinks is None else self.sinks[:H]
        query = self.query[b : b + 1].astype(mx.float32)
        return attend_tokens(query, *tokens, is_causal=False, mask=mask, bias_split=split, sinks=sinks)

    def _stored_problem(self, new: Sequence[mx.array]) -> str | None:
        """The difference in the new tokens as the kernel stored them; None: there is none."""
        expected = stored_tokens(self.key, self.value, self.arrays, **self.form)
        if not self.use.quant_bit:
            return None  # nothing is computed
        given, wanted = (  # (B, 2, K, S, D/G, G)
            mx.unflatten(multiply_scale(quantized, scale, self.use.quant_bit, mx.float32), -1, (scale.shape[-1], -1))
            for quantized, scale in (new, expected)
        )
        off = mx.abs(given - wanted) / expected[1].astype(mx.float32)[..., None]
        most, share = _number(off.max()), _number((off > 0.5).astype(mx.float32).mean())
        if most <= MAX_STEPS_OFF and share <= MAX_SHARE_OFF:
            return None
        return f"stored values are off by up to {most:.2g} scales, {share:.1%} of them"

    def _make_arrays(self, rows: int) -> list[mx.array]:
        """The cache, and its scale if there is one, of NaN."""
        use, B = self.use, len(self.spans)
        sides, width = (2, use.head_dim) if use.value_dim == use.head_dim else (1, use.head_dim + use.value_dim)
        shape = (sides, KV_HEADS, B * rows) if use.paged else (1, B, sides, KV_HEADS, rows)
        if not use.quant_bit:
            return [mx.full((*shape, width), math.nan, use.cache_dtype or use.dtype)]
        quantized = mx.zeros((*shape, width * use.quant_bit // 8), quantized_dtype(use.quant_bit))
        return [quantized, mx.full((*shape, width // use.quant_group), math.nan, use.scale_dtype)]

    def _places(self, b: int, rows: Sequence[int]) -> mx.array:
        """Where rows of sequence b are on the axis of rows."""
        if not self.use.paged:
            return mx.array(list(rows))
        return mx.array([self.pages[b][row // PAGE_SIZE] * PAGE_SIZE + row % PAGE_SIZE for row in rows])

    def _write(self, parts: Sequence[mx.array], rows: Sequence[int] | None) -> None:
        """Write (B, 2, K, tokens, last) to these rows if they hold tokens; None: to those of the new tokens."""
        for b, (_, offset) in enumerate(self.spans):
            held = self.positions[b]
            own = range(min(len(held), len(rows))) if rows is not None else [
                held.index(offset + i) for i in range(self.new_tokens)
            ]  # fmt: skip
            places = self._places(b, own)
            for array, part in zip(self.arrays, parts, strict=True):
                target = array if self.use.paged else array[0, b]
                target[:, :, places] = part[b][:, :, : len(own)]
                if not self.use.paged:
                    array[0, b] = target


def _number(x: mx.array) -> float:
    return float(x.item())  # type: ignore[arg-type]
