"""What changes the logits before a token is picked: bias and penalties, with mlx-lm's names and values."""

from collections.abc import Callable, Mapping

import mlx.core as mx

from kvant.engine.sampling_ranges import check

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]  # tokens so far (T,), logits (B, vocab) -> logits
CONTEXT_SIZE = 20  # mlx-lm's


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = CONTEXT_SIZE,
    presence_penalty: float | None = None,
    presence_context_size: int = CONTEXT_SIZE,
    frequency_penalty: float | None = None,
    frequency_context_size: int = CONTEXT_SIZE,
) -> list[LogitsProcessor]:
    """Functions of (tokens so far, logits) that return new logits. They are applied in this order.

    None and 0 leave an option out. A context size is the number of recent tokens a penalty looks at.

    Args:
        logit_bias: token id -> number added to its logit.
        repetition_penalty: a recent token's logit is divided by this if positive, multiplied if negative
            (Keskar et al. 2019, arXiv:1909.05858).
        presence_penalty: subtracted from a recent token's logit, once.
        frequency_penalty: subtracted from a recent token's logit, once an occurrence.

    Raises:
        ValueError: a value outside its range.
    """
    check(
        repetition_penalty=repetition_penalty or None,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_context_size=repetition_context_size,
        presence_context_size=presence_context_size,
        frequency_context_size=frequency_context_size,
    )
    processors: list[LogitsProcessor] = []
    if logit_bias:
        processors.append(_bias(logit_bias))
    if repetition_penalty and repetition_penalty != 1:
        processors.append(_repetition(repetition_penalty, repetition_context_size))
    if presence_penalty:
        processors.append(_presence(presence_penalty, presence_context_size))
    if frequency_penalty:
        processors.append(_frequency(frequency_penalty, frequency_context_size))
    return processors


def _bias(logit_bias: Mapping[int, float]) -> LogitsProcessor:
    biased, values = mx.array(list(logit_bias.keys())), mx.array(list(logit_bias.values()))

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, biased].add(values)

    return processor


def _repetition(penalty: float, context_size: int) -> LogitsProcessor:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        recent = tokens[-context_size:]
        chosen = logits[:, recent]
        return _replaced(logits, recent, mx.where(chosen < 0, chosen * penalty, chosen / penalty))

    return processor


def _presence(penalty: float, context_size: int) -> LogitsProcessor:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        recent = tokens[-context_size:]
        return _replaced(logits, recent, logits[:, recent] - penalty)

    return processor


def _frequency(penalty: float, context_size: int) -> LogitsProcessor:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, tokens[-context_size:]].subtract(penalty)

    return processor


def _replaced(logits: mx.array, tokens: mx.array, values: mx.array) -> mx.array:
    """New logits, those of ``tokens`` being ``values``; a token named twice has the same value twice."""
    changed = mx.array(logits)  # assignment rebinds the array object it is made to
    changed[:, tokens] = values
    return changed
