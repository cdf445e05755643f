"""Rotary position embedding: turns each pair of elements p and p + D/2 of a head by position * frequency
of p.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from kvant.operators.streams import FEW_ROWS

Rotate = Callable[[mx.array], mx.array]  # (B, heads, S, D) -> the same
MOST_MATRICES = 64  # of D * D numbers: 4 MiB for heads of 128


class Rotary:
    """How the heads of a model turn. Its tables are made once, not for every token.

    Source: Su et al., RoFormer, arXiv 2104.09864, with the pairs as Llama and Qwen checkpoints have them.

    Attributes:
        frequencies: (D/2), the radians each pair turns from one position to the next.
        factor: multiplies every turned head, of queries and keys.
    """

    __slots__ = ("_base", "_frequency", "_other", "_same", "_wavelengths", "factor", "frequencies")

    def __init__(
        self, frequencies: Sequence[float], factor: float = 1.0, *, base: float | None = None
    ) -> None:
        """From frequencies in float64. ``base`` is given if they are its powers base^(-2p/D)."""
        self.frequencies = tuple(frequencies)
        self.factor = factor
        self._base = base
        half = len(self.frequencies)
        self._frequency = mx.array(self.frequencies * 2, mx.float32)  # of each element's pair
        # MLX takes either a base or wavelengths.
        self._wavelengths = (
            None if base is not None else mx.array([1 / f for f in self.frequencies], mx.float32)
        )
        # The places of cosines and sines in the rotation matrix (D, D).
        identity, nothing = mx.eye(half) * factor, mx.zeros((half, half))
        self._same = mx.eye(2 * half) * factor
        self._other = mx.concatenate(
            [mx.concatenate([nothing, identity], axis=1), mx.concatenate([-identity, nothing], axis=1)],
            axis=0,
        )
        mx.eval(
            self._frequency, self._same, self._other, [] if self._wavelengths is None else self._wavelengths
        )

    @classmethod
    def plain(cls, head_dim: int, base: float) -> "Rotary":
        """The frequencies base^(-2p/D)."""
        return cls(plain_frequencies(head_dim, base), base=base)

    def at(self, offset: int | mx.array, new_tokens: int, dtype: mx.Dtype) -> Rotate:
        """A function that turns the heads of S new tokens. One serves all layers.

        On a CPU MLX composes RoPE of some twenty operations. A few tokens are turned there by products with
        the rotation matrices of their positions: one in 5 us instead of 60 for 6 heads of 64 (measured). This
        is done in float32 only, because half precision would round the table too.

        Args:
            offset: position of the first token: an int, or a (B,) array, one for each sequence.
            new_tokens: S.
            dtype: dtype of the heads.
        """
        several = offset.size if isinstance(offset, mx.array) else 1
        if (
            mx.default_device().type != mx.cpu
            or dtype != mx.float32
            or new_tokens > FEW_ROWS
            or (new_tokens > 1 and several * new_tokens > MOST_MATRICES)
        ):
            return lambda heads: self._rope(heads, offset)
        matrix = self._matrix(offset, new_tokens)
        if matrix.ndim == 2:
            return lambda heads: heads @ matrix
        # (B, heads, S, D) -> (B, S, heads, D) @ (B or 1, S, D, D)
        return lambda heads: (heads.swapaxes(1, 2) @ matrix).swapaxes(1, 2)

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

    def _matrix(self, offset: int | mx.array, new_tokens: int) -> mx.array:
        """R (D, D), with x R = x turned; of several tokens or offsets (B or 1, S, D, D).

        R[p, p] = R[p + D/2, p + D/2] = cos; R[p, p + D/2] = sin = -R[p + D/2, p].
        """
        if isinstance(offset, mx.array):
            offset = offset[:, None, None, None]
        if new_tokens > 1:
            offset = offset + mx.arange(new_tokens)[:, None, None]
        angle = self._frequency * offset
        return self._same * mx.cos(angle) + self._other * mx.sin(angle)


def plain_frequencies(head_dim: int, base: float) -> list[float]:
    """base^(-2p/D) of each pair p."""
    return [base ** (-2 * p / head_dim) for p in range(head_dim // 2)]
