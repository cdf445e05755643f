"""What is done to keys before a layer's cache quantizes them, and to queries so that attention stays the same.

A few large channels take the range that a group's other values need. Three changes undo that, and none of them changes
attention but by rounding. A constant taken out of every key adds the same to all scores of a query, which a softmax
does not see. A channel divided in keys and multiplied in queries gives the same products. So does an orthogonal
transform of both. They are applied after the rotary positions, in this order: center, balance, rotate.

Sources: SmoothQuant (arXiv 2211.10438) for the balance, QuaRot (arXiv 2404.00456) for the Hadamard transform.
"""

from dataclasses import dataclass, field

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """A layer's changes. K kv heads, H query heads, D the width of keys.

    Attributes:
        name: of its parts but the bias split, with a digest of their numbers; "": it has none.
        bias_split: the biases that keys and values come without. If some of its pairs have a key bias, ``balance`` is
            the same for both elements of such a pair, and nothing is rotated.
        center: (K, 1, D) float32, taken out of every key.
        balance: (K, 1, D) float32, powers of two, that keys are divided by and queries multiplied with.
        rotates: keys and queries go through a Hadamard transform, in blocks of the largest power of two that divides D.
    """

    name: str = ""
    bias_split: BiasSplit | None = None
    center: mx.array | None = None
    balance: mx.array | None = None
    rotates: bool = False
    _inverse: mx.array | None = field(default=None, init=False)
    _of_queries: dict[int, mx.array] = field(default_factory=dict, init=False)  # the balance by query heads

    def __post_init__(self) -> None:
        split = self.bias_split
        if self.balance is not None:
            mx.eval(inverse := 1 / self.balance)  # here: other threads read it
            object.__setattr__(self, "_inverse", inverse)
        if split is None or not split.pairs:
            return
        if self.rotates:
            raise ValueError("keys whose biases are split off cannot be rotated; without the bias split they can")
        if self.balance is not None:
            pairs = mx.take(self.balance.reshape(split.key_bias.shape[0], 2, -1), mx.array(split.pairs), axis=-1)
            if not mx.array_equal(pairs[:, 0], pairs[:, 1]).item():
                raise ValueError("the balance differs within a rotary pair whose bias is split off")
            split = BiasSplit(split.key_bias / pairs, split.pairs, split.rotation, split.value_bias)
            object.__setattr__(self, "bias_split", split)

    @property
    def arrays(self) -> list[mx.array]:
        """What it holds."""
        split = self.bias_split
        parts = [] if split is None else [split.key_bias, split.rotation, split.value_bias]
        return [*parts, *(part for part in (self.center, self.balance) if part is not None)]

    def keys(self, key: mx.array) -> mx.array:
        """Keys (R, K, S, D) as they are stored, in their dtype."""
        changed = key
        if self.center is not None:
            changed = (changed - self.center).astype(key.dtype)  # in float32: half precision would round the constant
        if self._inverse is not None:
            changed = changed * self._inverse.astype(key.dtype)
        return rotated(changed) if self.rotates else changed

    def queries(self, query: mx.array) -> mx.array:
        """Queries (R, H, S, D) for stored keys, in their dtype."""
        changed = query
        if self.balance is not None:
            if (heads := query.shape[1]) not in self._of_queries:
                mx.eval(own := mx.repeat(self.balance, heads // self.balance.shape[0], axis=0))
                self._of_queries[heads] = own
            changed = query * self._of_queries[heads].astype(query.dtype)
        return rotated(changed) if self.rotates else changed

    def restored(self, key: mx.array) -> mx.array:
        """Stored keys (R, K, T, D) as they were given."""
        changed = rotated(key) if self.rotates else key
        if self.balance is not None:
            changed = changed * self.balance.astype(key.dtype)
        return changed if self.center is None else (changed + self.center).astype(key.dtype)


PLAIN = Front()


def rotated(x: mx.array) -> mx.array:
    """The orthonormal Hadamard transform of the last dimension, in blocks; it is its own inverse."""
    width = x.shape[-1]
    block = width & -width
    if block == width:
        return mx.hadamard_transform(x)
    return mx.hadamard_transform(mx.unflatten(x, -1, (-1, block))).reshape(x.shape)
