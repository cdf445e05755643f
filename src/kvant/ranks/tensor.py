"""Tensor parallelism: ranks divide each layer's heads and features, and all have the same hidden states.

Attention and MLP end in a projection whose inputs are divided. Each rank's product is an addend, and the
ranks sum them: two sums of (B, S, hidden) per layer. An untied output head is divided by tokens, and the
logits are gathered. Every rank is called with the same tokens, and evaluates each step before the next one.

Source of the division: Shoeybi et al., arXiv 1909.08053.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.models.as_stored import open_folder
from kvant.models.bias import ProjectionBias, split_pairs
from kvant.models.checkpoint import Progress, load_shard
from kvant.models.decoder import Attention, Block, Decoder, DecoderParts, Pair
from kvant.models.share import Share
from kvant.ranks.group import Ranks
from kvant.ranks.shares import shares


@dataclass(frozen=True, slots=True)
class TensorAttention(Attention):
    """A rank's heads of a layer. Its output is one of the ranks' addends."""

    ranks: Ranks
    counts_keys: bool  # whether no lower rank has the same key heads
    norm_sizes: tuple[int, int]  # elements of all queries of a token, and of all its keys

    def _normalized(self, query: mx.array, key: mx.array, weights: Pair) -> Pair:
        """Normalize by the mean square over the heads of all ranks, counting each key head once."""
        squares = [mx.square(x.astype(mx.float32)).sum(axis=-1) for x in (query, key)]  # (B, S) of each
        if not self.counts_keys:
            squares[1] = mx.zeros_like(squares[1])
        sizes = mx.array(self.norm_sizes)[:, None, None]
        means = self.ranks.all_sum(mx.stack(squares)) / sizes
        scales = mx.rsqrt(means + self.config.rms_norm_eps)[..., None]  # (2, B, S, 1)
        dtype = query.dtype
        return (query * scales[0]).astype(dtype) * weights[0], (key * scales[1]).astype(dtype) * weights[1]


@dataclass(frozen=True, slots=True)
class TensorBlock(Block):
    """A rank's shard of a layer. The hidden states are the same on every rank."""

    ranks: Ranks

    def _summed(self, addend: mx.array) -> mx.array:
        return self.ranks.all_sum(addend)


class TensorDecoder(Decoder):
    """A rank's shard of a decoder. Its config, caches and pools are for its own heads."""

    divided = True  # other ranks have some of its caches

    def __init__(self, parts: DecoderParts, ranks: Ranks, dealt: Sequence[Share]) -> None:
        """``dealt``: the share of each rank."""
        super().__init__(parts)
        self.ranks = ranks
        self._rows = [share.vocabulary[1] - share.vocabulary[0] for share in dealt]

    def logits(self, hidden_states: mx.array) -> mx.array:
        """Return (..., vocab) for (..., hidden). With a tied head only rank 0 computes it."""
        if self._lm_head is None:
            return super().logits(hidden_states) if self.ranks.rank == 0 else hidden_states
        local = self._lm_head.project(hidden_states)
        widest = max(self._rows)
        padded = mx.pad(local, [(0, 0)] * (local.ndim - 1) + [(0, widest - local.shape[-1])])
        # (N * first, ..., widest) -> (N, first, ..., widest)
        gathered = self.ranks.all_gather(padded).reshape(self.ranks.size, *padded.shape)
        return mx.concatenate([gathered[rank, ..., :rows] for rank, rows in enumerate(self._rows)], axis=-1)


def load_tensor(
    folder: Path, ranks: Ranks, progress: Progress | None = None, adapter: Path | None = None
) -> TensorDecoder:
    """Load this rank's shard as :func:`kvant.models.load_decoder`. All ranks call it together."""
    config, _ = open_folder(folder)
    dealt = shares(config, ranks.size)
    share = dealt[ranks.rank]
    parts = load_shard(folder, share=share, all_sum=ranks.all_sum, progress=progress, adapter=adapter)
    norm_sizes = (config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim)
    layers = []
    for block, bias in zip(parts.layers, _united_biases(parts, ranks), strict=True):
        attention = replace(block.self_attn, qkv_bias=bias)
        divided = TensorAttention(
            **_fields(attention), ranks=ranks, counts_keys=share.counts_keys, norm_sizes=norm_sizes
        )
        layers.append(TensorBlock(**{**_fields(block), "self_attn": divided}, ranks=ranks))
    return TensorDecoder(replace(parts, layers=tuple(layers)), ranks, dealt)


def _united_biases(parts: DecoderParts, ranks: Ranks) -> list[ProjectionBias | None]:
    """Return each layer's bias, split at the rotary pairs that any rank's heads choose, as in one process."""
    biases = [layer.self_attn.qkv_bias for layer in parts.layers]
    present = [bias for bias in biases if bias is not None]
    if len(present) < len(biases):
        return biases  # q, k and v have a bias in all layers or in none
    pairs = range(parts.config.head_dim // 2)
    chosen = mx.array([[int(pair in bias.pairs) for pair in pairs] for bias in present])
    united: list[list[int]] = ranks.all_max(chosen).tolist()  # type: ignore[assignment]
    return [
        split_pairs(parts.config, bias.whole, tuple(pair for pair in pairs if layer[pair]))
        for bias, layer in zip(present, united, strict=True)
    ]


def _fields(block: Any) -> dict[str, Any]:
    return {field.name: getattr(block, field.name) for field in fields(block)}
