"""Pipeline: each rank has some of the layers, and what it computes goes on to the next. B batch, S new
tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from kvant.cache.pool_batch import PoolBatch
from kvant.models.checkpoint import Progress, load_part
from kvant.models.config import ModelConfig
from kvant.models.decoder import Decoder, DecoderParts
from kvant.models.matrix import DenseMatrix
from kvant.operators.normalization import rms_norm
from kvant.ranks.group import Ranks


class StageDecoder(Decoder):
    """Some layers of a model, as a rank has them. It is called on every rank, with caches of the same
    lengths.

    The hidden states go from rank to rank and back to rank 0, which has the embedding, the last norm and the
    head: its logits are those of one process, bitwise. Elsewhere the result is what was sent, to be
        evaluated.
    """

    divided = True  # other ranks hold a part of its caches

    def __init__(self, ranks: Ranks, parts: DecoderParts, all_windows: Sequence[int | None]) -> None:
        """``all_windows``: of the whole model's layers."""
        nothing = mx.zeros((parts.config.hidden_size, 0))
        norm = nothing if parts.norm is None else parts.norm
        super().__init__(replace(parts, embed_tokens=parts.embed_tokens or DenseMatrix(nothing), norm=norm))
        self.ranks, self.all_windows = ranks, tuple(all_windows)

    def _outputs(self, inputs: mx.array, cache: PoolBatch | None) -> mx.array:
        return self._normalized(self._passed(inputs, cache, wanted=inputs.shape[1]))

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        # Nothing comes back to rank 0: it can go on while others compute.
        return [self._passed(inputs, cache, wanted=0)]

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self.logits(self._normalized(self._passed(inputs, cache, wanted=1)))[:, -1]

    def logits(self, hidden_states: mx.array) -> mx.array:
        """(..., hidden) -> (..., vocab) on rank 0; elsewhere what was sent."""
        return hidden_states if self.ranks.rank else super().logits(hidden_states)

    def _normalized(self, passed: mx.array) -> mx.array:
        return passed if self.ranks.rank else rms_norm(passed, self._norm, self.config.rms_norm_eps)

    def _passed(self, inputs: mx.array, cache: PoolBatch | None, *, wanted: int) -> mx.array:
        """Take a step of (B, S) ids through this rank's layers; the last ``wanted`` positions go back to rank
        0.

        Returns these on rank 0, and elsewhere what was sent; with none, what there is to evaluate.
        """
        ranks = self.ranks
        rank, last = ranks.rank, ranks.size - 1
        start, caches = self.begin(inputs, cache)
        B, S = inputs.shape
        hidden = self.config.hidden_size
        if rank:
            x = ranks.receive((B, S, hidden), self.dtype, rank - 1)
        else:
            x = self._embed_tokens.rows(inputs).astype(self.dtype)
        x = self.through_layers(x, start, caches)
        if rank == last:
            return ranks.send(x[:, S - wanted :], 0) if wanted else x
        sent = ranks.send(x, rank + 1)
        if rank or not wanted:
            return sent
        mx.eval(sent)  # first: nothing orders a receive behind it
        return ranks.receive((B, wanted, hidden), self.dtype, last)


def load_stage(
    folder: Path, ranks: Ranks, layers: range, progress: Progress | None = None, adapter: Path | None = None
) -> StageDecoder:
    """As :func:`kvant.models.load_decoder`, this rank's layers; on rank 0 the embedding, last norm and
    head too.
    """
    first = ranks.rank == 0
    parts = load_part(
        folder,
        layers=layers,
        embedding=first,
        head=first,
        all_sum=ranks.all_sum,
        progress=progress,
        adapter=adapter,
    )
    return StageDecoder(ranks, parts, ModelConfig.from_folder(folder).windows)
