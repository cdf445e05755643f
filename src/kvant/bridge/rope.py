"""Rotary positions of one token on a CPU, for mlx-lm's models.

On a CPU, MLX composes RoPE from some twenty operations, for the queries and for the keys of every layer. The
rotation of one position is a matrix. It is computed once a step, by letting the model rotate a unit matrix,
and serves all layers.
"""

import threading
from collections.abc import Hashable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import rope_utils

KINDS = (
    RoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.Llama3RoPE,
    rope_utils.YarnRoPE,
    rope_utils.ProportionalRoPE,
)


def rotate_by_matrices(model: Module) -> None:
    """On a CPU, replace the rotary embeddings in an mlx-lm model by :class:`MatrixRoPE`."""
    if mx.default_device().type != mx.cpu:
        return
    kinds: dict[Hashable, _Matrices] = {}
    for parent in model.modules():
        for name, child in list(parent.items()):
            if type(child) in KINDS and not isinstance(parent, MatrixRoPE):
                parent[name] = MatrixRoPE(child, kinds.setdefault(_settings(child), _Matrices()))


class MatrixRoPE(Module):
    """A rotary position embedding that rotates one float32 token by a product with its position's matrix.

    Several tokens, other dtypes and array offsets use the model's own module.
    """

    def __init__(self, rope: Module, matrices: "_Matrices") -> None:
        """``matrices`` are shared by all layers with the same rotation."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._rope = rope
        self._made = matrices

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **options: Any) -> mx.array:
        """Rotate x (B, heads, S, D), whose first token is at position ``offset``."""
        if options or type(offset) is not int or x.ndim != 4 or x.shape[2] != 1 or x.dtype != mx.float32:
            rotated: mx.array = self._rope(x, offset=offset, **options)
            return rotated
        matrices = self._made
        if matrices.position != offset:
            matrices.position = offset
            matrices.of_width = {}
        D = x.shape[3]
        if D not in matrices.of_width:
            unit = mx.eye(D)[None, :, None]  # (1, D, 1, D): a head for each element
            matrices.of_width[D] = self._rope(unit, offset=offset)[0, :, 0]
        return x @ matrices.of_width[D]


class _Matrices(threading.local):
    """One position's matrices (D, D), by D. It is not a dict, which mlx.nn would treat as parameters.

    Each thread has its own: MLX crashes if two threads evaluate the same lazy array.
    """

    def __init__(self) -> None:
        self.position = -1
        self.of_width: dict[int, mx.array] = {}


def _settings(rope: Module) -> Hashable:
    """Return what determines a module's rotation: numbers are attributes, arrays are items."""
    numbers = sorted((name, repr(value)) for name, value in vars(rope).items())
    arrays = sorted((name, str(array.tolist())) for name, array in rope.items())
    return type(rope).__name__, str(numbers), str(arrays)
