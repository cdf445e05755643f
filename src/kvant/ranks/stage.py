"""Pipeline: each rank computes some of the layers and sends the result on. B batch, S new tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from kvant.cache.pool_batch import PoolBatch
from kvant.models.checkpoint import Progress, load_shard
from kvant.models.config import ModelConfig
from kvant.models.decoder import Decoder, DecoderParts
from kvant.models.matrix import DenseMatrix
from kvant.operators.normalization import rms_norm
from kvant.ranks.group import Ranks


class StageDecoder(Decoder):
    """One rank's layers of a model. Every rank calls it, with caches of the same lengths.

    The hidden states go from rank to rank and back to rank 0, which has the embedding, the last norm and the
    head. Its logits are bit for bit those of one process. Elsewhere the result is what was sent, which must
    be evaluated.
    """

    divided = True  # other ranks have some of its caches

    def __init__(self, ranks: Ranks, parts: DecoderParts, all_windows: Sequence[int | None]) -> None:
        """``all_windows``: of the whole model's layers."""
        nothing = mx.zeros((parts.config.hidden_size, 0))
        norm = nothing if parts.norm is None else parts.norm
        super().__init__(replace(parts, embed_tokens=parts.embed_tokens or DenseMatrix(nothing), norm=norm))
        self.ranks = ranks
        self.all_windows = tuple(all_windows)

    def _outputs(self, inputs: mx.array, cache: PoolBatch | None) -> mx.array:
        return self._normalized(self._passed(inputs, cache, returned=inputs.shape[1]))

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        # Nothing comes back to rank 0, so it can continue while others compute.
        return [self._passed(inputs, cache, returned=0)]

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self.logits(self._normalized(self._passed(inputs, cache, returned=1)))[:, -1]

    def logits(self, hidden_states: mx.array) -> mx.array:
        """Return (..., vocab) for (..., hidden) on rank 0, and elsewhere what was sent."""
        return hidden_states if self.ranks.rank else super().logits(hidden_states)

    def _normalized(self, passed: mx.array) -> mx.array:
        return passed if self.ranks.rank else rms_norm(passed, self._norm, self.config.rms_norm_eps)

    def _passed(self, inputs: mx.array, cache: PoolBatch | None, *, returned: int) -> mx.array:
        """Take a step of (B, S) ids through this rank's layers; rank 0 gets the last ``returned`` positions.

        Returns these on rank 0, and elsewhere what was sent; with 0 positions, an array to evaluate.
        """
        ranks = self.ranks
        rank = ranks.rank
        last = ranks.size - 1
        start, caches = self.begin(inputs, cache)
        B, S = inputs.shape
        hidden = self.config.hidden_size
        if rank:
            x = ranks.receive((B, S, hidden), self.dtype, rank - 1)
        else:
            x = self._embed_tokens.rows(inputs).astype(self.dtype)
        x = self.through_layers(x, start, caches)
        if rank == last:
            return ranks.send(x[:, S - returned :], 0) if returned else x
        sent = ranks.send(x, rank + 1)
        if rank or not returned:
            return sent
        mx.eval(sent)  # now, because nothing orders the receive after it
        return ranks.receive((B, returned, hidden), self.dtype, last)


def load_stage(
    folder: Path, ranks: Ranks, layers: range, progress: Progress | None = None, adapter: Path | None = None
) -> StageDecoder:
    """Load this rank's layers as :func:`kvant.models.load_decoder`; rank 0 also has embedding and head."""
    first = ranks.rank == 0
    parts = load_shard(
        folder,
        layers=layers,
        embedding=first,
        head=first,
        all_sum=ranks.all_sum,
        progress=progress,
        adapter=adapter,
    )
    return StageDecoder(ranks, parts, ModelConfig.from_folder(folder).windows)
