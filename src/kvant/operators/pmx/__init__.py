"""OpenPPL PMX's operators with their exact signatures, and test vectors for them.

The engine does not use these modules: its caches reach the same arithmetic through
:mod:`kvant.operators.paged_attention`.
"""

from kvant.operators.pmx import dynamic_batching
from kvant.operators.pmx.static_batching import key_value_cache, multi_head_cache_attention
from kvant.operators.quantization import dequantize, quantize

__all__ = ["dequantize", "dynamic_batching", "key_value_cache", "multi_head_cache_attention", "quantize"]
