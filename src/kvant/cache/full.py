"""A full-precision key/value cache of one layer that grows by concatenation, for comparison."""

import mlx.core as mx


class FullKVCache:
    """Keys and values (B, K, T, D) as passed in; every append copies all of them.

    The contract is Tiny-LLM's TinyKvFullCache.

    Attributes:
        offset: tokens so far; the position of the next one.
    """

    def __init__(self) -> None:
        self.offset = 0
        self._key_value: tuple[mx.array, mx.array] | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return sum(array.nbytes for array in self._key_value or ())

    def update_and_fetch(
        self,
        key: mx.array,
        value: mx.array,
        mask_length: int | None = None,
        mask: mx.array | str | None = None,
    ) -> tuple[mx.array, mx.array, int, mx.array | str | None]:
        """Append keys and values.

        Args:
            key, value: (B, K, S, D).
            mask_length: unused here, but required by the contract.
            mask: returned unchanged.

        Returns:
            key, value (B, K, offset, D), the offset after the update, and the mask.

        Raises:
            ValueError: shapes or dtypes differ from those in the cache.
        """
        if key.ndim != 4 or key.shape != value.shape:
            raise ValueError(
                f"key has shape {tuple(key.shape)}, value {tuple(value.shape)}; expected one (B, H, S, D)"
            )
        if self._key_value is not None:
            cached_key, cached_value = self._key_value
            B, K, _, D = cached_key.shape
            b, k, _, d = key.shape
            if (B, K, D, cached_key.dtype) != (b, k, d, key.dtype):
                raise ValueError(
                    f"the cache holds a batch of {B}, {K} kv heads and a head_dim of {D}, "
                    f"{cached_key.dtype}; got {b}, {k} and {d}, {key.dtype}"
                )
            key = mx.concatenate([cached_key, key], axis=2)
            value = mx.concatenate([cached_value, value], axis=2)
        self._key_value = key, value
        self.offset = key.shape[2]
        return key, value, self.offset, mask

    def reset(self) -> None:
        """Forget every token, and free them."""
        self._key_value = None
        self.offset = 0
