"""A matrix with an adapter, and the kinds of matrix there are."""

from dataclasses import dataclass

import mlx.core as mx

from kvant.models.matrix import DenseMatrix, QuantizedMatrix


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A quantized matrix with an adapter's low rank beside it: exact, and the matrix keeps its bits.

    Quantizing the sum again would add an error as large as the first quantization's: with 4 bits in groups of 64, an
    adapter that moved the embedded model's logits by 0.026 of the largest came out 0.064 away from where it should.
    """

    base: DenseMatrix | QuantizedMatrix
    down: mx.array  # (in, R)
    up: mx.array  # (R, out)

    def project(self, x: mx.array) -> mx.array:
        """(..., in) -> (..., out)."""
        return self.base.project(x) + (x @ self.down) @ self.up

    def rows(self, ids: mx.array) -> mx.array:
        """Rows of the sum, as an embedding reads them: (...) -> (..., in)."""
        up = mx.moveaxis(mx.take(self.up, ids, axis=1), 0, -1)  # (R, ...) -> (..., R)
        return self.base.rows(ids) + up @ self.down.T

    @property
    def num_rows(self) -> int:
        """Outputs."""
        return self.base.num_rows

    @property
    def arrays(self) -> list[mx.array]:
        """Every array of the matrix."""
        return [*self.base.arrays, self.down, self.up]


Matrix = DenseMatrix | QuantizedMatrix | AdaptedMatrix
