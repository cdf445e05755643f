"""Matrices as the device likes to multiply them: dense ones stored (in, out), quantized ones as MLX packs them.

A layer's experts have a matrix for each: then every array has an axis of experts first (:mod:`kvant.models.experts`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.models.quantization import Quantization
from kvant.models.unpacked import SMALL_PRODUCT, few_rows_product, in_turn, unpacked_product
from kvant.operators.streams import FEW_ROWS, cpu_streams

# On a CPU, measured on 2 cores (docs/performance.md). From so many rows of x making floats of the numbers is faster:
UNPACK_FROM_ROWS = 2  # of 2, 4 or 8 bits, by masks; of a large matrix from one row on
UNPACK_FROM_ELEMENTS = 256 * 1024  # a large matrix
DEQUANTIZE_FROM_ROWS = 4  # of other formats, by MLX
DEQUANTIZED_ELEMENTS = 1024 * 1024  # at a time: 4 MiB; 16 MiB are new memory every time and take twice as long
SUMMED_COLUMNS = 320  # OpenBLAS's large products are sums of sums over so many columns or more; its small ones are not
PARALLEL_ELEMENTS = 512 * 1024  # a matrix from this size on is worth a thread for each core


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A floating-point matrix, transposed. On a CPU it is contiguous so: 1.8x as fast to multiply (measured)."""

    weight: mx.array  # (in, out)

    def project(self, x: mx.array) -> mx.array:
        """(..., in) -> (..., out). On a CPU a few rows have the same numbers whatever is beside them.

        For that all products are small ones, or none is.
        """
        rows, in_one = x.size // x.shape[-1], SMALL_PRODUCT // max(1, self.weight.size)
        is_split = 2 <= in_one < rows <= FEW_ROWS and len(self.weight) > SUMMED_COLUMNS
        if not is_split or mx.default_device().type != mx.cpu:
            return x @ self.weight
        parts = mx.split(x.reshape(rows, -1), list(range(in_one, rows, in_one)))
        return mx.concatenate([part @ self.weight for part in parts]).reshape(*x.shape[:-1], -1)

    def rows(self, ids: mx.array) -> mx.array:
        """Rows of the checkpoint's (out, in) matrix, as an embedding reads them: (...) -> (..., in)."""
        return mx.moveaxis(mx.take(self.weight, ids, axis=1), 0, -1)  # (in, ...) -> (..., in)

    @property
    def num_rows(self) -> int:
        """Outputs."""
        return self.weight.shape[-1]

    @property
    def arrays(self) -> list[mx.array]:
        """Every array of the matrix."""
        return [self.weight]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """An (out, in) matrix in one of MLX's formats; the scales and biases of an affine one have the compute dtype."""

    weight: mx.array  # (out, in * bits / 32) uint32
    scales: mx.array  # (out, in / group_size); uint8 if the format is a floating-point one
    biases: mx.array | None  # (out, in / group_size); None there
    quantization: Quantization

    def project(self, x: mx.array) -> mx.array:
        """(..., in) -> (..., out)."""
        if mx.default_device().type == mx.cpu:
            rows, elements = x.size // x.shape[-1], self.num_rows * x.shape[-1]
            if self._in_bytes(x) and 1 <= rows <= FEW_ROWS:
                if rows >= UNPACK_FROM_ROWS or elements >= UNPACK_FROM_ELEMENTS:
                    return self._project_unpacked(x)
            elif rows >= DEQUANTIZE_FROM_ROWS:
                return self._project_dequantized(x)
            if elements >= PARALLEL_ELEMENTS:
                return self._project_in_parallel(x)
        return self._project_part(x, 0, self.num_rows)

    def _project_part(self, x: mx.array, first: int, last: int, stream: mx.ThreadLocalStream | None = None) -> mx.array:
        """(..., in) -> (..., last - first): some of the outputs."""
        return mx.quantized_matmul(
            x,
            self.weight[first:last],
            self.scales[first:last],
            None if self.biases is None else self.biases[first:last],
            transpose=True,
            group_size=self.quantization.group_size,
            bits=self.quantization.bits,
            mode=self.quantization.mode,
            stream=stream,
        )

    def _project_in_parallel(self, x: mx.array) -> mx.array:
        """The same numbers from a thread for each core, MLX's streams having one each."""
        streams = cpu_streams()[: self.num_rows]  # MLX dies of a division by zero in a product with no outputs
        bounds = [self.num_rows * i // len(streams) for i in range(len(streams) + 1)]
        parts = [
            self._project_part(x, first, last, stream)
            for first, last, stream in zip(bounds, bounds[1:], streams, strict=False)
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _project_unpacked(self, x: mx.array) -> mx.array:
        """Through floating-point weights, a few at a time, for a few rows."""
        return few_rows_product(x, self.arrays, self.quantization, self._streams(x))

    def _project_dequantized(self, x: mx.array) -> mx.array:
        """Through floating-point weights, some of them at a time; MLX's CPU product unpacks them for every row of x."""
        streams = self._streams(x)
        rounds = -(-self.num_rows * x.shape[-1] // (DEQUANTIZED_ELEMENTS * len(streams)))
        size = -(-self.num_rows // (rounds * len(streams)))
        masked = unpacked_product(x, self.quantization) if self._in_bytes(x) else None
        product = masked or (lambda packed: x @ self._dequantize(packed, x.dtype).T)
        parts = in_turn(x, self.arrays, [*range(0, self.num_rows, size), self.num_rows], product, streams)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _streams(self, x: mx.array) -> Sequence[mx.Stream | mx.ThreadLocalStream]:
        """One for each core; for a small matrix only the one in use."""
        is_small = self.num_rows * x.shape[-1] < PARALLEL_ELEMENTS
        return [mx.default_stream(mx.cpu)] if is_small else cpu_streams()

    def _in_bytes(self, x: mx.array) -> bool:
        """Whether :func:`unpacked_product` knows the format."""
        return (
            8 % self.quantization.bits == 0 and self.biases is not None and x.dtype == self.scales.dtype == mx.float32
        )

    def rows(self, ids: mx.array) -> mx.array:
        """Rows of the matrix, dequantized, as an embedding reads them: (...) -> (..., in)."""
        return self._dequantize([array[ids] for array in self.arrays], None)

    def _dequantize(self, packed: Sequence[mx.array], dtype: mx.Dtype | None) -> mx.array:
        """Some rows; without a dtype, an affine matrix's in its scales', any other's in bfloat16, which is exact."""
        weight, scales, *biases = packed
        return mx.dequantize(
            weight,
            scales,
            biases[0] if biases else None,
            group_size=self.quantization.group_size,
            bits=self.quantization.bits,
            mode=self.quantization.mode,
            dtype=dtype,
        )

    @property
    def num_rows(self) -> int:
        """Outputs."""
        return self.weight.shape[-2]

    @property
    def arrays(self) -> list[mx.array]:
        """Every array of the matrix."""
        return [self.weight, self.scales, *([] if self.biases is None else [self.biases])]
