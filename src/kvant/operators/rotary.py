"""Rotary position embedding: rotates elements p and p + D/2 of a head by position times frequency p."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from kvant.operators.streams import FEW_ROWS

Rotate = Callable[[mx.array], mx.array]  # (B, heads, S, D) -> the same
MOST_MATRICES = 64  # of D * D numbers: 4 MiB for heads of 128


class Rotary:
    """The rotary embedding of a model, with precomputed tables.

    Source: Su et al., RoFormer, arXiv 2104.09864, with the pairs of Llama and Qwen checkpoints.

    Attributes:
        frequencies: (D/2), the angle in radians of each pair per position.
        factor: multiplies every rotated head of queries and keys.
    """

    __slots__ = ("_base", "_frequency", "_other", "_same", "_wavelengths", "factor", "frequencies")

    def __init__(
        self, frequencies: Sequence[float], factor: float = 1.0, *, base: float | None = None
    ) -> None:
        """Make it from float64 frequencies. Pass ``base`` if they are the powers base^(-2p/D)."""
        self.frequencies = tuple(frequencies)
        self.factor = factor
        self._base = base
        half = len(self.frequencies)
        self._frequency = mx.array(self.frequencies * 2, mx.float32)  # of each element's pair
        # MLX takes either a base or wavelengths.
        self._wavelengths = (
            None if base is not None else mx.array([1 / f for f in self.frequencies], mx.float32)
        )
        # Where the rotation matrix (D, D) has cosines and sines.
        identity = mx.eye(half) * factor
        nothing = mx.zeros((half, half))
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
        """Make the embedding with frequencies base^(-2p/D)."""
        return cls(plain_frequencies(head_dim, base), base=base)

    def at(self, offset: int | mx.array, new_tokens: int, dtype: mx.Dtype) -> Rotate:
        """Return a function that rotates the heads of S new tokens, for all layers.

        On a CPU MLX composes RoPE from some twenty operations. A few tokens are instead multiplied by the
        rotation matrices of their positions: 5 us instead of 60 for a token with 6 heads of 64 (measured).
        This is done in float32 only, because half precision would round the matrices too.

        Args:
            offset: position of the first token: an int, or a (B,) array with one per sequence.
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
        rotated = mx.fast.rope(
            heads,
            heads.shape[-1],
            traditional=False,
            base=self._base,
            scale=1.0,
            offset=offset,
            freqs=self._wavelengths,  # MLX divides positions by them
        )
        return rotated if self.factor == 1.0 else rotated * self.factor

    def _matrix(self, offset: int | mx.array, new_tokens: int) -> mx.array:
        """Return R (D, D) that rotates x as x R, or (B or 1, S, D, D) for several tokens or offsets.

        R[p, p] = R[p + D/2, p + D/2] = cos; R[p, p + D/2] = sin = -R[p + D/2, p].
        """
        if isinstance(offset, mx.array):
            offset = offset[:, None, None, None]
        if new_tokens > 1:
            offset = offset + mx.arange(new_tokens)[:, None, None]
        angle = self._frequency * offset
        return self._same * mx.cos(angle) + self._other * mx.sin(angle)


def plain_frequencies(head_dim: int, base: float) -> list[float]:
    """Return base^(-2p/D) for each pair p."""
    return [base ** (-2 * p / head_dim) for p in range(head_dim // 2)]
