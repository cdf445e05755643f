"""Metal kernels on the host: MLX's own text, compiled, run with every access and every wait checked."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from support.metal_host.compiler import check_spaces, find_compiler, kernel_library
from support.metal_host.process import Buffer, Worker
from support.metal_host.rewrite import host_text
from support.metal_host.source import HostError, KernelCall, Parameter, kernel_call

FORWARD, REVERSE = 0, 1  # any larger number seeds a shuffle
MAX_THREADS = 1024  # of a threadgroup


@cache
def worker() -> Worker:
    return Worker(find_compiler())


def summary() -> str:
    """How often and by which compiler kernels ran in this process; nothing where none did."""
    if not worker.cache_info().currsize or not worker().num_runs:
        return ""
    compiler = worker().compiler
    return f"Metal host run: {worker().num_runs} runs with {compiler.kind} ({compiler})"


@cache
def compiled(call: KernelCall) -> Path:
    """The library of a call, made once. Raises a HostError where Metal would not take the text."""
    if math.prod(call.threadgroup) > MAX_THREADS:
        raise HostError(
            "CompileFailed", f"{call.name}: a threadgroup of {call.threadgroup}; Metal takes up to 1024"
        )
    with ThreadPoolExecutor() as pool:  # two compilers at once
        spaces = pool.submit(check_spaces, call.name, host_text(call, spaces=True))
        library = pool.submit(kernel_library, find_compiler(), call.name, host_text(call, spaces=False))
    spaces.result()  # first: a missing address space is told in its own words
    return library.result()


def on_host(
    kernel: Callable[..., Any],
    *,
    orders: Sequence[int] = (FORWARD, REVERSE),
    unreadable: Mapping[str, np.ndarray] | None = None,
) -> Callable[..., list[mx.array]]:
    """A function like `kernel`, an mx.fast.metal_kernel, that runs it on the host, or raises a HostError.

    Outputs are poisoned before, and the same bits in all orders of the threads. ``unreadable``: of an input,
    by name, booleans that broadcast to its shape; an element where one is true must not be read.
    """

    def launch(*, inputs: list[Any], stream: Any = None, **rest: Any) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        call = kernel_call(kernel, arrays, **rest)
        library, forbidden = compiled(call), dict(unreadable or {})
        kinds = {p.name: p.kind for p in call.parameters}
        if not all(kinds.get(name) == "input" for name in forbidden):
            raise ValueError(f"unreadable names {sorted(forbidden)}; expected inputs of {list(kinds)}")
        buffers = [_buffer(p, call, arrays, forbidden) for p in call.parameters if p.kind != "attribute"]
        results = [worker().run(call, library, order, buffers) for order in orders]
        for order, result in zip(orders[1:], results[1:], strict=True):
            for output, ours, first in zip(
                (b.name for b in buffers if b.writable), result, results[0], strict=True
            ):
                if ours != first:
                    told = f"{call.name}: `{output}` in thread order {order} differs from order {orders[0]}"
                    raise HostError("Race", told)
        return [_array(data, *kind) for data, kind in zip(results[0], call.outputs, strict=True)]

    return launch


def _buffer(
    p: Parameter, call: KernelCall, inputs: Sequence[mx.array], unreadable: Mapping[str, np.ndarray]
) -> Buffer:
    if p.kind == "output":
        shape, dtype = call.outputs[p.index]
        return Buffer(p.name, True, math.prod(shape) * dtype.size, b"")
    x = inputs[p.index]
    if p.kind == "shape":
        data = np.array(x.shape, np.int32).tobytes()
    else:
        flat = mx.contiguous(x, stream=mx.cpu).reshape(-1)
        data = np.array(flat.view(mx.uint16) if x.dtype == mx.bfloat16 else flat).tobytes()
        if p.name in unreadable:
            mask = np.broadcast_to(unreadable[p.name], x.shape)
            return Buffer(p.name, False, len(data), data, np.repeat(mask, x.dtype.size).tobytes())
    return Buffer(p.name, False, len(data), data)


def _array(data: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.size]
    return mx.array(np.frombuffer(data, unsigned)).view(dtype).reshape(shape)
