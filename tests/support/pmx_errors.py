"""A good call of each of PMX's operators, to change one thing of.

Its sizes differ from one another, so that a size in a message can mean one thing only.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import mlx.core as mx
import numpy as np

from kvant import operators
from kvant.operators import dynamic_batching

B, S, START, H, K, D, G, L = 2, 3, 4, 6, 2, 8, 4, 3
MAX_B, MAX_S, MAX_ROWS = 5, 11, 29
SEQSTARTS, KVSTARTS, START_POS = [0, 1, 5, 7], [0, 10, 14, 21], [9, 0, 5]
N, T, PAGE_SIZE = 7, 21, 4
CACHESTARTS: tuple[Any, ...] = ([16, 12, 5], [[16, 3, 8], [12, -1, 99], [20, 24, -9]])  # of each cache_mode
CACHE, ATTENTION = BOTH = ("key_value_cache", "multi_head_cache_attention")


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(1))


def good_call(
    operator: str, packed: bool, quant_bit: int, layout: int, mode: int = 0
) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Every argument by name, and the operator. The cache is full of values that no call writes: a change shows."""
    tokens = (N,) if packed else (B, S)
    outer = (
        (MAX_ROWS, L, 2, K), (L, MAX_ROWS, 2, K), (L, 2, MAX_ROWS, K), (L, 2, K, MAX_ROWS)
    )[layout] if packed else ((MAX_B, L, 2, MAX_S, K), (L, MAX_B, 2, K, MAX_S))[layout]  # fmt: skip
    fill = {0: (D, mx.nan, mx.float32), 8: (D, -128, mx.int8), 4: (D // 2, 0x88, mx.uint8)}[quant_bit]
    given: dict[str, Any] = {
        "current_key": normal(*tokens, K, D),
        "current_value": normal(*tokens, K, D),
        "cache": mx.full((*outer, fill[0]), fill[1], fill[2]),
        "scale": mx.full((*outer, D // G), mx.nan) if quant_bit else None,
    }
    given |= {"num_layer": L, "layer_idx": 1, "quant_bit": quant_bit, "quant_group": G, "cache_layout": layout}
    given |= {"start_pos": START_POS if packed else START}
    if packed:
        given |= {"seqstarts": SEQSTARTS, "kvstarts": KVSTARTS, "cachestarts": CACHESTARTS[mode]}
        given |= {"max_seqlen": 4, "max_kvlen": 10, "cache_mode": mode, "page_size": PAGE_SIZE}
    if operator == ATTENTION:
        given |= {"query": normal(*tokens, H, D), "attn_mask": None, "is_causal": True}
        given |= {"num_heads": H, "num_kv_heads": K, "head_dim": D} | ({"decoding_batches": 1} if packed else {})
    return given, getattr(dynamic_batching if packed else operators, operator)


# Any argument with a value of each kind: refused in our own words, or it works.
VALUES: list[Any] = [
    *(mx.array(1), mx.array([0, 1]), mx.array(True), np.array(1), np.array([0, 1]), np.int64(1), np.True_),
    *(1.0, 0.5, math.nan, math.inf, Decimal(1), True, False, -1, -(2**63), 2**31 - 1, 2**31, 2**32, 2**63, 2**64),
    *(10**100, None, "", "1", b"1", [1], (), {}, object(), int),
]
