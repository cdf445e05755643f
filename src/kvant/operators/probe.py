"""Tries the fused kernel as a layer will call it, against the unfused operator on the CPU.

MLX compiles an instance of the kernel when it first runs. A text that this device's compiler refuses, a
threadgroup that is too large for it, or a wrong number would otherwise show in an answer. Small arrays show
it: an instance depends on no size, except that MLX keeps inputs of fewer than 8 elements in Metal's constant
    memory.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit
from kvant.operators.exact_attention import attend_each_exactly
from kvant.operators.exact_rows import TAIL_ROWS, TAIL_WINDOW, ExactRows, ExactSpan, ExactTail
from kvant.operators.kernels.attend import MAX_NEW_TOKENS, PAGE_SIZE, threadgroup_shape, unsupported_reason
from kvant.operators.kernels.launch import Backend
from kvant.operators.masks import window_mask
from kvant.operators.paged_kernel import attend_fused, attend_pages, exact_pages, step_pages
from kvant.operators.paged_rows import PagedRows
from kvant.operators.quantization import quantized_dtype
from kvant.operators.row_runs import put_rows
from kvant.operators.stored_tokens import fitted_tokens, float_tokens, stored_tokens

KV_HEADS = 4
ROWS = 512  # so many that the second pass has its largest threadgroup
ANY_HEADS = (1, 8)  # query heads of a kv head, if they are not known: they give every shape of a threadgroup
# Of an output, relative to 1 + its expected magnitude: a few roundings of its dtype.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
# A GPU may divide with an error of some ulps. A quotient halfway between two integers may then round to the
# other one.
MAX_STEPS_OFF = 1.1  # in scales. The last tenth is for the scale's own rounding
MAX_SHARE_OFF = 0.01


@dataclass(frozen=True, slots=True)
class KernelUse:
    """How a layer calls the kernel. Uses of layers that call it alike are equal.

    Attributes:
        head_dim, value_dim: of keys and of values.
        dtype: of queries, and at 0 bits of keys and values.
        quant_bit, quant_group, scale_dtype: of the cache. value_bit: of its values; 0: as of its keys.
        heads: query heads of a kv head, H/K; None: not known.
        pairs: rotary pairs of a bias split; None: there is none.
        cache_dtype: of stored keys and values at 0 bits; None: ``dtype``.
        mask: whether a mask is given.
        sinks: whether learned sinks may be given, in the queries' dtype. Tried besides.
        paged: whether rows are in pages. A PMX operator's are not.
        window: tokens that a query sees, its own included; None: all.
        is_alibi: whether ALiBi is added.
        tail_dtype: of the rows of an exact tail; None: the layer has none. One that has is paged, without a
            mask and ALiBi.
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
    paged: bool = True
    window: int | None = None
    is_alibi: bool = False
    value_bit: int = 0
    tail_dtype: mx.Dtype | None = None

    @property
    def bits(self) -> dict[str, Any]:
        """As the operators take them."""
        return {"quant_bit": self.quant_bit, "value_bit": self.value_bit}

    @property
    def unsupported_reason(self) -> str | None:
        """Why the kernel does not take the layer's decode step; None: it takes it."""
        return unsupported_reason(
            (1, 1, 1, self.head_dim),
            quant_bit=self.quant_bit,
            quant_group=self.quant_group,
            value_dim=self.value_dim,
            value_bit=self.value_bit,
        )

    def __str__(self) -> str:
        values = "" if self.value_dim == self.head_dim else f" with values of {self.value_dim}"
        bits = (
            self.quant_bit if self.value_bit in (0, self.quant_bit) else f"{self.quant_bit}/{self.value_bit}"
        )
        kind = f"{bits} bits g{self.quant_group}" if self.quant_bit else "floats"
        has_split, has_window = self.pairs is not None, self.window is not None
        extras = {"bias split": has_split, "mask": self.mask, "window": has_window, "ALiBi": self.is_alibi}
        extras |= {"exact tail": self.tail_dtype is not None}
        dtype = str(self.dtype).removeprefix("mlx.core.")
        named = [name for name, on in (extras | {"no pages": not self.paged}).items() if on]
        return ", ".join([f"heads of {self.head_dim}{values}", kind, dtype, *named])


class Call(NamedTuple):
    """A call that is tried: query heads of a kv head, new tokens, and whether there are sinks."""

    heads: int
    new_tokens: int
    sinks: bool = False


def probe_failure(use: KernelUse, backend: Backend) -> str | None:
    """Why the kernel does not do what a layer needs of it; None: it does."""
    trials = {heads: Trial(use, heads) for heads in _heads(use)}
    for call in probe_calls(use, backend):
        try:
            problem = trials[call.heads].agreement(backend, call.new_tokens, sinks=call.sinks).problem
        except Exception as error:  # of a compiler or a driver: any
            problem = " ".join(str(error).split())[:500] or type(error).__name__
        if problem is not None:
            queries = call.heads * call.new_tokens
            return f"{use}{', sinks' * call.sinks}, {queries} queries of a kv head: {problem}"
    return None


def probe_calls(use: KernelUse, backend: Backend) -> list[Call]:
    """The calls that are tried: every instance in each way that its simdgroups share the work.

    Of the calls of 1 to 8 new tokens that are alike in this, it is the one with the largest threadgroup.
    """
    chosen: dict[tuple[int, int, bool], tuple[int, Call]] = {}
    for heads, new_tokens in product(_heads(use), range(1, MAX_NEW_TOKENS + 1)):
        tiles, groups, simdgroups, queries = _shape(use, backend, heads * new_tokens)
        way = (queries, simdgroups, tiles > 1)
        if way not in chosen or chosen[way][0] < groups * simdgroups:
            chosen[way] = (groups * simdgroups, Call(heads, new_tokens))
    calls = [call for _, call in chosen.values()]
    return [*calls, calls[-1]._replace(sinks=True)] if use.sinks else calls


def num_instances(use: KernelUse, backend: Backend, calls: Sequence[Call]) -> int:
    """The instances of the kernels that MLX compiles for calls, which store what they attend to."""
    attends = {_shape(use, backend, call.heads * call.new_tokens)[-1] for call in calls}
    passes = 1 if use.tail_dtype is None else 2  # exact rows take another instance
    return passes * len(attends) + len({call.sinks for call in calls}) + (use.quant_bit > 0)


def _heads(use: KernelUse) -> Sequence[int]:
    return [use.heads] if use.heads else ANY_HEADS


def _shape(use: KernelUse, backend: Backend, queries: int) -> tuple[int, int, int, int]:
    return threadgroup_shape(queries, use.pairs or 0, backend, max(use.head_dim, use.value_dim))


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of a comparison."""

    error: float  # the output's largest, relative to 1 + the expected magnitude. NaN if either is NaN
    tolerance: float  # for this dtype
    problem: str | None  # the difference that is too large. None: there is none


class Trial:
    """The arrays of calls that a layer makes: two sequences in pages, one from its second page on, or one
    without.

    Rows that hold no token hold NaN, so whoever reads one gives NaN.
    """

    def __init__(self, use: KernelUse, heads: int) -> None:
        self.use = use
        self.form: dict[str, Any] = use.bits | {"quant_group": use.quant_group}
        self.stores = fitted_tokens if use.paged else stored_tokens  # as a cache does, or PMX's operator
        K, D, Dv, S, R = KV_HEADS, use.head_dim, use.value_dim, MAX_NEW_TOKENS, ROWS
        self.window = None if use.window is None else min(use.window, R // 2)  # no constant of an instance
        # The position of the first row of each sequence, and its tokens before the new ones.
        self.spans = [(PAGE_SIZE, PAGE_SIZE + R - S - 7), (0, R // 2)] if use.paged else [(0, R - S - 7)]
        B, H, pages = len(self.spans), heads * K, R // PAGE_SIZE
        numbers = random.Random(0).sample(range(B * pages), B * pages) if use.paged else list(range(pages))
        self.pages = [numbers[b * pages : (b + 1) * pages] for b in range(B)]
        with mx.stream(mx.cpu):  # the same numbers wherever it is asked
            keys = iter(mx.random.split(mx.random.key(0), 12))

            def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
                return mx.random.normal(shape, key=next(keys)).astype(dtype)

            self.query = normal(B, H, S, D, dtype=use.dtype)
            self.key, self.value = (normal(B, K, S, width, dtype=use.dtype) for width in (D, Dv))
            self.sinks = normal(max(8, H), dtype=use.dtype)  # not small, as a model's are not
            self.mask = normal(S, R) > -1 if use.mask else None
            self.split: BiasSplit | None = None
            if use.pairs is not None:
                angle = normal(use.pairs, 2 * R)  # of each column
                table = mx.stack([mx.cos(angle), mx.sin(angle)])
                self.split = BiasSplit(
                    3 * normal(K, 2, use.pairs), tuple(range(use.pairs)), table, normal(K, Dv)
                )
            past_key, past_value = (normal(B, K, R, width, dtype=use.dtype) for width in (D, Dv))
            self.past = self._empty(R)
            stored = self.stores(past_key, past_value, self.past, **self.form)
            self._write(self.past, stored, 0)
            # Of the first sequence all exact rows are there, of the other one a few of the last tokens.
            self.tails = [ExactSpan(2), ExactSpan(0, sinks=0, start=self.spans[-1][1] - TAIL_ROWS // 4)]
            self.exact_rows: list[mx.array] = []
            if use.tail_dtype is not None:
                self.exact_rows = [self._past_exact_rows(past_key, past_value, use.tail_dtype)]
            mx.eval(self.query, self.key, self.value, self.past, self.exact_rows, self.sinks, self.mask)

    def agreement(self, backend: Backend, new_tokens: int, *, sinks: bool = False) -> Agreement:
        """Run the kernels, and compare what they store and give with what the unfused operators do on the
        CPU.

        Not on the GPU: some multiply float32 matrices with fewer bits.
        """
        arrays, new, output = self.run(backend, new_tokens, sinks=sinks)
        with mx.stream(mx.cpu):
            unfused = [self._unfused(arrays, b, new_tokens, sinks) for b in range(len(self.spans))]
            expected = mx.concatenate(unfused).astype(mx.float32)
            error = _number((mx.abs(output.astype(mx.float32) - expected) / (1 + mx.abs(expected))).max())
            key, value = (x[:, :, :new_tokens] for x in (self.key, self.value))
            problem = self._stored_problem(new, self.stores(key, value, arrays, **self.form))
        tolerance = TOLERANCE[self.use.dtype]
        if problem is None and not error <= tolerance:  # true for NaN too
            problem = f"the output is off by {error:.2g}; expected at most {tolerance:g}"
        return Agreement(error, tolerance, problem)

    def run(
        self, backend: Backend, new_tokens: int, *, sinks: bool = False
    ) -> tuple[list[mx.array], list[mx.array], mx.array]:
        """Store the new tokens and attend to them, by the kernels: the cache then, what was stored, and
        the output.
        """
        with mx.stream(mx.cpu):  # all but the kernels: MLX would compile its own scatter for the GPU
            arrays = [mx.array(array) for array in self.past]
            key, value = (x[:, :, :new_tokens] for x in (self.key, self.value))
            new = self.stores(key, value, arrays, **self.form, backend=backend)
            self._write(arrays, new, new_tokens)
            output = self._attend(arrays, new_tokens, self.sinks if sinks else None, backend)
            mx.eval(new, output)
        mx.synchronize()  # a failure is raised here, or when it was queued
        return arrays, new, output

    def _attend(self, arrays: list[mx.array], S: int, sinks: mx.array | None, backend: Backend) -> mx.array:
        query, mask = self.query[:, :, :S], None if self.mask is None else self.mask[:S]
        options = self.form | {"mask": mask, "sinks": sinks, "bias_split": self.split, "backend": backend}
        options["is_alibi"] = self.use.is_alibi
        starts, offsets = zip(*self.spans, strict=True)
        if self.use.paged:
            rows = max(len(self._places(b, S)) for b in range(len(self.spans)))
            options["exact"] = self._exact_tail(S) if self.exact_rows else None
            return attend_pages(
                query, arrays, step_pages(self.pages, starts, offsets, rows, self.window), **options
            )
        cache, *scales = (array[None, None] for array in arrays)
        scale = scales[0] if scales else None
        return attend_fused(query, cache, scale, mx.array(offsets), window=self.window, **options)

    def _unfused(self, arrays: list[mx.array], b: int, S: int, sinks: bool) -> mx.array:
        use, (_, H, _, D), places, first = self.use, self.query.shape, self._places(b, S), self.spans[b][0]
        query, own = self.query[b : b + 1, :, :S].astype(mx.float32), self.sinks[:H] if sinks else None
        if self.exact_rows:
            runs = [[(place, place + 1) for place in places]]
            (output,) = attend_each_exactly(
                query,
                arrays,
                PagedRows([], runs, [first], self.window),
                self._exact_tail(S).only(slice(b, b + 1)),
                (),
                **use.bits,
                dtype=mx.float32,
                mask=None,
                bias_split=self.split,
                sinks=own,
            )
            return output
        stored = [array[:, :, mx.array(places)][None] for array in arrays]
        tokens = float_tokens(stored, **use.bits, dtype=mx.float32, key_dim=D)
        T = len(places)
        mask = window_mask(S, T, self.window or T)
        if self.mask is not None:
            mask = mask & self.mask[:S, :T]
        split = None if self.split is None else replace(self.split, rotation=self.split.rotation[..., first:])
        return attend_tokens(query, *tokens, is_alibi=use.is_alibi, mask=mask, bias_split=split, sinks=own)

    def _stored_problem(self, new: Sequence[mx.array], expected: Sequence[mx.array]) -> str | None:
        """The difference in the new tokens as the kernel stored them; None: there is none."""
        D, G = self.use.head_dim, self.use.quant_group
        if not self.use.quant_bit:
            return None  # nothing is computed

        def joined(stored: Sequence[mx.array], key_dim: int, **bits: Any) -> mx.array:  # (B, K, S, D + Dv)
            return mx.concatenate([*float_tokens(stored, **bits, dtype=mx.float32, key_dim=key_dim)], axis=-1)

        given, wanted = (joined(stored, D, **self.use.bits) for stored in (new, expected))
        scales = joined(expected[1:], D // G, quant_bit=0)
        off = mx.abs(given - wanted) / mx.repeat(mx.abs(scales), G, axis=-1)
        most, share = _number(off.max()), _number((off > 0.5).astype(mx.float32).mean())
        if most <= MAX_STEPS_OFF and share <= MAX_SHARE_OFF:
            return None
        return f"stored values are off by up to {most:.2g} scales, {share:.1%} of them"

    def _empty(self, rows: int) -> list[mx.array]:
        """The cache, and its scale if there is one, of NaN."""
        use = self.use
        dtype = quantized_dtype(**use.bits) if use.quant_bit else use.cache_dtype or use.dtype
        shape = (1, KV_HEADS, len(self.spans) * rows)
        key, value = (mx.zeros((*shape, width)) for width in (use.head_dim, use.value_dim))
        arrays = stored_tokens(
            key, value, [mx.zeros(0, dtype), mx.zeros(0, use.scale_dtype)], **self.form, unbatched=True
        )
        arrays[-1] = mx.full(arrays[-1].shape, math.nan, arrays[-1].dtype)
        return arrays

    def _past_exact_rows(self, key: mx.array, value: mx.array, dtype: mx.Dtype) -> mx.array:
        """The exact rows of past tokens (B, K, R, D); those that hold none are NaN."""
        like = mx.zeros(0, dtype)
        tokens = self._exact_tokens(key, value, like)
        rows = mx.full((*tokens.shape[1:3], 3 * TAIL_ROWS, tokens.shape[4]), math.nan, dtype)
        for span, (first, offset), own in zip(self.tails, self.spans, tokens, strict=True):
            for start, end in ((0, span.sinks), (max(span.start, offset + 1 - TAIL_WINDOW), offset)):
                # Tokens before the first page are any.
                numbers = mx.array([(position - first) % ROWS for position in range(start, end)], mx.int32)
                put_rows(rows, own[:, :, numbers], span.runs(start, end))
        return rows

    def _exact_tokens(self, key: mx.array, value: mx.array, like: mx.array) -> mx.array:
        """Tokens (B, K, S, D) as exact rows: (B, 2, K, S, D)."""
        return fitted_tokens(key, value, [like], quant_bit=0, quant_group=0)[0]

    def _exact_tail(self, S: int) -> ExactTail:
        """The exact rows of a step of S new tokens, which are written to a copy."""
        rows = mx.array(self.exact_rows[0])
        new = self._exact_tokens(self.key[:, :, :S], self.value[:, :, :S], rows)
        ends = [offset + S for _, offset in self.spans]
        starts, runs = [], []
        for span, end, own in zip(self.tails, ends, new, strict=True):
            put_rows(rows, own, span.runs(end - S, end))
            start, read = span.read(end - S, end)
            starts.append(start)
            runs.append(read)
        sinks = [span.sinks for span in self.tails]
        pages = exact_pages(self.tails, sinks, starts, ends)
        numbers = [span.page for span in self.tails]
        return ExactTail(ExactRows(None, runs, sinks, starts, ends, numbers, pages), [rows])

    def _places(self, b: int, S: int) -> list[int]:
        """The rows of sequence b's tokens, S new ones included, in the order of positions."""
        first, offset = self.spans[b]
        rows = range(offset + S - first)
        return [self.pages[b][row // PAGE_SIZE] * PAGE_SIZE + row % PAGE_SIZE for row in rows]

    def _write(self, arrays: Sequence[mx.array], parts: Sequence[mx.array], S: int) -> None:
        """Write parts (B, 2, K, tokens, last) as the S new tokens; 0: as those before."""
        for b in range(len(self.spans)):
            places = self._places(b, S)[-S:]
            for array, part in zip(arrays, parts, strict=True):
                array[:, :, mx.array(places)] = part[b, :, :, : len(places)]


def _number(x: mx.array) -> float:
    return float(x.item())  # type: ignore[arg-type]
