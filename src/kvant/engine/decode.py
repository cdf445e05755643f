"""Token by token: feed the last token, sample the next."""

from collections.abc import Generator, Sequence

import mlx.core as mx

from kvant.cache import KVCache
from kvant.engine.sampling import LogitsProcessor, Sampler, draw_key, for_a_run, sample
from kvant.engine.step import CompiledStep, can_compile, should_compile
from kvant.models import Decoder


def decode(
    model: Decoder,
    logits: mx.array,
    prompt: Sequence[int],
    cache: Sequence[KVCache],
    *,
    max_tokens: int,
    sampler: Sampler,
    logits_processors: Sequence[LogitsProcessor] = (),
    look_ahead: int = 0,
    compiled: bool | None = None,
) -> Generator[tuple[int, mx.array], None, None]:
    """Yield ``max_tokens`` tokens with their log-probabilities; the cache must have room for all but the last.

    The step after a token is built while that token is computed and queued before it is yielded: while the iteration
    is suspended the cache holds a token more. However it ends, the cache then holds the prompt and every yielded
    token but the last.

    Args:
        model: the decoder.
        logits: (1, vocab) of the prompt's last token, not yet evaluated.
        prompt: token ids already in the cache, for the processors.
        cache: appended to, one token a step.
        max_tokens: at least 1.
        sampler: (1, vocab) log-probabilities -> (1,). A seeded one draws with the key of the tokens in the cache.
        logits_processors: mlx-lm's, called with all tokens so far and the logits.
        look_ahead: 0 queues the next step when a token is ready; 1 queues it before. With 1 a read of the cache may
            be unfinished when the next append is queued, and MLX then copies that layer's whole buffer (measured on a
            CPU for models of up to two layers: 19 ms a step instead of 0.2 with 131,072 rows reserved).
        compiled: whether the step is a compiled function; default: where that is faster and the cache allows it.

    Yields:
        token id, log-probabilities (vocab,).

    Raises:
        ValueError: a sampler that picked a token the model does not have, or ``compiled`` with a cache that grows.
    """
    if compiled and not can_compile(cache):
        raise ValueError("compiled is True; a step through a cache that grows is another one for every token")
    sampler = for_a_run(sampler)
    step_function = None
    if compiled or (compiled is None and should_compile() and can_compile(cache)):
        step_function = CompiledStep(model, cache, sampler, processed=bool(logits_processors))
    vocab_size = model.config.vocab_size
    tokens = mx.array(list(prompt)) if logits_processors else None
    token, logprobs = sample(logits, tokens, sampler, logits_processors, draw_key(sampler, cache[0].offset))
    mx.async_eval(token, logprobs)
    held = cache[0].offset  # tokens of the cache that may stay
    try:
        for count in range(1, max_tokens + 1):
            step: tuple[mx.array, ...] | None = None
            before = cache[0].offset
            if count < max_tokens:
                if tokens is not None:
                    tokens = mx.concatenate([tokens, token])
                fed: tuple[mx.array, ...]
                if step_function is None:
                    fed = (model.logits(model.hidden_states(token[None], cache=cache)[:, -1]),)
                else:
                    fed = step_function(token)
                step = fed
                if len(fed) == 1:
                    step = sample(fed[0], tokens, sampler, logits_processors, draw_key(sampler, cache[0].offset))
                if look_ahead:
                    mx.async_eval(*step)
            token_id = int(token.item())  # type: ignore[arg-type]
            if not 0 <= token_id < vocab_size:  # as an index it would be read out of bounds
                raise ValueError(f"the sampler picked token {token_id}; the model knows 0 to {vocab_size - 1}")
            if step is not None and not look_ahead:
                # The log-probabilities go with the token: kept lazily they would hold the cache's buffers.
                mx.async_eval(*step)
            held = before
            yield token_id, logprobs
            if step is None:
                return
            token, logprobs = step
    finally:
        # A step queued for a token after which nobody asked for more: forget the one row it appended; and that of the
        # last yielded token too where the next one failed or was interrupted.
        for layer in cache:
            if 1 <= layer.offset - held <= 2:
                layer.trim(layer.offset - held)


def trim_to(cache: Sequence[KVCache], num_tokens: int) -> None:
    """Forget what any layer holds past the first ``num_tokens`` tokens."""
    for layer in cache:
        layer.trim(max(0, layer.offset - num_tokens))
