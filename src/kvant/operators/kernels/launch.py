"""The kernels' source, and MLX's two ways of running it."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal

import mlx.core as mx

Backend = Literal["metal", "cuda"]
Kernel = Callable[..., list[mx.array]]
INPUTS = {
    "attend": (
        *("query", "cache", "scale", "offset", "pages", "first", "settings", "numbers"),
        *("mask", "key_bias", "pairs", "rotation", "slopes", "spans"),
    ),
    "combine": (
        *("partial", "sums", "max_scores", "offset", "first", "settings", "sinks", "value_bias"),
        *("tail_partial", "tail_sums", "tail_max_scores", "spans"),
    ),
    "append": ("key", "value"),
}
SMALL = 8  # elements; MLX passes smaller inputs to Metal's kernels as constants, which changes their source
OUTPUTS = {
    "attend": ("partial", "sums", "max_scores"),
    "combine": ("out",),
    "append": ("quantized", "scales"),
}


def launch(
    name: str,
    backend: Backend,
    inputs: Sequence[mx.array],
    *,
    template: dict[str, Any],
    grid: tuple[int, int, int],
    threads: int,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    """Run a kernel on the GPU.

    Args:
        name: attend, combine or append. The top of each file describes its inputs, in the order of
            ``INPUTS``, and its outputs.
        template: the compile-time constants. Every new value compiles the kernel again.
        grid: number of threadgroups in each direction.
        threads: number of threads in a threadgroup.
    """
    return _kernel(name, backend)(
        inputs=list(inputs),
        template=list(template.items()),
        grid=(grid[0] * threads, grid[1], grid[2]),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        stream=mx.gpu,
    )


@cache
def _kernel(name: str, backend: Backend) -> Kernel:
    make: Callable[..., Any] = mx.fast.metal_kernel if backend == "metal" else mx.fast.cuda_kernel
    kernel: Kernel = make(
        name=f"kvant_{name}",
        input_names=list(INPUTS[name]),
        output_names=list(OUTPUTS[name]),
        header="".join(map(_code, (f"{backend}.h", "load.h", "rows.h"))),
        source=_code(f"{name}.h"),
    )
    return kernel


def _code(file: str) -> str:
    """Return a file without comments, indentation and empty lines: MLX hashes the source at every launch."""
    lines = (line.partition("//")[0].strip() for line in _text(file).splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def _text(file: str) -> str:
    return (resources.files("kvant.operators.kernels") / file).read_text(encoding="utf-8")
