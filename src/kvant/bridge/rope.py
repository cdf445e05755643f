"""Rotary positions of one token on a CPU, for mlx-lm's models.

MLX composes RoPE of some twenty operations on a CPU, for the queries and for the keys of every layer. One
position's rotation is a matrix. It is made once a step, by the model's own rotation of a unit matrix, and
serves all layers.
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
    """Replace the rotary positions in an mlx-lm model by :class:`MatrixRoPE`. On a CPU; elsewhere nothing
    is done.
    """
    if mx.default_device().type != mx.cpu:
        return
    kinds: dict[Hashable, _Matrices] = {}
    for parent in model.modules():
        for name, child in list(parent.items()):
            if type(child) in KINDS and not isinstance(parent, MatrixRoPE):
                parent[name] = MatrixRoPE(child, kinds.setdefault(_settings(child), _Matrices()))


class MatrixRoPE(Module):
    """A rotary position embedding that turns one float32 token by a product with its position's matrix.

    More tokens, other dtypes and offsets that are arrays go through the model's own.
    """

    def __init__(self, rope: Module, matrices: "_Matrices") -> None:
        """``matrices``: shared by all layers that turn alike."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._rope = rope
        self._made = matrices

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **options: Any) -> mx.array:
        """x (B, heads, S, D), the first of its S tokens at position ``offset``; returns the same shape."""
        if options or type(offset) is not int or x.ndim != 4 or x.shape[2] != 1 or x.dtype != mx.float32:
            turned: mx.array = self._rope(x, offset=offset, **options)
            return turned
        matrices = self._made
        if matrices.position != offset:
            matrices.position, matrices.of_width = offset, {}
        D = x.shape[3]
        if D not in matrices.of_width:
            unit = mx.eye(D)[None, :, None]  # (1, D, 1, D): a head for each element
            matrices.of_width[D] = self._rope(unit, offset=offset)[0, :, 0]
        return x @ matrices.of_width[D]


class _Matrices(threading.local):
    """One position's matrices (D, D), by D. No dict: mlx.nn would take it for a part of the model.

    Each thread has its own: MLX crashes where two compute the same lazy array.
    """

    def __init__(self) -> None:
        self.position = -1
        self.of_width: dict[int, mx.array] = {}


def _settings(rope: Module) -> Hashable:
    """What a module turns by: numbers are its attributes, arrays its items."""
    numbers = sorted((name, repr(value)) for name, value in vars(rope).items())
    arrays = sorted((name, str(array.tolist())) for name, array in rope.items())
    return type(rope).__name__, str(numbers), str(arrays)
