"""Requests under way in a scheduler, and their answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvant.cache.pool import Pool, PoolSequence
from kvant.cache.single import SinglePool, SingleSequence
from kvant.engine.drafting.choice import Drafter
from kvant.engine.draw import Sampler, for_answer
from kvant.engine.request import CHUNK, CheckedRequest, own_tokens
from kvant.engine.row_sampling import Row
from kvant.models import LanguageModel
from kvant.text.grammar import Matcher

READ_AT_ONCE = 2048  # tokens that a drafter reads in a step: a long prompt holds nobody up


@dataclass(eq=False, slots=True)
class Work:
    """A request under way.

    Attributes:
        is_exact: chunks end at multiples of 128, and only pages that such chunks computed are shared.
        open: the numbers of the answers that have not ended.
        sequences: reserved for its answers until they run; the first is fed.
        start: tokens at the beginning that a shared prefix had, or the request's own cache.
        cached: of these, those of the prompt.
        exact: tokens at the beginning that whole chunks of 128 computed, here or in the request they are shared with.
    """

    checked: CheckedRequest
    is_exact: bool
    open: set[int]
    sequences: list[PoolSequence | SingleSequence] = field(default_factory=list)
    start: int = 0
    cached: int = 0
    exact: int = 0

    @property
    def left(self) -> int:
        """Tokens of the prompt that are to be fed."""
        return len(self.checked.ids) - self.sequences[0].length

    def reserve(self, pool: Pool | SinglePool) -> None:
        """Open its sequences, with the beginning that others have fed."""
        checked, sequences = self.checked, self.sequences
        known = () if checked.cache is not None else checked.ids
        try:
            whole_pages = self.is_exact  # chunks begin at their ends then
            sequences.append(pool.sequence(checked.reserved, known, salt=checked.request.salt, whole_pages=whole_pages))
            for _ in range(len(self.open) - 1):  # places that are kept for forks
                sequences.append(pool.sequence(own_tokens(len(checked.ids), checked.reserved, pool)))
            first = sequences[0]
            if checked.cache is None:
                self.start = self.cached = self.exact = first.length
                return
            assert isinstance(first, PoolSequence)
            first.load(checked.cache)
            self.start = checked.held
            if first.ids != checked.ids[: checked.held]:
                raise ValueError("the request's cache was changed after it was submitted")
        except BaseException:
            self.release()
            raise

    def feed(self, model: LanguageModel, pool: Pool | SinglePool, room: int) -> mx.array | None:
        """Feed a chunk, of ``room`` tokens at most. The logits (1, vocab) of the prompt's end, or None before."""
        ids, sequence = self.checked.ids, self.sequences[0]
        start = sequence.length
        chunk_end = start + min(room, pool.prefill_step_size)
        end = min((start // CHUNK + 1) * CHUNK if self.is_exact else chunk_end, len(ids))
        if end == len(ids) and model.last_token_alone:
            end = max(end - 1, start + 1)
        chunk, logits = ids[start:end], None
        tell = self.checked.request.progress
        if tell is not None and start == self.start:
            tell(0, len(ids) - start)
        batch = pool.batch([sequence])
        if end == len(ids):
            logits = model.next_logits(mx.array([chunk]), batch)
            mx.eval(logits)
        else:
            mx.eval(model.feed(mx.array([chunk]), batch))
            mx.clear_cache()  # a chunk's activations; without it MLX kept four times as much (measured)
        batch.commit(ids=[chunk])
        if self.exact == start and len(chunk) == CHUNK:
            self.exact = end
        if tell is not None:
            tell(end - self.start, len(ids) - self.start)
        if pool.has_windows:  # its pages are given back as it moves on
            self._share()
        return logits

    def begin_answers(self) -> list["Answer"]:
        """Fork the sequence that was fed, for every answer."""
        checked, request, sequences = self.checked, self.checked.request, self.sequences
        first = sequences[0]
        self._share()
        answers = []
        for place, number in enumerate(sorted(self.open)):
            if place:
                assert isinstance(first, PoolSequence)
                sequences[place].release()
                sequences[place] = first.fork(checked.reserved)
            answer = Answer(self, number, for_answer(checked.sampler, number), sequences[place], list(checked.ids))
            if checked.grammar is not None:
                answer.matcher = checked.grammar.matcher()
                for token in request.begun:
                    answer.matcher.take(token)
            if request.drafts is not None:
                answer.drafter = request.drafts.for_answer(request.salt, checked.reserved)
            answers.append(answer)
        for sequence in sequences[len(answers) :]:  # of answers that were cancelled since
            sequence.release()
        return answers

    def _share(self) -> None:
        """Let later requests begin with what was fed of the prompt."""
        self.sequences[0].share_prefix(self.exact if self.is_exact else None)

    def release(self) -> None:
        """Give its pages back."""
        for sequence in self.sequences:
            sequence.release()
        self.sequences.clear()


@dataclass(eq=False, slots=True)
class Answer:
    """An answer that gets a token every step.

    Attributes:
        tokens: of the cache, the prompt and the answer.
        matcher: where the answer follows a grammar.
        drafter: where it drafts.
    """

    work: Work
    number: int
    sampler: Sampler
    sequence: PoolSequence | SingleSequence
    tokens: list[int]
    matcher: Matcher | None = None
    drafter: Drafter | None = None
    _drafter_read: int = 0
    _seen: mx.array | None = None  # the tokens that processors were given last

    def row(self, after: Sequence[int] | mx.array = (), *, mask: bytes | None = None) -> Row:
        """How its next token is sampled.

        Args:
            after: tokens behind those that it has; in an array they need not be known yet.
            mask: of its grammar.
        """
        tokens: Sequence[int] | mx.array = self.tokens
        processors, position = self.work.checked.processors, len(self.tokens) + len(after)
        if processors and isinstance(after, mx.array):
            known = self._seen if self._seen is not None and self._seen.size == len(tokens) else mx.array(self.tokens)
            tokens = self._seen = mx.concatenate([known, after.astype(known.dtype)])
        elif processors:
            tokens = [*tokens, *after]
        asked = self.work.checked.request
        return Row(self.sampler, processors, position, tokens, mask, asked.top_logprobs, asked.keep_logprobs)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        checked = self.work.checked
        return len(checked.ids) + checked.limit - len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens of a step that its sequence has room for."""
        return self.sequence.max_tokens - self.sequence.length

    def may_draft(self) -> bool:
        """Tell what it drafts with of its new tokens. Returns whether all of them are known there."""
        if self.drafter is None:
            return False
        new = self.tokens[self._drafter_read : self._drafter_read + READ_AT_ONCE]
        self.drafter.extend(new)
        self._drafter_read += len(new)
        return self._drafter_read == len(self.tokens)

    def end_drafts(self) -> None:
        """Draft no more."""
        drafter, self.drafter = self.drafter, None
        if drafter is not None:
            drafter.release()

    def release(self) -> None:
        """Give its pages back, and what it drafts with."""
        self.sequence.release()
        self.end_drafts()

    @property
    def sees_tokens(self) -> bool:
        """Whether something may look at its tokens one by one: it must not see any that is taken back."""
        return self.work.checked.calls_out or self.matcher is not None

    @property
    def waits(self) -> bool:
        """Whether its token has to be known before the next one is sampled.

        Of several answers a caller's functions are called apart, so that an error is nobody else's, and kvant's own
        processors look tokens up in Python.
        """
        alone = isinstance(self.sequence, SingleSequence)
        return self.matcher is not None or (not alone and bool(self.sees_tokens or self.work.checked.processors))
