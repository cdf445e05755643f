"""What a request yields for every token."""

from dataclasses import dataclass
from typing import Any

from kvant.cache import ModelCache
from kvant.engine.drafting.choice import DraftCounts
from kvant.engine.request import FinishReason


@dataclass(slots=True)
class GenerationResponse:
    """One generated token, with mlx-lm's fields, and those from ``latency_ms`` on.

    Attributes:
        text: the next piece of text; empty while a character or a possible stop string is incomplete.
        token: the token's id.
        logprobs: (vocab,) log-probabilities the token was picked from; None of a batch.
        from_draft: whether the token was drafted.
        prompt_tokens: tokens of the prompt that were fed; 0 for further answers to it.
        prompt_tps: prompt tokens per second, until the first token was ready, waiting included.
        generation_tokens: tokens generated so far, this one included.
        generation_tps: tokens per second, excluding the first token, which prompt_tps covers; 0.0 for the first.
        peak_memory: most memory MLX held so far, in GB (1e9 bytes).
        finish_reason: None until the last response: "stop" (end-of-text token or stop string), "length"
            (max_tokens), "context" (the reserved context is full).
        latency_ms: milliseconds since the previous token was ready, what the caller did in between included; for the
            first token, since the call.
        drafts: what drafts did so far, for all answers; None: there are none.
        number: of the request, from 0; of a batch.
        answer: which of the request's answers, from 0.
        logprob: of the token.
        since_start_ms: milliseconds since the call.
        cache: of prompt and answer, with the last token, if a batch keeps it.
    """

    text: str
    token: int
    logprobs: Any
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: FinishReason | None
    latency_ms: float
    drafts: DraftCounts | None = None
    number: int = 0
    answer: int = 0
    logprob: float = 0.0
    since_start_ms: float = 0.0
    cache: ModelCache | None = None
