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


def put_tokens(arrays: Sequence[mx.array], tokens: Sequence[mx.array], row: mx.array) -> list[mx.array]:
    """A cache and its scale with S new tokens from ``row`` on, in operations that are the same for any row.

    On a GPU that is one launch each. MLX writes in place if nothing else holds an array. It does not check the row.

    Args:
        arrays: (1, B, 2, K, rows, last) each.
        tokens: (1, B, 2, K, S, last) each, in the array's dtype or in words of its bytes.
        row: integers, () or (1,) for all sequences, or (B,), one each; (B or 1, S): of every token.
    """
    S = tokens[0].shape[4]
    stored = [mx.view(array, part.dtype) for array, part in zip(arrays, tokens, strict=True)]
    if row.size == 1 and mx.default_device().type == mx.cpu:
        # There it takes 0.7 of the time. On a GPU it is two launches: the first finds the place in memory.
        place = row.reshape(1)
        updated = [mx.slice_update(array, part, place, axes=(4,)) for array, part in zip(stored, tokens, strict=True)]
    else:
        place = row.reshape(1, row.shape[0] if row.ndim else 1, 1, 1, -1, 1)
        if S > 1 and row.ndim < 2:
            place = place + mx.arange(S)[:, None]
        updated = [mx.put_along_axis(array, place, part, axis=4) for array, part in zip(stored, tokens, strict=True)]
    return [mx.view(new, array.dtype) for new, array in zip(updated, arrays, strict=True)]
