"""A full-precision key/value cache of one layer that grows by concatenation: the plain way, for comparison."""

import mlx.core as mx

from kvant.operators.attention import attend_tokens
from kvant.operators.validation import check_tokens
from kvant.threads import Turn


class FullKVCache:
    """Keys and values as they came, (B, K, T, D); every append copies all of them.

    The contract is Tiny-LLM's TinyKvFullCache.
    """

    def __init__(self) -> None:
        self._rows: tuple[mx.array, mx.array] | None = None
        self.turn = Turn()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, all the same; one 0 while the cache is empty."""
        return (0,) if self._rows is None else (self.offset,) * self._rows[0].shape[0]

    @property
    def offset(self) -> int:
        """Tokens in the cache; the position of the next one."""
        return 0 if self._rows is None else self._rows[0].shape[2]

    @property
    def max_seq_len(self) -> None:
        """None: the cache grows."""
        return

    @property
    def bias_split(self) -> None:
        """None: keys and values are kept as they are."""
        return

    @property
    def nbytes(self) -> int:
        """Bytes the keys and values take now."""
        return 0 if self._rows is None else sum(x.nbytes for x in self._rows)

    def update_and_fetch(
        self, key: mx.array, value: mx.array, mask_length: int | None = None, mask: mx.array | str | None = None
    ) -> tuple[mx.array, mx.array, int, mx.array | str | None]:
        """Append keys and values.

        Args:
            key, value: (B, K, S, D).
            mask_length: not used by a cache of one sequence; part of the contract.
            mask: passed through.

        Returns:
            key, value (B, K, offset, D), the offset after the update, and the mask.

        Raises:
            ValueError: shapes or dtypes that do not continue what is cached.
        """
        if key.ndim != 4 or key.shape != value.shape:
            raise ValueError(f"key has shape {tuple(key.shape)}, value {tuple(value.shape)}; expected one (B, H, S, D)")
        if self._rows is not None:
            cached_key, cached_value = self._rows
            self.check_shape(key.shape[0], key.shape[1], key.shape[3])
            if key.dtype != cached_key.dtype:
                raise ValueError(f"key is {key.dtype}; the cache holds {cached_key.dtype}")
            key = mx.concatenate([cached_key, key], axis=2)
            value = mx.concatenate([cached_value, value], axis=2)
        self._rows = (key, value)
        return key, value, self.offset, mask

    def attend(self, query: mx.array, key: mx.array, value: mx.array, mask: mx.array | None = None) -> mx.array:
        """Append keys and values and attend to every row so far; see :class:`kvant.cache.KVCache`."""
        check_tokens(query, key, value, mask, self.offset)
        all_keys, all_values, _, _ = self.update_and_fetch(key, value)
        return attend_tokens(query, all_keys, all_values, mask=mask)

    def check_shape(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise a ValueError unless the cache is empty or holds rows of this shape."""
        if self._rows is None:
            return
        B, K, _, D = self._rows[0].shape
        if (batch, num_kv_heads, head_dim) != (B, K, D):
            raise ValueError(
                f"the cache holds a batch of {B}, {K} kv heads and a head_dim of {D}; "
                f"given {batch}, {num_kv_heads} and {head_dim}"
            )

    def trim(self, num_tokens: int) -> int:
        """Forget the last ``num_tokens`` tokens, or all there are; return how many were forgotten."""
        if type(num_tokens) is not int or num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; expected an int, 0 or more")
        with self.turn:
            forgotten = min(num_tokens, self.offset)
            if self._rows is not None:
                kept = self.offset - forgotten
                key, value = self._rows
                self._rows = (key[:, :, :kept], value[:, :, :kept]) if kept else None
            return forgotten

    def reset(self) -> None:
        """Forget every token."""
        with self.turn:
            self._rows = None
