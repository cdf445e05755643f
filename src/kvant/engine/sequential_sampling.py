"""Immediate sampling, for first tokens and for tokens that something must see before the next one."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.engine.request_state import Answer
from kvant.engine.row_sampling import Row, SampledToken, sample_step
from kvant.errors import GrammarError


def sample_each(logits: mx.array, answers: Sequence[Answer]) -> list[SampledToken | Exception]:
    """Sample the next token of each answer from the first rows of logits (rows, vocab).

    Returns an exception instead of a token that could not be sampled. Answers that call the caller's
    functions come last; each of these is sampled and evaluated separately, so that an error, or an array that
    this thread cannot compute, affects no other answer.
    """
    rows: list[Row] = []
    errors: dict[int, GrammarError] = {}
    for number, answer in enumerate(answers):
        mask = None
        try:
            mask = None if answer.matcher is None else answer.matcher.mask()
        except GrammarError as error:
            errors[number] = error
        rows.append(answer.row(mask=mask))
    results: list[SampledToken | Exception] = []
    together = sum(not answer.state.calls_out for answer in answers)
    for first, end in [(0, together), *((row, row + 1) for row in range(together, len(answers)))]:
        try:
            results += sample_step(logits[first:], rows[first:end]).read() if first < end else []
        except Exception as error:
            results += [error] * (end - first)
    for number, (answer, result) in enumerate(zip(answers, results, strict=True)):
        try:
            if answer.matcher is not None and isinstance(result, SampledToken) and number not in errors:
                answer.matcher.take(result.token)
        except GrammarError as error:
            errors[number] = error
    return [errors.get(number, result) for number, result in enumerate(results)]
