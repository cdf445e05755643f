"""What a scheduler is asked for, checked when it is submitted, and what it hands out."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.cache.pool import Pool
from kvant.cache.single import SinglePool
from kvant.engine.drafting.choice import MOST
from kvant.engine.drafting.drafts import Drafts
from kvant.engine.draw import Sampler, SeededSampler, for_a_run, greedy
from kvant.engine.limits import check_count, limit_in_words
from kvant.engine.processors import KINDS, Change, LogitsProcessor
from kvant.engine.row_sampling import check_options
from kvant.errors import ArgumentError, ContextError
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit
from kvant.text.grammar import Grammar
from kvant.text.prompt import token_ids

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]
PromptProgress = Callable[[int, int], None]
CHUNK = 128  # prompt tokens between two tokens of others: a quarter of a prefill's speed is lost at 64 (measured)
PREFILL_STEP_SIZE = 512  # prompt tokens a chunk, where nobody says how many: it bounds the memory of activations


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """One prompt, and what is wanted of its answers. It is plain data; whoever submits it keeps it as its name.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: of each answer at most; -1: until the context is full.
        sampler: of :func:`kvant.sample_utils.make_sampler`, or (1, vocab) log-probabilities -> (1,). The draw at a
            position is the one that :func:`kvant.stream_generate` makes there. None: greedy.
        logits_processors: called with all tokens so far, of the cache, the prompt and the answer, and with logits
            (1, vocab). A :class:`kvant.text.grammar.Grammar` is one too: each answer follows it from its beginning.
        stop_tokens: token ids that end an answer, which includes them.
        salt: prefixes are shared only between requests with the same salt.
        top_logprobs: how many of the most probable tokens are told with each token.
        answers: the prompt is fed once for so many. Answer i has the seed + i, and the first is that of a single one.
        cache: of one sequence, from ``model.make_cache``. The prompt continues what it holds. It is only read, and must
            not be used otherwise before the first token.
        keep_cache: the last token of an answer brings a cache of its own with the prompt and the answer. It is reserved
            for as many tokens as ``cache``, or more where prompt and answer need more; without one, for as many as a
            sequence of the pool can have.
        drafts: each answer drafts for itself, from these; None: none does. The tokens are the same, but for rounding.
        begun: the first tokens of the answer, if the prompt ends with them: a grammar goes on after them.
        progress: called with (prompt tokens fed, prompt tokens in all), first with 0; those shared with others do not
            count.
        keep_logprobs: each token brings the log-probabilities of the whole vocabulary.
    """

    prompt: Sequence[int] | mx.array
    max_tokens: int = 256
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    stop_tokens: Collection[int] = ()
    salt: bytes = b""
    top_logprobs: int = 0
    answers: int = 1
    cache: Sequence[KVCache] | None = None
    keep_cache: bool = False
    drafts: Drafts | None = None
    begun: Sequence[int] = ()
    progress: PromptProgress | None = None
    keep_logprobs: bool = False


@dataclass(slots=True)
class Token:
    """A token of one answer, or its end.

    Attributes:
        request: what it answers.
        answer: the number of the answer, from 0.
        token: its id; None where an answer ends without one: cancelled or failed.
        logprob: its log-probability, of those the sampler was given.
        top_logprobs: (id, log-probability) of the most probable tokens, the most probable first.
        logprobs: (vocab,), where they are kept.
        finish_reason: None: there are more. "stop": the token is one of ``stop_tokens``; "length": ``max_tokens``;
            "context": the context or the reservation is full; "cancelled"; "error".
        cached_tokens: tokens of the prompt that other requests had fed.
        cache: with the last token, where it was wanted.
        error: why an answer failed.
        from_draft: the token was drafted.
    """

    request: Request
    answer: int
    token: int | None
    logprob: float | None = None
    top_logprobs: Sequence[tuple[int, float]] = ()
    logprobs: mx.array | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    cache: ModelCache | None = None
    error: BaseException | None = None
    from_draft: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class CheckedRequest:
    """A request that a pool can serve.

    Attributes:
        ids: of the cache's tokens and the prompt's.
        sampler: with a seed, where it draws.
        calls_out: sampling calls functions of the caller's.
        cache: holds the first ``held`` of the ids.
        limit: tokens of an answer at most.
        full: why an answer ends there.
        reserved: tokens that the sequence of each answer has room for.
    """

    request: Request
    ids: list[int]
    sampler: Sampler
    processors: tuple[Change, ...]
    grammar: Grammar | None
    stop_tokens: frozenset[int]
    calls_out: bool
    cache: ModelCache | None
    held: int
    limit: int
    full: FinishReason
    reserved: int


def check_request(request: Request, model: LanguageModel, pool: Pool | SinglePool, max_batch: int) -> CheckedRequest:
    """What the pool can serve once everything else is gone. Any thread may call it."""
    check_count("max_tokens", request.max_tokens, or_minus_one=True)
    check_count("answers", request.answers)
    if request.answers > max_batch:
        raise ValueError(f"answers is {request.answers}; the batch has room for {max_batch}")
    vocab_size = model.config.vocab_size
    if type(request.top_logprobs) is not int or not 0 <= request.top_logprobs <= vocab_size:
        raise ValueError(f"top_logprobs is {request.top_logprobs!r}; expected 0 to {vocab_size}")
    if not isinstance(request.salt, bytes):
        raise ValueError(f"salt is {request.salt!r:.80}; expected bytes")
    sampler = for_a_run(greedy if request.sampler is None else request.sampler)
    grammars = [each for each in request.logits_processors if isinstance(each, Grammar)]
    if len(grammars) > 1:
        raise ValueError(f"logits_processors has {len(grammars)} grammars; expected one at most")
    grammar = grammars[0] if grammars else None  # is applied last, wherever it stands
    processors = tuple(each for each in request.logits_processors if not isinstance(each, Grammar))
    check_options(sampler, processors, vocab_size)
    stop_tokens = frozenset(request.stop_tokens)
    if not all(type(token) is int for token in stop_tokens):
        raise ValueError(f"stop_tokens is {request.stop_tokens!r:.80}; expected token ids")
    if grammar is not None:
        grammar.check(vocab_size, stop_tokens)
    ids = token_ids(request.prompt, vocab_size)
    cache, held = None, 0
    if request.cache is not None:
        cache = model.check_cache(request.cache)
        mx.eval([layer.buffers for layer in cache])  # another thread could not compute what this one left undone
        ids, held = cache.ids[0] + ids, cache.offset
        if processors and max(ids) >= vocab_size:  # of a file; processors read logits at these places
            raise ValueError(f"the cache holds token {max(ids)}; the model knows 0 to {vocab_size - 1}")
    context = context_limit(model, pool.max_seq_len)
    assert context is not None
    if len(ids) > context:
        begun = pool.held(ids) if isinstance(pool, SinglePool) else held
        used = f", {begun} of them used" if begun else ""
        raise ContextError(f"the prompt has {len(ids) - begun} tokens; {limit_in_words(model, context)}{used}")
    # One more than there is room for: the last one is sampled and not fed.
    room = context - len(ids) + 1
    limit = room if request.max_tokens == -1 else min(room, request.max_tokens)
    reserved = min(len(ids) + limit, context)
    needed = pool.pages_needed(reserved) + (request.answers - 1) * pool.pages_needed(
        own_tokens(len(ids), reserved, pool)
    )
    if needed > pool.num_pages:
        raise ContextError(
            f"{len(ids)} tokens of a prompt and {request.answers} answers of up to {limit} need {needed} pages of "
            f"{pool.page_size} tokens; the pool has {pool.num_pages}"
        )
    return CheckedRequest(
        request=request,
        ids=ids,
        sampler=sampler,
        processors=processors,
        grammar=grammar,
        stop_tokens=stop_tokens,
        calls_out=not (sampler is greedy or isinstance(sampler, SeededSampler))
        or any(type(processor) not in KINDS for processor in processors),
        cache=cache,
        held=held,
        limit=limit,
        full="length" if limit == request.max_tokens else "context",
        reserved=reserved,
    )


def check_drafts(drafts: Drafts | None, pool: Pool | SinglePool, *, deterministic: bool = False) -> None:
    """Refuse drafts where a step of several tokens cannot be verified, or taken back in part."""
    if drafts is None:
        return
    name, given = drafts.asked
    if deterministic:
        raise ArgumentError(
            name, f"{given}; a step of more tokens rounds differently: it is refused with", "deterministic"
        )
    if pool.divided and drafts.source != "prompt":
        raise ArgumentError(name, f"{given}; several ranks draft from prompt and answer alone")
    if isinstance(pool, Pool):
        if not pool.takes_back:
            raise ArgumentError(name, f"{given}; side by side drafts are for models that kvant computes without mlx-lm")
        return
    most = MOST + 1  # tokens of a step
    if (back := pool.takes_back(most)) < most:
        kept = f"windows take back {back}" if back else "linear or convolution layers have states that cannot"
        raise ArgumentError(name, f"{given}; up to {most} tokens of a step are taken back, this model's {kept}")


def own_tokens(prompt_tokens: int, reserved: int, pool: Pool | SinglePool) -> int:
    """Of the tokens reserved for an answer those that it does not share with the others of its prompt.

    The pages of windows are not counted as shared: every answer moves through its own.
    """
    if pool.has_windows:
        return reserved
    return max(1, reserved - prompt_tokens // pool.page_size * pool.page_size)
