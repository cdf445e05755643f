"""A good call of each dynamic operator, to change one thing of.

Its sizes differ from one another, so that a size in a message can mean one thing only.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from kvant.operators import dynamic_batching
from support.operator_calls import normal

H, K, D, G, L, MAX_ROWS = 6, 2, 8, 4, 3, 29
SEQSTARTS, KVSTARTS, START_POS = [0, 1, 5, 7], [0, 10, 14, 21], [9, 0, 5]
N, T, PAGE_SIZE = 7, 21, 4
CACHESTARTS: tuple[Any, ...] = ([16, 12, 5], [[16, 3, 8], [12, -1, 99], [20, 24, -9]])  # of each cache_mode
OPERATORS: dict[str, Callable[..., Any]] = {
    "key_value_cache": dynamic_batching.key_value_cache,
    "multi_head_cache_attention": dynamic_batching.multi_head_cache_attention,
}


def cache_shape(layout: int, last: int) -> tuple[int, ...]:
    T = MAX_ROWS
    return ((T, L, 2, K, last), (L, T, 2, K, last), (L, 2, T, K, last), (L, 2, K, T, last))[layout]


def good_call(operator: str, quant_bit: int, mode: int, layout: int) -> dict[str, Any]:
    """Every argument by name. The cache is full of quantized values or NaN, so that a change shows."""
    given: dict[str, Any] = {
        "current_key": normal(N, K, D),
        "current_value": normal(N, K, D),
        "seqstarts": SEQSTARTS,
        "kvstarts": KVSTARTS,
        "cachestarts": CACHESTARTS[mode],
        "start_pos": START_POS,
        "max_seqlen": 4,
        "max_kvlen": 10,
        "cache": {
            0: mx.full(cache_shape(layout, D), mx.nan),
            8: mx.full(cache_shape(layout, D), -128, mx.int8),
            4: mx.full(cache_shape(layout, D // 2), 0x88, mx.uint8),
        }[quant_bit],
        "scale": mx.full(cache_shape(layout, D // G), mx.nan) if quant_bit else None,
        "num_layer": L,
        "layer_idx": 1,
        "quant_bit": quant_bit,
        "quant_group": G,
        "cache_mode": mode,
        "cache_layout": layout,
        "page_size": PAGE_SIZE,
    }
    if operator == "multi_head_cache_attention":
        given |= {"query": normal(N, H, D), "attn_mask": None, "decoding_batches": 1}
        given |= {"num_heads": H, "num_kv_heads": K, "head_dim": D}
    return given
