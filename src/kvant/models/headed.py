"""A decoder that drafts with its head for multi-token prediction."""

import mlx.core as mx

from kvant.cache.pool_batch import PoolBatch
from kvant.models.decoder import Caches, Decoder, DecoderParts
from kvant.models.mtp import Head, HeadedModel
from kvant.operators.normalization import rms_norm


class HeadedDecoder(HeadedModel, Decoder):
    """A decoder whose last layer belongs to its head."""

    def __init__(self, parts: DecoderParts, head: Head) -> None:
        super().__init__(parts)
        self._head = head

    def states(self, inputs: mx.array, start: int | mx.array, caches: Caches) -> mx.array:
        """Return the hidden states as :meth:`Decoder.states`; also write the tokens' rows of the head."""
        hidden = super().states(inputs, start, caches)
        if not isinstance(caches, PoolBatch):  # nothing is cached
            return hidden
        before = mx.concatenate([self.hidden_before_of(caches), hidden[:, :-1]], axis=1)
        rows = caches.embeddings
        embeddings = self._embed_tokens.rows(inputs) if rows is None else rows
        x = self._head.inputs(before, embeddings.astype(self.dtype))
        block, cache = self._head.block, caches[-1]
        rotate = self._rotary.at(start, x.shape[1], self.dtype)
        block.append(x, rotate, cache)
        made: list[mx.array] = mx.depends([hidden], cache.arrays)
        caches.give_hidden(made[0])
        return made[0]

    def through_layers(self, x: mx.array, start: int | mx.array, caches: Caches) -> mx.array:
        rotate = self._rotary.at(start, x.shape[1], self.dtype)
        for layer, cache in zip(self.layers[:-1], caches, strict=False):  # without the head's
            x = layer(x, rotate, cache)
        return x

    def hidden_before_of(self, batch: PoolBatch) -> mx.array:
        return batch.hidden_before(self.config.hidden_size, self.dtype)

    def guess(self, ids: mx.array, hidden: mx.array, batch: PoolBatch) -> tuple[mx.array, mx.array]:
        x = self._head.inputs(hidden, self._embed_tokens.rows(ids).astype(self.dtype))
        lengths = batch.lengths
        start = lengths[0] if batch.pool.single else mx.array(lengths)
        x = self._head.block(x, self._rotary.at(start, x.shape[1], self.dtype), batch[-1])
        output = rms_norm(x[:, -1], self._head.final_norm, self.config.rms_norm_eps)
        return self.logits(output), output

    @property
    def arrays(self) -> list[mx.array]:
        return [*super().arrays, *self._head.arrays]
