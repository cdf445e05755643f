"""A fused kernel that fails in a run, on a machine without a GPU: its results are MLX operations, until one is not."""

from typing import Any

import mlx.core as mx

from support import attend_stand_in

WORDS = {"build": "the compiler refuses the kernel", "eval": "NYI for the general case"}


class FailingKernel:
    """From call number ``first`` on the call raises ("build"), or what it returns, when it is evaluated ("eval")."""

    def __init__(self, how: str, first: int) -> None:
        self.how, self.first = how, first
        self.calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> mx.array:
        self.calls += 1
        if self.calls >= self.first and self.how == "build":
            raise RuntimeError(WORDS["build"])
        output = attend_stand_in.attend(*arguments, **options)
        if self.calls < self.first:
            return output
        square = mx.ones((64, 64))  # MLX has no product of two quantized matrices on a CPU, and says so when it is due
        return output + mx.qqmm(square, square)[0, 0]
