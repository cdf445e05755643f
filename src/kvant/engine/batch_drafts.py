"""Steps of a scheduler that verify drafts: every answer drafts for itself, and all are fed as many tokens."""

import time
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice, takewhile

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.pool import Pool
from kvant.engine.decoding import BatchDecoder, Step, pick
from kvant.engine.drafts import DraftCounts, Drafter
from kvant.engine.row_sampling import Picked, pick_rows
from kvant.engine.sampler import rows_of
from kvant.engine.work import Answer
from kvant.models import LanguageModel

START, LAST = 2, 6  # levels: at level n a draft needs a match of 2^n tokens; at the last one nothing is drafted
LOSS = 2.0  # steps of one token that drafts may cost before they need a longer match
RETRY = 128  # steps times 2^level, after which a match half as long is tried again
SAMPLES = 9  # of the time of a step, of which the lower quartile counts

# The next tokens of every answer of a step, and whether they were drafted; an error is the last.
Found = list[list[tuple[Picked | Exception, bool]]]


class DraftChoice:
    """Decides for the answers of a scheduler, which share its steps, how many tokens are drafted.

    A draft from the text is as long as its match, up to 7 tokens (as SuffixDecoding has it: Oliaro et al. 2024,
    arXiv:2411.04975); a model drafts as many as it was asked for. Gains and losses are counted in the time of a plain
    step. Once drafts cost two of these, a match has to be twice as long; a model drafts no more. After 128 steps times
    the length of that match the shorter one is tried again. So drafts are never slower for long.
    """

    def __init__(self) -> None:
        self.counts = DraftCounts()  # of all answers
        self._level, self._balance, self._steps = START, 0.0, 0
        # Seconds of steps: of one token begun while the one before ran, of one token not so begun, with drafts.
        self._plain, self._alone, self._drafted = (deque[float](maxlen=SAMPLES) for _ in range(3))

    def count(self, drafter: Drafter, most: int, *, longer: int = 0) -> int:
        """Tokens to draft, at most ``most``; the match may grow by ``longer`` tokens before."""
        if len(self._plain) < 2 or self._level == LAST:
            return 0
        if not drafter.is_free:
            return most if self._level <= START else 0
        match = drafter.match + longer
        return min(match, most) if match >= 1 << self._level else 0

    def stepped(self, seconds: float, *, ahead: bool) -> None:
        """A step of one token of each answer took so long; ``ahead``: it was begun while the one before it ran."""
        if ahead:
            self._plain.append(seconds)
            self._count(0.0)
        else:  # what might have been drafted cost time
            self._count(min(0.0, 1 - self._cost(self._alone, seconds)))

    def verified(self, tokens: float, seconds: float | None) -> None:
        """A step with drafts gave so many tokens an answer, in so many seconds; None: they are not known."""
        if self._level <= START:
            self.counts.off = None
        if seconds is not None:
            self._count(tokens - self._cost(self._drafted, seconds))

    def _cost(self, times: deque[float], seconds: float) -> float:
        """A step's time in steps of one token, by the last ones of its kind: the first takes longer, others wait."""
        times.append(seconds)
        return _quartile(times) / _quartile(self._plain) if self._plain and len(times) > 1 else 1.0

    def _count(self, gained: float) -> None:
        self._steps += 1
        self._balance = min(self._balance + gained, LOSS)
        counts = self.counts
        if self._balance < -LOSS:
            self._level, self._steps, self._balance = min(self._level + 1, LAST), 0, 0.0
            counts.off = f"they took longer; {counts.accepted} of {counts.drafted} were accepted"
        elif self._level > START and self._steps >= RETRY << self._level:
            self._level, self._steps, self._balance = self._level - 1, 0, 0.0
            if self._level == START:
                counts.off = None


def _quartile(times: Collection[float]) -> float:
    return sorted(times)[len(times) // 4]


class BatchDrafter:
    """Begins steps with drafts where they pay, and reads what came of them."""

    def __init__(self, model: LanguageModel, pool: Pool | ModelCache, decoder: BatchDecoder) -> None:
        self._model, self._pool, self._decoder = model, pool, decoder
        self._choice = DraftChoice()
        self.counts = self._choice.counts
        self._read_at: float | None = None  # when the last step's tokens were read, if nothing else was computed since
        self._seconds: float | None = None  # that the last step took, where that is known

    def may_draft(self, ready: Sequence[Answer]) -> bool:
        """Whether any of these answers may draft after its next token, whatever that is."""
        return any(self._count(answer, answer.left - 2, longer=1) > 0 for answer in ready)

    def _count(self, answer: Answer, most: int, *, longer: int = 0) -> int:
        drafts = answer.work.request.drafts
        if answer.drafter is None or drafts is None:
            return 0
        return self._choice.count(answer.drafter, min(drafts.most, most), longer=longer)

    def begin(self, running: Sequence[Answer], ready: Sequence[Answer]) -> Step | None:
        """Begin a step that verifies drafts, each behind the last token of its answer; None: none pays."""
        # Every answer has to have room, those that do not draft too. One near its end shortens a few steps.
        most = min(self._pool.prefill_step_size, *(answer.room for answer in running)) - 1
        asked = {answer: self._count(answer, min(most, answer.left - 1)) for answer in ready}
        left = [answer for answer, count in asked.items() if count > 0]
        drafts: dict[Answer, list[int]] = {}
        while left:
            source = left[0].work.request.drafts
            own = [answer for answer in left if answer.work.request.drafts is source]
            left = [answer for answer in left if answer not in own]
            assert source is not None
            made = source.propose([answer.drafter for answer in own], [asked[answer] for answer in own])
            if made is None:  # a step was made between two steps, of whose time it is no part
                self.paused()
                return None
            for answer, draft in zip(own, made, strict=True):
                # up to the first token that the model does not have: a prompt's file or a draft model may have others
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
        logits = self._model.every_logits(mx.array([ids + ids[-1:] * (width - len(ids)) for ids in fed]), batch)
        sampled = None
        if not any(answer.sees_tokens for answer in running):
            places = [(number, place) for number, ids in enumerate(fed) for place in range(len(ids))]
            # (rows, S, vocab) -> (positions, vocab), without the padding
            each = rows_of(logits.flatten(0, 1), [number * width + place for number, place in places])
            sampled = pick_rows(each, [running[number].row(every[number][:place]) for number, place in places])
        return Step(list(running), batch, logits, sampled, drafts=every)

    def paused(self) -> None:
        """Something else is computed before the next step: the time until then is not the step's."""
        self._read_at = None

    def read(self, step: Step, following: Step | None, *, is_counted: bool) -> None:
        """A step was evaluated just now; ``is_counted``: an answer might have drafted in it.

        ``following``: the step that was begun meanwhile. Several ranks compute a step where it is begun, and a CPU for
        the most part where it is queued.
        """
        if not is_counted:
            self.paused()
            return
        self.counts.steps += len(step.answers)
        self.counts.tokens += len(step.answers) if step.drafts is None else 0  # of drafts as many as are accepted
        now, before = time.perf_counter(), self._read_at
        self._read_at, self._seconds = now, None if before is None else now - before
        if step.is_ahead == (following is None):  # where queueing computes, none was since the last was read, or two
            self._seconds = None
        if step.drafts is None and self._seconds is not None:
            self._choice.stepped(self._seconds, ahead=step.is_ahead or self._pool.divided)

    def commit(self, step: Step, picked: Sequence[Picked | Exception] | None) -> Found:
        """Commit what was drafted rightly in an evaluated step. Returns the next tokens of its answers.

        ``picked``: of :attr:`Step.sampled`; None: a position is sampled when the tokens before it are known, so that
        whoever sees them sees none that was rejected.
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
            self._decoder.feed(step.batch, ids)
            took = time.perf_counter() - started  # a part of the step's time, and not of the next one's
            self._seconds = None if self._seconds is None else self._seconds + took
            self._read_at = None if self._read_at is None else self._read_at + took
        self.counts.tokens += sum(counts)
        self.counts.drafted += sum(map(len, step.drafts))
        self.counts.accepted += sum(is_drafted for own in found for _, is_drafted in own)
        self._choice.verified(sum(counts) / len(counts), self._seconds)
        return found


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
