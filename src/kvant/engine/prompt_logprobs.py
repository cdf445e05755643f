"""Log-probabilities of a prompt's own tokens, read while the prompt is fed."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.cache.pool_batch import PoolBatch
from kvant.engine.row_sampling import SampledToken, read_tokens
from kvant.models import LanguageModel

MAX_CHUNK = 32  # tokens fed at once, because the logits of all of them are in memory


class PromptLogprobs:
    """Feeds a prompt's chunks, and collects the log-probability of each token after the first."""

    def __init__(self, ids: Sequence[int], top: int) -> None:
        """``ids``: of the prompt. ``top``: how many of the most probable tokens to collect with each."""
        self.tokens: list[SampledToken] = []
        self._ids = ids
        self._top = top

    def feed(self, model: LanguageModel, batch: PoolBatch, start: int, end: int) -> mx.array:
        """Feed the tokens from ``start`` to ``end``; return the logits (1, vocab) of the last one."""
        logits = model.every_logits(mx.array([self._ids[start:end]]), batch)[0]
        mx.eval(logits)
        self.tokens += read_tokens(logits, self._ids[start + 1 : end + 1], self._top)
        return logits[-1:]
