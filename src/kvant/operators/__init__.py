"""Operators on MLX arrays. They do not depend on models, files or users.

Legend of the package: B batch, S new tokens, T cached tokens read, H query heads, K kv heads, D head_dim,
G quant_group, D' the last dimension as stored (D, or D/2 bytes at 4 bits), MaxB and MaxS the allocated B and
T.

OpenPPL PMX's operators, with its signatures, are in :mod:`kvant.operators.pmx`, imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvant.operators.pmx import (
        dequantize,
        dynamic_batching,
        key_value_cache,
        multi_head_cache_attention,
        quantize,
    )

__all__ = ["dequantize", "dynamic_batching", "key_value_cache", "multi_head_cache_attention", "quantize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvant.operators import pmx

    return getattr(pmx, name)
