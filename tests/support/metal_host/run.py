"""Metal kernels on the host: MLX's own text, compiled, run with every access and every wait checked.

call = kernel_call(kernel, inputs=[x], template=..., grid=..., threadgroup=..., output_shapes=..., output_dtypes=...)
HostKernel(call).run([x])     MLX arrays in, MLX arrays out; raises a HostError
on_host(kernel)               takes the place of what mx.fast.metal_kernel returned
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from support.metal_host.compiler import check_spaces, find_compiler, kernel_library
from support.metal_host.errors import CompileFailed, Race
from support.metal_host.process import Buffer, Worker
from support.metal_host.rewrite import host_text
from support.metal_host.source import KernelCall, kernel_call

FORWARD, REVERSE = 0, 1  # any larger number seeds a shuffle
ORDERS = (FORWARD, REVERSE)
MAX_THREADS = 1024  # of a threadgroup


@cache
def worker() -> Worker:
    """The process that runs this session's kernels."""
    return Worker(find_compiler())


def summary() -> str:
    """How often and by which compiler kernels ran in this process; nothing where none did."""
    if not worker.cache_info().currsize or not worker().num_runs:
        return ""
    compiler = worker().compiler
    return f"Metal host run: {worker().num_runs} runs with {compiler.kind} ({compiler})"


class HostKernel:
    """One kernel, compiled. Raises CompileFailed where Metal would not take it."""

    def __init__(self, call: KernelCall) -> None:
        self.call = call
        if math.prod(call.threadgroup) > MAX_THREADS:
            raise CompileFailed(
                f"{call.name}: a threadgroup of {call.threadgroup}; Metal takes up to {MAX_THREADS} threads"
            )
        with ThreadPoolExecutor() as pool:  # two compilers at once
            spaces = pool.submit(check_spaces, call.name, host_text(call, spaces=True))
            library = pool.submit(kernel_library, find_compiler(), call.name, host_text(call, spaces=False))
        spaces.result()  # first: a missing address space is told in its own words
        self._library = library.result()

    def run(
        self,
        inputs: Sequence[mx.array],
        *,
        orders: Sequence[int] = ORDERS,
        unreadable: Mapping[str, np.ndarray] | None = None,
    ) -> list[mx.array]:
        """The outputs for inputs of the call's shapes and dtypes.

        orders: in which the threads take their turns; outputs must not depend on it, to the bit. They are poisoned
        before, and reading them is an error. unreadable: by an input's name, booleans that broadcast to its shape;
        reading an element if one is true is an error.
        """
        given = [(tuple(x.shape), x.dtype) for x in inputs]
        expected = [(x.shape, x.dtype) for x in self.call.inputs]
        if given != expected:
            raise ValueError(f"{self.call.name} is given {given}; compiled for {expected}")
        buffers = self._buffers(inputs, unreadable or {})
        results = [self._run(buffers, order) for order in orders]
        for order, result in zip(orders[1:], results[1:], strict=True):
            for output, ours, first in zip(self._outputs(), result, results[0], strict=True):
                if ours != first:
                    raise Race(f"{self.call.name}: `{output}` in thread order {order} differs from order {orders[0]}")
        return [_array(data, x.shape, x.dtype) for data, x in zip(results[0], self.call.outputs, strict=True)]

    def _run(self, buffers: list[Buffer], order: int) -> list[bytes]:
        call = self.call
        return worker().run(call.name, call.text, self._library, call.grid, call.threadgroup, order, buffers)

    def _outputs(self) -> list[str]:
        return [p.name for p in self.call.parameters if p.kind == "output"]

    def _buffers(self, inputs: Sequence[mx.array], unreadable: Mapping[str, np.ndarray]) -> list[Buffer]:
        buffers = []
        names = {p.name for p in self.call.parameters if p.kind == "input"}
        if not unreadable.keys() <= names:
            raise ValueError(f"unreadable names {sorted(unreadable)}; the inputs are {sorted(names)}")
        for p in self.call.parameters:
            if p.kind == "attribute":
                continue
            if p.kind == "output":
                array = self.call.outputs[p.index]
                size = int(np.prod(array.shape, dtype=np.int64)) * array.dtype.size
                buffers.append(Buffer(p.name, True, size, b""))
                continue
            x = inputs[p.index]
            if p.kind == "input":
                data = _bytes(x)
            elif p.kind == "shape":
                data = np.array(x.shape, np.int32).tobytes()
            elif p.kind == "strides":  # of what MLX passes by default: rows made contiguous
                data = (np.cumprod([1, *x.shape[:0:-1]])[::-1]).astype(np.int64).tobytes()
            else:
                data = np.array(x.ndim, np.int32).tobytes()
            mask = unreadable.get(p.name) if p.kind == "input" else None
            forbidden = b"" if mask is None else np.repeat(np.broadcast_to(mask, x.shape), x.dtype.size).tobytes()
            buffers.append(Buffer(p.name, False, len(data), data, forbidden))
        return buffers


@cache
def compiled(call: KernelCall) -> HostKernel:
    """The compiled kernel of a call, made once."""
    return HostKernel(call)


def on_host(
    kernel: Callable[..., Any],
    *,
    orders: Sequence[int] = ORDERS,
    unreadable: Mapping[str, np.ndarray] | None = None,
) -> Callable[..., list[mx.array]]:
    """A function with the arguments and results of `kernel`, an mx.fast.metal_kernel, that runs it on the host."""

    def launch(*, inputs: list[Any], stream: Any = None, **rest: Any) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        host = compiled(kernel_call(kernel, arrays, **rest))
        return host.run(arrays, orders=orders, unreadable=unreadable)

    return launch


def _bytes(x: mx.array) -> bytes:
    flat = mx.contiguous(x, stream=mx.cpu)
    return np.array(flat.view(mx.uint16) if x.dtype == mx.bfloat16 and x.ndim else _plain(flat)).tobytes()


def _plain(x: mx.array) -> mx.array:
    return x.reshape(1).view(mx.uint16) if x.dtype == mx.bfloat16 else x


def _array(data: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.size]
    flat = mx.array(np.frombuffer(data, unsigned))
    return flat.view(dtype).reshape(shape)
