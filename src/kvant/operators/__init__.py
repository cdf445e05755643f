"""The OpenPPL PMX operators on MLX arrays: arrays in, arrays out; they know no model, no file and no user.

Legend of the package: B batch, S new tokens, T cached tokens read, H query heads, K kv heads, D head_dim,
G quant_group.
"""

from kvant.operators.key_value_cache import key_value_cache
from kvant.operators.multi_head_cache_attention import multi_head_cache_attention
from kvant.operators.quantization import dequantize, quantize

__all__ = ["dequantize", "key_value_cache", "multi_head_cache_attention", "quantize"]
