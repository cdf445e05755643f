"""What the fused kernel computes, by the oracle, for machines without a GPU; and one that fails in a run."""

from typing import Any

import mlx.core as mx
import numpy as np

from kvant.operators.exact_rows import RING, SINKS, TAIL_WINDOW
from kvant.operators.kernels.attend import PAGE_SIZE, ExactInput
from support import oracle
from support.operator_cases import to_numpy
from support.oracle import Array

WORDS = {"build": "the compiler refuses the kernel", "eval": "NYI for the general case"}


def attend(query: mx.array, *arrays: mx.array | None, **options: Any) -> mx.array:
    """As :func:`kvant.operators.kernels.attend.attend`."""
    return mx.array(exact(query, *arrays, **options), query.dtype)


def exact(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    *,
    quant_bit: int,
    quant_group: int,
    value_bit: int = 0,
    pages: mx.array | None = None,
    first: mx.array | None = None,
    rows: int | None = None,
    mask: mx.array | None = None,
    pairs: tuple[int, ...] = (),
    rotation: mx.array | None = None,
    key_bias: mx.array | None = None,
    value_bias: mx.array | None = None,
    slopes: tuple[float, ...] = (),
    score_scale: float | None = None,
    sinks: mx.array | None = None,
    tail: ExactInput | None = None,
    backend: str,
    **options: Any,
) -> Array:
    """The same in float64. Of each sequence only its own rows are read: its numbers do not depend on the
    others.
    """
    B, H, S, D = query.shape
    starts = [0] * B if first is None else first.tolist()[:B]
    ends = np.broadcast_to(np.array(offset).reshape(-1)[:B] + S, B).tolist()
    assert pages is None or rows in (None, max(end - start for start, end in zip(starts, ends, strict=True)))
    outputs = []
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        at = np.arange(end - start)
        if pages is not None:
            at = np.array(pages)[b, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        arrays = [
            None if x is None else to_numpy(x if pages is not None else x[0, b]) for x in (cache, scale)
        ]
        with np.errstate(invalid="ignore"):  # rows that no query sees may be NaN
            stored, scales = (None if x is None else x[:, :, at] for x in arrays)
            assert stored is not None
            both = oracle.sides(stored, scales, D, (quant_bit, value_bit or quant_bit), quant_group)
        key, value = (side.swapaxes(0, 1) for side in both)
        own = None if mask is None else to_numpy(mask)
        if own is not None:
            own = np.broadcast_to(own, (B, H, *own.shape[-2:]))[b : b + 1, ..., : len(at)]
        parts = [(slice(0, S), key, value, np.arange(start, end))]
        if tail is not None:
            at_once = [_with_exact(tail, b, S, i, key, value, start) for i in range(S)]
            parts = [(slice(i, i + 1), *tokens) for i, tokens in enumerate(at_once)]
        for share, keys, values, positions in parts:
            if pairs:
                cosine, sine = np.array(rotation)[..., positions].swapaxes(1, 2)
                keys = keys + oracle.turned_bias(np.array(key_bias), pairs, cosine, sine, D)
            if value_bias is not None:
                values = values + np.array(value_bias)
            output = oracle.attend(
                to_numpy(query[b : b + 1, :, share]).swapaxes(1, 2), keys[None], values[None], attn_mask=own,
                scale=score_scale, is_alibi=bool(slopes), sinks=None if sinks is None else to_numpy(sinks),
                **options,
            )  # fmt: skip
            outputs.append(output.swapaxes(1, 2))
    if tail is not None:  # B * S arrays (1, H, 1, Dv)
        outputs = [np.concatenate(outputs[b * S : (b + 1) * S], axis=2) for b in range(B)]
    return np.concatenate(outputs)


def _with_exact(
    tail: ExactInput, b: int, S: int, i: int, key: Array, value: Array, start: int
) -> tuple[Array, Array, Array]:
    """Keys and values (T, K, D) that new token i of a sequence sees, and their positions.

    ``key``, ``value``: as they are quantized, from position ``start`` on.
    """
    first_tokens, tail_start, end, _ = tail.spans[b].tolist()
    position = end - S + i
    tail_start = max(position + 1 - TAIL_WINDOW, tail_start)
    exact = [p for p in range(position + 1) if p < first_tokens or p >= tail_start]
    rows = [p if p < SINKS else SINKS + (p - SINKS) % RING for p in exact]
    page = int(tail.pages[b, 0].item()) * PAGE_SIZE
    own = to_numpy(tail.rows)[:, :, [page + row for row in rows]].astype(np.float64)
    exact_sides = [side.swapaxes(0, 1) for side in oracle.sides(own, None, key.shape[-1], (0, 0), 0)]
    seen = [*range(min(first_tokens, start)), *range(start, position + 1)]
    both = []
    for quantized, floats in zip((key, value), exact_sides, strict=True):
        tokens = np.full((position + 1, *quantized.shape[1:]), np.nan)
        tokens[start:] = quantized[: position + 1 - start]
        tokens[exact] = floats
        both.append(tokens[seen])
    return both[0], both[1], np.array(seen)


class FailingKernel:
    """From call number ``first`` on the call raises ("build"), or what it returns, when it is evaluated
    ("eval").
    """

    def __init__(self, how: str, first: int) -> None:
        self.how, self.first = how, first
        self.calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> mx.array:
        self.calls += 1
        if self.calls >= self.first and self.how == "build":
            raise RuntimeError(WORDS["build"])
        output = attend(*arguments, **options)
        if self.calls < self.first:
            return output
        # MLX has no product of two quantized matrices on a CPU, and says so when it is due
        square = mx.ones((64, 64))
        return output + mx.qqmm(square, square)[0, 0]
