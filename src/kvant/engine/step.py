"""A decoding step: the last token of every running answer is fed, and the next one is sampled."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch
from kvant.engine.kernel_failures import kernel_failures
from kvant.engine.request_state import Answer
from kvant.engine.row_sampling import Sampled, SampledToken, sample_step
from kvant.engine.sequential_sampling import sample_each
from kvant.models import LanguageModel


@dataclass(eq=False, slots=True)
class Step:
    """A begun step. The scheduler calls :meth:`start`, :meth:`wait` and :meth:`tokens`, in this order."""

    answers: list[Answer]
    batch: PoolBatch
    logits: mx.array  # (rows, vocab), the answers' rows first; not evaluated
    sampled: Sampled | None  # the next tokens; None: something has to see each token before the next
    is_lookahead: bool = False  # whether it began before the tokens that it feeds were read
    results: list[SampledToken | Exception] = field(default_factory=list)  # set by wait

    def start(self) -> None:
        """Queue the computation, and commit the tokens that the step feeds."""
        if self.sampled is not None and not self.is_lookahead:
            mx.async_eval(self.sampled.arrays)
        self.batch.commit(ids=[answer.tokens[-1:] for answer in self.answers])

    @property
    def is_speculative(self) -> bool:
        """Return whether it verifies drafts, so that the next step depends on the accepted tokens."""
        return False

    def wait(self) -> None:
        """Wait for the step's results."""
        if self.sampled is None:
            mx.eval(self.logits)
        else:
            self.results = self.sampled.read()

    def tokens(self) -> list[tuple[Answer, SampledToken | Exception, bool]]:
        """Return the answers' next tokens, and whether each was drafted."""
        results = sample_each(self.logits, self.answers) if self.sampled is None else self.results
        return [(answer, each, False) for answer, each in zip(self.answers, results, strict=True)]


@dataclass(eq=False, slots=True)
class FailedStep(Step):
    """A lookahead that failed to begin. Its error is raised after the previous tokens were returned."""

    error: Exception = field(kw_only=True)

    def start(self) -> None:
        """Raise the error."""
        raise self.error


def begin_step(
    model: LanguageModel,
    pool: Pool,
    answers: Sequence[Answer],
    ids: mx.array | None = None,
    *,
    rows: int | None = None,
    unread: Collection[Answer] = (),
) -> Step:
    """Begin a step that feeds the last token of each answer.

    Args:
        ids: (B,) these tokens; None: those of ``answer.tokens``.
        rows: number of rows of the step, including padding; None: one per answer.
        unread: answers whose ids are not computed yet.
    """
    if ids is None:
        ids = mx.array([answer.tokens[-1] for answer in answers])
    rows = rows or len(answers)
    if padding := rows - len(answers):
        ids = mx.concatenate([ids, mx.zeros(padding, ids.dtype)])
    batch = pool.batch([answer.sequence for answer in answers], rows)
    logits = model.next_logits(ids[:, None], batch)
    sampled = None
    if unread or not any(answer.is_sequential for answer in answers):
        new = [ids[row : row + 1] if answer in unread else () for row, answer in enumerate(answers)]
        each = [answer.row(after) for answer, after in zip(answers, new, strict=True)]
        sampled = sample_step(logits, each)
    return Step(list(answers), batch, logits, sampled, is_lookahead=bool(unread))


def begin_lookahead(
    model: LanguageModel, pool: Pool, step: Step, running: Sequence[Answer], *, rows: int | None = None
) -> Step | None:
    """Begin the step after one whose tokens were not read yet.

    Returns None if no answer continues, or if one has to see its token first. If the step fails to begin, it
    raises the error when it is started, after the previous step's tokens were returned.
    """
    if step.sampled is None:
        return None
    row_of = {answer: row for row, answer in enumerate(step.answers)}
    answers = [answer for answer in running if answer.left > (answer in row_of)]
    if not answers or any(answer.is_sequential for answer in answers):
        return None
    try:
        ids = step.sampled.tokens
        if answers != step.answers:
            last = [
                ids[row_of[one] : row_of[one] + 1] if one in row_of else mx.array(one.tokens[-1:], ids.dtype)
                for one in answers
            ]
            ids = mx.concatenate(last)
        return begin_step(model, pool, answers, ids, rows=rows, unread=row_of)
    except Exception as error:
        return FailedStep(list(running), step.batch, step.logits, None, error=error)


def feed_tokens(model: LanguageModel, batch: PoolBatch, ids: list[list[int]]) -> None:
    """Feed tokens whose logits are not needed, and commit them."""
    with kernel_failures(batch.pool):
        mx.eval(model.feed(mx.array(ids), batch))
    batch.commit(ids=ids)
