"""How many operations the fused path queues for a token, counted in the graph MLX traces."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from kvant.cache import QuantizedKVCache
from kvant.operators.kernels import attend as kernels

# They hand on the same bytes under another shape.
VIEWS = {"Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims", "Transpose", "Slice", "View", "Broadcast", "Split"}


def _operations(function: Callable[..., Any], *arrays: mx.array) -> list[str]:
    """Names of the operations traced, without views and constants of one element."""
    records: list[dict[str, Any]] = []
    mx.export_function(records.append, function, *arrays)
    traced = [record for record in records if record["type"] == "primitive" and record["name"] not in VIEWS]
    return [record["name"] for record in traced if any(math.prod(shape) > 1 for _, shape, _ in record["outputs"])]


def _new(heads: int) -> mx.array:
    return mx.random.normal((1, heads, 1, 64), key=mx.random.key(heads)).astype(mx.bfloat16)


def test_attention_in_kernels_is_two_launches_and_quantizing_one() -> None:
    cache = QuantizedKVCache(1024, 2, 64)

    def decode(query: mx.array, cache: mx.array, scale: mx.array, offset: mx.array) -> mx.array:
        return kernels.attend(query, cache, scale, offset, quant_bit=8, quant_group=32, backend="metal")

    assert cache.scale is not None
    assert _operations(decode, _new(14), cache.cache, cache.scale, mx.array(7)) == ["CustomKernel"] * 2

    def quantize(key: mx.array, value: mx.array) -> tuple[mx.array, mx.array]:
        return kernels.quantize_tokens(key, value, quant_bit=8, quant_group=32, scale_dtype=mx.float16, backend="metal")

    assert _operations(quantize, _new(2), 2 * _new(2)) == ["CustomKernel"]
