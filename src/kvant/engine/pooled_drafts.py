"""A draft model beside a pool: a pool of its own, and a step of all sequences for each drafted token."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import mlx.core as mx

from kvant.cache.pool import Pool, PoolSequence
from kvant.cache.single import SinglePool, SingleSequence
from kvant.engine.drafting.drafter import Drafter
from kvant.engine.drafting.drafts import Drafts
from kvant.engine.feeding import CHUNK
from kvant.errors import ContextError, one_line
from kvant.models import LanguageModel
from kvant.sizes import format_bytes

MOST_BEHIND = 8  # tokens of a sequence that are fed with the step that drafts; more are fed before, in chunks

T = TypeVar("T")


class PooledDrafter:
    """Drafts of one sequence by a model; see :class:`kvant.engine.drafting.drafter.Drafter`.

    Nothing is computed, and no page taken, before a draft is asked for. What was drafted and is not in the text is
    taken back.

    Attributes:
        drafts: that it is of.
        ended: why nothing can be drafted any more; None: it can.
    """

    is_free = False
    match = 0

    def __init__(self, drafts: "PooledDrafts", salt: bytes, reserved: int) -> None:
        """``salt``: prompts are shared with sequences of the same one. ``reserved``: tokens that it can have."""
        self.ended: str | None = None
        self.drafts, self._salt, self._reserved = drafts, salt, reserved
        self._tokens: list[int] = []
        self._held = 0  # of these, the first that the sequence has
        self._ahead: deque[int] = deque()  # what it has behind them, while that is what came
        self._sequence: PoolSequence | SingleSequence | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that are sure."""
        for token in tokens:
            if token >= self.drafts.model.config.vocab_size:
                self.ended = f"token {token} is not in the draft model's vocabulary"
            if self._held == len(self._tokens) and self._ahead and self._ahead[0] == token:
                self._ahead.popleft()
                self._held += 1
            else:
                self._ahead.clear()
            self._tokens.append(token)

    @property
    def sequence(self) -> PoolSequence | SingleSequence:
        """Of the draft model's pool, once it was opened."""
        assert self._sequence is not None
        return self._sequence

    @property
    def is_behind(self) -> bool:
        """Whether tokens have to be fed before it can draft."""
        most = min(MOST_BEHIND, self.drafts.pool.prefill_step_size)
        return self.ended is None and len(self._tokens) - self._held > most

    @property
    def room(self) -> int:
        """Tokens that its sequence has room for."""
        return self.sequence.max_tokens - self.sequence.length

    def propose(self, count: int) -> list[int]:
        """At most ``count`` tokens that may follow; none once :attr:`ended`."""
        while self.is_behind:
            self.drafts.feed(self)
        return self.drafts.propose([self], [count])[0]

    def opened(self) -> bool:
        """Take pages, unless it has them. Returns whether anything can be drafted."""
        if self.ended is None and len(self._tokens) > self._reserved:
            self.ended = f"the draft model's context, {self._reserved} tokens, is full"
        if self.ended is not None:
            return False
        if self._sequence is None:
            try:
                self._sequence = self.drafts.pool.sequence(
                    self._reserved, self._tokens, salt=self._salt, whole_pages=False
                )
            except ContextError as error:
                self.ended = str(error)
                return False
            self._held = self._sequence.length
        return True

    def go_back(self) -> int:
        """Take back what was drafted and did not come. Returns how many of the tokens its sequence has."""
        sequence = self.sequence
        self._ahead.clear()
        self._held = min(self._held, sequence.length, len(self._tokens) - 1)  # one has to be fed for there to be logits
        if not sequence.can_trim_to(self._held):
            self._held = 0
        sequence.trim_to(self._held)
        return self._held

    def is_ready(self) -> bool:
        """Whether it can draft now. Where a window had moved on too far to be taken back, all is to be fed again."""
        self.go_back()
        return not self.is_behind

    def rest(self) -> list[int]:
        """Tokens that are to be fed."""
        return self._tokens[self.go_back() :]

    def chunk(self) -> list[int]:
        """Of these the first, at most a chunk, and never the last one."""
        most = min(CHUNK, self.drafts.pool.prefill_step_size)
        return self._tokens[:-1][self.go_back() :][:most]

    def has_fed(self, count: int) -> None:
        """So many more of its tokens were committed."""
        self._held += count
        if self._held + 1 == len(self._tokens):
            self.sequence.share_prefix()

    def drafted(self, draft: Sequence[int]) -> None:
        """This was drafted behind its tokens, all of which were fed; the last one drafted was not."""
        self._held = len(self._tokens)
        self._ahead.extend(draft[: self.sequence.length - self._held])

    def release(self, *, failed: bool = False) -> None:
        """Give its pages back, once; later sequences may begin with what it has, unless that failed."""
        if self in self.drafts.drafters:
            self.drafts.drafters.remove(self)
        sequence, self._sequence = self._sequence, None
        self.ended = self.ended or "the answer has ended"
        if sequence is not None:
            if not failed:
                sequence.share_prefix(last_page=True)
            sequence.release()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PooledDrafts(Drafts):
    """Drafts of a model for sequences side by side, those of one scheduler.

    Attributes:
        model: drafts; its tokenizer was compared.
        pool: the model's, of as many sequences as the pool of the model that is drafted for; nobody else uses it.
        vocab_size: of the model that is drafted for. No id is proposed that it does not have.
        num_draft_tokens: a step, at most.
        drafters: of answers that have not ended.
    """

    source: str = "model"
    model: LanguageModel
    pool: Pool | SinglePool
    vocab_size: int
    num_draft_tokens: int
    drafters: list[PooledDrafter] = field(default_factory=list)

    @property
    def asked(self) -> tuple[str, str]:
        """The argument that asks for them, and its value in words; for a refusal."""
        return "draft_model", "is given"

    def describe(self) -> str:
        """The reservation of :attr:`pool` in a line."""
        pool = self.pool
        tokens = pool.max_seq_len if isinstance(pool, SinglePool) else pool.num_pages * pool.page_size
        return f"{tokens} tokens reserved, {format_bytes(pool.nbytes)}"

    @property
    def most(self) -> int:
        """Tokens that are drafted a step, at most."""
        return self.num_draft_tokens

    def for_answer(self, salt: bytes, tokens: int) -> PooledDrafter:
        """A drafter for an answer, of as many tokens as it can have at most. It must be released."""
        longest = self.pool.max_seq_len
        made = PooledDrafter(self, salt, min(tokens, longest))
        self.drafters.append(made)
        return made

    def release(self, drafter: Drafter) -> None:
        """Give back the pages of one of :attr:`drafters`."""
        assert isinstance(drafter, PooledDrafter)
        drafter.release()

    def feed(self, drafter: PooledDrafter) -> None:
        """Feed a chunk of what a sequence is behind. Where it fails, no answer under way drafts any more."""

        def feed() -> None:
            self._append(drafter.sequence, chunk := drafter.chunk())
            drafter.has_fed(len(chunk))

        if drafter.opened() and drafter.is_behind:
            self._computed(feed, None)

    def propose(self, drafters: Sequence[PooledDrafter], counts: Sequence[int]) -> list[list[int]]:
        """At most ``counts`` tokens that may follow each sequence. Where it fails, no answer under way drafts any more.

        Args:
            drafters: none of them is behind.
            counts: at least 1 each.
        """
        able = [n for n, each in enumerate(drafters) if each.opened() and each.is_ready()]
        found: list[list[int]] = [[] for _ in drafters]
        chosen = [drafters[n] for n in able]
        if able:
            none: list[list[int]] = []
            drafts = self._computed(lambda: self._draft(chosen, [counts[n] for n in able]), none)
            for n, draft in zip(able, drafts, strict=False):  # none, where it failed
                found[n] = draft
        return found

    def _draft(self, drafters: Sequence[PooledDrafter], counts: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in drafters]
        rests = [each.rest() for each in drafters]
        widest = max(map(len, rests))
        # Every sequence has to have room for as many; one near its end drafts no more.
        left = [n for n, each in enumerate(drafters) if each.room >= widest]
        if not left:
            return found
        rows = [rests[n] for n in left]
        batch = self.pool.batch([drafters[n].sequence for n in left])
        logits = self.model.every_logits(mx.array([row + row[-1:] * (widest - len(row)) for row in rows]), batch)
        ends = mx.array([len(row) - 1 for row in rows])[:, None, None]
        # (B, S, vocab) -> (B, vocab), the last of each row's own
        logits = mx.take_along_axis(logits, ends, axis=1).squeeze(1)
        while True:
            guesses = cast(list[int], mx.argmax(logits, axis=-1).tolist())
            batch.commit([len(row) for row in rows], ids=rows)
            for n, guess in zip(left, guesses, strict=True):
                if guess < self.vocab_size:
                    found[n].append(guess)
                else:
                    counts = [*counts[:n], 0, *counts[n + 1 :]]
            left = [n for n in left if len(found[n]) < counts[n] and drafters[n].room]
            if not left:
                break
            rows = [found[n][-1:] for n in left]
            batch = self.pool.batch([drafters[n].sequence for n in left])
            logits = self.model.next_logits(mx.array(rows), batch)
        for n, draft in enumerate(found):
            if draft:
                drafters[n].drafted(draft)
        return found

    def _append(self, sequence: PoolSequence | SingleSequence, ids: list[int]) -> None:
        batch = self.pool.batch([sequence])
        mx.eval(self.model.feed(mx.array([ids]), batch))
        mx.clear_cache()  # as of a prompt's chunks
        batch.commit(ids=[ids])

    def _computed(self, work: Callable[[], T], failed: T) -> T:
        """Do what computes with the draft model; ``failed``: where that is not possible."""
        try:
            return work()
        except Exception as error:
            reason = f"the draft model failed: {one_line(error)}"
        for each in [*self.drafters]:
            each.ended = reason
            each.release(failed=True)
        return failed
