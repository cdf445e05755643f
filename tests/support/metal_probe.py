"""Small kernels for the tests of the host run."""

from typing import Any

import mlx.core as mx
import numpy as np

from support.metal_host import FORWARD, REVERSE, on_host

Triple = tuple[int, int, int]


def launch(
    source: str,
    *inputs: mx.array,
    grid: Triple = (64, 1, 1),
    threadgroup: Triple = (64, 1, 1),
    shape: tuple[int, ...] = (64,),
    dtype: mx.Dtype = mx.float32,
    header: str = "",
    orders: tuple[int, ...] = (FORWARD, REVERSE),
    unreadable: dict[str, np.ndarray] | None = None,
    **options: Any,
) -> mx.array:
    """Runs a kernel of inputs x, y, ... and one output, out."""
    kernel = metal_kernel(source, len(inputs), header)
    launch_options = {"grid": grid, "threadgroup": threadgroup, "output_shapes": [shape], "output_dtypes": [dtype]}
    return on_host(kernel, orders=orders, unreadable=unreadable)(inputs=list(inputs), **launch_options, **options)[0]


def metal_kernel(source: str, num_inputs: int, header: str = "") -> Any:
    names = ["x", "y", "z"][:num_inputs]
    return mx.fast.metal_kernel(name="probe", input_names=names, output_names=["out"], source=source, header=header)


def normal(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def same(given: mx.array, expected: mx.array) -> None:
    assert given.dtype == expected.dtype
    assert given.shape == expected.shape
    assert mx.array_equal(given, expected).item(), (given, expected)


# Sums 64 elements a threadgroup.
REDUCTION = """
  threadgroup float tile[4][16];
  uint t = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
  tile[t / 16][t % 16] = x[g * 64 + t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint width = 32; width > 0; width /= 2) {
    if (t < width) tile[t / 16][t % 16] += tile[(t + width) / 16][(t + width) % 16];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (t == 0) out[g] = tile[0][0];
"""


def reduce(source: str) -> mx.array:
    return launch(source, normal(192), grid=(192, 1, 1), shape=(3,))
