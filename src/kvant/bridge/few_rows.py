"""mlx-lm's linear layers on a CPU, whose products of a few rows are BLAS's products of a matrix and a
vector.
"""

from collections.abc import Collection

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from kvant.models.gemv import serves
from kvant.models.matrix import DenseMatrix

# A token of mlx-lm's llama took 0.48 of the time with hidden 1,536 and as long as before with 576, whose
# matrices are smaller than this (measured on 2 cores). Each of these models' projections is an evaluation of
# its own.
FROM_ELEMENTS = 1024 * 1024


class FewRowsLinear(Linear):
    """A linear layer whose weight (out, in) lies in memory turned, as :class:`DenseMatrix` has it."""

    def __call__(self, x: mx.array) -> mx.array:
        """(..., in) -> (..., out)."""
        output = DenseMatrix(self["weight"].T).project(x)
        return output + self["bias"] if "bias" in self else output


def multiply_few_rows(model: Module, names: Collection[str] | None = None) -> None:
    """Have linear layers that are worth it multiply so, one after the other.

    ``names``: of the weights that are here; None: all.
    """
    if mx.default_device().type != mx.cpu:
        return
    for name, module in model.named_modules():
        if type(module) is not Linear or (names is not None and f"{name}.weight" not in names):
            continue
        if module["weight"].size >= FROM_ELEMENTS and serves(module["weight"], module["weight"]):
            module["weight"] = mx.contiguous(module["weight"].T).T
            mx.eval(module["weight"])
            module.__class__ = FewRowsLinear


def multiplies_few_rows(model: Module) -> bool:
    """Whether any layer does."""
    return any(isinstance(module, FewRowsLinear) for module in model.modules())
