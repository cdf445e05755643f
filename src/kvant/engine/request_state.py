"""The state of a request in a scheduler, and of each of its answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.cache.pool import Pool, PoolSequence
from kvant.cache.pool_batch import PoolBatch
from kvant.engine.drafts import Drafting
from kvant.engine.processors import KINDS, Change
from kvant.engine.prompt_logprobs import MAX_CHUNK, PromptLogprobs
from kvant.engine.prompt_prefix import PromptPrefix
from kvant.engine.request import CHUNK, FinishReason, Request, check_count, limit_in_words
from kvant.engine.row_sampling import Row, check_options
from kvant.engine.sampler import Sampler, for_a_run, for_answer, greedy, is_ours
from kvant.errors import ContextError
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit
from kvant.text.grammar import Grammar, Matcher
from kvant.text.prompt import token_ids


class PromptState(ABC):
    """The state of a request until its prompt is fed."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.open = set(range(request.answers))  # the numbers of the answers that have not ended
        # Reserved for the answers until they run. The prompt is fed to the first one.
        self.sequences: list[PoolSequence] = []
        self.cached = 0  # tokens of the prompt from a shared prefix

    @property
    def sequences_needed(self) -> int:
        """Return how many sequences must be free before its prompt is fed."""
        return len(self.open)

    @property
    @abstractmethod
    def left(self) -> int:
        """Return how many tokens remain to be fed."""

    @abstractmethod
    def reserve(self, pool: Pool) -> None:
        """Open sequences for it."""

    @abstractmethod
    def feed(self, model: LanguageModel, pool: Pool, room: int) -> mx.array | None:
        """Feed a chunk of at most ``room`` tokens.

        Return the logits (1, vocab) at the end of a prompt that is continued, otherwise None.
        """

    def fetch(self) -> bool:
        """Read some of its prompt from disk; return whether there is more to read."""
        return False

    @abstractmethod
    def share(self, **options: bool) -> None:
        """Share the fed tokens with later requests; see :meth:`PoolSequence.share_prefix` for options."""

    def release(self) -> None:
        """Release its sequences."""
        for sequence in self.sequences:
            sequence.release()
        self.sequences.clear()


class RequestState(PromptState):
    """A request whose answers are generated, and its progress."""

    def __init__(
        self,
        request: Request,
        model: LanguageModel,
        pool: Pool,
        max_batch: int,
        *,
        is_exact: bool = False,
    ) -> None:
        """Check whether an otherwise idle pool could serve the request, in any thread.

        ``is_exact``: end chunks at multiples of 128, and share only pages computed in such chunks.
        """
        vocab_size = model.config.vocab_size
        _check_request(request, vocab_size, max_batch)
        super().__init__(request)
        self.is_exact = is_exact
        self.sampler = for_a_run(greedy if request.sampler is None else request.sampler)
        self.grammar, self.processors = _split_grammar(request)
        check_options(self.sampler, self.processors, vocab_size)
        # whether sampling calls the caller's functions
        self.calls_out = not is_ours(self.sampler) or any(
            not isinstance(each, KINDS) for each in self.processors
        )
        self.stop_tokens = frozenset(request.stop_tokens)
        if not all(type(token) is int for token in self.stop_tokens):
            raise ValueError(f"stop_tokens is {request.stop_tokens!r:.80}; expected token ids")
        if self.grammar is not None:
            self.grammar.check(vocab_size, self.stop_tokens)
        self.ids = token_ids(request.prompt, vocab_size)  # of the cache and the prompt
        self.cache = None  # the request's own, with the first of these ids
        if request.cache is not None:
            self.cache = model.check_cache(request.cache)
            mx.eval(self.cache.arrays)  # another thread cannot evaluate this thread's lazy arrays
            self.ids = self.cache.ids + self.ids
            # Ids in a file may be out of range, and processors index logits with them.
            if self.processors and max(self.ids) >= vocab_size:
                raise ValueError(
                    f"the cache holds token {max(self.ids)}; the model knows 0 to {vocab_size - 1}"
                )
        self.cache_tokens = 0 if self.cache is None else self.cache.offset
        self._set_limits(model, pool)
        is_shared = self.cache is None and not request.prompt_logprobs
        self.prefix = PromptPrefix(
            self.ids,
            self.ids if is_shared else (),
            request.salt,
            self.stop_tokens,
            pool,
            unit=CHUNK if is_exact else 1,
        )
        self.logprobs = PromptLogprobs(self.ids, request.top_logprobs) if request.prompt_logprobs else None
        self.start = 0  # number of first tokens from a shared prefix or the request's own cache
        # number of first tokens computed in whole chunks of 128, here or in the shared prefix
        self.exact = 0

    def _set_limits(self, model: LanguageModel, pool: Pool) -> None:
        """Set how many tokens an answer may have; raise a ContextError if the request never fits."""
        context = context_limit(model, pool.max_seq_len)
        assert context is not None
        length = len(self.ids)
        if length > context:
            used = pool.shared_with(self.ids) or self.cache_tokens
            note = f", {used} of them used" if used else ""
            raise ContextError(
                f"the prompt has {length - used} tokens; {limit_in_words(model, context)}{note}"
            )
        # One more than the room, because the last token is sampled and not fed.
        room = context - length + 1
        most = self.request.max_tokens
        self.max_tokens = room if most == -1 else min(room, most)  # of an answer
        self.limit_reason: FinishReason = "length" if self.max_tokens == most else "context"
        self.reserved = min(length + self.max_tokens, context)  # tokens of each answer's sequence
        needed = pool.pages_needed(self.reserved)
        needed += (self.request.answers - 1) * pool.pages_needed(self._unshared_tokens(pool))
        if needed > pool.num_pages:
            raise ContextError(
                f"{length} tokens of a prompt and {self.request.answers} answers of up to {self.max_tokens} "
                f"need {needed} pages of {pool.page_size} tokens; the pool has {pool.num_pages}"
            )

    def _unshared_tokens(self, pool: Pool) -> int:
        """Return how many of an answer's reserved tokens are not shared with the other answers."""
        # With a window each answer's pages move separately.
        shared = 0 if pool.has_windows else len(self.ids) // pool.page_size * pool.page_size
        return max(1, self.reserved - shared)

    @property
    def left(self) -> int:
        return len(self.ids) - self.sequences[0].length

    def fetch(self) -> bool:
        return self.prefix.fetch(self.reserved)

    def reserve(self, pool: Pool) -> None:
        """Open a sequence for each answer. The first one starts with the shared prefix."""
        try:
            first = self.prefix.open_sequence(self.reserved)
            self.sequences.append(first)
            for _ in range(len(self.open) - 1):  # to reserve room for forks
                self.sequences.append(pool.sequence(self._unshared_tokens(pool)))
            if self.cache is None:
                self.start = self.cached = self.exact = first.length
                self.prefix.note_shared(first)
                return
            first.load(self.cache.sequence)
            self.start = self.cache_tokens
            if first.ids != self.ids[: self.start]:
                raise ValueError("the request's cache was changed after it was submitted")
        except BaseException:
            self.release()
            raise

    def feed(self, model: LanguageModel, pool: Pool, room: int) -> mx.array | None:
        """Feed a chunk of at most ``room`` tokens; after the last one, return its logits (1, vocab)."""
        sequence = self.sequences[0]
        start = sequence.length
        end = self._chunk_end(start, room, model)
        if start == self.start:
            self._report(start)
        batch = pool.batch([sequence])
        self._give_embeddings(batch, start, end)
        is_last = end == len(self.ids)
        chunk = self.ids[start:end]
        logits = None
        if self.logprobs is not None:
            logits = self.logprobs.feed(model, batch, start, end)
        elif is_last:
            logits = model.next_logits(mx.array([chunk]), batch)
            mx.eval(logits)
        else:
            mx.eval(model.feed(mx.array([chunk]), batch))
            mx.clear_cache()  # free activations; without it MLX kept four times as much (measured)
        batch.commit(ids=[chunk])
        if self.exact == start and len(chunk) == CHUNK:
            self.exact = end
        self._report(end)
        self.prefix.chunk_fed(sequence, self._shareable)
        return logits if is_last else None

    def _chunk_end(self, start: int, room: int, model: LanguageModel) -> int:
        """Return the length of the prompt after its next chunk."""
        if self.logprobs is not None:
            room = min(room, MAX_CHUNK)
        end = (start // CHUNK + 1) * CHUNK if self.is_exact else start + room
        end = min(end, self.prefix.next_checkpoint(start))
        if end == len(self.ids) and model.feeds_last_token_separately:
            end = max(end - 1, start + 1)
        if self.request.embeddings is not None:  # a chunk has ids or embeddings, not both
            first = len(self.ids) - len(self.request.embeddings)
            end = min(end, first) if start < first else end
        return end

    def _give_embeddings(self, batch: PoolBatch, start: int, end: int) -> None:
        """Pass the request's own embeddings of a chunk, if any, to the next step."""
        rows = self.request.embeddings
        first = len(self.ids) - (0 if rows is None else len(rows))
        if rows is not None and start >= first:
            batch.give_embeddings(rows[None, start - first : end - first])

    def _report(self, length: int) -> None:
        """Report to the caller how much of the prompt was fed."""
        if self.request.progress is not None:
            self.request.progress(length - self.start, len(self.ids) - self.start)

    @property
    def _shareable(self) -> int | None:
        """Return how many first tokens others may share; None: all."""
        return self.exact if self.is_exact else None

    def share(self, **options: bool) -> None:
        self.prefix.share(self.sequences[0], self._shareable, **options)

    def begin_answers(self) -> list["Answer"]:
        """Fork the prompt's sequence for every answer."""
        first = self.sequences[0]
        self.share()
        answers = []
        for place, number in enumerate(sorted(self.open)):
            if place:
                self.sequences[place].release()
                self.sequences[place] = first.fork(self.reserved)
            sampler = for_answer(self.sampler, number)
            answer = Answer(self, number, sampler, self.sequences[place], list(self.ids))
            if self.grammar is not None:
                answer.matcher = self.grammar.matcher()
                for token in self.request.begun:
                    answer.matcher.take(token)
            if self.request.drafts is not None:
                answer.drafting = Drafting(
                    self.request.drafts, self.request.salt, self.reserved, answer.sequence
                )
            answers.append(answer)
        for sequence in self.sequences[len(answers) :]:  # of answers cancelled since
            sequence.release()
        return answers


@dataclass(eq=False, slots=True)
class Answer:
    """An answer that gets a token every step."""

    state: RequestState
    number: int
    sampler: Sampler
    sequence: PoolSequence
    tokens: list[int]  # of the cache, the prompt and the answer
    matcher: Matcher | None = None  # if the answer follows a grammar
    drafting: Drafting | None = None  # if it may draft
    _seen: mx.array | None = None  # the tokens last passed to processors

    def row(self, after: Sequence[int] | mx.array = (), *, mask: bytes | None = None) -> Row:
        """Return how to sample the token after its tokens and ``after``; an array need not be evaluated."""
        tokens: Sequence[int] | mx.array = self.tokens
        processors = self.state.processors
        position = len(self.tokens) + len(after)
        if processors and isinstance(after, mx.array):
            is_known = self._seen is not None and self._seen.size == len(tokens)
            shareable_ids = self._seen if is_known else mx.array(self.tokens)
            assert shareable_ids is not None
            tokens = self._seen = mx.concatenate([shareable_ids, after.astype(shareable_ids.dtype)])
        elif processors:
            tokens = [*tokens, *after]
        request = self.state.request
        return Row(
            self.sampler, processors, position, tokens, mask, request.top_logprobs, request.keep_logprobs
        )

    @property
    def left(self) -> int:
        """Return how many more tokens it may get."""
        return len(self.state.ids) + self.state.max_tokens - len(self.tokens)

    @property
    def sees_tokens(self) -> bool:
        """Return whether something looks at its tokens one by one, and must not see rejected drafts."""
        return self.state.calls_out or self.matcher is not None

    @property
    def is_sequential(self) -> bool:
        """Return whether each token must be read before the next one is sampled.

        In a shared pool this includes answers that call the caller's functions, so that an error in these
        affects no other answer.
        """
        return self.matcher is not None or (self.state.calls_out and not self.sequence.pool.single)

    def end_drafts(self) -> None:
        """Stop drafting."""
        drafting = self.drafting
        self.drafting = None
        if drafting is not None:
            drafting.drafter.release()

    def release(self) -> None:
        """Release its sequence and its drafter."""
        self.sequence.release()
        self.end_drafts()


def _check_request(request: Request, vocab_size: int, max_batch: int) -> None:
    """Raise a ValueError for fields that are out of range."""
    check_count("max_tokens", request.max_tokens, or_minus_one=True)
    check_count("answers", request.answers)
    if request.answers > max_batch:
        raise ValueError(f"answers is {request.answers}; the batch has room for {max_batch}")
    if type(request.top_logprobs) is not int or not 0 <= request.top_logprobs <= vocab_size:
        raise ValueError(f"top_logprobs is {request.top_logprobs!r}; expected 0 to {vocab_size}")
    if not isinstance(request.salt, bytes):
        raise ValueError(f"salt is {request.salt!r:.80}; expected bytes")


def _split_grammar(request: Request) -> tuple[Grammar | None, tuple[Change, ...]]:
    """Return the request's grammar, which is always applied last, and its other processors."""
    grammars = [each for each in request.logits_processors if isinstance(each, Grammar)]
    if len(grammars) > 1:
        raise ValueError(f"logits_processors has {len(grammars)} grammars; expected one at most")
    others = tuple(each for each in request.logits_processors if not isinstance(each, Grammar))
    return (grammars[0] if grammars else None), others
