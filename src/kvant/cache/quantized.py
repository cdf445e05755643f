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
    """One layer alone: it counts appended tokens at once. A model's caches are made by ``model.make_cache``.

    All memory is allocated, and touched, when the cache is made; it never grows. Keys and values are appended
    in place. Nothing else may hold its arrays, or a slice of them: MLX would copy the whole buffer at the
    next append.
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
            max_seq_len: tokens it can hold.
            num_kv_heads: K.
            head_dim: D.
            window: the last tokens that a query sees, its own included; None: all. The others are forgotten.
            kv_bits: 8, 4, or 0 for no quantization.
            kv_group_size: elements of D that share one scale; None: the greatest common divisor of 32 and D.
            dtype: of queries, and of keys and values at 0 bits.
            scale_dtype: float16 or float32.
            bias_split: the biases that keys and values come without; its table is as long as the cache.
            kernels: "unfused" or "fused" forces how attention is computed. None: the environment variable
                KVANT_KERNELS decides; without it, a GPU uses the fused kernel. The choice holds for the
                cache's life. A call of more than 8 new tokens, as in a prefill, is always unfused.
            num_heads: H; None: not known. The kernel is tried now as it will be used, and then in more
                shapes.

        Raises:
            ValueError: a size below 1, a group that does not divide D, an unsupported bit or dtype; a kernel
                forced for a format that it does not support, or where there is no GPU.
            RuntimeError: a forced kernel that fails on this device when it is tried.
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
        own = LayerFormat.of_rows(
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
                    [own],
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
        """Append keys and values and attend to every row so far; see :class:`kvant.cache.AttentionCache`.

        Raises:
            ContextError: more tokens than there is room for; nothing was written.
            ValueError: shapes that do not fit the cache.
        """
        check_tokens(query, key, value, mask, self.offset)
        B, K, S, D = key.shape
        own = self.layer.format
        if (1, own.num_kv_heads, own.head_dim) != (B, K, D):
            raise ValueError(
                f"the cache is for one sequence, {own.num_kv_heads} kv heads and a head_dim of "
                f"{own.head_dim}; "
                f"given {B}, {K} and {D}"
            )
        self.batch.begin(mx.zeros((1, S), mx.int32))
        output = super().multi_head_cache_attention(query, key, value, mask, sinks)
        self.batch.commit(ids=[[0] * S])
        return output

    def reset(self) -> None:
        """Forget every token; the memory stays reserved."""
        self.cache.reset()

    def release(self) -> None:
        """Give the memory back. The cache cannot be used after it."""
        self.cache.release()
