"""A preallocated key/value cache of one layer, quantized in groups: PMX cache_layout 1 with one layer."""

import math
from typing import Any

import mlx.core as mx

from kvant.cache.layer_format import DTYPE_NAMES, LayerFormat
from kvant.cache.model import KVCache, ModelCache
from kvant.cache.options import DEFAULT_KV_GROUP_SIZE
from kvant.cache.pool import Pool, check_sizes, single_sizes
from kvant.operators.bias_split import BiasSplit
from kvant.operators.key_transform import KeyTransform
from kvant.operators.pmx.validation import check_tokens
from kvant.operators.quantization import FLOAT_DTYPES, SCALE_DTYPES, check_quantization


class QuantizedKVCache(KVCache):
    """The cache of a single layer, which commits tokens as they are appended.

    ``model.make_cache`` makes a model's caches. All memory is allocated and touched when the cache is made;
    it never grows. Keys and values are appended in place. Nothing else may reference its arrays or a slice of
    them, or MLX copies the whole buffer at the next append.
    """

    def __init__(
        self,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: int | None = None,
        kv_bits: int = 8,
        kv_group_size: int | None = None,
        dtype: mx.Dtype = mx.float16,
        scale_dtype: mx.Dtype = mx.float16,
        bias_split: BiasSplit | None = None,
        kernels: str | None = None,
        num_heads: int | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            max_seq_len: maximum number of tokens.
            num_kv_heads: K.
            head_dim: D.
            window: how many of the last tokens a query sees, including its own, and the cache stores; None:
                all.
            kv_bits: 8, 4, or 0 for no quantization.
            kv_group_size: elements of D that share one scale; None: the greatest common divisor of 32 and D.
            dtype: of queries, and of keys and values at 0 bits.
            scale_dtype: float16 or float32.
            bias_split: the biases that keys and values lack; its table is as long as the cache.
            kernels: "unfused" or "fused" forces how attention is computed. None: the environment variable
                KVANT_KERNELS decides, or else a GPU uses the fused kernel. The choice holds for the cache's
                life. A call of more than 8 new tokens, as in a prefill, is always unfused.
            num_heads: H; None: unknown, and the kernel is tried in more shapes.

        Raises:
            ValueError: a size is below 1, a group does not divide D, a bit or dtype is unsupported, or a
                kernel is forced for an unsupported format or without a GPU.
            RuntimeError: a forced kernel fails on this device when it is tried.
        """
        seen = 1 if window is None else window
        check_sizes(max_seq_len=max_seq_len, num_kv_heads=num_kv_heads, head_dim=head_dim, window=seen)
        if kv_group_size is None:
            kv_group_size = math.gcd(DEFAULT_KV_GROUP_SIZE, head_dim)
        check_quantization(kv_bits, kv_group_size, head_dim, names=("kv_bits", "kv_group_size"))
        if dtype not in FLOAT_DTYPES or scale_dtype not in SCALE_DTYPES:
            raise ValueError(
                f"dtype is {dtype}, scale_dtype {scale_dtype}; expected floats, the scale's not bfloat16"
            )
        layer_format = LayerFormat.of_rows(
            num_kv_heads,
            head_dim,
            head_dim,
            kv_bits,
            kv_group_size,
            DTYPE_NAMES[dtype],
            window=window,
            max_seq_len=max_seq_len,
            scale_dtype=DTYPE_NAMES[scale_dtype],
            split_pairs=None if bias_split is None else bias_split.pairs,
        )
        options: dict[str, Any] = {"kernels": kernels, "dtype": dtype, "num_heads": num_heads}

        def made(tokens: int) -> ModelCache:
            return ModelCache(
                Pool(
                    [layer_format],
                    [KeyTransform(bias_split=bias_split)],
                    **single_sizes(tokens),
                    **options,
                    make_cache=made,
                )
            )

        cache = made(max_seq_len)
        super().__init__(cache, cache.pool.groups[0], cache.pool.layers[0])

    def multi_head_cache_attention(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append keys and values, and attend to all rows; see :class:`kvant.cache.AttentionCache`.

        Raises:
            ContextError: there is no room for the tokens; nothing was written.
            ValueError: a shape does not fit the cache.
        """
        check_tokens(query, key, value, mask, self.offset)
        B, K, S, D = key.shape
        layer_format = self.layer.format
        if (1, layer_format.num_kv_heads, layer_format.head_dim) != (B, K, D):
            raise ValueError(
                f"the cache is for one sequence, {layer_format.num_kv_heads} kv heads and a head_dim of "
                f"{layer_format.head_dim}; got {B}, {K} and {D}"
            )
        self.batch.begin(mx.zeros((1, S), mx.int32))
        output = super().multi_head_cache_attention(query, key, value, mask, sinks)
        self.batch.commit(ids=[[0] * S])
        return output

    def reset(self) -> None:
        """Forget every token; the memory stays reserved."""
        self.cache.reset()

    def release(self) -> None:
        """Free the memory. The cache cannot be used afterwards."""
        self.cache.release()
