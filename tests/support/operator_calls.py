"""A good call of each operator, to change one thing of.

Its sizes differ from one another, so that a size in a message can mean one thing only.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import mlx.core as mx
import numpy as np

from kvant.operators import key_value_cache, multi_head_cache_attention
from support.operator_cases import to_numpy

B, S, START, H, K, D, G = 2, 3, 4, 6, 2, 8, 4
MAX_B, MAX_S, L = 5, 11, 3
BOTH = ("key_value_cache", "multi_head_cache_attention")
CACHE_ONLY, ATTENTION_ONLY = BOTH[:1], BOTH[1:]
ANY_BIT, QUANTIZED = (0, 8, 4), (8, 4)


def cache_shape(layout: int, last: int) -> tuple[int, ...]:
    return (MAX_B, L, 2, MAX_S, K, last) if layout == 0 else (L, MAX_B, 2, K, MAX_S, last)


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(1))


def good_call(operator: str, quant_bit: int, layout: int) -> dict[str, Any]:
    """Every argument by name. The cache is full of quantized values or NaN, so that a change shows."""
    given: dict[str, Any] = {
        "current_key": normal(B, S, K, D),
        "current_value": normal(B, S, K, D),
        "start_pos": START,
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
        "cache_layout": layout,
    }
    if operator == "multi_head_cache_attention":
        given |= {"query": normal(B, S, H, D), "attn_mask": None}
        given |= {"num_heads": H, "num_kv_heads": K, "head_dim": D, "is_causal": True}
    return given


OPERATORS: dict[str, Callable[..., Any]] = {
    "key_value_cache": key_value_cache,
    "multi_head_cache_attention": multi_head_cache_attention,
}


def bits_of(given: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    return [to_numpy(x).copy() for x in (given["cache"], given["scale"]) if isinstance(x, mx.array)]


# Any argument with a value of each kind: refused in our own words, or it works.
VALUES: dict[str, Any] = {
    "an array": mx.array(1),
    "an array of two": mx.array([0, 1]),
    "an array of a bool": mx.array(True),
    "a NumPy array": np.array(1),
    "a NumPy array of two": np.array([0, 1]),
    "a NumPy int": np.int64(1),
    "a NumPy bool": np.True_,
    "a float": 1.0,
    "half": 0.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "a decimal": Decimal(1),
    "True": True,
    "False": False,
    "minus one": -1,
    "minus 2**63": -(2**63),
    "2**31 - 1": 2**31 - 1,
    "2**31": 2**31,
    "2**32": 2**32,
    "2**63": 2**63,
    "2**64": 2**64,
    "10**100": 10**100,
    "None": None,
    "nothing": "",
    "a string": "1",
    "bytes": b"1",
    "a list": [1],
    "a tuple": (),
    "a dict": {},
    "an object": object(),
    "a type": int,
}
OWN_WORDS = ("expected", "needs", "takes", "the cache has", "do not fit", "does not divide", "not a multiple")
