"""Transforms of keys and values that reduce quantization error without changing attention.

A few large channels take up the range that the other values of a group need. Three transforms undo that and
change attention only by rounding. Subtracting a constant from every key shifts all scores of a query alike,
which the softmax cancels. Dividing a channel of keys and multiplying it in queries keeps the products. So
does an orthogonal transform of both. They are applied after the rotary embedding, in this order: center,
balance, rotate. Values can go through the same orthogonal transform, which is its own inverse; the output of
attention then goes through it once more.

Sources: SmoothQuant (arXiv 2211.10438) for the balance, QuaRot (arXiv 2404.00456) for the Hadamard transform.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit

VALUES = "rotate-values"  # the component of a transform's name that concerns values


@dataclass(frozen=True, slots=True, eq=False)
class KeyTransform:
    """The transforms of one layer.

    Attributes:
        name: of its components except the bias split, with a digest of their numbers; "" without any.
        bias_split: the biases that keys and values lack. If some of its pairs have a key bias, ``balance`` is
            the same for both elements of such a pair, and keys are not rotated.
        center: (K, 1, D) float32, subtracted from every key.
        balance: (K, 1, D) float32, powers of two; keys are divided by it and queries multiplied.
        rotates: whether keys and queries go through a Hadamard transform, in blocks of the largest power of
            two that divides D.
        rotates_values: whether values and outputs do. The split-off value bias is added to such outputs.
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
        """Return all its arrays."""
        split = self.bias_split
        parts = [] if split is None else [split.key_bias, split.rotation, split.value_bias]
        return [*parts, *(constant for constant in (self.center, self.balance) if constant is not None)]

    def query_key(self, both: mx.array, num_heads: int) -> mx.array:
        """Transform H query and K key heads (R, H + K, S, D) in their dtype, in at most two GPU launches."""
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
        """Transform keys (R, K, S, D) for storage, in their dtype."""
        return self.query_key(key, 0)

    def queries(self, query: mx.array) -> mx.array:
        """Transform queries (R, H, S, D) for stored keys, in their dtype."""
        return self.query_key(query, query.shape[1])

    def values(self, value: mx.array) -> mx.array:
        """Transform values (R, K, S, Dv) for storage, or restore stored values or outputs."""
        return rotated(value) if self.rotates_values else value

    def restored(self, key: mx.array) -> mx.array:
        """Restore stored keys (R, K, T, D)."""
        if self.rotates:
            key = rotated(key)
        if self.balance is not None:
            key = key / self._constants("factor", key.dtype, 0, key.shape[1])  # exact: a power of two
        return key if self.center is None else key + self._constants("center", key.dtype, 0, key.shape[1])

    def _constants(self, name: str, dtype: mx.Dtype, H: int, K: int) -> mx.array:
        """Return a cached constant (H + K, 1, D). Rounding it is harmless: any constant can be subtracted."""
        if (cached := self._made.get((name, dtype, H, K))) is not None:
            return cached
        constant = self.center if name == "center" else self.balance
        assert constant is not None
        is_center = name == "center"
        for_queries = mx.zeros_like(constant) if is_center else constant
        for_keys = constant if is_center else 1 / constant
        for_queries = mx.repeat(for_queries, H // for_keys.shape[0], axis=0)
        made = mx.concatenate([for_queries, for_keys[:K]]).astype(dtype)
        mx.eval(made)  # now, because other threads read it
        return self._made.setdefault((name, dtype, H, K), made)


PLAIN = KeyTransform()


@partial(mx.compile, shapeless=True)
def _compiled(x: mx.array, center: mx.array, factor: mx.array) -> mx.array:
    return (x - center) * factor


def can_rotate(width: int) -> bool:
    """Return whether :func:`rotated` changes vectors of this width; odd widths have blocks of one element."""
    return width % 2 == 0


def rotated(x: mx.array) -> mx.array:
    """Apply the orthonormal Hadamard transform to the last dimension, in blocks; it is its own inverse."""
    width = x.shape[-1]
    block = width & -width
    if block == width:
        return mx.hadamard_transform(x)
    return mx.hadamard_transform(mx.unflatten(x, -1, (-1, block))).reshape(x.shape)
