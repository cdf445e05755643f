"""A full-precision key/value cache of one layer that grows by concatenation: the plain way, for comparison."""

import mlx.core as mx

from kvant.cache.layer import KVCache
from kvant.cache.layer_format import LayerFormat
from kvant.operators.attention import attend_tokens
from kvant.operators.masks import both_masks, window_mask
from kvant.operators.validation import check_tokens


class FullKVCache(KVCache):
    """Keys and values as they came, (B, K, T, D); every append copies all of them.

    The contract is Tiny-LLM's TinyKvFullCache.
    """

    def __init__(self, window: int | None = None) -> None:
        """``window``: the last tokens that a query sees in :meth:`attend`; None: all."""
        super().__init__()
        self.window = window
        self._key_value: tuple[mx.array, mx.array] | None = None

    @property
    def max_seq_len(self) -> None:
        """None: the cache grows."""
        return

    @property
    def buffers(self) -> list[mx.array]:
        """Keys and values."""
        return [] if self._key_value is None else list(self._key_value)

    @property
    def format(self) -> LayerFormat:
        """How it stores tokens: as they come."""
        return LayerFormat("full", window=self.window)

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
        offset = self.offset
        if self._key_value is not None and offset:
            self.check_shape(key.shape[0], key.shape[1], key.shape[3])
            # Without the tokens of a step that was not committed.
            cached_key, cached_value = (x[:, :, :offset] for x in self._key_value)
            if key.dtype != cached_key.dtype:
                raise ValueError(f"key is {key.dtype}; the cache holds {cached_key.dtype}")
            key = mx.concatenate([cached_key, key], axis=2)
            value = mx.concatenate([cached_value, value], axis=2)
        self._key_value = (key, value)
        if not self.sequence.shared:
            self.sequence.commit(key.shape[2] - offset)
        return key, value, key.shape[2], mask

    def attend(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append keys and values and attend to every token so far; see :class:`kvant.cache.KVCache`."""
        check_tokens(query, key, value, mask, self.offset)
        S = key.shape[2]
        all_keys, all_values, T, _ = self.update_and_fetch(key, value)
        if self.window is not None and self.window < T:
            seen = window_mask(S, T, self.window)
            mask = seen if mask is None else both_masks(seen, mask)
        return attend_tokens(query, all_keys, all_values, mask=mask, sinks=sinks)

    def check_shape(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise a ValueError unless the cache is empty or holds keys and values of this shape."""
        if self._key_value is None or not self.offset:
            return
        B, K, _, D = self._key_value[0].shape
        if (batch, num_kv_heads, head_dim) != (B, K, D):
            raise ValueError(
                f"the cache holds a batch of {B}, {K} kv heads and a head_dim of {D}; "
                f"given {batch}, {num_kv_heads} and {head_dim}"
            )

    def reserve(self, num_tokens: int) -> None:
        """There is always room: the cache grows."""

    def reset(self) -> None:
        """Forget every token, and free them."""
        super().reset()
        self._key_value = None

    def release(self) -> None:
        """The same as :meth:`reset`: nothing is reserved."""
        self.reset()
