"""Filters of samplers: log-probabilities (B, vocab) in, the same out with -inf for tokens that are left out.

The tokens left are those mlx-lm leaves, at ties too. Nothing is compiled: on a CPU that would start a C++ compiler.
What is left of a row depends on it alone.
"""

import math
from collections.abc import Sequence

import mlx.core as mx

from kvant.errors import ArgumentError


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """The likeliest tokens that together have the probability ``top_p`` (Holtzman et al. 2019, arXiv:1904.09751).

    A token that is as likely as the last one kept is kept too.
    """
    descending = mx.sort(_without_lost(logprobs), axis=-1)[..., ::-1]
    probs = mx.exp(descending.astype(mx.float32))
    likelier = mx.cumsum(probs, axis=-1, inclusive=False)  # probability of all tokens before each one
    total = likelier[..., -1:] + probs[..., -1:]
    kept = (likelier < top_p * total).sum(axis=-1, keepdims=True)
    # None is kept where top_p is too small for float32: the likeliest one is kept then.
    least = mx.take_along_axis(descending, mx.maximum(kept, 1) - 1, axis=-1)
    return mx.where(logprobs < least, -math.inf, logprobs)


def _without_lost(logprobs: mx.array) -> mx.array:
    """The same with -inf for tokens whose probability is lost when it is added to the likeliest one's, on a CPU.

    They change no sum from the likeliest token on, so :func:`keep_top_p` never keeps them; and a CPU sorts many equal
    numbers fast: of 151,936 logits of a model most are such tokens. A GPU adds parts that are summed before.
    """
    if mx.default_device().type == mx.gpu:
        return logprobs
    likeliest = logprobs.max(axis=-1, keepdims=True).astype(mx.float32)
    lost = likeliest + math.log(2**-25) - 0.1  # less than half of float32's last place, with a margin for rounding
    return mx.where(logprobs < lost, -math.inf, logprobs)


def keep_min_p(logprobs: mx.array, min_p: float, min_tokens_to_keep: int) -> mx.array:
    """Tokens with at least ``min_p`` times the likeliest one's probability (Nguyen et al. 2024, arXiv:2407.01082)."""
    unlikely = logprobs < logprobs.max(axis=-1, keepdims=True) + math.log(min_p)
    if min_tokens_to_keep > 1:
        order = mx.argpartition(logprobs, kth=-min_tokens_to_keep, axis=-1)
        unlikely = mx.put_along_axis(unlikely, order[..., -min_tokens_to_keep:], mx.array(False), axis=-1)
    return mx.where(unlikely, -math.inf, logprobs)


def leave_out_top_choices(
    logprobs: mx.array, probability: float, threshold: float, special_tokens: Sequence[int], coin: mx.array
) -> mx.array:
    """XTC: with a probability, every token above the threshold but the least likely of them is left out.

    By p-e-w, https://github.com/oobabooga/text-generation-webui/pull/6335.

    Args:
        special_tokens: token ids that are never left out.
        coin: a number from 0 to 1 for all rows or, (B, 1), one for each. XTC applies up to ``probability``.
    """
    probs = mx.softmax(logprobs, axis=-1)
    least = mx.where(probs > threshold, probs, math.inf).min(axis=-1, keepdims=True)
    left_out = probs > least
    if special_tokens:
        left_out[..., mx.array(list(special_tokens))] = False
    return mx.where((coin <= probability) & left_out, -math.inf, logprobs)


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """The ``top_k`` likeliest tokens, of equally likely ones any (Fan et al. 2018, arXiv:1805.04833)."""
    order = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)
    return mx.put_along_axis(logprobs, order[..., top_k:], mx.array(-math.inf, logprobs.dtype), axis=-1)


def check_special(special_tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse a token that the vocabulary does not have."""
    for token in special_tokens:
        if not 0 <= token < vocab_size:
            raise ArgumentError("xtc_special_tokens", f"has token {token}; the model knows 0 to {vocab_size - 1}")


def check_at_most(name: str, count: int, most: int) -> None:
    """Refuse a count that the vocabulary is too small for."""
    if count > most:
        raise ArgumentError(name, f"is {count}; expected at most {most} with this vocabulary")


def rows_of(array: mx.array, rows: Sequence[int]) -> mx.array:
    """Some rows of an array (B, ...), in ascending order."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return array if len(rows) == len(array) else array[rows[0] : rows[-1] + 1]
    return array[mx.array(list(rows))]


def with_rows(array: mx.array, rows: Sequence[int], values: mx.array) -> mx.array:
    """The array with other values in some rows, in ascending order."""
    if len(rows) == len(array):
        return values
    place = {row: number for number, row in enumerate(rows)}
    parts = [values[place[row]][None] if row in place else array[row : row + 1] for row in range(len(array))]
    return mx.concatenate(parts)  # which copies whole rows; an assignment goes number by number


def in_order(rows: Sequence[Sequence[int]], parts: Sequence[mx.array]) -> mx.array:
    """The array whose rows are those of the parts, of which each has some."""
    if len(parts) == 1:
        return parts[0]
    places = [row for some in rows for row in some]
    return mx.concatenate(list(parts))[mx.array(sorted(range(len(places)), key=places.__getitem__))]
