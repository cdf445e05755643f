"""NumPy views of stored keys and values, for attention on a CPU.

The views share the memory of MLX's arrays. Importing NumPy takes 0.1 s, so import this module only when it
is needed.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvant import blas
from kvant.operators.packing import PACKINGS, stored_width
from kvant.operators.row_runs import Run

FLOAT_BYTES = 4

Floats = npt.NDArray[np.float32]

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys or values of a layer: (K, rows, bytes or floats), scales (K, rows, G) or None."""

    numbers: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None
    bits: int

    @property
    def width(self) -> int:
        """Return the numbers per token."""
        stored = int(self.numbers.shape[-1])
        return stored * 8 // self.bits if self.bits else stored

    @property
    def groups(self) -> int:
        """Return G, the scales per token; 1 without quantization."""
        return 1 if self.scales is None else int(self.scales.shape[-1])

    def unscaled(self, head: int, runs: Sequence[Run]) -> Floats:
        """Return a kv head's rows as unscaled float32 (tokens, width), overwritten by the next call."""
        numbers = _join_rows(self.numbers[head], runs)
        if self.bits:
            numbers = PACKINGS[self.bits].unpack_numpy(numbers)
        elif numbers.dtype == np.float32:
            return numbers
        elif numbers.dtype == np.uint16:  # bfloat16 is the upper half of a float32
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        floats = scratch("tokens", numbers.shape)
        np.copyto(floats, numbers)
        return floats

    def floats(self, head: int, runs: Sequence[Run]) -> Floats:
        """Return a kv head's rows as float32 (tokens, width), overwritten by this thread's next call."""
        floats = self.unscaled(head, runs)
        if self.scales is not None:
            scales = _join_rows(self.scales[head], runs).astype(np.float32)
            grouped = floats.reshape(len(floats), self.groups, -1)  # (tokens, width) -> (tokens, G, width/G)
            grouped *= scales[..., None]
        return floats

    def scales_of(self, head: int, runs: Sequence[Run]) -> Floats | None:
        """Return the scales of rows of a kv head: (G, tokens)."""
        if self.scales is None:
            return None
        return _join_rows(self.scales[head], runs).T.astype(np.float32, order="C")


def stored_keys_and_values(
    arrays: Sequence[mx.array], key_dim: int, quant_bit: int, value_bit: int
) -> tuple[Stored, Stored]:
    """Return the keys and values of a layer's evaluated arrays, (2, K, ...) or (1, K, ...) in shared rows."""
    numbers, *of_scales = (
        np.asarray(mx.view(array, mx.uint16) if array.dtype == mx.bfloat16 else array) for array in arrays
    )
    scales = of_scales[0] if quant_bit else None
    if numbers.shape[0] == 2:
        key_scales, value_scales = (None, None) if scales is None else scales
        return Stored(numbers[0], key_scales, quant_bit), Stored(numbers[1], value_scales, quant_bit)
    split = stored_width(key_dim, quant_bit)
    keys = numbers[0, ..., :split]
    values = numbers[0, ..., split:]
    if scales is None:
        return Stored(keys, None, 0), Stored(values, None, 0)
    value_bits = value_bit or quant_bit
    value_dim = values.shape[-1] * 8 // value_bits
    groups = scales.shape[-1] * key_dim // (key_dim + value_dim)
    return Stored(keys, scales[0, ..., :groups], quant_bit), Stored(
        values, scales[0, ..., groups:], value_bits
    )


def address(array: npt.NDArray[Any]) -> int:
    """Return where an array's memory begins. ``array.ctypes`` takes longer than a small product."""
    return int(array.__array_interface__["data"][0])


def multiply(
    left: Floats, right: Floats, output: Floats, *, transposed: bool = False, add: bool = False
) -> None:
    """Multiply (M, L) by (L, N), or by (N, L) if ``transposed``, into (M, N), which may be added to.

    Rows need not be contiguous. NumPy's own product would use NumPy's BLAS, whose threads block each other.
    """
    sgemm = blas.sgemm()
    if sgemm is None:
        product = left @ (right.T if transposed else right)
        np.add(output, product, out=output) if add else np.copyto(output, product)
        return
    sgemm(
        blas.ROW_MAJOR,
        blas.NOT_TRANSPOSED,
        blas.TRANSPOSED if transposed else blas.NOT_TRANSPOSED,
        *output.shape,
        left.shape[1],
        1.0,
        address(left),
        left.strides[0] // FLOAT_BYTES,
        address(right),
        right.strides[0] // FLOAT_BYTES,
        1.0 if add else 0.0,
        address(output),
        output.strides[0] // FLOAT_BYTES,
    )


def join_blocks(blocks: Floats, bias: Floats, sinks: Floats | None) -> Floats:
    """Combine blocks (blocks, ..., Dv + 2) of tokens into the attention (..., Dv) to all of them.

    The last axis holds the weighted sum of values, the sum of the weights, and the largest score. ``bias`` is
    the values'. Source: FlashAttention (arXiv 2205.14135).
    """
    largest = blocks[..., -1:].max(axis=0)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    sums = (blocks[..., :-1] * np.exp(blocks[..., -1:] - largest)).sum(axis=0)
    total: Floats = sums[..., -1:]
    values: Floats = sums[..., :-1] + bias * total
    if sinks is not None:
        total = total + np.exp(sinks - largest)
    return values / total


def scratch(name: str, shape: tuple[int, ...]) -> Floats:
    """Return this thread's scratch memory of a name, because allocating it costs more than filling it."""
    size = math.prod(shape)
    memory: Floats | None = getattr(_local, name, None)
    if memory is None or memory.size < size:
        memory = np.empty(size, np.float32)
        setattr(_local, name, memory)
    return memory[:size].reshape(shape)


def _join_rows(rows: npt.NDArray[Any], runs: Sequence[Run]) -> npt.NDArray[Any]:
    if len(runs) == 1:
        start, stop = runs[0]
        return rows[start:stop]
    return np.concatenate([rows[start:stop] for start, stop in runs])
