"""Steps of a batch that verify drafts: every answer drafts for itself, and all are fed as many tokens."""

import time
from collections.abc import Sequence

import mlx.core as mx

from kvant.cache.pool import Pool
from kvant.cache.single import SinglePool
from kvant.engine.decoding import Step, pick, pick_for
from kvant.engine.drafting.batch_choice import AnswerDrafts, BatchChoice, StepKind
from kvant.engine.drafting.choice import DraftCounts
from kvant.engine.filters import rows_of
from kvant.engine.pooled_drafts import PooledDrafter
from kvant.engine.row_sampling import Picked
from kvant.engine.work import Answer
from kvant.models import LanguageModel

Found = list[list[Picked | Exception]]  # the next tokens of every answer of a step; an error is the last


class BatchDrafter:
    """Begins steps with drafts where they pay, and reads what came of them."""

    def __init__(self, model: LanguageModel, pool: Pool | SinglePool) -> None:
        self._model, self._pool = model, pool
        self._choice = BatchChoice(model, ("batch", tuple(sorted({str(layer.format) for layer in pool.layers}))))
        self._read_at: float | None = None  # when the last step's tokens were read, if nothing else was computed since
        self._seconds: float | None = None  # that the last step took, where that is known

    @property
    def counts(self) -> DraftCounts:
        """What drafts did. A step counts once for every answer."""
        return self._choice.counts

    @staticmethod
    def ready(running: Sequence[Answer]) -> list[Answer]:
        """Those of the answers that may draft. What they draft from is told of their tokens."""
        return [answer for answer in running if answer.drafts is not None and answer.drafts.read(answer.tokens)]

    def may_draft(self, running: Sequence[Answer], ready: Sequence[Answer]) -> bool:
        """Whether any of these answers may draft after its next token, whatever that is."""
        own = [answer.drafts for answer in ready if answer.drafts is not None]
        return bool(own) and self._choice.may_draft(len(running), own, kind=_kind(running))

    def begin(self, running: Sequence[Answer], ready: Sequence[Answer]) -> Step | None:
        """Begin a step of the last token of each answer and a draft behind it; None: no draft pays."""
        # Every answer has to have room, those that do not draft too. One near its end shortens a few steps.
        most = min(self._pool.prefill_step_size, *(answer.room for answer in running)) - 1
        drafts: dict[Answer, list[int]] = {}
        proposed: list[tuple[AnswerDrafts, int]] = []
        asked: list[tuple[Answer, PooledDrafter, int]] = []
        for answer in ready if most > 0 else ():
            own = answer.drafts
            assert own is not None
            count = min(own.most, answer.left - 1)
            if isinstance(own.drafter, PooledDrafter):  # it takes time: nothing is drafted that is not fed
                if count > 0:
                    asked.append((answer, own.drafter, count))
                    proposed.append((own, count))
            elif draft := own.propose(count, self._model.config.vocab_size):
                drafts[answer] = draft
                proposed.append((own, len(draft)))
        kind = _kind(running)
        size = self._choice.size(len(running), proposed, most, kind=kind) if proposed else 0
        if size and asked:
            if behind := next((drafter for _, drafter, _ in asked if drafter.is_behind), None):
                # A chunk, between two steps, of whose time it is no part. Before all are fed no cost would be learnt.
                behind.drafts.feed(behind)
                self.paused()
                return None
            drafts |= self._by_model(asked, size)
        if not size or not any(drafts.values()):
            return None
        return self._begin(list(running), [drafts.get(answer, [])[:size] for answer in running], size + 1)

    def _by_model(self, asked: Sequence[tuple[Answer, PooledDrafter, int]], size: int) -> dict[Answer, list[int]]:
        """What models draft for these answers, as many tokens as they may have each, up to ``size``."""
        found: dict[Answer, list[int]] = {}
        for drafts in dict.fromkeys(drafter.drafts for _, drafter, _ in asked):
            own = [each for each in asked if each[1].drafts is drafts]
            counts = [min(size, count) for _, _, count in own]
            made = drafts.propose([drafter for _, drafter, _ in own], counts)
            found |= {answer: draft for (answer, _, _), draft in zip(own, made, strict=True)}
        for answer, drafter, _ in asked:
            if drafter.ended is not None:
                self._choice.counts.off = drafter.ended
                _switch_off([answer], drafter.ended)
        return found

    def _begin(self, answers: list[Answer], drafts: list[list[int]], num_tokens: int) -> Step:
        rows = [[answer.tokens[-1], *draft] for answer, draft in zip(answers, drafts, strict=True)]
        batch = self._pool.batch([answer.sequence for answer in answers])
        padded = mx.array([row + row[-1:] * (num_tokens - len(row)) for row in rows])
        logits = self._model.every_logits(padded, batch)
        sampled = None
        if _at_once(answers):
            places = [(number, place) for number, row in enumerate(rows) for place in range(len(row))]
            # (rows, S, vocab) -> (positions, vocab), without the padding
            each = rows_of(logits.flatten(0, 1), [number * num_tokens + place for number, place in places])
            asked = [answers[number].row(drafts[number][:place]) for number, place in places]
            sampled = pick_for(each, asked, [answers[number] for number, _ in places])
        return Step(answers, batch, logits, sampled, drafts=drafts)

    def paused(self) -> None:
        """Something else is computed before the next step: the time until then is not the step's."""
        self._read_at = None

    def read(self, step: Step, following: Step | None, *, is_counted: bool) -> None:
        """A step was evaluated just now; ``is_counted``: an answer might have drafted in it.

        ``following``: the step that was begun meanwhile. Over several ranks a step is computed where it is begun.
        """
        self.counts.steps += len(step.answers)
        self.counts.tokens += len(step.answers) if step.drafts is None else 0  # of drafts as many as are accepted
        now, before = time.perf_counter(), self._read_at
        self._read_at, self._seconds = now, None if before is None else now - before
        in_order = self._pool.divided
        if in_order and step.is_ahead == (following is None):  # none was computed since the last was read, or two
            self._seconds = None
        if is_counted and step.drafts is None and self._seconds is not None:
            ahead = step.is_ahead or in_order
            off = self._choice.stepped(len(step.answers), self._seconds, kind=_kind(step.answers), ahead=ahead)
            _switch_off(step.answers, off)

    def commit(self, step: Step, picked: Sequence[Picked | Exception] | None) -> Found:
        """Commit what was drafted rightly in a step. Returns the next tokens of its answers.

        Args:
            step: its logits are evaluated.
            picked: of :attr:`Step.sampled`; None: a position is sampled when the tokens before it are known, so that
                whoever sees them sees none that was rejected.
        """
        assert step.drafts is not None
        found = _one_by_one(step, step.drafts) if picked is None else _first(step, step.drafts, picked)
        fed = [[answer.tokens[-1], *draft] for answer, draft in zip(step.answers, step.drafts, strict=True)]
        counts = [len(own) for own in found]
        step.batch.commit(counts, ids=[ids[:count] for ids, count in zip(fed, counts, strict=True)])
        self.counts.tokens += sum(counts)
        self.counts.drafted += sum(map(len, step.drafts))
        self.counts.accepted += sum(
            is_drafted(draft, place, each)
            for draft, own in zip(step.drafts, found, strict=True)
            for place, each in enumerate(own)
        )
        for answer, draft, own in zip(step.answers, step.drafts, found, strict=True):
            if answer.drafts is not None and draft:
                answer.drafts.verified(len(draft), sum(is_drafted(draft, *each) for each in enumerate(own)))
        size = step.logits.shape[1] - 1
        off = self._choice.verified(len(found), size, sum(counts), self._seconds, kind=_kind(step.answers))
        _switch_off(step.answers, off)
        return found


def _switch_off(answers: Sequence[Answer], reason: str | None) -> None:
    """Have none of these answers draft any more, where there is a reason."""
    for answer in answers if reason is not None else ():
        if answer.drafts is not None:
            answer.drafts.off = reason
            answer.drafts.release()


def is_drafted(draft: Sequence[int], place: int, picked: Picked | Exception) -> bool:
    """Whether the token at a place behind an answer's last one is the one that was drafted there."""
    return isinstance(picked, Picked) and place < len(draft) and picked.token == draft[place]


def _first(step: Step, drafts: Sequence[Sequence[int]], picked: Sequence[Picked | Exception]) -> Found:
    """Of the tokens that were sampled at all positions those up to the first that was drafted wrongly."""
    found: Found = []
    rest = iter(picked)
    for answer, draft in zip(step.answers, drafts, strict=True):
        every = [next(rest) for _ in range(len(draft) + 1)]
        count = next(n for n, each in enumerate(every) if not _goes_on(answer, draft, n, each)) + 1
        found.append([*every[:count]])
    return found


def _one_by_one(step: Step, drafts: Sequence[Sequence[int]]) -> Found:
    """As :func:`_first`; a position is sampled when the tokens before it are known."""
    found: Found = [[] for _ in step.answers]
    held = [len(answer.tokens) for answer in step.answers]
    left, place = list(range(len(held))), 0
    try:
        while left:
            sampled = pick(rows_of(step.logits[:, place], left), [step.answers[number] for number in left])
            numbers, left = left, []
            for number, each in zip(numbers, sampled, strict=True):
                answer = step.answers[number]
                found[number].append(each)
                if isinstance(each, Picked) and _goes_on(answer, drafts[number], place, each):
                    answer.tokens.append(each.token)
                    left.append(number)
            place += 1
    finally:  # they are handed out when they are committed
        for answer, count in zip(step.answers, held, strict=True):
            del answer.tokens[count:]
    return found


def _goes_on(answer: Answer, draft: Sequence[int], place: int, picked: Picked | Exception) -> bool:
    """Whether the next position's logits are those of the text with this token."""
    stops = answer.work.checked.stop_tokens
    return isinstance(picked, Picked) and is_drafted(draft, place, picked) and picked.token not in stops


def _kind(answers: Sequence[Answer]) -> StepKind:
    """What the cost of a step of these answers goes with."""
    models = (each.drafts.drafter.name for each in answers if each.drafts is not None and each.drafts.by_model)
    return StepKind(_at_once(answers), next(models, ""))


def _at_once(answers: Sequence[Answer]) -> bool:
    """Whether none of them has to see a token before the next one is sampled."""
    return not any(answer.sees_tokens for answer in answers)
