"""mlx-lm's linear layers on a CPU, with BLAS's matrix-vector product for a few rows."""

from collections.abc import Collection

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from kvant.models.gemv import serves
from kvant.models.matrix import DenseMatrix

# A token of mlx-lm's llama took 0.48 of the time with hidden size 1,536, and no less with 576, whose matrices
# are smaller than this (measured on 2 cores). Each projection is then an evaluation of its own.
FROM_ELEMENTS = 1024 * 1024


class FewRowsLinear(Linear):
    """A linear layer whose weight (out, in) is stored transposed, as in :class:`DenseMatrix`."""

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply x and add the bias: (..., in) -> (..., out)."""
        output = DenseMatrix(self["weight"].T).project(x)
        return output + self["bias"] if "bias" in self else output


def multiply_few_rows(model: Module, names: Collection[str] | None = None) -> None:
    """Convert the linear layers that are large enough to :class:`FewRowsLinear`, one at a time.

    ``names``: the loaded weights; None: all.
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
    """Return whether any layer is a :class:`FewRowsLinear`."""
    return any(isinstance(module, FewRowsLinear) for module in model.modules())
