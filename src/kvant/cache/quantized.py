"""A preallocated key/value cache of one layer, quantized in groups: PMX cache_layout 1 with one layer."""

from copy import copy
from typing import Self

import mlx.core as mx

from kvant.cache.layer import KVCache, copied
from kvant.cache.layer_format import DTYPE_NAMES, LayerFormat
from kvant.operators.bias_split import BiasSplit
from kvant.operators.cached_attention import append_and_attend, float_tokens, write_tokens
from kvant.operators.dispatch import resolve
from kvant.operators.kernels.attend import unsupported_reason
from kvant.operators.kernels.launch import Backend
from kvant.operators.probe import KernelUse
from kvant.operators.quantization import FLOAT_DTYPES, SCALE_DTYPES, check_quantization, quantized_dtype
from kvant.operators.validation import check_tokens
from kvant.threads import check_process


class QuantizedKVCache(KVCache):
    """All memory is allocated, and touched, when the cache is made; it never grows.

    Keys and values are appended in place. Nothing else may hold ``cache`` or ``scale``, or a slice of them: MLX would
    copy the whole buffer at the next append.

    Attributes:
        head_dim, value_head_dim, kv_bits, kv_group_size, bias_split, kernels: as given.
        arrays: values (1, 1, sides, K, rows, D'), and if they are quantized their scales.
        backend: runs the fused kernel for the calls it supports; None: every call is unfused.
    """

    def __init__(
        self,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_head_dim: int | None = None,
        kv_bits: int = 8,
        kv_group_size: int = 32,
        dtype: mx.Dtype = mx.float16,
        scale_dtype: mx.Dtype = mx.float16,
        bias_split: BiasSplit | None = None,
        kernels: str | None = None,
        num_heads: int | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            max_seq_len: tokens it can hold.
            num_kv_heads: K; 0: another process has the keys and values, and nothing is allocated.
            head_dim: D.
            value_head_dim: the width of values, where it is not that of keys. Both lie side by side then. 0: there are
                no values, and every call is unfused.
            kv_bits: 8, 4, or 0 for no quantization.
            kv_group_size: elements of D that share one scale; it divides the width of values too.
            dtype: of queries, and of keys and values at 0 bits.
            scale_dtype: float16 or float32.
            bias_split: the biases that keys and values come without; its table is as long as the cache.
            kernels: "unfused" or "fused" forces how attention is computed. None: the environment variable
                KVANT_KERNELS decides; without it, a GPU uses the fused kernel. The choice holds for the cache's life.
                A call of more than 8 new tokens, as in a prefill, is always unfused.
            num_heads: H; None: not known. The kernel is tried now as it will be used, and then in more shapes.

        Raises:
            ValueError: a size below 1, a group that does not divide D, an unsupported bit or dtype; a kernel forced for
                a format that it does not support, or where there is no GPU.
            RuntimeError: a forced kernel that fails on this device when it is tried.
        """
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        heads = 1 if num_kv_heads == 0 else num_kv_heads
        sizes = {"max_seq_len": max_seq_len, "num_kv_heads": heads, "head_dim": head_dim}
        for name, number in (sizes | {"value_head_dim": value_head_dim or 1}).items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} is {number!r}; expected a positive int")
        for width in (head_dim, value_head_dim or head_dim):
            check_quantization(kv_bits, kv_group_size, width, names=("kv_bits", "kv_group_size"))
        if dtype not in FLOAT_DTYPES or scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"dtype is {dtype}, scale_dtype {scale_dtype}; expected floats, the scale's not bfloat16")
        check_process()
        self._max_seq_len = max_seq_len
        super().__init__()
        self.head_dim = head_dim
        self.value_head_dim = value_head_dim
        self.kv_bits = kv_bits
        self.kv_group_size = kv_group_size
        self.bias_split = bias_split
        self.kernels = kernels
        queries, pairs = num_heads and num_heads // num_kv_heads, None if bias_split is None else len(bias_split.pairs)
        use = KernelUse(head_dim, value_head_dim, dtype, kv_bits, kv_group_size, scale_dtype, queries, pairs)
        self.backend = resolve(kernels, self._unsupported_reason((1, 1, 1, head_dim)), [self._as_used(use)])
        sides, width = (2, head_dim) if head_dim == value_head_dim else (1, head_dim + value_head_dim)
        shape = (1, 1, sides, num_kv_heads, self.num_rows)
        # A list, not two attributes: mx.compile captures a container, and puts new arrays into it.
        self.arrays = [
            mx.zeros((*shape, width // 2 if kv_bits == 4 else width), quantized_dtype(kv_bits) if kv_bits else dtype)
        ]
        if kv_bits:
            self.arrays.append(mx.zeros((*shape, width // kv_group_size), scale_dtype))
        tables = [] if bias_split is None else [bias_split.key_bias, bias_split.rotation, bias_split.value_bias]
        mx.eval(self.arrays, tables)  # reserved now, not at the first token

    @property
    def cache(self) -> mx.array:
        """Quantized values, or keys and values as they are at 0 bits: (1, 1, 2, K, num_rows, D')."""
        return self.arrays[0]

    @property
    def scale(self) -> mx.array | None:
        """Scales: (1, 1, 2, K, num_rows, D/G); None at 0 bits."""
        return self.arrays[1] if self.kv_bits else None

    def backend_for(self, query: mx.array) -> Backend | None:
        """Runs the fused kernel for a (B, H, S, D) query; None: the call is unfused."""
        supported = self.backend is not None and self._unsupported_reason(query.shape) is None
        return self.backend if supported else None

    @property
    def max_seq_len(self) -> int:
        """The reservation: tokens it can have."""
        return self._max_seq_len

    @property
    def num_rows(self) -> int:
        """Rows of its arrays."""
        return self._max_seq_len

    @property
    def buffers(self) -> list[mx.array]:
        """Its arrays."""
        return self.arrays

    def attend(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append keys and values and attend to every row so far; see :class:`kvant.cache.KVCache`.

        Raises, of a layer alone (:meth:`ModelCache.begin` checks a step):
            ContextError: more tokens than there is room for; nothing was written.
            ValueError: shapes that do not fit the cache.
        """
        offset = self.offset
        S = key.shape[2]
        if not self.sequence.shared:
            check_tokens(query, key, value, mask, offset)
            self._check_new(key)
        output = append_and_attend(
            query,
            key,
            value,
            offset,
            self.cache,
            self.scale,
            mask=mask,
            quant_bit=self.kv_bits,
            quant_group=self.kv_group_size,
            bias_split=self.bias_split,
            sinks=sinks,
            backend=self.backend_for(query),
        )
        if not self.sequence.shared:
            self.sequence.commit(S)
        return output

    def append(self, key: mx.array, value: mx.array) -> list[mx.array]:
        """Write S tokens behind those that count, without counting them: key (1, K, S, D), value (1, K, S, Dv).

        Returns:
            what new queries may see, as it is stored; :meth:`read` makes keys and values of it. It has to be used, or
            forgotten, before the next append: MLX would copy the whole buffer.

        Raises:
            ContextError: more tokens than there is room for; nothing was written.
            ValueError: shapes that do not fit the cache.
        """
        S = key.shape[2]
        if not self.sequence.shared:
            self._check_new(key)
        write_tokens(
            key,
            value,
            self.offset,
            self.cache,
            self.scale,
            quant_bit=self.kv_bits,
            quant_group=self.kv_group_size,
            backend=self.backend_for(key),
        )
        return [array[0, :, :, :, : self.offset + S] for array in self.arrays]

    def _check_new(self, key: mx.array) -> None:
        """Raise unless keys (1, K, S, D) fit the cache, and there is room for them."""
        B, K, S, D = key.shape
        self.check_shape(B, K, D)
        self.reserve(S)

    def read(self, stored: list[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Keys (1, K, T, D) and values (1, K, T, Dv) of what :meth:`append` returned, not evaluated."""
        return float_tokens(stored, quant_bit=self.kv_bits, dtype=dtype, key_dim=self.head_dim)

    def reserve(self, num_tokens: int) -> None:
        """Raise a ContextError unless there is room for ``num_tokens`` more tokens."""
        if not self.arrays:
            raise RuntimeError("the cache was released; expected one that was not")
        self._check_room(num_tokens)

    def check_shape(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise a ValueError unless the cache was made for this batch, these kv heads and this head dimension."""
        own = (1, self.cache.shape[3], self.head_dim)
        if own != (batch, num_kv_heads, head_dim):
            raise ValueError(
                f"the cache is for one sequence, {own[1]} kv heads and a head_dim of {own[2]}; "
                f"given {batch}, {num_kv_heads} and {head_dim}"
            )

    def release(self) -> None:
        """Give the memory back. The cache cannot be used after it."""
        self.sequence.reset()
        self.arrays.clear()

    @property
    def format(self) -> LayerFormat:
        """How it stores tokens."""
        return LayerFormat(
            kind="quantized",
            num_kv_heads=self.arrays[0].shape[3],
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            kv_bits=self.kv_bits,
            kv_group_size=self.kv_group_size if self.kv_bits else 0,
            dtype=DTYPE_NAMES[self.arrays[0].dtype],
            scale_dtype=DTYPE_NAMES[self.arrays[1].dtype] if self.kv_bits else "",
            split_pairs=None if self.bias_split is None else self.bias_split.pairs,
        )

    def stored(self) -> list[mx.array]:
        return [array[0, 0, :, :, : self.sequence.length] for array in self.arrays]

    def restore(self, tokens: list[mx.array], first: int, length: int) -> None:
        if first:
            raise ValueError(f"tokens before {first} are forgotten; a cache without a window needs all of them")
        for array, new in zip(self.arrays, tokens, strict=True):
            array[0, 0, :, :, : new.shape[2]] = new

    def fork(self) -> Self:
        made = copy(self)
        rows = min(self.num_rows, self.sequence.written)
        made.arrays = [copied(array, rows) for array in self.arrays]
        return made

    def _as_used(self, use: KernelUse) -> KernelUse:
        """How this kind of cache uses the kernel."""
        return use

    def _unsupported_reason(self, query_shape: tuple[int, ...]) -> str | None:
        if not self.value_head_dim:
            return "a cache without values"
        return unsupported_reason(
            query_shape, quant_bit=self.kv_bits, quant_group=self.kv_group_size, value_dim=self.value_head_dim
        )
