"""Steps of decoding: the last token of every answer is fed together, and the next ones are sampled."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch
from kvant.engine.row_sampling import Picked, Row, Sampled, pick_rows
from kvant.engine.work import Answer
from kvant.errors import GrammarError, KernelError, one_line
from kvant.models import LanguageModel
from kvant.operators import kernel_record


@dataclass(eq=False, slots=True)
class Step:
    """A step that was begun: the last token of each answer is fed."""

    answers: list[Answer]
    batch: PoolBatch | ModelCache
    logits: mx.array  # (rows, vocab), the first rows being the answers', not evaluated
    sampled: Sampled | None  # the next tokens; None where something has to see the tokens before them
    is_ahead: bool = False  # it was begun before the tokens that it feeds were read
    # what is fed of each answer behind its last token, to be verified; None: nothing of any. Logits are (rows, S,
    # vocab) then, and ``sampled`` has the tokens behind each last one and its draft, answer by answer
    drafts: list[list[int]] | None = None
    error: Exception | None = None  # why it could not be begun


class BatchDecoder:
    """Begins steps of a model and a pool."""

    def __init__(self, model: LanguageModel, pool: Pool | ModelCache, *, rows: int | None) -> None:
        """``rows``: of every step, those beyond the answers being padding; None: one for each answer."""
        self._model, self._pool, self._rows = model, pool, rows

    def begin(self, answers: Sequence[Answer], ids: mx.array, unread: Collection[Answer] = ()) -> Step:
        """Begin a step of ids (B,), the last token of each answer; those of the ``unread`` are not known yet."""
        rows = self._rows or len(answers)
        if padding := rows - len(answers):
            ids = mx.concatenate([ids, mx.zeros(padding, ids.dtype)])
        batch = self._pool.batch([answer.sequence for answer in answers], rows)
        logits, sampled = self._model.next_logits(ids[:, None], batch), None
        if unread or not any(answer.waits for answer in answers):
            each = [one.row(ids[place : place + 1] if one in unread else ()) for place, one in enumerate(answers)]
            sampled = pick_rows(logits, each)
        return Step(list(answers), batch, logits, sampled, is_ahead=bool(unread))

    def begin_after(self, step: Step, running: Sequence[Answer]) -> Step | None:
        """Begin the step after one that is not read; None: no answer goes on, or one has to see its token before."""
        if step.sampled is None:
            return None
        places = {answer: row for row, answer in enumerate(step.answers)}
        answers = [answer for answer in running if answer.left > (answer in places)]
        if not answers or any(answer.waits for answer in answers):
            return None
        ids = step.sampled.tokens
        if answers != step.answers:
            each = [
                ids[places[one] : places[one] + 1] if one in places else mx.array(one.tokens[-1:], ids.dtype)
                for one in answers
            ]
            ids = mx.concatenate(each)
        return self.begin(answers, ids, places)

    def feed(self, batch: PoolBatch, ids: list[list[int]]) -> None:
        """Feed tokens whose logits are known, and commit them."""
        with kernel_failures(self._pool):
            mx.eval(self._model.feed(mx.array(ids), batch))
        batch.commit(ids=ids)


def pick(logits: mx.array, answers: Sequence[Answer]) -> list[Picked | Exception]:
    """Sample the next token of every answer by the first rows of logits (rows, vocab), or say why it has none.

    Those that call functions of the caller's are the last. Each of these is sampled and evaluated alone, so that an
    error, or an array that this thread cannot compute, is nobody else's.
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
    picked: list[Picked | Exception] = []
    together = sum(not answer.work.calls_out for answer in answers)
    for first, end in [(0, together), *((row, row + 1) for row in range(together, len(answers)))]:
        try:
            picked += pick_rows(logits[first:], rows[first:end]).read() if first < end else []
        except Exception as error:
            picked += [error] * (end - first)
    for number, (answer, each) in enumerate(zip(answers, picked, strict=True)):
        try:
            if answer.matcher is not None and isinstance(each, Picked) and number not in errors:
                answer.matcher.take(each.token)
        except GrammarError as error:
            errors[number] = error
    return [errors.get(number, each) for number, each in enumerate(picked)]


@contextmanager
def kernel_failures(cache: Pool | ModelCache) -> Iterator[None]:
    """Raise what MLX raises of a step as a KernelError, if the cache uses the fused kernel.

    MLX's errors are a RuntimeError or a ValueError itself, whatever failed. Arrays that the step changed may be lost.
    The failure is recorded: later caches of these formats, in other processes too, do without the kernel.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error) not in (RuntimeError, ValueError) or cache.backend is None:
            raise
        said = f"a step failed: {one_line(error)}"
        layers = cache.layers if isinstance(cache, Pool) else cache.pool.layers
        kernel_record.keep({layer.use: said for layer in layers if layer.backend is not None}, cache.backend)
        raise KernelError(
            f"{said}; if that is the fused kernel, --kernels unfused (KVANT_KERNELS=unfused) computes without it"
        ) from error
