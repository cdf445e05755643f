"""A run that drafts: several tokens a step where they were guessed, the same text."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.engine.drafting.choice import SIZES, costs_of
from kvant.engine.drafting.drafter import known_part
from kvant.engine.drafting.drafts import Drafts
from kvant.engine.draw import SeededSampler, greedy
from kvant.engine.kernel_failure import kernel_failures
from kvant.engine.processors import KINDS
from kvant.engine.row_sampling import Row, sample_rows
from kvant.engine.run import Run
from kvant.engine.step import can_compile
from kvant.errors import ArgumentError
from kvant.models import LanguageModel

LARGEST_STEP = SIZES[-1] + 1


class DraftedRun(Run):
    """As :class:`Run`, with drafts.

    Each position is sampled as without drafts, with its own key, and a drafted token is accepted where it is the one
    that was sampled. So the same seed gives the same text, but for rounding: a step of several tokens and several steps
    of one round differently. Samplers, processors and grammars see every token in order and none that was rejected.

    What is verified is one step of the cache. Its tokens are committed one by one, as they are handed out.
    """

    _most_tokens = LARGEST_STEP

    def __init__(
        self, model: LanguageModel, prompt: Sequence[int], cache: Sequence[KVCache], *, drafts: Drafts, **options: Any
    ) -> None:
        """``drafts``: where they come from; other arguments and errors as those of :class:`Run`."""
        super().__init__(model, prompt, cache, **options)
        check_drafts(drafts, self._cache)
        own = isinstance(self._sampler, SeededSampler) or self._sampler is greedy
        self._at_once = own and all(type(processor) in KINDS for processor in self._processors)
        # Over ranks a step is computed where it is begun.
        self._at_begin = self._cache.divided
        # A step that was built, and not computed, is dropped without a trace; a caller's functions would remember it.
        self._can_drop = self._at_once and not self._at_begin
        self._drafter = drafts.beside(self._cache, self._cache.offset + len(self.prompt) + self._limit).drafter()
        formats = tuple(sorted({str(layer.format) for layer in self._cache.layers}))
        compiled = can_compile(model, self._cache, self._compiled)
        costs = costs_of(model, (self._drafter.name, self._at_once, compiled, formats))
        self._choice = drafts.choice(costs, self._drafter)
        self.drafts = self._choice.counts
        self._base = 0  # tokens of the cache after the prompt
        self._learnt = 0  # tokens of the answer that the drafter knows
        self._rows: _Rows | None = None
        self._ready: float | None = None  # when the token was ready whose step, of one token, is under way
        self._alone = False  # whether that was begun after it was ready, not before

    def _settle_last(self) -> None:
        first = not self.generated and self._next is None
        super()._settle_last()
        if first:
            self._base = self._cache.offset
            self._choice.learn(self._drafter, self._cache.ids[0])
        if self._rows is not None and self._cache.step is None and (rest := self._rows.rest()):
            self._cache.resume_step(mx.array([rest]))

    def _take_next(self) -> tuple[int, mx.array]:
        self._choice.counts.tokens += bool(self.generated)
        if self._rows is not None:
            return self._take_row(self._rows)
        began = time.perf_counter()
        if self._at_begin:
            self._measure()
        self.from_draft = False
        self._choice.counts.steps += bool(self.generated)
        if self._choice.may_draft(self._drafter.match + 1):
            return self._take_or_draft()
        token_id, logprobs = super()._take_next()
        if not self._at_begin:
            self._measure()
        self._ready, self._alone = began if self._at_begin else time.perf_counter(), False
        self._learn(token_id)
        return token_id, logprobs

    def _take_or_draft(self) -> tuple[int, mx.array]:
        """As :meth:`_take_next`. The step begun while the token is computed is dropped where a draft follows."""
        cache, tokens = self._cache, self._tokens
        assert self._next is not None
        token, logprobs = self._next
        following = held = None
        if self._can_drop and len(self.generated) + 1 < self._limit:
            held = cache.hold()
            following = self._feed(token)
        token_id = self._read(token, logprobs)
        if not self._at_begin:
            self._measure()
        if following is None or held is None:
            self._go_on(token, token_id)
            return token_id, logprobs
        began = time.perf_counter()
        self._learn(token_id)
        if draft := self._draft():
            cache.put_back(held)
            following = held = None  # or MLX would copy the buffers
            self._tokens = tokens
            self._verify(token, token_id, draft, began)
        else:
            del held  # or MLX would copy the buffers
            self._queue(following)
            self._next, self._fed = following, cache.step
            self._ready, self._alone = began, False
        return token_id, logprobs

    def _measure(self) -> None:
        """A token of a step of one is ready."""
        if self._ready is not None:
            self._choice.stepped(time.perf_counter() - self._ready, alone=self._alone)

    def _go_on(self, token: mx.array, token_id: int) -> None:
        """Begin the step of a token (1,) that is known, with a draft where one pays."""
        began = time.perf_counter()
        self._learn(token_id)
        if len(self.generated) + 1 >= self._limit or token_id in self._stop_tokens:
            self._cache.end_step()
            self._next = self._rows = self._ready = None
        elif draft := self._draft():
            self._verify(token, token_id, draft, began)
        else:
            following = self._feed(token)
            self._queue(following)
            self._next, self._rows = following, None
            self._ready, self._alone = began, not self._at_begin
        self._fed = self._cache.step

    def _draft(self) -> list[int]:
        """Tokens that may follow, as many as pay."""
        choice, drafter = self._choice, self._drafter
        # A step gives one token more than were accepted.
        count = choice.count(drafter.match, self._limit - len(self.generated) - 2)
        draft = known_part(drafter.propose(count), self._model.config.vocab_size) if count else []
        return draft[: choice.count(drafter.match, len(draft))]

    def _verify(self, token: mx.array, token_id: int, draft: list[int], began: float) -> None:
        """Begin the step of a token (1,) and the draft behind it; queued, with the sampling where that is at once."""
        cache = self._cache
        if self._tokens is not None:
            self._tokens = mx.concatenate([self._tokens, token])
        step, ids = self._compiled_step(), [token_id, *draft]
        picked, is_traced = None, False
        with kernel_failures(cache):
            if step is None or not step.takes(len(ids)):
                logits = self._model.every_logits(mx.array([ids]), cache).squeeze(0)
            else:
                traced = step.compilations
                *sampled, logits = step(ids)
                picked, is_traced = sampled[0] if step.samples else None, step.compilations > traced
        if picked is None and self._at_once:
            known = [*cache.ids[0], token_id] if self._processors else []
            asked = [
                Row(self._sampler, self._processors, cache.offset + 1 + place, [*known, *draft[:place]])
                for place in range(len(draft) + 1)
            ]
            picked, logits = sample_rows(logits, asked)
        self._queue([logits] if picked is None else [picked, logits])
        self._rows = _Rows(draft, began, logits, picked, is_traced)
        self._next = self._ready = None
        self._fed = cache.step

    def _take_row(self, rows: "_Rows") -> tuple[int, mx.array]:
        """The token of the next position that was verified; where that ends what was accepted, a step is begun."""
        began, place = time.perf_counter(), rows.place
        row = rows.logits[place : place + 1]
        if rows.picked is None:
            token, logprobs = self._sample(row, self._cache.offset)
        else:
            token, logprobs = rows.picked[place : place + 1], row.squeeze(0)
        self._queue([token, logprobs])
        token_id = self._read(token, logprobs)
        rows.seconds += time.perf_counter() - (began if place else rows.began)
        self.from_draft = place < len(rows.draft) and token_id == rows.draft[place]
        counts = self._choice.counts
        counts.accepted += self.from_draft
        if not place:
            counts.steps += 1
            counts.drafted += len(rows.draft)
        if self.from_draft:
            rows.place += 1
            self._learn(token_id)
            if self._tokens is not None:
                self._tokens = mx.concatenate([self._tokens, token])
            self._fed = self._cache.step
        else:
            if not rows.is_traced:  # what it took says nothing of the next
                self._choice.verified(len(rows.draft), place, rows.seconds)
            self._go_on(token, token_id)
        return token_id, logprobs

    def _learn(self, token_id: int) -> None:
        """Let the drafter know the token that is handed out next, once."""
        if self._learnt == len(self.generated):
            self._choice.learn(self._drafter, [token_id])
            self._learnt += 1


def check_drafts(drafts: Drafts | None, cache: ModelCache) -> None:
    """Refuse drafts through a cache that cannot take back a part of a step, and a draft model beside several ranks."""
    if drafts is None:
        return
    argument, value = drafts.asked
    if cache.divided and drafts.source != "prompt":
        raise ArgumentError(argument, f"{value}; several ranks draft from prompt and answer alone")
    back = min((limit.tokens for limit in cache.layers[0].sequence.limits), default=LARGEST_STEP)
    if back < LARGEST_STEP:
        kept = f"windows take back {back}" if back else "linear or convolution layers have states that cannot"
        raise ArgumentError(
            argument, f"{value}; up to {LARGEST_STEP} tokens of a step are taken back, this model's {kept}"
        )


def make_run(
    drafts: Drafts | None, model: LanguageModel, prompt: Sequence[int], cache: Sequence[KVCache], **options: Any
) -> Run:
    """A run, with drafts or without; arguments and errors as those of :class:`DraftedRun`."""
    if drafts is None:
        return Run(model, prompt, cache, **options)
    return DraftedRun(model, prompt, cache, drafts=drafts, **options)


@dataclass(slots=True)
class _Rows:
    """Positions that are verified in one step, after a token whose draft this is.

    Attributes:
        place: positions whose token was taken.
        logits: (S, vocab); log-probabilities where ``picked`` has the tokens (S,) already.
        began, seconds: when, and how long what was done of it took.
        is_traced: it took the time of tracing a compiled step too.
    """

    draft: list[int]
    began: float
    logits: mx.array
    picked: mx.array | None
    is_traced: bool
    place: int = 0
    seconds: float = 0.0

    def rest(self) -> list[int]:
        """Drafted tokens that are fed and not handed out yet."""
        return self.draft[self.place :]
