"""A prompt into the cache, in chunks."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from kvant.cache import KVCache
from kvant.models import Decoder

PromptProgress = Callable[[int, int], None]


def prefill(
    model: Decoder,
    prompt: Sequence[int],
    cache: Sequence[KVCache],
    *,
    step_size: int,
    progress: PromptProgress | None = None,
) -> mx.array:
    """Feed every token of the prompt and return the logits of the last one.

    Args:
        model: the decoder.
        prompt: token ids, at least one.
        cache: appended to.
        step_size: tokens a chunk; it bounds the memory of activations.
        progress: called with (tokens fed, tokens in all), first with 0.

    Returns:
        (1, vocab) logits, not yet evaluated; everything they are made from is.
    """
    total = len(prompt)
    if progress:
        progress(0, total)
    hidden = None
    for first in range(0, total, step_size):
        chunk = prompt[first : first + step_size]
        hidden = model.hidden_states(mx.array(list(chunk))[None], cache=cache)[:, -1]
        mx.eval(hidden)  # a chunk's activations are freed before the next one's are made, and progress is true
        if first + len(chunk) < total:
            mx.clear_cache()
        if progress:
            progress(first + len(chunk), total)
    assert hidden is not None
    return model.logits(hidden)
