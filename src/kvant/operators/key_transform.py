"""What is done to keys and values before a layer's cache quantizes them, and to queries and outputs so that
attention stays the same.

A few large channels take the range that a group's other values need. Three changes undo that, and none of
them changes attention but by rounding. A constant taken out of every key adds the same to all scores of a
query, which a softmax does not see. A channel divided in keys and multiplied in queries gives the same
products. So does an orthogonal transform of both. They are applied after the rotary positions, in this order:
center, balance, rotate. Values can go through the same orthogonal transform, which is its own inverse: then
the output of attention goes through it once more.

Sources: SmoothQuant (arXiv 2211.10438) for the balance, QuaRot (arXiv 2404.00456) for the Hadamard transform.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit

VALUES = "rotate-values"  # the part of a transform's name that is of values


@dataclass(frozen=True, slots=True, eq=False)
class KeyTransform:
    """A layer's changes. K kv heads, H query heads, D the width of keys.

    Attributes:
        name: of its parts but the bias split, with a digest of their numbers; "": it has none.
        bias_split: the biases that keys and values come without. If some of its pairs have a key bias,
            ``balance`` is the same for both elements of such a pair, and nothing is rotated.
        center: (K, 1, D) float32, taken out of every key.
        balance: (K, 1, D) float32, powers of two, that keys are divided by and queries multiplied with.
        rotates: keys and queries go through a Hadamard transform, in blocks of the largest power of two that
            divides D.
        rotates_values: values and outputs do. The value bias that is split off is added to such outputs.
    """

    name: str = ""
    bias_split: BiasSplit | None = None
    center: mx.array | None = None
    balance: mx.array | None = None
    rotates: bool = False
    rotates_values: bool = False
    _made: dict[tuple[str, mx.Dtype, int, int], mx.array] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        split = self.bias_split
        if split is not None and self.rotates_values:
            split = replace(split, value_bias=rotated(split.value_bias))
            object.__setattr__(self, "bias_split", split)
        if split is None or not split.pairs:
            return
        if self.rotates:
            raise ValueError(
                "keys whose biases are split off cannot be rotated; without the bias split they can"
            )
        if self.balance is not None:
            pairs = mx.take(
                self.balance.reshape(split.key_bias.shape[0], 2, -1), mx.array(split.pairs), axis=-1
            )
            if not mx.array_equal(pairs[:, 0], pairs[:, 1]).item():
                raise ValueError("the balance differs within a rotary pair whose bias is split off")
            object.__setattr__(self, "bias_split", replace(split, key_bias=split.key_bias / pairs))

    @property
    def arrays(self) -> list[mx.array]:
        """What it holds."""
        split = self.bias_split
        parts = [] if split is None else [split.key_bias, split.rotation, split.value_bias]
        return [*parts, *(part for part in (self.center, self.balance) if part is not None)]

    def query_key(self, both: mx.array, num_heads: int) -> mx.array:
        """(R, H + K, S, D) of H query heads and K kv heads, in their dtype: on a GPU two launches at most."""
        heads = num_heads, both.shape[1] - num_heads
        if self.center is not None and self.balance is not None:
            center, factor = (self._constants(name, both.dtype, *heads) for name in ("center", "factor"))
            on_gpu = mx.default_device().type == mx.gpu
            both = _compiled(both, center, factor) if on_gpu else (both - center) * factor
        elif self.center is not None and heads[1]:
            both = both - self._constants("center", both.dtype, *heads)
        elif self.balance is not None:
            both = both * self._constants("factor", both.dtype, *heads)
        return rotated(both) if self.rotates else both

    def keys(self, key: mx.array) -> mx.array:
        """Keys (R, K, S, D) as they are stored, in their dtype."""
        return self.query_key(key, 0)

    def queries(self, query: mx.array) -> mx.array:
        """Queries (R, H, S, D) for stored keys, in their dtype."""
        return self.query_key(query, query.shape[1])

    def values(self, value: mx.array) -> mx.array:
        """Values (R, K, S, Dv) as they are stored, or stored ones as they were given; outputs likewise."""
        return rotated(value) if self.rotates_values else value

    def restored(self, key: mx.array) -> mx.array:
        """Stored keys (R, K, T, D) as they were given."""
        if self.rotates:
            key = rotated(key)
        if self.balance is not None:
            key = key / self._constants("factor", key.dtype, 0, key.shape[1])  # exact: a power of two
        return key if self.center is None else key + self._constants("center", key.dtype, 0, key.shape[1])

    def _constants(self, name: str, dtype: mx.Dtype, H: int, K: int) -> mx.array:
        """(H + K, 1, D), made once. Any constant can be taken out, a rounded one too."""
        if (found := self._made.get((name, dtype, H, K))) is not None:
            return found
        own = self.center if name == "center" else self.balance
        assert own is not None
        of_queries, of_keys = (mx.zeros_like(own), own) if name == "center" else (own, 1 / own)
        of_queries = mx.repeat(of_queries, H // of_keys.shape[0], axis=0)
        made = mx.concatenate([of_queries, of_keys[:K]]).astype(dtype)
        mx.eval(made)  # here: other threads read it
        return self._made.setdefault((name, dtype, H, K), made)


PLAIN = KeyTransform()


@partial(mx.compile, shapeless=True)
def _compiled(x: mx.array, center: mx.array, factor: mx.array) -> mx.array:
    return (x - center) * factor


def can_rotate(width: int) -> bool:
    """Return whether :func:`rotated` changes vectors of this width: an odd one has blocks of one element."""
    return width % 2 == 0


def rotated(x: mx.array) -> mx.array:
    """The orthonormal Hadamard transform of the last dimension, in blocks; it is its own inverse."""
    width = x.shape[-1]
    block = width & -width
    if block == width:
        return mx.hadamard_transform(x)
    return mx.hadamard_transform(mx.unflatten(x, -1, (-1, block))).reshape(x.shape)
