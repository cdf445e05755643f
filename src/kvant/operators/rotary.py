"""Rotary position embedding: each pair of elements p and p + D/2 of a head turned by position * frequency of p."""

from collections.abc import Callable, Sequence

import mlx.core as mx

Rotate = Callable[[mx.array], mx.array]  # (B, heads, S, D) -> the same


class Rotary:
    """How the heads of a model turn; its tables are made once, not for every token.

    Source: Su et al., RoFormer, arXiv 2104.09864, with the pairs as Llama and Qwen checkpoints have them.

    Attributes:
        frequencies: (D/2), radians from one position to the next, of each pair.
        factor: what a turned head is multiplied by, queries and keys alike.
    """

    __slots__ = ("_base", "_frequency", "_other", "_same", "_wavelengths", "factor", "frequencies")

    def __init__(self, frequencies: Sequence[float], factor: float = 1.0, *, base: float | None = None) -> None:
        """From frequencies in float64; ``base`` where they are its powers base^(-2p/D)."""
        self.frequencies = tuple(frequencies)
        self.factor = factor
        self._base = base
        half = len(self.frequencies)
        self._frequency = mx.array(self.frequencies * 2, mx.float32)  # of each element's pair
        # None is what MLX takes where there is a base.
        self._wavelengths = None if base is not None else mx.array([1 / f for f in self.frequencies], mx.float32)
        # Where cosines and sines go in the rotation matrix (D, D).
        identity, nothing = mx.eye(half) * factor, mx.zeros((half, half))
        self._same = mx.eye(2 * half) * factor
        self._other = mx.concatenate(
            [mx.concatenate([nothing, identity], axis=1), mx.concatenate([-identity, nothing], axis=1)], axis=0
        )
        mx.eval(self._frequency, self._same, self._other, [] if self._wavelengths is None else self._wavelengths)

    @classmethod
    def plain(cls, head_dim: int, base: float) -> "Rotary":
        """The frequencies base^(-2p/D)."""
        return cls(plain_frequencies(head_dim, base), base=base)

    def at(self, offset: int | mx.array, new_tokens: int, dtype: mx.Dtype) -> Rotate:
        """The function that turns S new tokens' heads, the first of which is at ``offset``; made once for all layers.

        On a CPU, where MLX composes its RoPE of some twenty operations a call, one token is turned by a product with
        its position's rotation matrix (5 us instead of 60 for 6 heads of 64, measured). A float32 product only: in
        half precision the table would be rounded too.

        Args:
            offset: position of the first token: an int, a () array where it is not known yet, or a (B,) array with one
                position a sequence.
            new_tokens: S.
            dtype: of what will be turned.
        """
        if mx.default_device().type == mx.cpu and new_tokens == 1 and dtype == mx.float32:
            matrix = self._matrix(offset)
            if matrix.ndim == 2:
                return lambda heads: heads @ matrix
            return lambda heads: (heads.squeeze(2) @ matrix)[:, :, None]  # (B, heads, D) @ (B, D, D)
        return lambda heads: self._rope(heads, offset)

    def _rope(self, heads: mx.array, offset: int | mx.array) -> mx.array:
        turned = mx.fast.rope(
            heads,
            heads.shape[-1],
            traditional=False,
            base=self._base,
            scale=1.0,
            offset=offset,
            freqs=self._wavelengths,  # MLX divides positions by them
        )
        return turned if self.factor == 1.0 else turned * self.factor

    def _matrix(self, offset: int | mx.array) -> mx.array:
        """(D, D) R with x R = x turned: R[p, p] = R[p + D/2, p + D/2] = cos, R[p, p + D/2] = sin = -R[p + D/2, p].

        With an offset (B,) it is (B, D, D).
        """
        if isinstance(offset, mx.array) and offset.ndim:
            offset = offset[:, None, None]
        angle = self._frequency * offset
        return self._same * mx.cos(angle) + self._other * mx.sin(angle)


def plain_frequencies(head_dim: int, base: float) -> list[float]:
    """base^(-2p/D) of each pair p."""
    return [base ** (-2 * p / head_dim) for p in range(head_dim // 2)]
