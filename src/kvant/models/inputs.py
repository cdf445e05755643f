"""Check a model's inputs: token ids and offsets."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.cache import KVCache
from kvant.cache.pool_batch import PoolBatch

Offset = int | mx.array | None
Cached = Sequence[KVCache] | PoolBatch | None


def check_shape(inputs: mx.array) -> None:
    """Raise a ValueError unless ``inputs`` are (B, S), with neither of them 0."""
    if inputs.ndim != 2 or 0 in inputs.shape:
        raise ValueError(f"inputs has shape {inputs.shape}; expected (B, S) token ids")


def check_ids(inputs: mx.array, vocab_size: int) -> None:
    """Raise a ValueError unless ``inputs`` are token ids (B, S) of a vocabulary."""
    check_shape(inputs)
    if not mx.issubdtype(inputs.dtype, mx.integer):
        raise ValueError(f"inputs has dtype {inputs.dtype}; expected integer token ids")
    low = inputs.min().item()
    high = inputs.max().item()
    if low < 0 or high >= vocab_size:  # type: ignore[operator]
        raise ValueError(f"inputs has token ids {low} to {high}; the model knows 0 to {vocab_size - 1}")


def check_offset(offset: Offset, lengths: tuple[int, ...]) -> None:
    """Raise a ValueError unless ``offset`` is None or equals the lengths of the sequences."""
    if offset is None:
        return
    batch = len(lengths)
    if isinstance(offset, mx.array):
        fits = offset.shape == (batch,) and mx.issubdtype(offset.dtype, mx.integer)
        shown: object = offset.tolist() if fits else f"an array of {offset.dtype} {offset.shape}"
        agrees = shown == list(lengths)
    else:
        fits = type(offset) is int
        shown = repr(offset)
        agrees = all(offset == length for length in lengths)
    if not fits:
        raise ValueError(f"offset is {shown}; expected an int or an array of integers ({batch},)")
    if not agrees:
        stored = lengths[0] if len(set(lengths)) == 1 else list(lengths)
        raise ValueError(f"offset is {shown}; the cache holds {stored} tokens")
