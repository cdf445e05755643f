"""Matrices as the device likes to multiply them: dense ones transposed, quantized ones as MLX packs them.

A layer's experts have a matrix for each: then every array has an axis of experts first
(:mod:`kvant.models.mlp`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from kvant.errors import ModelError, one_line
from kvant.models import gemv
from kvant.models.quantization import Quantization
from kvant.models.unpacked import SMALL_PRODUCT, few_rows_product, multiply_on_cores, unpacked_product
from kvant.operators.streams import FEW_ROWS, cpu_streams

# On a CPU, measured on 2 cores (scripts/results/tables.txt). From so many rows of x making floats of the
# numbers is faster:
UNPACK_FROM_ROWS = 2  # of 2, 4 or 8 bits, by masks; of a large matrix from one row on
UNPACK_FROM_ELEMENTS = 256 * 1024  # a large matrix
DEQUANTIZE_FROM_ROWS = 4  # of other formats, by MLX
# at a time: 4 MiB; 16 MiB are new memory every time and take twice as long
DEQUANTIZED_ELEMENTS = 1024 * 1024
# OpenBLAS's large products are sums of sums over so many columns or more; its small ones are not
SUMMED_COLUMNS = 320
PARALLEL_ELEMENTS = 512 * 1024  # a matrix from this size on is worth a thread for each core
# multiplications with a smaller one that are worth a thread for each core
PARALLEL_PRODUCT = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A floating-point matrix, transposed."""

    weight: mx.array  # (in, out); in memory too on a CPU, and as the checkpoint's (out, in) on other devices

    def project(self, x: mx.array) -> mx.array:
        """(..., in) -> (..., out). On a CPU a few rows have the same numbers whatever is beside them."""
        rows = x.size // x.shape[-1]
        if rows == 0 or mx.default_device().type != mx.cpu:
            return x @ self.weight
        if rows <= FEW_ROWS and gemv.serves(x, self.weight):
            return gemv.gemv_rows(x, self.weight)
        in_one = SMALL_PRODUCT // max(1, self.weight.size)
        if rows > FEW_ROWS and rows * self.weight.size >= PARALLEL_PRODUCT:
            joined = in_parallel(lambda part: part @ self.weight, [x.reshape(rows, -1)], 0)
        elif (
            2 <= in_one < rows <= FEW_ROWS and len(self.weight) > SUMMED_COLUMNS
        ):  # all are small ones, or none is
            parts = mx.split(x.reshape(rows, -1), list(range(in_one, rows, in_one)))
            joined = mx.concatenate([part @ self.weight for part in parts])
        else:
            return x @ self.weight
        return joined.reshape(*x.shape[:-1], -1)

    def rows(self, ids: mx.array) -> mx.array:
        """Rows of the checkpoint's (out, in) matrix, as an embedding reads them: (...) -> (..., in)."""
        return mx.moveaxis(mx.take(self.weight, ids, axis=1), 0, -1)  # (in, ...) -> (..., in)

    def gather(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        return mx.gather_mm(x, self.weight, rhs_indices=experts, sorted_indices=in_order)

    def of_expert(self, number: int) -> "DenseMatrix":
        return DenseMatrix(self.weight[number])

    @property
    def computes_at_once(self) -> bool:
        """Whether the product of a few rows is computed where it is asked for, and not when it is
        evaluated.
        """
        return mx.default_device().type == mx.cpu and gemv.serves(self.weight, self.weight)

    @property
    def num_rows(self) -> int:
        """Outputs."""
        return self.weight.shape[-1]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.weight]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """An (out, in) matrix in one of MLX's formats; the scales and biases of an affine one have the compute
    dtype.
    """

    quantization: Quantization
    weight: mx.array  # (out, in * bits / 32) uint32
    scales: mx.array  # (out, in / group_size); uint8 if the format is a floating-point one
    biases: mx.array | None = None  # (out, in / group_size); None there

    def project(self, x: mx.array) -> mx.array:
        """(..., in) -> (..., out)."""
        if mx.default_device().type == mx.cpu:
            rows, elements = x.size // x.shape[-1], self.num_rows * x.shape[-1]
            if self._in_bytes(x) and 1 <= rows <= FEW_ROWS:
                if rows >= UNPACK_FROM_ROWS or elements >= UNPACK_FROM_ELEMENTS:
                    return few_rows_product(x, self.arrays, self.quantization, self._streams(x))
            elif rows >= DEQUANTIZE_FROM_ROWS:
                return self._project_dequantized(x)
            if elements >= PARALLEL_ELEMENTS:
                return in_parallel(partial(self._product, x), self.arrays, -1)
        return self._product(x, *self.arrays)

    def _product(
        self, x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array | None = None
    ) -> mx.array:
        """MLX's, with some of the rows."""
        return mx.quantized_matmul(x, weight, scales, biases, transpose=True, **self.quantization.form)

    def _project_dequantized(self, x: mx.array) -> mx.array:
        """Through floating-point weights, some of them at a time; MLX's CPU product unpacks them for every
        row of x.
        """
        streams = self._streams(x)
        rounds = -(-self.num_rows * x.shape[-1] // (DEQUANTIZED_ELEMENTS * len(streams)))
        size = -(-self.num_rows // (rounds * len(streams)))
        masked = unpacked_product(x, self.quantization) if self._in_bytes(x) else None
        product = masked or (lambda packed: x @ self.dequantized(packed, x.dtype).T)
        parts = multiply_on_cores(
            x, self.arrays, [*range(0, self.num_rows, size), self.num_rows], product, streams
        )
        return _side_by_side(parts)

    def _streams(self, x: mx.array) -> Sequence[mx.Stream | mx.ThreadLocalStream]:
        """One for each core; for a small matrix only the one in use."""
        is_small = self.num_rows * x.shape[-1] < PARALLEL_ELEMENTS
        return [mx.default_stream(mx.cpu)] if is_small else cpu_streams()

    def _in_bytes(self, x: mx.array) -> bool:
        """Whether :func:`unpacked_product` knows the format."""
        in_float32 = x.dtype == self.scales.dtype == mx.float32
        return 8 % self.quantization.bits == 0 and self.biases is not None and in_float32

    def rows(self, ids: mx.array) -> mx.array:
        """Rows of the matrix, dequantized, as an embedding reads them: (...) -> (..., in)."""
        return self.dequantized([array[ids] for array in self.arrays], None)

    def gather(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        options = {"rhs_indices": experts, "sorted_indices": in_order, **self.quantization.form}
        return mx.gather_qmm(x, self.weight, self.scales, self.biases, transpose=True, **options)

    def of_expert(self, number: int) -> "QuantizedMatrix":
        return QuantizedMatrix(self.quantization, *(array[number] for array in self.arrays))

    @property
    def computes_at_once(self) -> bool:
        return False

    def dequantized(self, packed: Sequence[mx.array], dtype: mx.Dtype | None) -> mx.array:
        """Some rows; without a dtype, an affine matrix's in its scales', any other's in bfloat16, which is
        exact.
        """
        weight, scales, *biases = packed
        return mx.dequantize(
            weight, scales, biases[0] if biases else None, **self.quantization.form, dtype=dtype
        )

    @property
    def num_rows(self) -> int:
        return self.weight.shape[-2]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.weight, self.scales, *([] if self.biases is None else [self.biases])]


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A quantized matrix with an adapter's low rank beside it: exact, and the matrix keeps its bits.

    Quantizing the sum again would add an error as large as the first quantization's: with 4 bits in groups of
    64, an adapter that moved the embedded model's logits by 0.026 of the largest came out 0.064 away from
    where it should.
    """

    base: DenseMatrix | QuantizedMatrix
    down: mx.array  # (in, R)
    up: mx.array  # (R, out)

    def project(self, x: mx.array) -> mx.array:
        """(..., in) -> (..., out)."""
        return self.base.project(x) + (x @ self.down) @ self.up

    def rows(self, ids: mx.array) -> mx.array:
        """Rows of the sum, as an embedding reads them: (...) -> (..., in)."""
        return self.base.rows(ids) + DenseMatrix(self.up).rows(ids) @ self.down.T  # (..., R) @ (R, in)

    def gather(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        low = DenseMatrix(self.down).gather(x, experts, in_order)
        return self.base.gather(x, experts, in_order) + DenseMatrix(self.up).gather(low, experts, in_order)

    def of_expert(self, number: int) -> "AdaptedMatrix":
        return AdaptedMatrix(self.base.of_expert(number), self.down[number], self.up[number])

    @property
    def computes_at_once(self) -> bool:
        return self.base.computes_at_once

    @property
    def num_rows(self) -> int:
        return self.base.num_rows

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.base.arrays, self.down, self.up]


Matrix = DenseMatrix | QuantizedMatrix | AdaptedMatrix


@dataclass(frozen=True, slots=True)
class Linear:
    """x -> x W^T + b for one or more of a checkpoint's projections that share their input.

    Projections whose storage agrees are one matrix (exact: rows side by side); the others stay separate.
    """

    matrices: tuple[Matrix, ...]
    bias: mx.array | None = None  # (out,), of all of them

    def __call__(self, x: mx.array) -> mx.array:
        """(..., in) -> (..., out)."""
        output = _side_by_side([matrix.project(x) for matrix in self.matrices])
        return output if self.bias is None else output + self.bias

    def gather(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """Each row through the projections of its own expert: (N, 1, in), (N,) -> (N, 1, out).

        ``in_order``: the experts' numbers do not decrease from row to row.
        """
        return _side_by_side([matrix.gather(x, experts, in_order) for matrix in self.matrices])

    def of_expert(self, number: int) -> "Linear":
        """The projections of one expert."""
        return Linear(tuple(matrix.of_expert(number) for matrix in self.matrices))

    @property
    def num_rows(self) -> int:
        return sum(matrix.num_rows for matrix in self.matrices)

    def rows(self, first: int, last: int) -> mx.array:
        """Rows of the matrices side by side, (last - first, in), of one matrix or of whole ones."""
        found = []
        for matrix in self.matrices:
            count = matrix.num_rows
            if first < count and last > 0:
                found.append(matrix.rows(mx.arange(max(first, 0), min(last, count))))
            first, last = first - count, last - count
        return mx.concatenate(found, axis=0)

    @property
    def arrays(self) -> list[mx.array]:
        return [
            *(a for matrix in self.matrices for a in matrix.arrays),
            *([] if self.bias is None else [self.bias]),
        ]


def dense_matrix(weights: Sequence[mx.array], dtype: mx.Dtype) -> DenseMatrix:
    """One matrix from the checkpoint's (out, in) matrices, their rows side by side, stored as the device
    likes it.

    Those of experts, (experts, out, in), are side by side expert by expert.
    """
    weight = mx.concatenate(list(weights), axis=-2).astype(dtype).swapaxes(-1, -2)  # (out, in) -> (in, out)
    if mx.default_device().type == mx.cpu:
        weight = mx.contiguous(weight)  # other devices multiply the transposed view best
    mx.eval(weight)  # matrix by matrix: its sources, up to twice its bytes, are not held for a whole layer
    return DenseMatrix(weight)


def joined_matrix(parts: Sequence[DenseMatrix | QuantizedMatrix], dtype: mx.Dtype) -> DenseMatrix:
    """Matrices side by side as one of floats; those that are quantized as the floats that their numbers
    stand for.
    """
    weights = [
        part.weight.swapaxes(-1, -2)
        if isinstance(part, DenseMatrix)
        else part.dequantized(part.arrays, dtype)
        for part in parts
    ]
    return dense_matrix(weights, dtype)


def quantized_matrix(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix from matrices of one quantization, their rows side by side: exact."""
    if len(parts) == 1:
        return parts[0]
    arrays = (mx.concatenate(list(rows), axis=-2) for rows in zip(*(m.arrays for m in parts), strict=True))
    return QuantizedMatrix(parts[0].quantization, *arrays)


def check_device(quantization: Quantization, *, gathers: bool = False) -> None:
    """Multiply a little in this format, and as experts do if it ``gathers``."""
    try:
        stack = QuantizedMatrix(quantization, *mx.quantize(mx.ones((2, 32, 512)), **quantization.form))
        matrix = stack.of_expert(0)
        mx.eval([matrix.project(mx.ones((rows, 512))) for rows in (1, 32)], matrix.rows(mx.array([0])))
        if gathers:
            mx.eval(stack.gather(mx.ones((2, 1, 512)), mx.array([0, 1], mx.uint32), True))
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"MLX cannot use {quantization.bits}-bit {quantization.mode} weights in groups of "
            f"{quantization.group_size} on this device ({mx.default_device().type}): {one_line(error)}"
        ) from error


def _side_by_side(parts: Sequence[mx.array]) -> mx.array:
    """(..., out) each -> (..., sum of outs)."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=-1)


def in_parallel(product: Callable[..., mx.array], arrays: Sequence[mx.array], axis: int) -> mx.array:
    """The products with shares of the arrays' rows, side by side: one from each core, MLX's streams having
    one each.
    """
    rows = len(arrays[0])
    streams = cpu_streams()[:rows]  # MLX dies of a division by zero in a product with no outputs
    bounds = [rows * i // len(streams) for i in range(len(streams) + 1)]
    parts = []
    for first, last, stream in zip(bounds, bounds[1:], streams, strict=False):
        with mx.stream(stream):
            parts.append(product(*(array[first:last] for array in arrays)))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)
