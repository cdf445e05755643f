"""A fused kernel that fails in a run, on a machine without a GPU: its results are MLX operations, until one is not."""

from typing import Any

import mlx.core as mx

from support import attend_stand_in

WORDS = {"build": "the compiler refuses the kernel", "eval": "NYI for the general case"}


class FailingKernel:
    """What takes the place of ``fused_attention.attend``. From its call number ``first`` on it fails.

    Attributes:
        how: "build": the call raises. "eval": what it returns raises when it is evaluated, as a Metal compiler's
            error does.
        calls: so far.
        error: what the call raises.
    """

    def __init__(self, how: str, first: int) -> None:
        self.how, self.first = how, first
        self.calls = 0
        self.error: BaseException = RuntimeError(WORDS["build"])

    def __call__(self, *arguments: Any, **options: Any) -> mx.array:
        """Attention."""
        self.calls += 1
        if self.calls >= self.first and self.how == "build":
            raise self.error
        output = attend_stand_in.attend(*arguments, **options)
        return output if self.calls < self.first else output + cannot_be_evaluated()


def cannot_be_evaluated() -> mx.array:
    """A number (): MLX has no product of two quantized matrices on a CPU, and says so when it is to compute it."""
    square = mx.ones((64, 64))
    return mx.qqmm(square, square)[0, 0]
