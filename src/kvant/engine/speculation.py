"""Speculative decoding: drafted tokens are verified, several in one step. The scheduler asks it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import mlx.core as mx

from kvant.cache.pool import Pool
from kvant.engine.drafts import DraftChoice, DraftCounts
from kvant.engine.request_state import Answer
from kvant.engine.row_sampling import SampledToken, sample_step
from kvant.engine.sampler import rows_of
from kvant.engine.sequential_sampling import sample_each
from kvant.engine.step import Step, feed_tokens
from kvant.models import LanguageModel


@dataclass(eq=False, slots=True, kw_only=True)
class SpeculativeStep(Step):
    """A step that feeds drafts after the last token of each answer.

    Logits are (B, S, vocab). ``sampled`` has the tokens after each answer's last token and after each token
    of its draft, answer by answer.
    """

    speculation: "Speculation"
    drafts: list[list[int]] = field(default_factory=list)  # of each answer

    def start(self) -> None:
        """Queue the computation. What the step feeds counts once it was verified."""
        if self.sampled is not None:
            mx.async_eval(self.sampled.arrays)

    @property
    def is_speculative(self) -> bool:
        return True

    def tokens(self) -> list[tuple[Answer, SampledToken | Exception, bool]]:
        """Verify the drafts, and commit the tokens that were drafted correctly."""
        verified = self._verify()
        self.speculation.commit(self, verified)
        each = zip(self.answers, verified, strict=True)
        return [(answer, *token) for answer, tokens in each for token in tokens]

    def _verify(self) -> list[list[tuple[SampledToken | Exception, bool]]]:
        """Return each answer's tokens up to the first one that was drafted wrongly; an error is the last."""
        answers = self.answers
        lengths = [len(answer.tokens) for answer in answers]
        verified: list[list[tuple[SampledToken | Exception, bool]]] = [[] for _ in answers]
        rest = iter(self.results)
        known = [[*islice(rest, len(draft) + 1)] for draft in self.drafts]
        left = list(range(len(answers)))
        position = 0
        try:
            while left:
                if self.sampled is None:
                    logits = rows_of(self.logits[:, position], left)
                    results = sample_each(logits, [answers[number] for number in left])
                else:
                    results = [known[number][position] for number in left]
                numbers = left
                left = []
                for number, result in zip(numbers, results, strict=True):
                    draft = self.drafts[number][position : position + 1]
                    is_drafted = isinstance(result, SampledToken) and draft == [result.token]
                    verified[number].append((result, is_drafted))
                    if isinstance(result, SampledToken) and is_drafted:
                        # The next position's logits are those of the text with this token.
                        answers[number].tokens.append(result.token)
                        if result.token not in answers[number].state.stop_tokens:
                            left.append(number)
                position += 1
        finally:  # the scheduler appends them when it hands them out
            for answer, length in zip(answers, lengths, strict=True):
                del answer.tokens[length:]
        return verified


class Speculation:
    """Decides which steps verify drafts, begins and commits these, and measures whether they pay."""

    def __init__(self, model: LanguageModel, pool: Pool) -> None:
        self._model = model
        self._pool = pool
        self._choice = DraftChoice()
        self._ready: list[Answer] = []  # may draft: their drafters know all of their tokens
        # when the last step's tokens were read; None: something else was computed since
        self._read_at: float | None = None
        self._step_seconds: float | None = None  # of the last step; None: not known

    @property
    def counts(self) -> DraftCounts:
        """Return the counts of drafts, over all answers."""
        return self._choice.counts

    def update(self, running: Sequence[Answer]) -> None:
        """Pass the new tokens of answers to their drafters, before every step."""
        self._ready = [
            answer
            for answer in running
            if answer.drafting is not None and answer.drafting.update(answer.tokens)
        ]

    def may_draft_next(self) -> bool:
        """Return whether an answer may draft after its next token, which rules out a lookahead."""
        return any(self._count(answer, answer.left - 2, longer=1) > 0 for answer in self._ready)

    def _count(self, answer: Answer, most: int, *, longer: int = 0) -> int:
        """Return how many tokens to draft, at most ``most``."""
        if answer.drafting is None:
            return 0
        most = min(answer.drafting.source.most, most)
        return self._choice.count(answer.drafting.drafter, most, longer=longer)

    def begin(self, running: Sequence[Answer]) -> SpeculativeStep | None:
        """Begin a step that verifies drafts. Returns None if no draft is expected to pay.

        If any answer has a draft, all rows are padded to the longest draft; the padding is discarded.
        """
        drafts = self._draft(running)
        if not any(drafts.values()):
            return None
        each = [drafts.get(answer, []) for answer in running]
        fed = [[answer.tokens[-1], *draft] for answer, draft in zip(running, each, strict=True)]
        width = max(map(len, fed))
        batch = self._pool.batch([answer.sequence for answer in running])
        logits = self._model.every_logits(
            mx.array([ids + ids[-1:] * (width - len(ids)) for ids in fed]), batch
        )
        sampled = None
        if not any(answer.sees_tokens for answer in running):
            positions = [(row, position) for row, ids in enumerate(fed) for position in range(len(ids))]
            # (B, S, vocab) -> (positions, vocab), without the padding
            flat = rows_of(logits.flatten(0, 1), [row * width + position for row, position in positions])
            rows = [running[row].row(each[row][:position]) for row, position in positions]
            sampled = sample_step(flat, rows)
        return SpeculativeStep(list(running), batch, logits, sampled, drafts=each, speculation=self)

    def _draft(self, running: Sequence[Answer]) -> dict[Answer, list[int]]:
        """Return the drafts of the answers that are ready and whose drafts pay."""
        if not self._ready:
            return {}
        # Every answer needs room for the longest draft, even if it does not draft itself: an answer near its
        # end shortens the drafts of a few steps.
        room = (answer.sequence.room for answer in running)
        most = min(self._pool.prefill_step_size, *room) - 1
        counts = {answer: self._count(answer, min(most, answer.left - 1)) for answer in self._ready}
        asked = {answer: count for answer, count in counts.items() if count > 0}
        drafts: dict[Answer, list[int]] = {}
        sources = {answer: answer.drafting.source for answer in asked if answer.drafting is not None}
        for source in {id(source): source for source in sources.values()}.values():
            asking = [answer for answer in asked if sources[answer] is source]
            drafters = [answer.drafting.drafter for answer in asking if answer.drafting is not None]
            proposed = source.propose(drafters, [asked[answer] for answer in asking])
            if proposed is None:  # the draft model computed a step, which is no part of the next step's time
                self.interrupt()
                return {}
            for answer, drafter, draft in zip(asking, drafters, proposed, strict=True):
                # A prompt's file or a draft model may have tokens that the model does not know.
                drafts[answer] = [*takewhile(self._is_known, draft)]
                if drafter.ended is not None:
                    self.counts.off = drafter.ended
                    answer.end_drafts()
        return drafts

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self._model.config.vocab_size

    def interrupt(self) -> None:
        """Note that something else is computed before the next step, which does not count as its time."""
        self._read_at = None

    def finish(self, step: Step, following: Step | None) -> None:
        """Measure a step that was evaluated just now, if an answer might have drafted in it.

        ``following``: its lookahead. Several ranks compute a step when it is begun, and a CPU mostly when it
            is queued.
        """
        if not self._ready:
            self.interrupt()
            return
        self.counts.steps += len(step.answers)
        if not step.is_speculative:
            self.counts.tokens += len(step.answers)
        now = time.perf_counter()
        self._step_seconds = None if self._read_at is None else now - self._read_at
        self._read_at = now
        # If a step computes when it is queued, none did since the last was read, or two did.
        if step.is_lookahead == (following is None):
            self._step_seconds = None
        if not step.is_speculative and self._step_seconds is not None:
            self._choice.stepped(self._step_seconds, is_lookahead=step.is_lookahead or self._pool.divided)

    def commit(
        self, step: SpeculativeStep, verified: Sequence[Sequence[tuple[SampledToken | Exception, bool]]]
    ) -> None:
        """Commit the tokens of a step that were drafted correctly, and each answer's last token before."""
        each = zip(step.answers, step.drafts, verified, strict=True)
        ids = [[answer.tokens[-1], *draft][: len(tokens)] for answer, draft, tokens in each]
        counts = [len(tokens) for tokens in ids]
        if self._pool.takes_back or counts[0] == step.logits.shape[1]:
            step.batch.commit(counts, ids=ids)
        else:  # a recurrent state has consumed the whole step: the accepted tokens are fed again
            started = time.perf_counter()
            step.batch.end_step()
            feed_tokens(self._model, step.batch, ids)
            took = time.perf_counter() - started  # a part of this step's time, and not of the next one's
            self._step_seconds = None if self._step_seconds is None else self._step_seconds + took
            self._read_at = None if self._read_at is None else self._read_at + took
        self.counts.tokens += sum(counts)
        self.counts.drafted += sum(map(len, step.drafts))
        self.counts.accepted += sum(is_drafted for tokens in verified for _, is_drafted in tokens)
        self._choice.verified(sum(counts) / len(counts), self._step_seconds)
