"""A model whose likeliest tokens are those of a text that is known: its steps cost what they cost."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.models import LanguageModel

CERTAIN = 1e4  # a logit that no other one reaches, in half precision too


class Replayed:
    """A model that computes everything, and then finds the text's next token the likeliest. B is 1."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._text = mx.zeros((1,), mx.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def replay(self, text: Sequence[int]) -> None:
        """``text``: ids of the prompt and the answer. Behind its end come its last tokens again."""
        self._text = mx.array([*text, text[-1], text[-1]])

    def next_logits(self, inputs: mx.array, cache: ModelCache) -> mx.array:
        """See :class:`kvant.models.LanguageModel`."""
        place = cache.offset + inputs.shape[1]
        return self._certain(self._model.next_logits(inputs, cache), self._text[place : place + 1])

    def every_logits(self, inputs: mx.array, cache: ModelCache) -> mx.array:
        """See :class:`kvant.models.LanguageModel`."""
        place = cache.offset + 1
        return self._certain(self._model.every_logits(inputs, cache), self._text[place : place + inputs.shape[1]])

    def step_logits(self, tokens: mx.array, offset: mx.array, cache: ModelCache, num_tokens: int) -> mx.array:
        """See :class:`kvant.models.LanguageModel`."""
        logits = self._model.step_logits(tokens, offset, cache, num_tokens)
        return self._certain(logits, self._text[offset + 1 + mx.arange(len(tokens))])

    @staticmethod
    def _certain(logits: mx.array, ids: mx.array) -> mx.array:
        """Logits (..., S, vocab) with these ids (S,) as the likeliest."""
        places = mx.arange(logits.shape[-1]) == ids[:, None]  # (S, vocab)
        return mx.where(places, mx.array(CERTAIN, logits.dtype), logits)
