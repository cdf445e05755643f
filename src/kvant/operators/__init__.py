"""The OpenPPL PMX operators on MLX arrays. They know no model, no file and no user.

Legend of the package: B batch, S new tokens, T cached tokens read, H query heads, K kv heads, D head_dim,
G quant_group, D' the last dimension as stored (D, or D/2 bytes at 4 bits), MaxB and MaxS the allocated B and
T.
"""

from kvant.operators import dynamic_batching
from kvant.operators.quantization import dequantize, quantize
from kvant.operators.static_batching import key_value_cache, multi_head_cache_attention

__all__ = ["dequantize", "dynamic_batching", "key_value_cache", "multi_head_cache_attention", "quantize"]
