"""Try the fused kernel as a layer will call it, against the unfused operator on the CPU.

MLX compiles an instance of the kernel when it first runs. Otherwise source that this device's compiler
rejects, a threadgroup that is too large for it, or a wrong number would only show in an answer. Small arrays
suffice: an instance depends on no size, except that MLX keeps inputs of fewer than 8 elements in Metal's
constant memory.
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
ROWS = 512  # enough that the second pass has its largest threadgroup
ANY_HEADS = (1, 8)  # query heads per kv head to try if unknown: they give every threadgroup shape
# Relative to 1 + the expected magnitude of an output: a few roundings of its dtype.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
# A GPU's division may be off by some ulps, so a quotient near a half may round the other way.
MAX_STEPS_OFF = 1.1  # in scales; the last tenth allows for the scale's own rounding
MAX_SHARE_OFF = 0.01


@dataclass(frozen=True, slots=True)
class KernelUse:
    """How a layer calls the kernel. Layers that call it alike have equal uses.

    Attributes:
        head_dim, value_dim: widths of keys and of values.
        dtype: of queries and, at 0 bits, of keys and values.
        quant_bit, quant_group, scale_dtype: of the cache. value_bit: of its values; 0 means that of keys.
        heads: query heads per kv head, H/K; None: unknown.
        pairs: number of rotary pairs of a bias split; None: no split.
        cache_dtype: of stored keys and values at 0 bits; None: ``dtype``.
        mask: whether calls pass a mask.
        sinks: whether calls may pass learned sinks, in the queries' dtype. They are tried in addition.
        paged: whether rows are in pages; those of a PMX operator are not.
        window: tokens that a query sees, including its own; None: all.
        is_alibi: whether ALiBi is added.
        tail_dtype: of the exact tail's rows; None: no exact tail. A layer with one is paged and has neither a
            mask nor ALiBi.
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
        """Return the bits as keyword arguments of the operators."""
        return {"quant_bit": self.quant_bit, "value_bit": self.value_bit}

    @property
    def unsupported_reason(self) -> str | None:
        """Return why the kernel does not support the layer's decode step, or None if it does."""
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
        has_split = self.pairs is not None
        has_window = self.window is not None
        extras = {"bias split": has_split, "mask": self.mask, "window": has_window, "ALiBi": self.is_alibi}
        extras |= {"exact tail": self.tail_dtype is not None}
        dtype = str(self.dtype).removeprefix("mlx.core.")
        named = [name for name, on in (extras | {"no pages": not self.paged}).items() if on]
        return ", ".join([f"heads of {self.head_dim}{values}", kind, dtype, *named])


class Call(NamedTuple):
    """A trial call: query heads per kv head, new tokens, and whether there are sinks."""

    heads: int
    new_tokens: int
    sinks: bool = False


def probe_failure(use: KernelUse, backend: Backend) -> str | None:
    """Return why the kernel does not do what a layer needs, or None if it does."""
    trials = {heads: Trial(use, heads) for heads in _heads(use)}
    for call in probe_calls(use, backend):
        try:
            problem = trials[call.heads].agreement(backend, call.new_tokens, sinks=call.sinks).problem
        except Exception as error:  # a compiler or driver may raise anything
            problem = " ".join(str(error).split())[:500] or type(error).__name__
        if problem is not None:
            queries = call.heads * call.new_tokens
            return f"{use}{', sinks' * call.sinks}, {queries} queries of a kv head: {problem}"
    return None


def probe_calls(use: KernelUse, backend: Backend) -> list[Call]:
    """Return trial calls that cover every instance and every way its simdgroups share the work.

    Among equivalent calls of 1 to 8 new tokens it is the one with the largest threadgroup.
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
    """Return how many kernel instances MLX compiles for calls, including those that store the tokens."""
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

    error: float  # the output's largest, relative to 1 + the expected magnitude; NaN if either is NaN
    tolerance: float  # for this dtype
    problem: str | None  # describes a difference that is too large


class Trial:
    """The arrays of a layer's calls: two sequences in pages, one from its second page on, or one unpaged.

    Empty rows hold NaN, so reading one gives NaN.
    """

    def __init__(self, use: KernelUse, heads: int) -> None:
        self.use = use
        self.form: dict[str, Any] = use.bits | {"quant_group": use.quant_group}
        self.stores = fitted_tokens if use.paged else stored_tokens  # a cache's, or a PMX operator's
        K = KV_HEADS
        D = use.head_dim
        Dv = use.value_dim
        S = MAX_NEW_TOKENS
        R = ROWS
        self.window = None if use.window is None else min(use.window, R // 2)  # no compile-time constant
        # For each sequence the position of its first row, and its tokens before the new ones.
        self.spans = [(PAGE_SIZE, PAGE_SIZE + R - S - 7), (0, R // 2)] if use.paged else [(0, R - S - 7)]
        B = len(self.spans)
        H = heads * K
        pages = R // PAGE_SIZE
        numbers = random.Random(0).sample(range(B * pages), B * pages) if use.paged else list(range(pages))
        self.pages = [numbers[b * pages : (b + 1) * pages] for b in range(B)]
        with mx.stream(mx.cpu):  # the same numbers on every machine
            keys = iter(mx.random.split(mx.random.key(0), 12))

            def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
                return mx.random.normal(shape, key=next(keys)).astype(dtype)

            self.query = normal(B, H, S, D, dtype=use.dtype)
            self.key, self.value = (normal(B, K, S, width, dtype=use.dtype) for width in (D, Dv))
            self.sinks = normal(max(8, H), dtype=use.dtype)  # at least 8, like a model's
            self.mask = normal(S, R) > -1 if use.mask else None
            self.split: BiasSplit | None = None
            if use.pairs is not None:
                angle = normal(use.pairs, 2 * R)
                table = mx.stack([mx.cos(angle), mx.sin(angle)])
                self.split = BiasSplit(
                    3 * normal(K, 2, use.pairs), tuple(range(use.pairs)), table, normal(K, Dv)
                )
            past_key, past_value = (normal(B, K, R, width, dtype=use.dtype) for width in (D, Dv))
            self.past = self._empty(R)
            stored = self.stores(past_key, past_value, self.past, **self.form)
            self._write(self.past, stored, 0)
            # The first sequence has all exact rows, the other one only some of its last tokens.
            self.tails = [ExactSpan(2), ExactSpan(0, sinks=0, start=self.spans[-1][1] - TAIL_ROWS // 4)]
            self.exact_rows: list[mx.array] = []
            if use.tail_dtype is not None:
                self.exact_rows = [self._past_exact_rows(past_key, past_value, use.tail_dtype)]
            mx.eval(self.query, self.key, self.value, self.past, self.exact_rows, self.sinks, self.mask)

    def agreement(self, backend: Backend, new_tokens: int, *, sinks: bool = False) -> Agreement:
        """Run the kernels, and compare stored tokens and output with the unfused operators on the CPU.

        The reference runs on the CPU because some GPUs multiply float32 matrices with fewer bits.
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
        """Store and attend to the new tokens with the kernels; return cache, stored tokens and output."""
        with mx.stream(mx.cpu):  # everything but the kernels: MLX would compile its own scatter for the GPU
            arrays = [mx.array(array) for array in self.past]
            key, value = (x[:, :, :new_tokens] for x in (self.key, self.value))
            new = self.stores(key, value, arrays, **self.form, backend=backend)
            self._write(arrays, new, new_tokens)
            output = self._attend(arrays, new_tokens, self.sinks if sinks else None, backend)
            mx.eval(new, output)
        mx.synchronize()  # failures are raised here, or when the work was queued
        return arrays, new, output

    def _attend(self, arrays: list[mx.array], S: int, sinks: mx.array | None, backend: Backend) -> mx.array:
        query = self.query[:, :, :S]
        mask = None if self.mask is None else self.mask[:S]
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
        use = self.use
        _, H, _, D = self.query.shape
        places = self._places(b, S)
        first = self.spans[b][0]
        query = self.query[b : b + 1, :, :S].astype(mx.float32)
        sink_scores = self.sinks[:H] if sinks else None
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
                sinks=sink_scores,
            )
            return output
        stored = [array[:, :, mx.array(places)][None] for array in arrays]
        tokens = float_tokens(stored, **use.bits, dtype=mx.float32, key_dim=D)
        T = len(places)
        mask = window_mask(S, T, self.window or T)
        if self.mask is not None:
            mask = mask & self.mask[:S, :T]
        split = None if self.split is None else replace(self.split, rotation=self.split.rotation[..., first:])
        options: dict[str, Any] = {"mask": mask, "bias_split": split, "sinks": sink_scores}
        return attend_tokens(query, *tokens, is_alibi=use.is_alibi, **options)

    def _stored_problem(self, new: Sequence[mx.array], expected: Sequence[mx.array]) -> str | None:
        """Return how the tokens that the kernel stored differ, or None if they do not."""
        D = self.use.head_dim
        G = self.use.quant_group
        if not self.use.quant_bit:
            return None  # floats are only copied

        def joined(stored: Sequence[mx.array], key_dim: int, **bits: Any) -> mx.array:  # (B, K, S, D + Dv)
            return mx.concatenate([*float_tokens(stored, **bits, dtype=mx.float32, key_dim=key_dim)], axis=-1)

        result, target = (joined(stored, D, **self.use.bits) for stored in (new, expected))
        scales = joined(expected[1:], D // G, quant_bit=0)
        off = mx.abs(result - target) / mx.repeat(mx.abs(scales), G, axis=-1)
        most = _number(off.max())
        share = _number((off > 0.5).astype(mx.float32).mean())
        if most <= MAX_STEPS_OFF and share <= MAX_SHARE_OFF:
            return None
        return f"stored values are off by up to {most:.2g} scales, {share:.1%} of them"

    def _empty(self, rows: int) -> list[mx.array]:
        """Return a cache and, if quantized, its scale, filled with NaN."""
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
        """Return the exact rows of past tokens (B, K, R, D); empty rows are NaN."""
        like = mx.zeros(0, dtype)
        tokens = self._exact_tokens(key, value, like)
        rows = mx.full((*tokens.shape[1:3], 3 * TAIL_ROWS, tokens.shape[4]), math.nan, dtype)
        for span, (first, offset), tail_tokens in zip(self.tails, self.spans, tokens, strict=True):
            for start, end in ((0, span.sinks), (max(span.start, offset + 1 - TAIL_WINDOW), offset)):
                # Tokens before the first page may be any.
                numbers = mx.array([(position - first) % ROWS for position in range(start, end)], mx.int32)
                put_rows(rows, tail_tokens[:, :, numbers], span.runs(start, end))
        return rows

    def _exact_tokens(self, key: mx.array, value: mx.array, like: mx.array) -> mx.array:
        """Convert tokens (B, K, S, D) to exact rows (B, 2, K, S, D)."""
        return fitted_tokens(key, value, [like], quant_bit=0, quant_group=0)[0]

    def _exact_tail(self, S: int) -> ExactTail:
        """Return the exact tail of a step of S new tokens, which are written to a copy."""
        rows = mx.array(self.exact_rows[0])
        new = self._exact_tokens(self.key[:, :, :S], self.value[:, :, :S], rows)
        ends = [offset + S for _, offset in self.spans]
        starts = []
        runs = []
        for span, end, new_rows in zip(self.tails, ends, new, strict=True):
            put_rows(rows, new_rows, span.runs(end - S, end))
            start, read = span.read(end - S, end)
            starts.append(start)
            runs.append(read)
        sinks = [span.sinks for span in self.tails]
        pages = exact_pages(self.tails, sinks, starts, ends)
        numbers = [span.page for span in self.tails]
        return ExactTail(ExactRows(None, runs, sinks, starts, ends, numbers, pages), [rows])

    def _places(self, b: int, S: int) -> list[int]:
        """Return the rows of sequence b's tokens, including S new ones, in the order of positions."""
        first, offset = self.spans[b]
        rows = range(offset + S - first)
        return [self.pages[b][row // PAGE_SIZE] * PAGE_SIZE + row % PAGE_SIZE for row in rows]

    def _write(self, arrays: Sequence[mx.array], parts: Sequence[mx.array], S: int) -> None:
        """Write ``parts`` (B, 2, K, tokens, last) as the S new tokens, or with 0 as those before."""
        for b in range(len(self.spans)):
            places = self._places(b, S)[-S:]
            for array, tokens in zip(arrays, parts, strict=True):
                array[:, :, mx.array(places)] = tokens[b, :, :, : len(places)]


def _number(x: mx.array) -> float:
    return float(x.item())  # type: ignore[arg-type]
