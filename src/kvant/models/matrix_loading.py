"""Matrices as they are loaded: rows side by side, in formats that this device multiplies."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.errors import ModelError, one_line
from kvant.models.matrix import DenseMatrix, QuantizedMatrix
from kvant.models.quantization import Quantization


def dense_matrix(weights: Sequence[mx.array], dtype: mx.Dtype) -> DenseMatrix:
    """One matrix from the checkpoint's (out, in) matrices, their rows side by side, stored as the device likes it.

    Those of experts, (experts, out, in), are side by side expert by expert.
    """
    weight = mx.concatenate(list(weights), axis=-2).astype(dtype).swapaxes(-1, -2)  # (out, in) -> (in, out)
    if mx.default_device().type == mx.cpu:
        weight = mx.contiguous(weight)  # other devices multiply the transposed view best
    mx.eval(weight)  # matrix by matrix: its sources, up to twice its bytes, are not held for a whole layer
    return DenseMatrix(weight)


def quantized_matrix(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix from matrices of one quantization, their rows side by side: exact."""
    if len(parts) == 1:
        return parts[0]
    weight, scales, *biases = (
        mx.concatenate(list(rows), axis=-2) for rows in zip(*(m.arrays for m in parts), strict=True)
    )
    return QuantizedMatrix(weight, scales, biases[0] if biases else None, parts[0].quantization)


def check_device(quantization: Quantization) -> None:
    """Multiply a little in this format."""
    try:
        weight, scales, *biases = mx.quantize(
            mx.ones((32, 512)), group_size=quantization.group_size, bits=quantization.bits, mode=quantization.mode
        )
        matrix = QuantizedMatrix(weight, scales, biases[0] if biases else None, quantization)
        mx.eval([matrix.project(mx.ones((rows, 512))) for rows in (1, 32)], matrix.rows(mx.array([0])))
    except (RuntimeError, ValueError) as error:
        raise unusable(quantization, error) from error


def unusable(quantization: Quantization, error: Exception) -> ModelError:
    """The error of a format that MLX does not multiply with on this device."""
    return ModelError(
        f"MLX cannot use {quantization.bits}-bit {quantization.mode} weights in groups of "
        f"{quantization.group_size} on this device ({mx.default_device().type}): {one_line(error)}"
    )
