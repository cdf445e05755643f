"""The fused kernel on pages in MLX's operations, for tests of what is around it: fast, and lazy as a launch is.

It computes each sequence alone, in float32, from no other rows than the sequence's own.
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import pytest

from kvant.operators import cached_attention, dispatch, fused_attention
from kvant.operators.quantization import quantize

PAGE = 128


def attend(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    *,
    quant_bit: int,
    quant_group: int,
    value_dim: int | None = None,
    is_causal: bool = True,
    slopes: tuple[float, ...] = (),
    score_scale: float | None = None,
    softcap: float = 0.0,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    keep: int = 0,
    pages: mx.array | None = None,
    first: mx.array | None = None,
    rows: int | None = None,
    key_bias: mx.array | None = None,
    pairs: tuple[int, ...] = (),
    rotation: mx.array | None = None,
    value_bias: mx.array | None = None,
    backend: str,
) -> mx.array:
    """As ``kvant.operators.kernels.attend.attend``, of pages."""
    assert backend == "metal"
    assert (is_causal, slopes, softcap, mask, keep) == (True, (), 0.0, None, 0)
    assert pages is not None
    assert first is not None
    assert pages.dtype == first.dtype == offset.dtype == mx.int32
    B, _, S, D = query.shape
    assert S <= 8
    assert offset.shape == first.shape == pages.shape[:1] == (B,)
    assert cache.shape[0] == (2 if value_dim is None else 1)
    starts, lengths, tables = first.tolist(), offset.tolist(), pages.tolist()
    counts = [length + S - start for length, start in zip(lengths, starts, strict=True)]
    assert rows == max(counts)
    outputs = []
    for b, (start, count, table) in enumerate(zip(starts, counts, tables, strict=True)):
        numbers = [table[row // PAGE] * PAGE + row % PAGE for row in range(count)]
        index = mx.array(numbers)
        both = cache[:, :, index]
        if quant_bit:
            assert scale is not None
            levels = both.astype(mx.float32) if quant_bit == 8 else _nibbles(both)
            both = levels * mx.repeat(scale[:, :, index].astype(mx.float32), quant_group, axis=-1)
        both = both.astype(mx.float32)
        keys, values = (both[0], both[1]) if value_dim is None else (both[0, ..., :D], both[0, ..., D:])
        position = mx.arange(start, start + count)
        if key_bias is not None and pairs:
            assert rotation is not None
            keys = keys + _turned(key_bias, pairs, rotation[..., start : start + count], D)
        place = mx.arange(lengths[b], lengths[b] + S)[:, None]
        seen = (position <= place) & (position > place - (window or start + count))
        outputs.append(_attend_one(query[b], keys, values, seen, score_scale, sinks, value_bias))
    return mx.stack(outputs).astype(query.dtype)


def _attend_one(
    query: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: mx.array,
    score_scale: float | None,
    sinks: mx.array | None,
    value_bias: mx.array | None,
) -> mx.array:
    """Of one sequence: (H, S, D) to (K, T, D), where (S, T) is True."""
    H, S, D = query.shape
    K = keys.shape[0]
    alive = seen.any(axis=0)[:, None]  # a row that nobody sees may hold anything
    keys, values = mx.where(alive, keys, 0.0), mx.where(alive, values, 0.0)
    if value_bias is not None:
        values = values + value_bias[:, None]
    scores = query.astype(mx.float32).reshape(K, H // K, S, D) @ keys[:, None].swapaxes(-1, -2)
    scores = mx.where(seen, scores * (1 / math.sqrt(D) if score_scale is None else score_scale), -mx.inf)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(mx.float32).reshape(K, H // K, 1, 1), (K, H // K, S, 1))
        scores = mx.concatenate([scores, sink], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : seen.shape[1]]
    return (weights @ values[:, None]).reshape(H, S, -1)


def _nibbles(packed: mx.array) -> mx.array:
    """Bytes (..., D/2) -> levels (..., D) in two's complement, the low nibble first."""
    both = mx.stack([packed & 15, packed >> 4], axis=-1).flatten(-2).astype(mx.int32)
    return mx.where(both > 7, both - 16, both).astype(mx.float32)


def _turned(bias: mx.array, pairs: Sequence[int], rotation: mx.array, D: int) -> mx.array:
    """The bias (K, 2, P) turned by each position's angle: (K, T, D)."""
    b1, b2 = bias[:, 0, None], bias[:, 1, None]  # (K, 1, P)
    cosine, sine = rotation.swapaxes(-1, -2)  # (T, P) each
    whole = mx.zeros((bias.shape[0], rotation.shape[-1], D))
    whole[..., mx.array(pairs)] = b1 * cosine - b2 * sine
    whole[..., mx.array(pairs) + D // 2] = b1 * sine + b2 * cosine
    return whole


def _quantize_tokens(
    key: mx.array, value: mx.array, *, quant_bit: int, quant_group: int, scale_dtype: mx.Dtype, backend: str
) -> list[mx.array]:
    assert backend == "metal"
    same = key.shape == value.shape
    both = mx.stack([key, value], axis=1) if same else mx.concatenate([key, value], axis=-1)[:, None]
    levels, scales = quantize(both, quant_bit=quant_bit, quant_group=quant_group, scale_dtype=scale_dtype)
    return [mx.view(levels, mx.uint32)[None], scales[None]]


@pytest.fixture
def double_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A GPU whose kernel is the double. Returns the shapes of the queries that it was given."""
    given: list[tuple[int, ...]] = []

    def counted(query: mx.array, *arguments: mx.array, **options: object) -> mx.array:
        given.append(query.shape)
        return attend(query, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dispatch, "self_check_failure", lambda backend: None)
    monkeypatch.setattr(fused_attention, "attend", counted)
    monkeypatch.setattr(cached_attention, "quantize_tokens", _quantize_tokens)
    return given
