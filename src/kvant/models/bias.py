"""Split the bias of the q, k and v projections into one part that caches store and one that they omit."""

from dataclasses import dataclass

import mlx.core as mx

from kvant.models.config import ModelConfig
from kvant.models.matrix import Linear
from kvant.operators.bias_split import BiasSplit, rotation_table

# The cache omits a rotary pair's key bias above this many times the root mean square of that head's keys
# without a bias. Quantized values of a group reach about three times that anyway, so a smaller bias costs
# little of their range, less than its table and arithmetic would. (With 1.0, relative to the spread of each
# pair, half of the embedded model's pairs were split off: 1.4x the time per token, without a benefit.)
SPLIT_FROM = 3.0


@dataclass(frozen=True, slots=True)
class ProjectionBias:
    """The bias of a layer's q, k and v, whole and without the part that a cache may omit."""

    whole: mx.array  # (H D + 2 K D,), for caches that store keys and values with their bias
    stored: mx.array  # the same with zeros for all values, and for keys at ``pairs``
    # rotary pairs whose key bias the cache omits because it outweighs the rest of the key
    pairs: tuple[int, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.whole, self.stored]

    def split(self, config: ModelConfig, max_seq_len: int) -> BiasSplit:
        """Return what the layer's cache omits, with angles for ``max_seq_len`` tokens."""
        H, K, D = _heads(config)
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
    """Split off all of the values' bias, and the keys' bias where it outweighs the keys without it.

    After RMSNorm, the projection's input has unit mean square. The spread of an output is therefore about the
    norm of its row of weights times the RMSNorm's weight, ``norm`` (hidden,).
    """
    H, K, D = _heads(config)
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
    """Split the bias at the given rotary pairs. The choice does not affect attention."""
    H, K, D = _heads(config)
    is_stored = mx.array([p not in pairs for p in range(D // 2)])
    of_keys = mx.broadcast_to(is_stored, (K, 2, D // 2)).reshape(K * D)
    stays = mx.concatenate([mx.ones(H * D, mx.bool_), of_keys, mx.zeros(K * D, mx.bool_)])
    return ProjectionBias(whole=bias, stored=mx.where(stays, bias, mx.zeros_like(bias)), pairs=pairs)


def _heads(config: ModelConfig) -> tuple[int, int, int]:
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim
