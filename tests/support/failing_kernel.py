"""A fused kernel that fails in a run, on a machine without a GPU: its results are MLX operations, until one is not."""

from typing import Any

import mlx.core as mx

from support.fused_path import unfused_launch

WORDS = {"build": "the compiler refuses the kernel", "eval": "NYI for the general case"}


class FailingKernel:
    """What takes the place of ``attend.launch``. From its call number ``first`` on every attention fails.

    Attributes:
        how: "build": the launch raises. "eval": what it returns raises when it is evaluated, as a Metal compiler's
            error does.
        calls: of attention so far.
        error: what the launch raises.
    """

    def __init__(self, how: str, first: int) -> None:
        self.how, self.first = how, first
        self.calls = 0
        self.error: BaseException = RuntimeError(WORDS["build"])

    def __call__(self, name: str, *arguments: Any, **options: Any) -> list[mx.array]:
        """A launch."""
        results = unfused_launch(name, *arguments, **options)
        if name != "attend":
            return results
        self.calls += 1
        if self.calls < self.first:
            return results
        if self.how == "build":
            raise self.error
        return [result + cannot_be_evaluated() for result in results]


def cannot_be_evaluated() -> mx.array:
    """A number (): MLX has no product of two quantized matrices on a CPU, and says so when it is to compute it."""
    square = mx.ones((64, 64))
    return mx.qqmm(square, square)[0, 0]
