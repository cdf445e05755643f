"""What a request yields for every token."""

from dataclasses import dataclass

import mlx.core as mx

from kvant.engine.drafting.choice import DraftCounts
from kvant.engine.run import FinishReason


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """One generated token, with mlx-lm's fields, ``latency_ms`` and ``drafts``.

    Attributes:
        text: the next piece of text; empty while a character or a possible stop string is incomplete.
        token: the token's id.
        logprobs: (vocab,) log-probabilities the token was picked from.
        from_draft: whether the token was drafted.
        prompt_tokens: tokens of the prompt that were fed.
        prompt_tps: prompt tokens per second, until the first token was ready.
        generation_tokens: tokens generated so far, this one included.
        generation_tps: tokens per second, excluding the first token, which prompt_tps covers; 0.0 for the first.
        peak_memory: most memory MLX held so far, in GB (1e9 bytes).
        finish_reason: None until the last response: "stop" (end-of-text token or stop string), "length"
            (max_tokens), "context" (the reserved context is full).
        latency_ms: milliseconds since the previous token was ready, what the caller did in between included; for the
            first token, since the call.
        drafts: what drafts did so far; None: there are none.
    """

    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: FinishReason | None
    latency_ms: float
    drafts: DraftCounts | None = None
