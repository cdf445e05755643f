"""The bias of the q, k and v projections, divided into a part that caches store and a part that they leave
out.
"""

from dataclasses import dataclass

import mlx.core as mx

from kvant.models.config import ModelConfig
from kvant.models.matrix import Linear
from kvant.operators.bias_split import BiasSplit, rotation_table

# A rotary pair's key bias stays out of the cache if it is more than this many times the root mean square of
# the keys in the pairs of that head, without a bias. The quantized values of a group reach to about three
# times that anyway. A smaller bias costs few of them; its own table and arithmetic would cost more. (With
# 1.0, and against the pair's own spread, half of the embedded model's pairs were split off: 1.4x the time a
# token, and no better.)
SPLIT_FROM = 3.0


@dataclass(frozen=True, slots=True)
class ProjectionBias:
    """The bias of a layer's q, k and v, and how it divides when a cache stores keys and values without
    theirs.
    """

    whole: mx.array  # (H D + 2 K D,), for caches that keep keys and values as they are
    stored: mx.array  # the same without the values' part and without the keys' part at ``pairs``
    # rotary pairs whose key bias stays out of the cache: it outweighs the keys without it
    pairs: tuple[int, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.whole, self.stored]

    def split(self, config: ModelConfig, max_seq_len: int) -> BiasSplit:
        """What the layer's cache leaves out, with angles for ``max_seq_len`` tokens."""
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        missing = (self.whole - self.stored).astype(mx.float32)
        # the pair's first elements, then its second
        key_bias = missing[H * D : (H + K) * D].reshape(K, 2, D // 2)
        return BiasSplit(
            key_bias=key_bias[..., mx.array(self.pairs, mx.int32)],
            pairs=self.pairs,
            rotation=rotation_table(config.rope.rotary(D), self.pairs, max_seq_len),
            value_bias=missing[(H + K) * D :].reshape(K, D),
        )


def divide_bias(config: ModelConfig, qkv_proj: Linear, bias: mx.array, norm: mx.array) -> ProjectionBias:
    """Divide a layer's bias: all of the values' is split off, and the keys' if it outweighs the keys without
    it.

    After RMSNorm the input of the projection has unit mean square. So the spread of an output is about the
    length of its row of weights, each times the RMSNorm's weight: ``norm``, (hidden,).
    """
    H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    keys = slice(H * D, (H + K) * D)
    # (K D, hidden)
    weights = qkv_proj.rows(keys.start, keys.stop).astype(mx.float32) * norm.astype(mx.float32)
    spread = mx.square(weights).sum(axis=-1).reshape(K, 2, D // 2).sum(axis=1)  # (K, D/2): of a pair, squared
    size = mx.square(bias[keys].astype(mx.float32)).reshape(K, 2, D // 2).sum(axis=1)
    typical = mx.sqrt(spread.mean(axis=1, keepdims=True))  # (K, 1): of a head's pairs
    # (D/2,), one choice for all heads of the layer
    outweighs = (mx.sqrt(size) > SPLIT_FROM * typical).any(axis=0)
    return split_pairs(config, bias, tuple(p for p in range(D // 2) if outweighs[p].item()))


def split_pairs(config: ModelConfig, bias: mx.array, pairs: tuple[int, ...]) -> ProjectionBias:
    """The division for given rotary pairs; attention is the same for any."""
    H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    kept = mx.array([p not in pairs for p in range(D // 2)])
    of_keys = mx.broadcast_to(kept, (K, 2, D // 2)).reshape(K * D)
    stays = mx.concatenate([mx.ones(H * D, mx.bool_), of_keys, mx.zeros(K * D, mx.bool_)])
    return ProjectionBias(whole=bias, stored=mx.where(stays, bias, mx.zeros_like(bias)), pairs=pairs)
