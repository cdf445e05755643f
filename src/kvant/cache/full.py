"""A full-precision key/value cache of one layer that grows by concatenation: the plain way, for comparison."""

import mlx.core as mx

from kvant.cache.sequences import Sequences
from kvant.operators.attention import attend_rows
from kvant.operators.validation import check_rows


class FullKVCache:
    """Keys and values as they came, (B, K, T, D); every append copies all of them.

    The contract is Tiny-LLM's TinyKvFullCache.
    """

    def __init__(self) -> None:
        self._rows: tuple[mx.array, mx.array] | None = None
        self._number: int | None = None  # of a model's cache
        self.sequences = Sequences(None)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, all the same; one 0 while the cache is empty."""
        return self.sequences.lengths

    @property
    def offset(self) -> int:
        """Tokens in the cache; the position of the next one."""
        return self.sequences.offset

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
        return sum(x.nbytes for x in self.state)

    @property
    def state(self) -> list[mx.array]:
        """Keys and values, for mlx-lm, which evaluates them."""
        return [] if self._rows is None else list(self._rows)

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
        batch, offset = key.shape[0], self.offset
        if min(self.lengths) != offset:
            raise ValueError(f"the cache holds {list(self.lengths)} tokens; expected sequences of one length")
        if self._rows is not None and offset:
            self.check_shape(batch, key.shape[1], key.shape[3])
            cached_key, cached_value = (x[:, :, :offset] for x in self._rows)  # without a step that was not committed
            if key.dtype != cached_key.dtype:
                raise ValueError(f"key is {key.dtype}; the cache holds {cached_key.dtype}")
            key = mx.concatenate([cached_key, key], axis=2)
            value = mx.concatenate([cached_value, value], axis=2)
        self._rows = (key, value)
        if not self.sequences.shared:
            self.sequences.take_batch(batch)
            self.sequences.commit(key.shape[2] - offset)
        return key, value, key.shape[2], mask

    def attend(self, query: mx.array, key: mx.array, value: mx.array, mask: mx.array | None = None) -> mx.array:
        """Append keys and values and attend to every row so far; see :class:`kvant.cache.KVCache`."""
        check_rows(query, key, value, mask, self.offset)
        all_keys, all_values, _, _ = self.update_and_fetch(key, value)
        return attend_rows(query, all_keys, all_values, mask=mask)

    def check_shape(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise a ValueError unless the cache is empty or holds rows of this shape."""
        if self._rows is None or not self.offset:
            return
        B, K, _, D = self._rows[0].shape
        if (batch, num_kv_heads, head_dim) != (B, K, D):
            raise ValueError(
                f"the cache holds a batch of {B}, {K} kv heads and a head_dim of {D}; "
                f"given {batch}, {num_kv_heads} and {head_dim}"
            )

    def bind(self, sequences: Sequences, number: int) -> None:
        """Become layer ``number`` of a model's cache with these sequences."""
        self.sequences, self._number = sequences, number

    def reserve(self, num_tokens: int) -> None:
        """There is always room: the cache grows."""

    def is_trimmable(self) -> bool:
        """True, for mlx-lm."""
        return True

    def trim(self, num_tokens: int) -> int:
        """Forget the last ``num_tokens`` tokens, or all there are; return how many were forgotten."""
        return self.sequences.trim(num_tokens, self._number)

    def reset(self) -> None:
        """Forget every token."""
        self.sequences.reset()
        self._rows = None

    def release(self) -> None:
        """The same as :meth:`reset`: nothing is reserved."""
        self.reset()
