"""Functions that change the logits before a token is picked: bias and penalties, with mlx-lm's values.

A penalty looks at the last ``context_size`` tokens.
"""

from collections.abc import Callable, Mapping

import mlx.core as mx

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]  # tokens so far (T,), logits (B, vocab) -> logits


def bias(logit_bias: Mapping[int, float]) -> LogitsProcessor:
    """Add a number to the logit of each token id given."""
    biased, values = mx.array(list(logit_bias.keys())), mx.array(list(logit_bias.values()))

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, biased].add(values)

    return processor


def repetition(penalty: float, context_size: int) -> LogitsProcessor:
    """Divide a recent token's logit by the penalty; multiply a negative one (Keskar et al. 2019, arXiv:1909.05858)."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        recent = tokens[-context_size:]
        chosen = logits[:, recent]
        return _replaced(logits, recent, mx.where(chosen < 0, chosen * penalty, chosen / penalty))

    return processor


def presence(penalty: float, context_size: int) -> LogitsProcessor:
    """Subtract the penalty from a recent token's logit, once."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        recent = tokens[-context_size:]
        return _replaced(logits, recent, logits[:, recent] - penalty)

    return processor


def frequency(penalty: float, context_size: int) -> LogitsProcessor:
    """Subtract the penalty from a recent token's logit, once an occurrence."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, tokens[-context_size:]].subtract(penalty)

    return processor


def _replaced(logits: mx.array, tokens: mx.array, values: mx.array) -> mx.array:
    """The logits with ``values`` for ``tokens``; a token named twice has the same value twice."""
    changed = mx.array(logits)  # assignment rebinds the array object it is made to
    changed[:, tokens] = values
    return changed
