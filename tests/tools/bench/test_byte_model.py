"""The byte model against arrays' own sizes, the graph MLX traces, and the arrays that kernels are launched with."""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.base import scaled_dot_product_attention
from support.graph_traffic import graph_traffic

from kvant.cache import FullKVCache, QuantizedKVCache
from kvant.operators.bias_split import BiasSplit
from kvant.operators.cached_attention import append_and_attend, attend_fused
from kvant.operators.kernels import attend as kernels
from kvant.tools.bench import bytes as model
from kvant.tools.bench.bytes import AttentionStep, Traffic, total

SHAPES = [(14, 2, 64), (8, 8, 128), (32, 8, 96)]  # H, K, D
FORMATS = [(8, 32), (8, 8), (4, 16), (4, 32), (0, 32)]  # bits, group
DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def _new(H: int, K: int, D: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Query, key and value of one token, evaluated; no two are one array."""
    arrays = [mx.random.normal((1, heads, 1, D), key=mx.random.key(i)) for i, heads in enumerate((H, K, K))]
    query, key, value = (array.astype(dtype) for array in arrays)
    mx.eval(query, key, value)
    return query, key, value


def _split(K: int, D: int, pairs: int | None, rows: int) -> BiasSplit | None:
    if pairs is None:
        return None
    split = BiasSplit(mx.zeros((K, 2, pairs)), tuple(range(pairs)), mx.zeros((2, pairs, rows)), mx.zeros((K, D)))
    mx.eval(split.key_bias, split.rotation, split.value_bias)
    return split


def _same(counted: Traffic, computed: Traffic, names: Sequence[str] = ()) -> None:
    """All three; the amortized ones are fractions."""
    got = (counted.bytes_read, counted.bytes_written, counted.launches)
    expected = (computed.bytes_read, computed.bytes_written, computed.launches)
    assert got == pytest.approx(expected, rel=1e-12), names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize(("H", "K", "D"), SHAPES)
def test_a_row_has_the_bytes_of_the_caches(H: int, K: int, D: int, bits: int, group: int, dtype: mx.Dtype) -> None:
    rows = 256
    step = AttentionStep(heads=H, kv_heads=K, head_dim=D, rows=rows, max_rows=rows, bits=bits, group=group, dtype=dtype)
    own = QuantizedKVCache(rows, K, D, quant_bit=bits, quant_group=group, dtype=dtype)
    assert step.row_bytes * rows == own.nbytes
    if bits and group != 32:
        return
    theirs = mlx_lm_cache.QuantizedKVCache(group, bits) if bits else mlx_lm_cache.KVCache()
    theirs.update_and_fetch(*(mx.zeros((1, K, rows, D), dtype) for _ in "kv"))
    assert step.mlx_lm_row_bytes * rows == theirs.nbytes


@pytest.mark.parametrize("pairs", [None, 0, 1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_the_unfused_path_is_the_traced_graph(bits: int, group: int, dtype: mx.Dtype, pairs: int | None) -> None:
    H, K, D = SHAPES[(bits + group + (pairs or 0)) % len(SHAPES)]
    rows, room = 300, 520
    split = _split(K, D, pairs, room)
    cache = QuantizedKVCache(room, K, D, quant_bit=bits, quant_group=group, dtype=dtype, bias_split=split)

    def decode(query: mx.array, key: mx.array, value: mx.array, *arrays: mx.array) -> list[mx.array]:
        scale = arrays[1] if bits else None
        output = append_and_attend(
            query,
            key,
            value,
            rows - 1,
            arrays[0],
            scale,
            quant_bit=bits,
            quant_group=group,
            bias_split=split,
        )
        return [output, *arrays]

    counted, names = graph_traffic(decode, *_new(H, K, D, dtype), *cache.arrays)
    step = AttentionStep(
        heads=H, kv_heads=K, head_dim=D, rows=rows, max_rows=room, bits=bits, group=group, dtype=dtype, pairs=pairs
    )
    _same(counted, total(model.unfused(step)), names)


def test_the_concatenating_cache_is_the_traced_graph() -> None:
    H, K, D, rows = 14, 2, 64, 100
    query, key, value = _new(H, K, D, mx.float32)
    past = [mx.random.normal((1, K, rows - 1, D), key=mx.random.key(i)) for i in (5, 6)]

    def decode(query: mx.array, key: mx.array, value: mx.array, *past: mx.array) -> mx.array:
        cache = FullKVCache()
        cache.update_and_fetch(*past)
        return cache.attend(query, key, value)

    counted, names = graph_traffic(decode, query, key, value, *past)
    step = AttentionStep(heads=H, kv_heads=K, head_dim=D, rows=rows, max_rows=rows, dtype=mx.float32)
    _same(counted, total(model.concatenated(step)), names)


def _mlx_lm_step(step: AttentionStep, before: int) -> tuple[Traffic, list[str]]:
    """mlx-lm's cache with ``before`` rows: one token appended and attended to, traced."""
    bits, group = step.bits, step.group
    cache: Any = mlx_lm_cache.QuantizedKVCache(group, bits) if bits else mlx_lm_cache.KVCache()
    if before:
        cache.update_and_fetch(*(mx.ones((1, step.kv_heads, before, step.head_dim), step.dtype) * x for x in (1, 2)))
        mx.eval(cache.keys, cache.values)

    def decode(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
        rows = cache.update_and_fetch(key, value)
        return scaled_dot_product_attention(query, *rows, cache, scale=0.1, mask=None)

    return graph_traffic(decode, *_new(step.heads, step.kv_heads, step.head_dim, step.dtype))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(0, 64), (8, 64), (4, 32)])
def test_mlx_lm_is_the_traced_graph(bits: int, group: int, dtype: mx.Dtype) -> None:
    """A step that fits, one that begins the cache, and two that make it longer; growth is spread over 256 tokens."""
    H, K, D = 14, 2, 64
    path = model.mlx_lm_quantized if bits else model.mlx_rows
    for rows, grows in ((300, False), (1, True), (257, True), (513, True)):
        step = AttentionStep(
            heads=H, kv_heads=K, head_dim=D, rows=rows, max_rows=rows, bits=bits, group=group, dtype=dtype
        )
        stages = path(step)
        growth = stages.pop("grow")
        expected = total(stages) + growth * 256 if grows else total(stages)
        counted, names = _mlx_lm_step(step, rows - 1)
        _same(counted, expected, names)


class Launches:
    """Stands in for ``launch``: keeps what it is called with, and returns arrays of the asked shapes."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[list[mx.array], list[int]]] = {}

    def __call__(
        self,
        name: str,
        backend: str,
        inputs: list[mx.array],
        *,
        outputs: list[tuple[tuple[int, ...], mx.Dtype]],
        **_: Any,
    ) -> list[mx.array]:
        assert name not in self.calls
        self.calls[name] = (inputs, [math.prod(shape) * dtype.size for shape, dtype in outputs])
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels are not run."""
    stub = Launches()
    monkeypatch.setattr(kernels, "launch", stub)
    return stub


def _nbytes(arrays: Sequence[mx.array]) -> int:
    """Without one-element constants and placeholders."""
    return sum(array.nbytes for array in arrays if array.size > 1)


@pytest.mark.parametrize("pairs", [None, 0, 1, 5])
@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize(("rows", "room"), [(1, 1), (1, 4096), (64, 4096), (65, 4096), (1000, 4096), (4096, 4096)])
def test_the_fused_path_is_what_is_launched(
    rows: int, room: int, bits: int, group: int, pairs: int | None, launches: Launches
) -> None:
    """Of cache, scale and rotation the rows so far; of the partial sums those of splits that have rows."""
    H, K, D = SHAPES[rows % len(SHAPES)]
    dtype = DTYPES[1 + rows % 2]
    split = _split(K, D, pairs, room)
    cache = QuantizedKVCache(room, K, D, quant_bit=bits, quant_group=group, dtype=dtype, bias_split=split)
    query, key, value = _new(H, K, D, dtype)
    stages = model.fused(
        AttentionStep(
            heads=H, kv_heads=K, head_dim=D, rows=rows, max_rows=room, bits=bits, group=group, dtype=dtype, pairs=pairs
        )
    )
    attend_fused(
        query,
        cache.cache,
        cache.scale,
        mx.array(rows - 1),
        quant_bit=bits,
        quant_group=group,
        bias_split=split,
        backend="metal",
    )
    inputs, (partial, *statistics) = launches.calls["attend"]
    by_row = [array for array in inputs if array.ndim > 2 and room in array.shape[-2:] and array.size > 1]
    read = _nbytes([array for array in inputs if all(array is not other for other in by_row)])
    read += sum(array.nbytes for array in by_row) * rows // room
    splits = launches.calls["combine"][0][1].shape[-1]
    share = max(math.ceil(rows / splits), kernels.MIN_SPLIT_TOKENS)  # as attend.h shares them
    used = sum(1 for first in range(0, splits * share, share) if first < rows)
    assert stages["attend"] == Traffic(read, partial * used // splits + sum(statistics), 1)
    (_, sums, most, bias), (output,) = launches.calls["combine"]
    read = partial * used // splits + sum(statistics) + _nbytes([bias])
    assert stages["combine"] == Traffic(read, output, 1)
    assert sum(statistics) == sums.nbytes + most.nbytes
    if bits:
        levels, scales = kernels.quantize_tokens(
            key, value, quant_bit=bits, quant_group=group, scale_dtype=mx.float16, backend="metal"
        )
        written = levels.nbytes + scales.nbytes
        assert stages["quantize"] == Traffic(_nbytes([key, value]), written, 1)
        assert stages["write"] == Traffic(written, written, 2)
        assert len(launches.calls) + 2 == total(stages).launches == 5
    else:
        assert total(stages).launches == 4


def test_attention_in_kernels_is_two_launches() -> None:
    """Nothing else is dispatched with them but constants of one element."""
    cache = QuantizedKVCache(1024, 2, 64)
    query, key, value = _new(14, 2, 64, mx.bfloat16)

    def decode(query: mx.array, cache: mx.array, scale: mx.array, offset: mx.array) -> mx.array:
        return attend_fused(query, cache, scale, offset, quant_bit=8, quant_group=32, backend="metal")

    assert cache.scale is not None
    assert graph_traffic(decode, query, cache.cache, cache.scale, mx.array(7))[1] == ["CustomKernel"] * 2

    def quantize(key: mx.array, value: mx.array) -> tuple[mx.array, mx.array]:
        return kernels.quantize_tokens(key, value, quant_bit=8, quant_group=32, scale_dtype=mx.float16, backend="metal")

    assert graph_traffic(quantize, key, value)[1] == ["CustomKernel"]


def test_the_claim_in_numbers() -> None:
    """32/8/128 at 32,768 rows, by hand: a row is 4,096 B in bfloat16, 2,048 + 128 at 8 bits, 1,024 + 128 at 4."""
    rows = 32768
    steps = {
        bits: AttentionStep(heads=32, kv_heads=8, head_dim=128, rows=rows, max_rows=rows, bits=bits, on_gpu=True)
        for bits in (0, 8, 4)
    }
    plain = total(model.mlx_rows(steps[0]))
    assert model.mlx_rows(steps[0])["attend"] == Traffic(rows * 4096 + 8192, 8192, 1)
    for bits, row, share in ((8, 2176, 0.57), (4, 1152, 0.32)):
        stages = model.fused(steps[bits])
        assert stages["attend"].bytes_read == rows * row + 8192
        moved = total(stages)
        assert (moved.bytes_read + moved.bytes_written) / (plain.bytes_read + plain.bytes_written) < share
        # The unfused path reads those rows too, and writes floats that it reads again.
        unfused = total(model.unfused(steps[bits]))
        assert unfused.bytes_written > 2 * rows * 2048 * 4
        assert unfused.bytes_read + unfused.bytes_written > 10 * (moved.bytes_read + moved.bytes_written)


def test_traffic_adds_up() -> None:
    one, other = Traffic(1, 2, 3), Traffic(10, 20, 30)
    assert one + other == Traffic(11, 22, 33)
    assert one * 24 == Traffic(24, 48, 72)
    assert total({"a": one, "b": other}) == Traffic(11, 22, 33)
