"""What a scheduler is asked for, checked when it is submitted, and what it hands out."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.cache.pool import Pool
from kvant.engine.drafts import MOST, Drafts
from kvant.engine.draw import Sampler
from kvant.engine.processors import LogitsProcessor
from kvant.errors import ArgumentError

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


def check_drafts(drafts: Drafts | None, pool: Pool | ModelCache, *, deterministic: bool = False) -> None:
    """Refuse drafts where a step of several tokens cannot be verified, or taken back in part."""
    if drafts is None:
        return
    name, given = drafts.asked
    if deterministic:
        raise ArgumentError(
            name, f"{given}; a step of more tokens rounds differently: it is refused with", "deterministic"
        )
    if pool.divided and name == "draft_model":
        raise ArgumentError(name, f"{given}; several ranks draft from prompt and answer alone")
    if not pool.takes_back:
        refused = "side by side drafts are for models that kvant computes without mlx-lm"
        if isinstance(pool, ModelCache):
            kept = "linear or convolution layers have states that cannot"
            refused = f"up to {MOST + 1} tokens of a step are taken back, this model's {kept}"
        raise ArgumentError(name, f"{given}; {refused}")
