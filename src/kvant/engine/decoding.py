"""Steps of decoding: the last token of every answer, and drafts behind it, are fed together and the next
sampled.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, takewhile

import mlx.core as mx

from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch
from kvant.engine.drafts import DraftChoice
from kvant.engine.row_sampling import Picked, Row, Sampled, pick_rows
from kvant.engine.sampler import rows_of
from kvant.engine.work import Answer
from kvant.errors import GrammarError, KernelError, one_line
from kvant.models import LanguageModel
from kvant.operators import kernel_record

# The next tokens of every answer of a step, and whether they were drafted; an error is the last.
Found = list[list[tuple[Picked | Exception, bool]]]


@dataclass(eq=False, slots=True)
class Step:
    """A step that was begun: the last token of each answer is fed."""

    answers: list[Answer]
    batch: PoolBatch
    logits: mx.array  # (rows, vocab), the first rows being the answers', not evaluated
    sampled: Sampled | None  # the next tokens; None where something has to see the tokens before them
    is_ahead: bool = False  # it was begun before the tokens that it feeds were read
    # what is fed of each answer behind its last token, to be verified; None: nothing of any. Logits are
    # (rows, S, vocab) then, and ``sampled`` has the tokens behind each last one and its draft, answer by
    # answer
    drafts: list[list[int]] | None = None
    error: Exception | None = None  # why it could not be begun


class BatchDecoder:
    """Begins steps of a model and a pool, with drafts where they pay, and reads what came of these."""

    def __init__(self, model: LanguageModel, pool: Pool, *, rows: int | None) -> None:
        """``rows``: of every step, those beyond the answers being padding; None: one for each answer."""
        self._model, self._pool, self._rows = model, pool, rows
        self._choice = DraftChoice()
        self.counts = self._choice.counts
        # when the last step's tokens were read, if nothing else was computed since
        self._read_at: float | None = None
        self._seconds: float | None = None  # that the last step took, where that is known

    def begin(self, answers: Sequence[Answer], ids: mx.array, unread: Collection[Answer] = ()) -> Step:
        """Begin a step of ids (B,), the last token of each answer; those of the ``unread`` are not known
        yet.
        """
        rows = self._rows or len(answers)
        if padding := rows - len(answers):
            ids = mx.concatenate([ids, mx.zeros(padding, ids.dtype)])
        batch = self._pool.batch([answer.sequence for answer in answers], rows)
        logits, sampled = self._model.next_logits(ids[:, None], batch), None
        if unread or not any(answer.waits for answer in answers):
            each = [
                one.row(ids[place : place + 1] if one in unread else ()) for place, one in enumerate(answers)
            ]
            sampled = pick_rows(logits, each)
        return Step(list(answers), batch, logits, sampled, is_ahead=bool(unread))

    def begin_after(self, step: Step, running: Sequence[Answer]) -> Step | None:
        """Begin the step after one that is not read; None: no answer goes on, or one has to see its token
        before.
        """
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

    def may_draft(self, ready: Sequence[Answer]) -> bool:
        """Whether any of these answers may draft after its next token, whatever that is."""
        return any(self._count(answer, answer.left - 2, longer=1) > 0 for answer in ready)

    def _count(self, answer: Answer, most: int, *, longer: int = 0) -> int:
        drafts = answer.work.request.drafts
        if answer.drafter is None or drafts is None:
            return 0
        return self._choice.count(answer.drafter, min(drafts.most, most), longer=longer)

    def begin_drafted(self, running: Sequence[Answer], ready: Sequence[Answer]) -> Step | None:
        """Begin a step that verifies drafts, each behind the last token of its answer; None: none pays."""
        # Every answer has to have room, those that do not draft too. One near its end shortens a few steps.
        most = min(self._pool.prefill_step_size, *(answer.sequence.room for answer in running)) - 1
        asked = {
            answer: count
            for answer in ready
            if (count := self._count(answer, min(most, answer.left - 1))) > 0
        }
        drafts: dict[Answer, list[int]] = {}
        for source in {id(each): each for each in (answer.work.request.drafts for answer in asked)}.values():
            own = [answer for answer in asked if answer.work.request.drafts is source]
            assert source is not None
            made = source.propose([answer.drafter for answer in own], [asked[answer] for answer in own])
            if made is None:  # a step was made between two steps, of whose time it is no part
                self.paused()
                return None
            for answer, draft in zip(own, made, strict=True):
                # up to the first token that the model does not have: a prompt's file or a draft model may
                # have others
                drafts[answer] = [*takewhile(lambda token: 0 <= token < self._model.config.vocab_size, draft)]
                if answer.drafter is not None and answer.drafter.ended is not None:
                    self.counts.off = answer.drafter.ended
                    answer.end_drafts()
        if not any(drafts.values()):
            return None
        every = [drafts.get(answer, []) for answer in running]
        fed = [[answer.tokens[-1], *draft] for answer, draft in zip(running, every, strict=True)]
        width = max(map(len, fed))
        batch = self._pool.batch([answer.sequence for answer in running])
        logits = self._model.every_logits(
            mx.array([ids + ids[-1:] * (width - len(ids)) for ids in fed]), batch
        )
        sampled = None
        if not any(answer.sees_tokens for answer in running):
            places = [(number, place) for number, ids in enumerate(fed) for place in range(len(ids))]
            # (rows, S, vocab) -> (positions, vocab), without the padding
            each = rows_of(logits.flatten(0, 1), [number * width + place for number, place in places])
            sampled = pick_rows(
                each, [running[number].row(every[number][:place]) for number, place in places]
            )
        return Step(list(running), batch, logits, sampled, drafts=every)

    def paused(self) -> None:
        """Something else is computed before the next step: the time until then is not the step's."""
        self._read_at = None

    def read(self, step: Step, following: Step | None, *, is_counted: bool) -> None:
        """A step was evaluated just now; ``is_counted``: an answer might have drafted in it.

        ``following``: the step that was begun meanwhile. Several ranks compute a step where it is begun, and
        a CPU for the most part where it is queued.
        """
        if not is_counted:
            self.paused()
            return
        self.counts.steps += len(step.answers)
        # of drafts as many as are accepted
        self.counts.tokens += len(step.answers) if step.drafts is None else 0
        now, before = time.perf_counter(), self._read_at
        self._read_at, self._seconds = now, None if before is None else now - before
        # where queueing computes, none was since the last was read, or two
        if step.is_ahead == (following is None):
            self._seconds = None
        if step.drafts is None and self._seconds is not None:
            self._choice.stepped(self._seconds, ahead=step.is_ahead or self._pool.divided)

    def commit(self, step: Step, picked: Sequence[Picked | Exception] | None) -> Found:
        """Commit what was drafted rightly in an evaluated step. Returns the next tokens of its answers.

        ``picked``: of :attr:`Step.sampled`; None: a position is sampled once the tokens before it are known.
        """
        assert step.drafts is not None
        found = _found(step, step.drafts, picked)
        each = zip(step.answers, step.drafts, found, strict=True)
        ids = [[answer.tokens[-1], *draft][: len(own)] for answer, draft, own in each]
        counts = [len(own) for own in ids]
        if self._pool.takes_back or counts[0] == step.logits.shape[1]:
            step.batch.commit(counts, ids=ids)
        else:  # a state has taken all of the step: its first tokens are fed again
            started = time.perf_counter()
            step.batch.end_step()
            self.feed(step.batch, ids)
            took = time.perf_counter() - started  # a part of the step's time, and not of the next one's
            self._seconds = None if self._seconds is None else self._seconds + took
            self._read_at = None if self._read_at is None else self._read_at + took
        self.counts.tokens += sum(counts)
        self.counts.drafted += sum(map(len, step.drafts))
        self.counts.accepted += sum(is_drafted for own in found for _, is_drafted in own)
        self._choice.verified(sum(counts) / len(counts), self._seconds)
        return found


def pick(logits: mx.array, answers: Sequence[Answer]) -> list[Picked | Exception]:
    """Sample the next token of every answer by the first rows of logits (rows, vocab), or say why it has
    none.

    Those that call functions of the caller's are the last. Each of these is sampled and evaluated alone, so
    that an error, or an array that this thread cannot compute, is nobody else's.
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


def _found(step: Step, drafts: Sequence[list[int]], picked: Sequence[Picked | Exception] | None) -> Found:
    """The tokens of each answer up to the first that was drafted wrongly."""
    answers, held = step.answers, [len(answer.tokens) for answer in step.answers]
    found: Found = [[] for _ in answers]
    rest = iter(picked or ())
    known = [[*islice(rest, len(draft) + 1)] for draft in drafts]
    left, place = list(range(len(answers))), 0
    try:
        while left:
            if picked is None:
                sampled = pick(rows_of(step.logits[:, place], left), [answers[number] for number in left])
            else:
                sampled = [known[number][place] for number in left]
            numbers, left = left, []
            for number, each in zip(numbers, sampled, strict=True):
                is_drafted = isinstance(each, Picked) and drafts[number][place : place + 1] == [each.token]
                found[number].append((each, is_drafted))
                if isinstance(each, Picked) and is_drafted:
                    # The next position's logits are those of the text with this token.
                    answers[number].tokens.append(each.token)
                    if each.token not in answers[number].work.stop_tokens:
                        left.append(number)
            place += 1
    finally:  # they are handed out when they are committed
        for answer, count in zip(answers, held, strict=True):
            del answer.tokens[count:]
    return found


@contextmanager
def kernel_failures(pool: Pool) -> Iterator[None]:
    """Raise what MLX raises of a step as a KernelError, if the pool uses the fused kernel.

    MLX's errors are a RuntimeError or a ValueError itself, whatever failed. Arrays that the step changed may
    be lost. The failure is recorded: later caches of these formats, in other processes too, do without the
    kernel.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error) not in (RuntimeError, ValueError) or pool.backend is None:
            raise
        said = f"a step failed: {one_line(error)}"
        kernel_record.keep(
            {layer.use: said for layer in pool.layers if layer.backend is not None}, pool.backend
        )
        raise KernelError(
            f"{said}; if that is the fused kernel, --kernels unfused (KVANT_KERNELS=unfused) computes "
            f"without it"
        ) from error
