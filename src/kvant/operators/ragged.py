"""Sequences of different lengths in one batch: attention, and where their new tokens go. Unchecked."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit


def attend_sequences(
    query: mx.array,
    sequences: Sequence[tuple[mx.array, mx.array]],
    *,
    is_causal: bool = True,
    is_alibi: bool = False,
    mask: mx.array | None = None,
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """:func:`kvant.operators.attention.attend_tokens` for sequences of different lengths.

    Args:
        query: (B, H, S, D).
        sequences: key and value (1, K, T, D) of each of the B sequences. Each has its own T.
        mask: as ``attend_tokens`` takes it, for the largest T. A shorter sequence reads its first columns only.

    Returns:
        (B, H, S, D) in the query's dtype.
    """
    outputs = []
    for b, (key, value) in enumerate(sequences):
        own_mask = mask
        if mask is not None:
            own_mask = mask[b : b + 1] if mask.ndim == 4 and mask.shape[0] > 1 else mask
            own_mask = own_mask[..., : key.shape[2]]
        output = attend_tokens(
            query[b : b + 1],
            key,
            value,
            is_causal=is_causal,
            is_alibi=is_alibi,
            mask=own_mask,
            bias_split=bias_split,
            sinks=sinks,
        )
        outputs.append(output)
    return mx.concatenate(outputs)


def put_tokens(array: mx.array, tokens: mx.array, offset: mx.array) -> mx.array:
    """A cache or scale with (B, 2, K, S, last) tokens written at ``offset`` (B,), in one operation for all sequences.

    MLX writes in place where nothing else holds ``array``.
    """
    B, _, _, S, _ = tokens.shape
    place = offset[:, None] + mx.arange(S)  # (B, S)
    return mx.put_along_axis(array, place.reshape(1, B, 1, 1, S, 1), tokens[None], axis=4)
