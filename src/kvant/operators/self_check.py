"""Compares the fused kernel with plain attention on the CPU, on the device that runs the kernel."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit, rotated_bias, rotation_table
from kvant.operators.cached_attention import append_and_attend, float_tokens, stored_tokens, write_tokens
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernel_case import SELF_CHECK, KernelCase
from kvant.operators.kernels.attend import PAGE_SIZE
from kvant.operators.kernels.launch import Backend
from kvant.operators.masks import alibi_slopes
from kvant.operators.probe import first_words
from kvant.operators.quantization import multiply_scale, quantized_dtype
from kvant.operators.rotary import Rotary

# Of an output, relative to 1 + its expected magnitude: a few roundings of its dtype.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
# A GPU may divide with an error of some ulps. A quotient halfway between two integers may then round to the other one.
MAX_STEPS_OFF = 1.1  # in scales. The last tenth is for the scale's own rounding
MAX_SHARE_OFF = 0.01


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of a comparison.

    Attributes:
        error: the output's largest, relative to 1 + the expected magnitude. NaN where either is NaN.
        tolerance: for this dtype.
        problem: the difference that is too large. None: there is none.
    """

    error: float
    tolerance: float
    problem: str | None


class Trial:
    """A case's arrays. Rows that hold no token hold NaN, so an output that reads them is NaN."""

    def __init__(self, case: KernelCase) -> None:
        self.case = case
        B, H, K, D, S, T = case.B, case.H, case.K, case.D, case.S, case.offset
        Dv = self.value_dim = case.value_dim or D
        keys = mx.random.split(mx.random.key(case.seed), 9)
        with mx.stream(mx.cpu):  # the same numbers wherever it is asked

            def normal(i: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
                return mx.random.normal(shape, key=keys[i]).astype(dtype)

            self.query = normal(0, B, H, S, D, dtype=case.dtype)
            self.key, self.value = (normal(1 + i, B, K, S, w, dtype=case.dtype) for i, w in enumerate((D, Dv)))
            self.pages = self._make_pages()
            self.arrays = self._make_arrays()
            self.offset = mx.array(case.offsets if case.shorter else case.offset, mx.int32)
            if T:
                past = tuple(normal(3 + i, B, K, T, width, dtype=case.dtype) for i, width in enumerate((D, Dv)))
                stored = self._stored(past[0], past[1])
                for b, offset in enumerate(case.offsets):
                    held = [position for position in case.positions(b) if position < offset]
                    if held:
                        self._put(b, [part[b][:, :, mx.array(held)] for part in stored], held)
            self.mask = self.sinks = None
            if case.has_mask:
                columns = max(len(case.positions(b)) for b in range(B))
                self.mask = normal(5, 1, H, S, columns)
                self.mask = mx.where(self.mask < -1, -math.inf, self.mask)
            if case.has_sinks:
                self.sinks = normal(6, H)
            self.bias_split: BiasSplit | None = None
            if case.pairs is not None:
                table = rotation_table(Rotary.plain(D, 1e6), case.pairs, max(T + S, case.max_seq_len))  # by position
                self.bias_split = BiasSplit(normal(7, K, 2, len(case.pairs)) * 10, case.pairs, table, normal(8, K, Dv))
            mx.eval(self.query, self.key, self.value, self.arrays, self.mask, self.sinks)

    def run(self, backend: Backend | None, queries: int | None = None) -> mx.array:
        """Append the new tokens and attend, by the kernel or, with None, by the unfused operator. Evaluated.

        ``queries`` of a simdgroup as :func:`kvant.operators.kernels.attend.attend` takes them.
        """
        case, cache, scale = self.case, self.arrays[0], self.arrays[1] if self.case.quant_bit else None
        start = case.offsets if case.shorter else case.offset
        form: dict[str, Any] = {"quant_bit": case.quant_bit, "quant_group": case.quant_group, "backend": backend}
        terms: dict[str, Any] = {"is_alibi": case.is_alibi, "mask": self.mask, "sinks": self.sinks}
        if backend is None:
            form["bias_split"] = self.bias_split
            output = append_and_attend(self.query, self.key, self.value, start, cache, scale, **form, **terms)
        else:
            if case.is_paged or case.is_ring:
                new = stored_tokens(self.key, self.value, self.arrays, **form)
                for b, offset in enumerate(case.offsets):
                    self._put(b, [part[b] for part in new], range(offset, offset + case.S))
            else:
                write_tokens(self.key, self.value, start, cache, scale, **form)
            output = attend_fused(
                self.query,
                cache,
                scale,
                self.offset,
                value_dim=case.value_dim,
                score_scale=case.score_scale,
                softcap=case.softcap,
                window=case.window,
                keep=case.keep,
                pages=None if self.pages is None else mx.array(self.pages, mx.int32),
                first=mx.array([case.first(b) for b in range(case.B)], mx.int32) if case.is_paged else None,
                bias_split=self._bias_by_column(),
                queries=queries,
                **form,
                **terms,
            )
        mx.eval(output, self.arrays)
        mx.synchronize()  # a kernel's failure is raised here or when it was queued
        return output

    def agreement(self, backend: Backend, queries: int | None = None) -> Agreement:
        """Run the kernel. Compare the tokens it stored, and its output, with what the CPU makes of them.

        Not the GPU: some multiply float32 matrices with fewer bits.
        """
        case = self.case
        given = self.run(backend, queries).astype(mx.float32)
        with mx.stream(mx.cpu):
            expected = mx.stack([self._expected(b) for b in range(case.B)])
            error = _number((mx.abs(given - expected) / (1 + mx.abs(expected))).max())
            problem = self._stored_problem()
        tolerance = TOLERANCE[case.dtype]
        if problem is None and not error <= tolerance:  # true for NaN too
            problem = f"the output is off by {error:.2g}; expected at most {tolerance:g}"
        return Agreement(error, tolerance, problem)

    def _expected(self, b: int) -> mx.array:
        """Attention of sequence b to its rows, written out: (H, S, Dv) float32."""
        case = self.case
        H, K, S, D = case.H, case.K, case.S, case.D
        held = case.positions(b)
        position = mx.array(held)
        stored = [part[None] for part in self._rows(b, held)]
        key, value = float_tokens(stored, quant_bit=case.quant_bit, dtype=mx.float32, key_dim=D)  # (1, K, T, D or Dv)
        if (split := self.bias_split) is not None:
            value = value + split.value_bias[:, None]
            if split.pairs:
                turned = replace(split, rotation=split.rotation[..., position])
                key = key + rotated_bias(turned, D, len(held))
        queries = self.query[b].astype(mx.float32).reshape(K, H // K * S, D)
        scale = D**-0.5 if case.score_scale is None else case.score_scale
        scores = (scale * queries @ key[0].swapaxes(-1, -2)).reshape(H, S, -1)
        if case.softcap:
            scores = case.softcap * mx.tanh(scores / case.softcap)
        at = case.offsets[b] + mx.arange(S)[:, None]
        if case.is_alibi:
            scores = scores + mx.array(alibi_slopes(H))[:, None, None] * (position - at)
        if self.mask is not None:
            scores = scores + self.mask[0, :, :, : len(held)]
        seen = position <= at
        if case.window is not None:
            seen = seen & ((position > at - case.window) | (position < case.keep))
        scores = mx.where(seen, scores, -math.inf)
        sink = mx.full(H, -math.inf) if self.sinks is None else self.sinks
        scores = mx.concatenate([scores, mx.broadcast_to(sink[:, None, None], (H, S, 1))], axis=-1)
        alive = (scores > -math.inf).any(axis=-1, keepdims=True)  # a query that sees nothing gives 0
        weights = mx.where(alive, mx.softmax(mx.where(alive, scores, 0.0), axis=-1), 0.0)[..., :-1]
        return (weights.reshape(K, H // K * S, -1) @ value[0]).reshape(H, S, -1)

    def _stored_problem(self) -> str | None:
        """The difference in the new tokens as the kernel stored them; None: there is none."""
        case = self.case
        ends = [(offset, offset + case.S) for offset in case.offsets]
        own = [self._rows(b, range(*end)) for b, end in enumerate(ends)]
        stored = [mx.stack(list(parts)) for parts in zip(*own, strict=True)]  # (B, 2, K, S, D' or D/G)
        expected = self._stored(self.key, self.value)
        if not case.quant_bit:
            return None if mx.array_equal(stored[0], expected[0]).item() else "the new tokens were not stored unchanged"
        given, wanted = (  # (B, 2, K, S, D/G, G)
            mx.unflatten(multiply_scale(quantized, scale, case.quant_bit, mx.float32), -1, (scale.shape[-1], -1))
            for quantized, scale in (stored, expected)
        )
        off = mx.abs(given - wanted) / expected[1].astype(mx.float32)[..., None]
        most, share = _number(off.max()), _number((off > 0.5).astype(mx.float32).mean())
        if most <= MAX_STEPS_OFF and share <= MAX_SHARE_OFF:
            return None
        return f"stored values are off by up to {most:.2g} scales, {share:.1%} of them"

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _make_pages(self) -> list[list[int]] | None:
        """The pages of each sequence, in no order. Behind them is one that nobody has: what is not to be read.

        Eight numbers or more, as a pool has them.
        """
        if not self.case.is_paged:
            return None
        counts = [-(-len(self.case.positions(b)) // PAGE_SIZE) for b in range(self.case.B)]
        numbers = list(range(sum(counts)))
        random.Random(self.case.seed).shuffle(numbers)
        own = [[numbers.pop() for _ in range(count)] for count in counts]
        return [pages + [sum(counts)] * (max(8, 1 + max(counts)) - len(pages)) for pages in own]

    def _make_arrays(self) -> list[mx.array]:
        """The cache, and its scale where there is one, of NaN."""
        case = self.case
        sides, width = (2, case.D) if case.value_dim is None else (1, case.D + case.value_dim)
        if self.pages is None:
            shape: tuple[int, ...] = (1, case.B, sides, case.K, case.max_seq_len)
        else:
            shape = (sides, case.K, (1 + max(map(max, self.pages))) * PAGE_SIZE)
        if not case.quant_bit:
            return [mx.full((*shape, width), math.nan, case.dtype)]
        quantized = mx.zeros((*shape, width * case.quant_bit // 8), quantized_dtype(case.quant_bit))
        return [quantized, mx.full((*shape, width // case.quant_group), math.nan, mx.float16)]

    def _stored(self, key: mx.array, value: mx.array) -> list[mx.array]:
        """Tokens as the unfused operator stores them."""
        case = self.case
        return stored_tokens(key, value, self.arrays, quant_bit=case.quant_bit, quant_group=case.quant_group)

    def _places(self, b: int, positions: Sequence[int]) -> mx.array:
        """Where positions of sequence b are on the axis of rows."""
        rows = [self.case.row(b, position) for position in positions]
        if self.pages is not None:
            rows = [self.pages[b][row // PAGE_SIZE] * PAGE_SIZE + row % PAGE_SIZE for row in rows]
        return mx.array(rows)

    def _put(self, b: int, parts: Sequence[mx.array], positions: Sequence[int]) -> None:
        """Write (2, K, positions, D' or D/G)."""
        places = self._places(b, positions)
        for array, part in zip(self.arrays, parts, strict=True):
            own = array if self.pages is not None else array[0, b]
            own[:, :, places] = part
            if self.pages is None:
                array[0, b] = own

    def _rows(self, b: int, positions: Sequence[int]) -> list[mx.array]:
        """Read them: (2, K, positions, D' or D/G)."""
        places = self._places(b, positions)
        return [(array if self.pages is not None else array[0, b])[:, :, places] for array in self.arrays]

    def _bias_by_column(self) -> BiasSplit | None:
        """The bias split, its rotation as the kernel reads it: by position with pages, otherwise by row."""
        case, split = self.case, self.bias_split
        if split is None or not case.is_ring:
            return split
        tables = []
        for b in range(case.B):
            held = case.positions(b)
            tables.append(split.rotation[..., mx.array(held + [0] * (case.max_seq_len - len(held)))])
        return replace(split, rotation=mx.stack(tables))


def self_check(backend: Backend, queries: int | None = None) -> str | None:
    """Run the kernel on a few small cases. Returns the first problem, an exception included; None: there is none.

    ``queries`` of a simdgroup as :func:`kvant.operators.kernels.attend.attend` takes them.
    """
    for case in SELF_CHECK:
        try:
            problem = Trial(case).agreement(backend, queries).problem
        except Exception as error:  # a kernel that does not compile raises when it runs
            problem = first_words(error)
        if problem is not None:
            return f"{case}: {problem}"
    return None


def _number(x: mx.array) -> float:
    return float(x.item())  # type: ignore[arg-type]
