"""A prompt fed through the cache of one sequence."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.models import LanguageModel


def prefill(model: LanguageModel, ids: Sequence[int], cache: ModelCache, step_size: int = 512) -> mx.array:
    """Feed and commit it in chunks. Returns the logits (1, vocab) of its last token."""
    for first in range(0, len(ids), step_size):
        logits = model.next_logits(mx.array([list(ids[first : first + step_size])]), cache)
        mx.eval(logits)
        cache.commit()
    return logits
