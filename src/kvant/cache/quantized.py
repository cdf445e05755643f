"""A preallocated key/value cache of one layer, quantized in groups: PMX cache_layout 1 with one layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.errors import ContextError
from kvant.operators.bias_split import BiasSplit
from kvant.operators.cached_attention import append_and_attend, append_and_attend_static
from kvant.operators.dispatch import resolve
from kvant.operators.kernels.attend import unsupported_reason
from kvant.operators.kernels.launch import Backend
from kvant.operators.quantization import FLOAT_DTYPES, SCALE_DTYPES, check_quantization, quantized_dtype
from kvant.operators.validation import check_tokens
from kvant.threads import Turn, check_process


class QuantizedKVCache:
    """All memory is allocated, and touched, when the cache is made; it never grows.

    Rows are appended in place. That needs the arrays to themselves: whoever holds ``cache`` or ``scale``, or a slice
    of them, makes MLX copy the whole buffer at the next append.

    Attributes:
        quant_bit, quant_group, bias_split: as given.
        turn: held while a thread computes through the cache.
        backend: what runs the fused kernel for calls that it takes; None: all are unfused.
    """

    def __init__(
        self,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        batch: int = 1,
        quant_bit: int = 8,
        quant_group: int = 32,
        dtype: mx.Dtype = mx.float16,
        scale_dtype: mx.Dtype = mx.float16,
        bias_split: BiasSplit | None = None,
        kernels: str | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            max_seq_len: tokens it can hold.
            num_kv_heads: K.
            head_dim: D.
            batch: B, sequences side by side, each with a length of its own.
            quant_bit: 8, 4, or 0 for no quantization.
            quant_group: elements of D that share one scale.
            dtype: dtype of the rows at 0 bits; without meaning otherwise.
            scale_dtype: float16 or float32.
            bias_split: what keys and values will lack of their biases, its table as long as the cache.
            kernels: "unfused" or "fused" forces how attention is computed; None: the environment variable
                KVANT_KERNELS does, or else it is the fused kernel on a GPU. Decided now, for the cache's life. Calls of
                more new tokens than the kernel takes (8), as in a prefill, are unfused whatever this says.

        Raises:
            ValueError: a size below 1, a group that does not divide D, an unsupported bit or dtype; a kernel forced for
                a format that it does not take, or where there is no GPU.
            RuntimeError: a forced kernel that failed its self-check on this device.
        """
        for name, number in (
            ("max_seq_len", max_seq_len),
            ("num_kv_heads", num_kv_heads),
            ("head_dim", head_dim),
            ("batch", batch),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} is {number!r}; expected a positive int")
        check_quantization(quant_bit, quant_group, head_dim)
        if dtype not in FLOAT_DTYPES or scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"dtype is {dtype}, scale_dtype {scale_dtype}; expected floats, the scale's not bfloat16")
        check_process()
        self.turn = Turn()
        self.quant_bit = quant_bit
        self.quant_group = quant_group
        self.bias_split = bias_split
        self.backend = resolve(kernels, self._unsupported_reason((batch, num_kv_heads, 1, head_dim)))
        self._max_seq_len = max_seq_len
        self._lengths = (0,) * batch
        shape = (1, batch, 2, num_kv_heads, max_seq_len)
        stored = head_dim // 2 if quant_bit == 4 else head_dim
        # A list, not two attributes: mx.compile captures a container, and puts new arrays into it.
        self.arrays = [mx.zeros((*shape, stored), quantized_dtype(quant_bit) if quant_bit else dtype)]
        if quant_bit:
            self.arrays.append(mx.zeros((*shape, head_dim // quant_group), scale_dtype))
        tables = [] if bias_split is None else [bias_split.key_bias, bias_split.rotation, bias_split.value_bias]
        mx.eval(self.arrays, tables)  # reserved now, not at the first token

    @property
    def cache(self) -> mx.array:
        """Levels, or rows at 0 bits: (1, B, 2, K, max_seq_len, D')."""
        return self.arrays[0]

    @property
    def scale(self) -> mx.array | None:
        """Scales: (1, B, 2, K, max_seq_len, D/G); None at 0 bits."""
        return self.arrays[1] if self.quant_bit else None

    def backend_for(self, query: mx.array) -> Backend | None:
        """What runs the fused kernel for a (B, H, S, D) query; None: it is unfused."""
        takes = self.backend is not None and self._unsupported_reason(query.shape) is None
        return self.backend if takes else None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence; the position of its next one."""
        return self._lengths

    @property
    def offset(self) -> int:
        """Tokens of the longest sequence."""
        return max(self._lengths)

    @property
    def max_seq_len(self) -> int:
        """Tokens the cache can hold."""
        return self._max_seq_len

    @property
    def nbytes(self) -> int:
        """Bytes of levels, scales and bias tables; the same before the first token and after the last."""
        return sum(part.nbytes for part in (self.cache, self.scale, self.bias_split) if part is not None)

    def attend(self, query: mx.array, key: mx.array, value: mx.array, mask: mx.array | None = None) -> mx.array:
        """Append keys and values and attend to every row so far; see :class:`kvant.cache.KVCache`.

        Raises:
            ContextError: more tokens than there is room for; nothing was written.
            ValueError: shapes that do not fit the cache.
        """
        offset = self.offset
        check_tokens(query, key, value, mask, offset)
        B, K, S, D = key.shape
        self.check_shape(B, K, D)
        if offset + S > self._max_seq_len:
            raise ContextError(
                f"{S} more tokens do not fit: {offset} of the {self._max_seq_len} reserved tokens are used"
            )
        output = append_and_attend(
            query,
            key,
            value,
            offset if min(self._lengths) == offset else self._lengths,
            self.cache,
            self.scale,
            mask=mask,
            quant_bit=self.quant_bit,
            quant_group=self.quant_group,
            bias_split=self.bias_split,
            backend=self.backend_for(query),
        )
        self.advance(S)
        return output

    def advance(self, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens of every sequence: those that :class:`CompiledCacheView` appended."""
        self._lengths = tuple(length + num_tokens for length in self._lengths)

    def check_shape(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise a ValueError unless the cache was made for this batch, these kv heads and this head dimension."""
        _, B, _, K, _, stored = self.cache.shape
        own = (B, K, stored * 2 if self.quant_bit == 4 else stored)
        if own != (batch, num_kv_heads, head_dim):
            raise ValueError(
                f"the cache is for a batch of {own[0]}, {own[1]} kv heads and a head_dim of {own[2]}; "
                f"given {batch}, {num_kv_heads} and {head_dim}"
            )

    def trim(self, num_tokens: int | Sequence[int]) -> int:
        """Forget the last tokens of every sequence, or all it has.

        Args:
            num_tokens: an int for all sequences, or B ints, one each.

        Returns:
            how many were forgotten, of the sequence that lost most.

        Raises:
            ValueError: a number below 0, or not one for each sequence; nothing was forgotten.
        """
        batch = len(self._lengths)
        each = list(num_tokens) if isinstance(num_tokens, Sequence) else [num_tokens] * batch
        if any(type(n) is not int or n < 0 for n in each):
            raise ValueError(f"num_tokens is {num_tokens}; expected an int, 0 or more")
        if len(each) != batch:
            raise ValueError(f"num_tokens has {len(each)} numbers; the cache has {batch} sequences")
        with self.turn:
            forgotten = [min(n, length) for n, length in zip(each, self._lengths, strict=True)]
            self._lengths = tuple(length - n for n, length in zip(forgotten, self._lengths, strict=True))
            return max(forgotten)

    def reset(self) -> None:
        """Forget every token; the memory stays reserved."""
        with self.turn:
            self._lengths = (0,) * len(self._lengths)

    def _unsupported_reason(self, query_shape: tuple[int, ...]) -> str | None:
        return unsupported_reason(query_shape, quant_bit=self.quant_bit, quant_group=self.quant_group)


@dataclass(frozen=True, slots=True)
class CompiledCacheView:
    """One append to a cache, in operations that are the same for any offset: what a compiled step attends through.

    Nothing is checked, the cache's own lengths stay as they are, and its arrays are replaced, not changed.

    Attributes:
        cache: appended to.
        offset: integer array: where the new row goes, below the cache's max_seq_len; () for all sequences, or (B,).
        rows: rows to read, more than any ``offset`` and at most max_seq_len; a sequence's rows past its new one are
            ignored. The fused kernel reads up to the new one, whatever this says.
    """

    cache: QuantizedKVCache
    offset: mx.array
    rows: int

    @property
    def bias_split(self) -> BiasSplit | None:
        """The cache's."""
        return self.cache.bias_split

    def attend(self, query: mx.array, key: mx.array, value: mx.array, mask: mx.array | None = None) -> mx.array:
        """As :meth:`QuantizedKVCache.attend` for S = 1, without a mask."""
        assert mask is None
        output, *self.cache.arrays[:] = append_and_attend_static(
            query,
            key,
            value,
            self.offset,
            self.cache.cache,
            self.cache.scale,
            tokens=self.rows,
            quant_bit=self.cache.quant_bit,
            quant_group=self.cache.quant_group,
            bias_split=self.bias_split,
            backend=self.cache.backend_for(query),
        )
        return output
