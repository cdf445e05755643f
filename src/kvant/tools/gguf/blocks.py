"""The block types of GGUF and what each becomes in MLX.

A row of a GGUF tensor is divided into blocks, each with scales of its own. MLX's affine format divides a row
into groups of 32 values, ``value = scale * q + bias``, so every type whose scales cover whole groups of 32
can be repacked:

- Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 exactly: scale and bias are float16 numbers of the file, or these times a
  power of two;
- Q4_K, Q5_K with rounding: their scales are products of a float16 and a 6-bit number, rounded to float16
  here;
- Q6_K has a scale for every 16 values, which MLX has not: the values are computed and quantized to 8 bits
  again;
- MXFP4 exactly, in MLX's mode of that name.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0 to block_mxfp4) and
dequantize_row_* in ggml-quants.c beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import mlx.core as mx
import numpy as np

from kvant.models.quantization import Quantization

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
GROUP = 32
REQUANTIZED_BITS = 8  # of Q6_K


class Fidelity(StrEnum):
    """How close the imported tensor is to the file's."""

    EXACT = "exact"
    ROUNDED = "scales rounded to float16"
    REQUANTIZED = "requantized to 8 bits"


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor in MLX's form: one array, or a quantized matrix's three (``biases`` is None for mxfp4)."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensor.

    Attributes:
        size: values in a block.
        nbytes: bytes of a block.
        pack: (blocks (n, nbytes) uint8, shape) -> the tensor in MLX's form. A ValueError: scales MLX cannot
        hold. quantization: what a matrix becomes; None: it stays in floating point.
    """

    name: str
    size: int
    nbytes: int
    pack: Callable[[Bytes, tuple[int, ...]], Packed]
    quantization: Quantization | None
    fidelity: Fidelity = Fidelity.EXACT


def _half(data: Bytes) -> Floats:
    """Two bytes each -> float32 (n, 1). Blocks are sliced out of rows, so they are copied together first."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes, run: int) -> Bytes:
    """Unpack 4-bit numbers: of each ``run`` bytes first all the low halves, then all the high ones.

    (n, bytes) -> (n, 2 * bytes).
    """
    runs = data.reshape(len(data), -1, 1, run)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(len(data), -1)


def _bits(data: Bytes) -> Bytes:
    """Unpack single bits, lowest first: (n, bytes) -> (n, 8 * bytes)."""
    return np.unpackbits(data, axis=1, bitorder="little")


def _fifth(data: Bytes) -> Bytes:
    """Unpack the fifth bits of numbers, as 16 or 0."""
    return _bits(data) * np.uint8(16)


def _float16(values: Floats) -> np.ndarray[Any, np.dtype[np.float16]]:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise ValueError("has a scale that is not a finite float16")
    return rounded


def pack_bits(numbers: Bytes, bits: int) -> mx.array:
    """Pack numbers (n, count) of ``bits`` bits as MLX stores them: one stream of bits, lowest first, in
    uint32.

    ``count`` is a multiple of 32. Returns (n, count * bits / 32) uint32.
    """
    eights = numbers.reshape(-1, 8)
    stream = np.zeros(len(eights), np.uint64)
    for place in range(8):
        stream |= eights[:, place].astype(np.uint64) << np.uint64(place * bits)
    packed = np.ascontiguousarray(stream.view(np.uint8).reshape(-1, 8)[:, :bits])
    return mx.array(packed.reshape(len(numbers), -1).view(np.uint32))


def _affine(numbers: Bytes, bits: int, scales: Floats, biases: Floats, shape: tuple[int, ...]) -> Packed:
    """Arrange groups (n, 32) of a tensor of this shape: scales and biases (n, 1)."""
    groups = (*shape[:-1], shape[-1] // GROUP)
    weight = pack_bits(numbers, bits).reshape(*shape[:-1], -1)
    return Packed(weight, mx.array(_float16(scales)).reshape(groups), mx.array(_float16(biases)).reshape(groups))


def _q4_0(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    scale = _half(blocks[:, :2])
    return _affine(_nibbles(blocks[:, 2:], 16), 4, scale, -8 * scale, shape)


def _q4_1(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    return _affine(_nibbles(blocks[:, 4:], 16), 4, _half(blocks[:, :2]), _half(blocks[:, 2:4]), shape)


def _q5_0(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    scale = _half(blocks[:, :2])
    numbers = _nibbles(blocks[:, 6:], 16) | _fifth(blocks[:, 2:6])
    return _affine(numbers, 5, scale, -16 * scale, shape)


def _q5_1(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    numbers = _nibbles(blocks[:, 8:], 16) | _fifth(blocks[:, 4:8])
    return _affine(numbers, 5, _half(blocks[:, :2]), _half(blocks[:, 2:4]), shape)


def _q8_0(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    scale = _half(blocks[:, :2])
    return _affine(blocks[:, 2:] ^ np.uint8(0x80), 8, scale, -128 * scale, shape)  # int8 + 128


def _k_scales(data: Bytes) -> tuple[Floats, Floats]:
    """Unpack the eight 6-bit scales and the eight 6-bit minima of K blocks: (n, 12) -> twice (n, 8).

    The first four of each lie in the low 6 bits of bytes 0 to 3 and 4 to 7. The last four have their low
    halves in bytes 8 to 11, scales in the low nibbles and minima in the high ones, and their top two bits
    above the first four's.
    """
    scales, minima, low = data[:, :4], data[:, 4:8], data[:, 8:]
    scale = np.concatenate([scales & 0x3F, low & 0x0F | scales >> 6 << 4], axis=1)
    minimum = np.concatenate([minima & 0x3F, low >> 4 | minima >> 6 << 4], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _k_affine(blocks: Bytes, numbers: Bytes, bits: int, shape: tuple[int, ...]) -> Packed:
    scale, minimum = _k_scales(blocks[:, 4:16])
    scales = _half(blocks[:, :2]) * scale  # (n, 8)
    biases = -_half(blocks[:, 2:4]) * minimum
    return _affine(numbers.reshape(-1, GROUP), bits, scales.reshape(-1, 1), biases.reshape(-1, 1), shape)


def _q4_k(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    return _k_affine(blocks, _nibbles(blocks[:, 16:], 32), 4, shape)


def _q5_k(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    # Bit j of the 32 bytes is the fifth bit of the 32 values of group j: (n, 32, 8) -> (n, 8, 32).
    fifth = _fifth(blocks[:, 16:48]).reshape(-1, 32, 8).swapaxes(1, 2).reshape(-1, 256)
    return _k_affine(blocks, _nibbles(blocks[:, 48:], 32) | fifth, 5, shape)


def q6_k_values(blocks: Bytes) -> Floats:
    """Compute the values of Q6_K blocks: (n, 210) uint8 -> (n, 256) float32.

    Low halves lie in 128 bytes, 64 for each half of the block; the top two bits in 64 bytes, 32 for each
    half, whose bit pairs 0 to 3 belong to its four quarters of 32; then 16 int8 scales and a float16.
    """
    low = _nibbles(blocks[:, :128], 64)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = np.concatenate([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 256)
    numbers = (low | high << 4).astype(np.float32) - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)  # (n, 16)
    return (numbers.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


def _q6_k(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    values = _float16(q6_k_values(blocks)).reshape(shape)
    return Packed(*mx.quantize(mx.array(values), GROUP, REQUANTIZED_BITS))


def _mxfp4(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    # Both formats: a byte of 2^(byte - 127) and 4-bit floating-point numbers; only their order differs.
    weight = pack_bits(_nibbles(blocks[:, 1:], 16), 4).reshape(*shape[:-1], -1)
    return Packed(weight, mx.array(np.ascontiguousarray(blocks[:, 0]).reshape(*shape[:-1], -1)))


def _f16(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    return Packed(mx.array(np.ascontiguousarray(blocks).view(np.float16).reshape(shape)))


def _bf16(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    return Packed(mx.array(np.ascontiguousarray(blocks).view(np.uint16).reshape(shape)).view(mx.bfloat16))


def _f32(blocks: Bytes, shape: tuple[int, ...]) -> Packed:
    """Floats as float16 if it holds each of them exactly: llama.cpp stores norms of any dtype as float32."""
    values = np.ascontiguousarray(blocks).view(np.float32).reshape(shape)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    return Packed(mx.array(halves if np.array_equal(halves.astype(np.float32), values) else values))


_AFFINE_4, _AFFINE_5, _AFFINE_8 = (Quantization(bits, GROUP) for bits in (4, 5, 8))
# By the numbers of GGUF.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, _f32, None),
    1: BlockType("F16", 1, 2, _f16, None),
    2: BlockType("Q4_0", 32, 18, _q4_0, _AFFINE_4),
    3: BlockType("Q4_1", 32, 20, _q4_1, _AFFINE_4),
    6: BlockType("Q5_0", 32, 22, _q5_0, _AFFINE_5),
    7: BlockType("Q5_1", 32, 24, _q5_1, _AFFINE_5),
    8: BlockType("Q8_0", 32, 34, _q8_0, _AFFINE_8),
    12: BlockType("Q4_K", 256, 144, _q4_k, _AFFINE_4, Fidelity.ROUNDED),
    13: BlockType("Q5_K", 256, 176, _q5_k, _AFFINE_5, Fidelity.ROUNDED),
    14: BlockType("Q6_K", 256, 210, _q6_k, _AFFINE_8, Fidelity.REQUANTIZED),
    30: BlockType("BF16", 1, 2, _bf16, None),
    39: BlockType("MXFP4", 32, 17, _mxfp4, Quantization(4, GROUP, "mxfp4")),
}
# Types that are not imported, for messages.
TYPE_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28:
    "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
