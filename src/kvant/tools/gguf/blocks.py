"""The block types of GGUF and what each becomes in MLX.

A row of a GGUF tensor is divided into blocks, each with scales of its own. MLX's affine format divides a row into
groups of 32 values, ``value = scale * q + bias``. A type whose scales cover whole groups of 32 can be repacked:

- Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 exactly: scale and bias are float16 numbers of the file, or these times a power of two;
- Q4_K, Q5_K with rounding: their scales are products of a float16 and a 6-bit number, rounded to float16 here;
- Q6_K has a scale for every 16 values, and MLX's groups are larger: the values are quantized to 8 bits again;
- MXFP4 exactly, in MLX's mode of that name.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0 to block_mxfp4) and
dequantize_row_* in ggml-quants.c beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
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
    """Rows in MLX's form: one array, or a quantized matrix's three (``biases`` is None for mxfp4)."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Groups:
    """Blocks as groups of 32 values, ``scale * number + bias``: numbers (n, 32), scales and biases (n, 1)."""

    numbers: Bytes
    scales: Floats
    biases: Floats


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensor.

    Attributes:
        size: values in a block.
        nbytes: bytes of a block.
        pack: (blocks (n, nbytes) uint8, width of a row) -> the rows in MLX's form; a ValueError if a scale is no
            finite float16.
        expand: blocks (n, nbytes) uint8 -> the file's own values (n * size,), float32.
        quantization: what a matrix becomes; None: it stays in floating point.
    """

    name: str
    size: int
    nbytes: int
    pack: Callable[[Bytes, int], Packed]
    expand: Callable[[Bytes], Floats]
    quantization: Quantization | None
    fidelity: Fidelity = Fidelity.EXACT


def _half(data: Bytes) -> Floats:
    """Convert float16 numbers of two bytes each: (n, 2) -> float32 (n, 1)."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes, run: int) -> Bytes:
    """Unpack 4-bit numbers: of each ``run`` bytes first all the low halves, then all the high ones.

    (n, bytes) -> (n, 2 * bytes).
    """
    runs = data.reshape(len(data), -1, 1, run)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(len(data), -1)


def _fifth_bits(data: Bytes) -> Bytes:
    """Unpack the fifth bits of numbers, lowest first, as 16 or 0: (n, bytes) -> (n, 8 * bytes)."""
    return np.unpackbits(data, axis=1, bitorder="little") * np.uint8(16)


def _float16(values: Floats) -> mx.array:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise ValueError("has a scale that is not a finite float16")
    return mx.array(rounded)


def pack_bits(numbers: Bytes, bits: int) -> mx.array:
    """Pack numbers (n, count) as MLX stores them: one stream of bits, lowest first, in uint32.

    ``count`` is a multiple of 32. Returns (n, count * bits / 32) uint32.
    """
    eights = numbers.reshape(-1, 8)
    stream = np.zeros(len(eights), np.uint64)
    for place in range(8):
        stream |= eights[:, place].astype(np.uint64) << np.uint64(place * bits)
    packed = np.ascontiguousarray(stream.view(np.uint8).reshape(-1, 8)[:, :bits])
    return mx.array(packed.reshape(len(numbers), -1).view(np.uint32))


def _q4_0(blocks: Bytes) -> Groups:
    scale = _half(blocks[:, :2])
    return Groups(_nibbles(blocks[:, 2:], 16), scale, -8 * scale)


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 4:], 16), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q5_0(blocks: Bytes) -> Groups:
    scale = _half(blocks[:, :2])
    return Groups(_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale)


def _q5_1(blocks: Bytes) -> Groups:
    numbers = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return Groups(numbers, _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q8_0(blocks: Bytes) -> Groups:
    scale = _half(blocks[:, :2])
    return Groups(blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale)  # an int8 and 128


def _k_groups(blocks: Bytes, numbers: Bytes) -> Groups:
    """Scale the numbers (n, 256) of K blocks, which begin with two float16 and 12 bytes of 6-bit numbers.

    These are eight scales and eight minima. The first four of each lie in the low 6 bits of bytes 0 to 3 and 4 to 7.
    The last four have their low halves in bytes 8 to 11, scales in the low nibbles and minima in the high ones, and
    their top two bits above the first four's.
    """
    scales, minima, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([scales & 0x3F, low & 0x0F | scales >> 6 << 4], axis=1).astype(np.float32)  # (n, 8)
    minimum = np.concatenate([minima & 0x3F, low >> 4 | minima >> 6 << 4], axis=1).astype(np.float32)
    return Groups(
        numbers.reshape(-1, GROUP),
        (_half(blocks[:, :2]) * scale).reshape(-1, 1),
        (-_half(blocks[:, 2:4]) * minimum).reshape(-1, 1),
    )


def _q4_k(blocks: Bytes) -> Groups:
    return _k_groups(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Bytes) -> Groups:
    # Bit j of the 32 bytes is the fifth bit of the 32 values of group j: (n, 32, 8) -> (n, 8, 32).
    fifth = _fifth_bits(blocks[:, 16:48]).reshape(-1, 32, 8).swapaxes(1, 2).reshape(-1, 256)
    return _k_groups(blocks, _nibbles(blocks[:, 48:], 32) | fifth)


def _pack_groups(read: Callable[[Bytes], Groups], bits: int, blocks: Bytes, width: int) -> Packed:
    groups = read(blocks)
    return Packed(
        pack_bits(groups.numbers, bits).reshape(-1, width * bits // 32),
        _float16(groups.scales).reshape(-1, width // GROUP),
        _float16(groups.biases).reshape(-1, width // GROUP),
    )


def _expand_groups(read: Callable[[Bytes], Groups], blocks: Bytes) -> Floats:
    groups = read(blocks)
    return (groups.numbers.astype(np.float32) * groups.scales + groups.biases).reshape(-1)


def _affine(
    name: str,
    size: int,
    nbytes: int,
    bits: int,
    read: Callable[[Bytes], Groups],
    fidelity: Fidelity = Fidelity.EXACT,
) -> BlockType:
    """A type that MLX's affine format of ``bits`` bits holds."""
    pack, expand = partial(_pack_groups, read, bits), partial(_expand_groups, read)
    return BlockType(name, size, nbytes, pack, expand, Quantization(bits, GROUP), fidelity)


def _expand_q6_k(blocks: Bytes) -> Floats:
    """Compute the values of Q6_K blocks.

    Low halves lie in 128 bytes, 64 for each half of the block; the top two bits in 64 bytes, 32 for each half, whose
    bit pairs 0 to 3 belong to its four quarters of 32; then 16 int8 scales and a float16.
    """
    low = _nibbles(blocks[:, :128], 64)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = np.concatenate([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 256)
    numbers = (low | high << 4).astype(np.float32) - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)  # (n, 16)
    return (numbers.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1)


def _pack_q6_k(blocks: Bytes, width: int) -> Packed:
    return Packed(*mx.quantize(_float16(_expand_q6_k(blocks)).reshape(-1, width), GROUP, REQUANTIZED_BITS))


def _pack_mxfp4(blocks: Bytes, width: int) -> Packed:
    # Both formats: a byte of 2^(byte - 127) and 4-bit floating-point numbers; only their order differs.
    weight = pack_bits(_nibbles(blocks[:, 1:], 16), 4).reshape(-1, width // 8)
    return Packed(weight, mx.array(np.ascontiguousarray(blocks[:, 0]).reshape(-1, width // GROUP)))


def _expand_mxfp4(blocks: Bytes) -> Floats:
    packed = _pack_mxfp4(blocks, GROUP)
    assert packed.scales is not None
    values = mx.dequantize(packed.weight, packed.scales, group_size=GROUP, bits=4, mode="mxfp4")
    return np.array(values.astype(mx.float32)).reshape(-1)


def _expand_f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float32).reshape(-1)


def _pack_floats(dtype: mx.Dtype, blocks: Bytes, width: int) -> Packed:
    return Packed(mx.array(np.ascontiguousarray(blocks)).view(dtype).reshape(-1, width))


def _expand_bf16(blocks: Bytes) -> Floats:
    halves = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32)
    return (halves << np.uint32(16)).view(np.float32).reshape(-1)


ROUNDED, REQUANTIZED = Fidelity.ROUNDED, Fidelity.REQUANTIZED
# By the numbers of GGUF.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, partial(_pack_floats, mx.float32), _expand_f32, None),
    1: BlockType("F16", 1, 2, partial(_pack_floats, mx.float16), lambda blocks: _half(blocks).reshape(-1), None),
    2: _affine("Q4_0", 32, 18, 4, _q4_0),
    3: _affine("Q4_1", 32, 20, 4, _q4_1),
    6: _affine("Q5_0", 32, 22, 5, _q5_0),
    7: _affine("Q5_1", 32, 24, 5, _q5_1),
    8: _affine("Q8_0", 32, 34, 8, _q8_0),
    12: _affine("Q4_K", 256, 144, 4, _q4_k, ROUNDED),
    13: _affine("Q5_K", 256, 176, 5, _q5_k, ROUNDED),
    14: BlockType("Q6_K", 256, 210, _pack_q6_k, _expand_q6_k, Quantization(REQUANTIZED_BITS, GROUP), REQUANTIZED),
    30: BlockType("BF16", 1, 2, partial(_pack_floats, mx.bfloat16), _expand_bf16, None),
    39: BlockType("MXFP4", 32, 17, _pack_mxfp4, _expand_mxfp4, Quantization(4, GROUP, "mxfp4")),
}
# Types that are not imported, for messages.
TYPE_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28:
    "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
