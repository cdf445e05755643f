"""Attention of one token in one layer: kvant's, and MLX's over unquantized keys and values."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from kvant.cache.pages import pages_for
from kvant.operators.kernels.launch import Backend
from kvant.operators.packing import stored_width
from kvant.operators.paged_attention import multi_head_cache_attention
from kvant.operators.paged_kernel import step_pages
from kvant.operators.paged_rows import PagedRows
from kvant.operators.quantization import quantized_dtype

GROUP = 32
Heads = tuple[int, int, int]  # query heads, kv heads, head_dim
Step = Callable[[mx.array], mx.array]  # a query (1, H, 1, D) to its attention


def kvant_step(heads: Heads, tokens: int, dtype: mx.Dtype, *, bits: int, backend: Backend | None) -> Step:
    """Make a step that quantizes a token into a cache of zeros and attends to it; no backend: unfused."""
    _, K, D = heads
    shape = (2, K, tokens)
    arrays = [mx.zeros((*shape, stored_width(D, bits)), quantized_dtype(bits) if bits else dtype)]
    arrays += [mx.zeros((*shape, D // GROUP), mx.float16)] if bits else []
    key = mx.ones((1, K, 1, D), dtype)
    pages = step_pages([range(pages_for(tokens))], [0], [tokens - 1], tokens, None)
    rows = PagedRows([(tokens - 1, tokens)], [[(0, tokens)]], [0], None, pages)
    form: dict[str, Any] = {"quant_bit": bits, "quant_group": GROUP, "backend": backend}
    mx.eval(arrays, key)
    return lambda query: multi_head_cache_attention(query, key, key, arrays, rows, **form)[0]


def mlx_step(heads: Heads, tokens: int, dtype: mx.Dtype) -> Step:
    """Make a step that writes a token into a cache of zeros and attends to it, as mlx-lm does."""
    _, K, D = heads
    keys, values = (mx.zeros((1, K, tokens, D), dtype) for _ in range(2))
    key = mx.ones((1, K, 1, D), dtype)
    mx.eval(keys, values, key)

    def step(query: mx.array) -> mx.array:
        keys[..., tokens - 1 :, :] = key
        values[..., tokens - 1 :, :] = key
        return mx.fast.scaled_dot_product_attention(query, keys, values, scale=D**-0.5)

    return step
