"""Matrices in the layout that the device multiplies best: dense ones transposed, quantized ones as packed.

For a layer's experts, every array has a leading axis of experts (:mod:`kvant.models.mlp`).
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

# Rows of x from which unpacking to floats is faster on a CPU, measured on 2 cores
# (scripts/results/tables.txt):
UNPACK_FROM_ROWS = 2  # 2, 4 or 8 bits, with masks; a large matrix from one row on
UNPACK_FROM_ELEMENTS = 256 * 1024  # size of a large matrix
DEQUANTIZE_FROM_ROWS = 4  # other formats, with MLX
# at a time: 4 MiB; 16 MiB would be freshly allocated each time and take twice as long
DEQUANTIZED_ELEMENTS = 1024 * 1024
# OpenBLAS sums large products in blocks of at least this many columns, and small ones in one go
SUMMED_COLUMNS = 320
PARALLEL_ELEMENTS = 512 * 1024  # matrix size from which a thread per core pays
# multiplications from which a thread per core pays for a smaller matrix
PARALLEL_PRODUCT = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A floating-point matrix, transposed."""

    weight: mx.array  # (in, out); contiguous on a CPU, a view of the checkpoint's (out, in) on other devices

    def project(self, x: mx.array) -> mx.array:
        """Multiply x: (..., in) -> (..., out). On a CPU, a few rows round independently of each other."""
        rows = x.size // x.shape[-1]
        if rows == 0 or mx.default_device().type != mx.cpu:
            return x @ self.weight
        if rows <= FEW_ROWS and gemv.serves(x, self.weight):
            return gemv.gemv_rows(x, self.weight)
        in_one = SMALL_PRODUCT // max(1, self.weight.size)
        if rows > FEW_ROWS and rows * self.weight.size >= PARALLEL_PRODUCT:
            joined = in_parallel(lambda block: block @ self.weight, [x.reshape(rows, -1)], 0)
        elif (
            2 <= in_one < rows <= FEW_ROWS and len(self.weight) > SUMMED_COLUMNS
        ):  # all products must be small, or none
            blocks = mx.split(x.reshape(rows, -1), list(range(in_one, rows, in_one)))
            joined = mx.concatenate([block @ self.weight for block in blocks])
        else:
            return x @ self.weight
        return joined.reshape(*x.shape[:-1], -1)

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows of the checkpoint's (out, in) matrix, as for an embedding: (...) -> (..., in)."""
        return mx.moveaxis(mx.take(self.weight, ids, axis=1), 0, -1)  # (in, ...) -> (..., in)

    def gather(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        return mx.gather_mm(x, self.weight, rhs_indices=experts, sorted_indices=in_order)

    def of_expert(self, number: int) -> "DenseMatrix":
        return DenseMatrix(self.weight[number])

    @property
    def computes_at_once(self) -> bool:
        """Whether a product of a few rows is computed at the call instead of at its evaluation."""
        return mx.default_device().type == mx.cpu and gemv.serves(self.weight, self.weight)

    @property
    def num_rows(self) -> int:
        """The number of outputs."""
        return self.weight.shape[-1]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.weight]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """An (out, in) matrix in one of MLX's formats. Affine scales and biases have the compute dtype."""

    quantization: Quantization
    weight: mx.array  # (out, in * bits / 32) uint32
    scales: mx.array  # (out, in / group_size); uint8 for floating-point formats
    biases: mx.array | None = None  # (out, in / group_size); None for floating-point formats

    def project(self, x: mx.array) -> mx.array:
        """Multiply x: (..., in) -> (..., out)."""
        if mx.default_device().type == mx.cpu:
            rows = x.size // x.shape[-1]
            elements = self.num_rows * x.shape[-1]
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
        """Return MLX's product with some of the rows."""
        return mx.quantized_matmul(x, weight, scales, biases, transpose=True, **self.quantization.form)

    def _project_dequantized(self, x: mx.array) -> mx.array:
        """Dequantize some weights at a time: MLX's CPU product would unpack them for every row of x."""
        streams = self._streams(x)
        rounds = -(-self.num_rows * x.shape[-1] // (DEQUANTIZED_ELEMENTS * len(streams)))
        size = -(-self.num_rows // (rounds * len(streams)))
        masked = unpacked_product(x, self.quantization) if self._in_bytes(x) else None
        product = masked or (lambda packed: x @ self.dequantized(packed, x.dtype).T)
        products = multiply_on_cores(
            x, self.arrays, [*range(0, self.num_rows, size), self.num_rows], product, streams
        )
        return _side_by_side(products)

    def _streams(self, x: mx.array) -> Sequence[mx.Stream | mx.ThreadLocalStream]:
        """Return a stream for each core, or only the current one for a small matrix."""
        is_small = self.num_rows * x.shape[-1] < PARALLEL_ELEMENTS
        return [mx.default_stream(mx.cpu)] if is_small else cpu_streams()

    def _in_bytes(self, x: mx.array) -> bool:
        """Return whether :func:`unpacked_product` supports the format."""
        in_float32 = x.dtype == self.scales.dtype == mx.float32
        return 8 % self.quantization.bits == 0 and self.biases is not None and in_float32

    def rows(self, ids: mx.array) -> mx.array:
        """Return dequantized rows, as for an embedding: (...) -> (..., in)."""
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
        """Dequantize rows. Default dtype: an affine matrix's scales', else bfloat16, which is exact."""
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
    """A quantized matrix plus an adapter's low-rank change, which stays separate and exact.

    Quantizing their sum would add an error as large as the first quantization's: with 4 bits in groups of 64,
    an adapter that moved the embedded model's logits by 0.026 of the largest ended up off by 0.064.
    """

    base: DenseMatrix | QuantizedMatrix
    down: mx.array  # (in, R)
    up: mx.array  # (R, out)

    def project(self, x: mx.array) -> mx.array:
        """Multiply x: (..., in) -> (..., out)."""
        return self.base.project(x) + (x @ self.down) @ self.up

    def rows(self, ids: mx.array) -> mx.array:
        """Return rows of the sum, as for an embedding: (...) -> (..., in)."""
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

    Projections with the same storage are concatenated to one matrix, which is exact. Others stay separate.
    """

    matrices: tuple[Matrix, ...]
    bias: mx.array | None = None  # (out,), of all matrices

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply x and add the bias: (..., in) -> (..., out)."""
        output = _side_by_side([matrix.project(x) for matrix in self.matrices])
        return output if self.bias is None else output + self.bias

    def gather(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """Multiply each row by the projections of its expert: (N, 1, in), (N,) -> (N, 1, out).

        ``in_order``: the expert numbers are sorted.
        """
        return _side_by_side([matrix.gather(x, experts, in_order) for matrix in self.matrices])

    def of_expert(self, number: int) -> "Linear":
        """Return the projections of one expert."""
        return Linear(tuple(matrix.of_expert(number) for matrix in self.matrices))

    @property
    def num_rows(self) -> int:
        return sum(matrix.num_rows for matrix in self.matrices)

    def rows(self, first: int, last: int) -> mx.array:
        """Return rows (last - first, in) of the concatenated matrices."""
        pieces = []
        for matrix in self.matrices:
            count = matrix.num_rows
            if first < count and last > 0:
                pieces.append(matrix.rows(mx.arange(max(first, 0), min(last, count))))
            first -= count
            last -= count
        return mx.concatenate(pieces, axis=0)

    @property
    def arrays(self) -> list[mx.array]:
        return [
            *(a for matrix in self.matrices for a in matrix.arrays),
            *([] if self.bias is None else [self.bias]),
        ]


def dense_matrix(weights: Sequence[mx.array], dtype: mx.Dtype) -> DenseMatrix:
    """Concatenate the rows of (out, in) matrices, in the layout that the device multiplies best.

    Matrices of experts, (experts, out, in), are concatenated for each expert.
    """
    weight = mx.concatenate(list(weights), axis=-2).astype(dtype).swapaxes(-1, -2)  # (out, in) -> (in, out)
    if mx.default_device().type == mx.cpu:
        weight = mx.contiguous(weight)  # other devices multiply the transposed view best
    mx.eval(weight)  # now: the sources, up to twice its bytes, are freed before the layer is complete
    return DenseMatrix(weight)


def joined_matrix(matrices: Sequence[DenseMatrix | QuantizedMatrix], dtype: mx.Dtype) -> DenseMatrix:
    """Concatenate matrices to one of floats, dequantizing those that are quantized."""
    weights = [
        matrix.weight.swapaxes(-1, -2)
        if isinstance(matrix, DenseMatrix)
        else matrix.dequantized(matrix.arrays, dtype)
        for matrix in matrices
    ]
    return dense_matrix(weights, dtype)


def quantized_matrix(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Concatenate the rows of matrices with one quantization, which is exact."""
    if len(matrices) == 1:
        return matrices[0]
    arrays = (mx.concatenate(list(rows), axis=-2) for rows in zip(*(m.arrays for m in matrices), strict=True))
    return QuantizedMatrix(matrices[0].quantization, *arrays)


def check_device(quantization: Quantization, *, gathers: bool = False) -> None:
    """Refuse a format that MLX cannot multiply on this device, with :meth:`gather` if it ``gathers``."""
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


def _side_by_side(outputs: Sequence[mx.array]) -> mx.array:
    """Concatenate (..., out) each to (..., sum of outs)."""
    return outputs[0] if len(outputs) == 1 else mx.concatenate(list(outputs), axis=-1)


def in_parallel(product: Callable[..., mx.array], arrays: Sequence[mx.array], axis: int) -> mx.array:
    """Concatenate products with shares of the arrays' rows, one for each core through a stream of its own."""
    rows = len(arrays[0])
    streams = cpu_streams()[:rows]  # MLX divides by zero in a product with no outputs
    bounds = [rows * i // len(streams) for i in range(len(streams) + 1)]
    products = []
    for first, last, stream in zip(bounds, bounds[1:], streams, strict=False):
        with mx.stream(stream):
            products.append(product(*(array[first:last] for array in arrays)))
    return products[0] if len(products) == 1 else mx.concatenate(products, axis=axis)
