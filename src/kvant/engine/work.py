"""Requests under way in a scheduler, and their answers."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.cache.pool import Pool, PoolSequence
from kvant.cache.pool_batch import PoolBatch
from kvant.engine.drafts import Drafter
from kvant.engine.processors import KINDS
from kvant.engine.request import CHUNK, FinishReason, Request, check_count, limit_in_words
from kvant.engine.row_sampling import Picked, Row, check_options, read_tokens
from kvant.engine.sampler import Sampler, for_a_run, for_answer, greedy, is_ours
from kvant.errors import ContextError
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit
from kvant.text.grammar import Grammar, Matcher
from kvant.text.prompt import token_ids

logger = logging.getLogger("kvant.engine")
SAID = 8  # tokens that are said of a prompt that is not shared
READ_LOGITS = 32  # tokens of a prompt whose logits are held at once, where each is read
READ_AT_ONCE = 2048  # tokens that a drafter reads in a step: a long prompt holds nobody up
FETCH_PAGES, MIN_FETCHES = 4, 8  # that are read from disk in a step; steps that may read, beside one a page
APART = 2048  # tokens at least between places that are kept in the middle of a prompt


class Work:
    """A request that a pool can serve, and how far it is."""

    def __init__(
        self,
        request: Request,
        model: LanguageModel,
        pool: Pool,
        max_batch: int,
        *,
        is_exact: bool = False,
    ) -> None:
        """Check what the pool can serve once everything else is gone. Any thread may.

        ``is_exact``: chunks end at multiples of 128, and only pages that such chunks computed are shared.
        """
        check_count("max_tokens", request.max_tokens, or_minus_one=True)
        check_count("answers", request.answers)
        if request.answers > max_batch:
            raise ValueError(f"answers is {request.answers}; the batch has room for {max_batch}")
        vocab_size = model.config.vocab_size
        if type(request.top_logprobs) is not int or not 0 <= request.top_logprobs <= vocab_size:
            raise ValueError(f"top_logprobs is {request.top_logprobs!r}; expected 0 to {vocab_size}")
        if not isinstance(request.salt, bytes):
            raise ValueError(f"salt is {request.salt!r:.80}; expected bytes")
        self.request, self.is_exact = request, is_exact
        self.sampler = for_a_run(greedy if request.sampler is None else request.sampler)
        grammars = [each for each in request.logits_processors if isinstance(each, Grammar)]
        if len(grammars) > 1:
            raise ValueError(f"logits_processors has {len(grammars)} grammars; expected one at most")
        self.grammar = grammars[0] if grammars else None  # is applied last, wherever it stands
        self.processors = tuple(each for each in request.logits_processors if not isinstance(each, Grammar))
        check_options(self.sampler, self.processors, vocab_size)
        # sampling calls functions of the caller's
        self.calls_out = not is_ours(self.sampler) or any(
            not isinstance(each, KINDS) for each in self.processors
        )
        self.stop_tokens = frozenset(request.stop_tokens)
        if not all(type(token) is int for token in self.stop_tokens):
            raise ValueError(f"stop_tokens is {request.stop_tokens!r:.80}; expected token ids")
        if self.grammar is not None:
            self.grammar.check(vocab_size, self.stop_tokens)
        self.ids = token_ids(request.prompt, vocab_size)  # of the cache's tokens and the prompt's
        self.cache, self.held = None, 0  # the request's own, which holds the first of these ids, and so many
        if request.cache is not None:
            self.cache = model.check_cache(request.cache)
            mx.eval(self.cache.arrays)  # another thread could not compute what this one left undone
            self.ids, self.held = self.cache.ids + self.ids, self.cache.offset
            # of a file; processors read logits at these places
            if self.processors and max(self.ids) >= vocab_size:
                raise ValueError(
                    f"the cache holds token {max(self.ids)}; the model knows 0 to {vocab_size - 1}"
                )
        ids, context = self.ids, context_limit(model, pool.max_seq_len)
        assert context is not None
        if len(ids) > context:
            begun = pool.shared_with(ids) or self.held
            used = f", {begun} of them used" if begun else ""
            raise ContextError(
                f"the prompt has {len(ids) - begun} tokens; {limit_in_words(model, context)}{used}"
            )
        # One more than there is room for: the last one is sampled and not fed.
        room = context - len(ids) + 1
        # tokens of an answer at most
        self.limit = room if request.max_tokens == -1 else min(room, request.max_tokens)
        # why it ends there
        self.full: FinishReason = "length" if self.limit == request.max_tokens else "context"
        # tokens that the sequence of each answer has room for
        self.reserved = min(len(ids) + self.limit, context)
        needed = pool.pages_needed(self.reserved) + (request.answers - 1) * pool.pages_needed(
            self._own_tokens(pool)
        )
        if needed > pool.num_pages:
            raise ContextError(
                f"{len(ids)} tokens of a prompt and {request.answers} answers of up to {self.limit} need "
                f"{needed} "
                f"pages of {pool.page_size} tokens; the pool has {pool.num_pages}"
            )
        self.unit = CHUNK if is_exact else 1
        # chunks end there
        self.places, self.heads = _places(ids, self.stop_tokens, pool.checkpoints, self.unit)
        self.open = set(range(request.answers))  # the numbers of the answers that have not ended
        self.sequences: list[PoolSequence] = []  # reserved for its answers until they run; the first is fed
        self.start = 0  # tokens at the beginning that a shared prefix had, or the request's own cache
        self.cached = 0  # of these, those of the prompt
        # tokens at the beginning that whole chunks of 128 computed, here or where they are shared from
        self.exact = 0
        self.miss = ""  # why no more was shared, as of :class:`Token`
        self.fetches = 0  # times that something was read from disk
        self.read: list[Picked] = []  # tokens of the prompt behind the first, where they are wanted

    @property
    def left(self) -> int:
        """Tokens of the prompt that are to be fed."""
        return len(self.ids) - self.sequences[0].length

    @property
    def known(self) -> Sequence[int]:
        """What its first sequence may share the beginning of."""
        return () if self.cache is not None or self.request.prompt_logprobs else self.ids

    def _own_tokens(self, pool: Pool) -> int:
        """Of the tokens reserved for an answer those that it does not share with the others of its prompt."""
        # Through a window every answer moves in pages of its own.
        shared = 0 if pool.has_windows else len(self.ids) // pool.page_size * pool.page_size
        return max(1, self.reserved - shared)

    def fetch(self, pool: Pool) -> bool:
        """Read a part of its beginning from disk. Returns whether there is more; not for ever, if others
        need pages.
        """
        if pool.disk is None or not pool.fits(self.reserved):
            return False
        self.fetches += 1
        again = pool.prefixes.fetch(
            self.known, salt=self.request.salt, whole_pages=self.is_exact, most=FETCH_PAGES
        )
        return again and self.fetches <= MIN_FETCHES + len(self.ids) // pool.page_size * len(pool.parts)

    def reserve(self, pool: Pool) -> None:
        """Open its sequences, with the beginning that others have fed."""
        ids, sequences, reserved, known = self.ids, self.sequences, self.reserved, self.known
        try:
            whole_pages = self.is_exact  # chunks begin at their ends then
            sequences.append(pool.sequence(reserved, known, salt=self.request.salt, whole_pages=whole_pages))
            for _ in range(len(self.open) - 1):  # places that are kept for forks
                sequences.append(pool.sequence(self._own_tokens(pool)))
            first = sequences[0]
            if self.cache is None:
                self.start = self.cached = self.exact = first.length
                if known and not pool.single:
                    self._explain(pool)
                    self._add_head(pool)
                return
            first.load(self.cache.sequence)
            self.start = self.held
            if first.ids != ids[: self.held]:
                raise ValueError("the request's cache was changed after it was submitted")
        except BaseException:
            self.release()
            raise

    def _explain(self, pool: Pool) -> None:
        """Note why no more of the prompt was shared, and say it to whoever debugs, by its token ids."""
        shared = self.cached
        stored = pool.prefixes.stored_after(self.ids[:shared], self.request.salt)
        alike = stored == self.ids[shared : shared + len(stored)]
        self.miss = "new" if not stored else "unkept" if alike else "differs"
        sent = self.ids[shared : shared + SAID]
        logger.debug(
            "%d of %d prompt tokens were stored; then %s, sent %s", shared, len(self.ids), stored[:SAID], sent
        )

    def _add_head(self, pool: Pool) -> None:
        """Have a checkpoint where the prompt and a stored text diverge, unless there is one not far
        before.
        """
        if not pool.checkpoints:
            return
        head = pool.prefixes.num_stored(self.known, self.request.salt) // self.unit * self.unit
        if head - max(place for place in (0, self.start, *self.places) if place <= head) >= pool.page_size:
            self.places = sorted([*self.places, head])
            self.heads = {*self.heads, head}
        elif head == self.start and pool.has_windows:  # it was joined where pages happened to be
            self.share(last_page=not self.is_exact, is_head=True)

    def feed(self, model: LanguageModel, pool: Pool, room: int) -> mx.array | None:
        """Feed a chunk, of ``room`` tokens at most. The logits (1, vocab) of the prompt's end, or None
        before.
        """
        ids, sequence = self.ids, self.sequences[0]
        start = sequence.length
        room = min(room, READ_LOGITS) if self.request.prompt_logprobs else room
        end = min((start // CHUNK + 1) * CHUNK if self.is_exact else start + room, len(ids))
        end = min([end, *(place for place in self.places if start < place)])
        if end == len(ids) and model.last_token_alone:
            end = max(end - 1, start + 1)
        batch = pool.batch([sequence])
        end = self._give_embeddings(batch, start, end)
        chunk, logits = ids[start:end], None
        tell = self.request.progress
        if tell is not None and start == self.start:
            tell(0, len(ids) - start)
        if self.request.prompt_logprobs:
            every = model.every_logits(mx.array([chunk]), batch)[0]
            mx.eval(every)
            self.read += read_tokens(every, ids[start + 1 : end + 1], self.request.top_logprobs)
            logits = every[-1:] if end == len(ids) else None
        elif end == len(ids):
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
        is_place = end in self.places
        # Its pages are given back, or its states lost, as it moves on; and a whole prompt at once would take
        # long.
        if pool.has_windows or is_place or pool.disk is not None:
            self.share(
                last_page=is_place and not self.is_exact, mid_prompt=not is_place, is_head=end in self.heads
            )
        return logits

    def _give_embeddings(self, batch: PoolBatch, start: int, end: int) -> int:
        """Give the request's own embeddings of a chunk to its step. Returns the chunk's end: rows or ids,
        not both.
        """
        rows = self.request.embeddings
        if rows is None:
            return end
        first = len(self.ids) - len(rows)
        if start < first:
            return min(end, first)
        batch.give_embeddings(rows[None, start - first : end - first])
        return end

    def begin_answers(self) -> list["Answer"]:
        """Fork the sequence that was fed, for every answer."""
        request, sequences = self.request, self.sequences
        first = sequences[0]
        self.share()
        answers = []
        for place, number in enumerate(sorted(self.open)):
            if place:
                sequences[place].release()
                sequences[place] = first.fork(self.reserved)
            answer = Answer(self, number, for_answer(self.sampler, number), sequences[place], list(self.ids))
            if self.grammar is not None:
                answer.matcher = self.grammar.matcher()
                for token in request.begun:
                    answer.matcher.take(token)
            if request.drafts is not None:
                answer.drafter = request.drafts.for_answer(request.salt, self.reserved)
            answers.append(answer)
        for sequence in sequences[len(answers) :]:  # of answers that were cancelled since
            sequence.release()
        return answers

    @property
    def asked(self) -> int:
        """Tokens up to the last checkpoint in the prompt."""
        return self.places[-1] if self.places else len(self.ids)

    def share(self, **options: bool) -> None:
        """Let later requests begin with what was fed of the prompt; as :meth:`PoolSequence.share_prefix`."""
        upto = self.exact if self.is_exact else None
        self.sequences[0].share_prefix(upto, asked=self.asked, **options)

    def release(self) -> None:
        """Give its pages back."""
        for sequence in self.sequences:
            sequence.release()
        self.sequences.clear()


@dataclass(eq=False, slots=True)
class Answer:
    """An answer that gets a token every step."""

    work: Work
    number: int
    sampler: Sampler
    sequence: PoolSequence
    tokens: list[int]  # of the cache, the prompt and the answer
    matcher: Matcher | None = None  # where the answer follows a grammar
    drafter: Drafter | None = None  # where it drafts
    _drafter_read: int = 0
    _seen: mx.array | None = None  # the tokens that processors were given last

    def row(self, after: Sequence[int] | mx.array = (), *, mask: bytes | None = None) -> Row:
        """How the token behind its own and ``after`` is sampled; in an array these need not be known yet."""
        tokens: Sequence[int] | mx.array = self.tokens
        processors, position = self.work.processors, len(self.tokens) + len(after)
        if processors and isinstance(after, mx.array):
            known = (
                self._seen
                if self._seen is not None and self._seen.size == len(tokens)
                else mx.array(self.tokens)
            )
            tokens = self._seen = mx.concatenate([known, after.astype(known.dtype)])
        elif processors:
            tokens = [*tokens, *after]
        asked = self.work.request
        return Row(self.sampler, processors, position, tokens, mask, asked.top_logprobs, asked.keep_logprobs)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return len(self.work.ids) + self.work.limit - len(self.tokens)

    def tell_drafter(self) -> bool:
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
        return self.work.calls_out or self.matcher is not None

    @property
    def waits(self) -> bool:
        """Whether its token has to be known before the next one is sampled: a caller's error is nobody
        else's.
        """
        return self.matcher is not None or (self.work.calls_out and not self.sequence.pool.single)


def _places(
    ids: Sequence[int], stop_tokens: Collection[int], checkpoints: int, unit: int
) -> tuple[list[int], Collection[int]]:
    """The places of a prompt, each a multiple of ``unit``, that later ones are likely to go on from; and its
    heads.

    The end of its first turn, of system prompt and tools, and of its last two: an answer before may be
    written in another way the next time. And some between, for a quarter of the checkpoints. A head is the
    end of a first turn that is not the last one.
    """
    if not checkpoints:
        return [], ()
    ends = [place for place, token in enumerate(ids, 1) if token in stop_tokens] or [len(ids) - 1]
    apart = APART * -(-len(ids) // (APART * max(1, checkpoints // 4)))
    found = {place // unit * unit for place in (*ends[:1], *ends[-2:], *range(apart, len(ids), apart))}
    heads = {place // unit * unit for place in ends[:-1][:1]}
    return sorted(place for place in found if 0 < place < len(ids)), heads
