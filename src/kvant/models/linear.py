"""A projection of one or more matrices."""

from dataclasses import dataclass

import mlx.core as mx

from kvant.models.adapted import Matrix


@dataclass(frozen=True, slots=True)
class Linear:
    """x -> x W^T + b for one or more of a checkpoint's projections that share their input.

    Projections whose storage agrees are one matrix (exact: rows side by side); the others stay separate.
    """

    matrices: tuple[Matrix, ...]
    bias: mx.array | None = None  # (out,), of all of them

    def __call__(self, x: mx.array) -> mx.array:
        """(..., in) -> (..., out)."""
        parts = [matrix.project(x) for matrix in self.matrices]
        output = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        return output if self.bias is None else output + self.bias

    @property
    def num_rows(self) -> int:
        """Outputs."""
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
        """Every array of the projection."""
        return [*(a for matrix in self.matrices for a in matrix.arrays), *([] if self.bias is None else [self.bias])]
