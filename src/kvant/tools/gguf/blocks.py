"""GGUF's block types, and the MLX format that each is converted to.

GGUF divides a tensor's rows into blocks, each with its own scales. MLX's affine format divides rows into
groups of 32 values, ``value = scale * q + bias``. A type whose scales cover whole groups of 32 can be
repacked:

- Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 exactly: scales and biases are the file's float16 numbers, or these times a
  power of two;
- Q4_K, Q5_K with rounding: their scales are products of a float16 and a 6-bit number, rounded to float16
here;
- Q6_K is quantized again, to 8 bits, because it has a scale for every 16 values and MLX's groups are larger;
- MXFP4 exactly, in MLX's mode of the same name.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0 to block_mxfp4) and
dequantize_row_* in ggml-quants.c next to it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from kvant.models.as_stored import PARTS
from kvant.models.quantization import Quantization
from kvant.models.tensors import DTYPES

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
# Blocks as groups of values, scale * number + bias: numbers (n, group), scales and biases (n, 1).
Groups = tuple[np.ndarray[Any, Any], Floats, Floats]
Read = Callable[[Bytes], Groups]
# Groups in MLX's format, (n, ...): "weight"; also "scales" if quantized, and "biases" if that is affine.
Packed = dict[str, mx.array]
GROUP = 32


class Fidelity(StrEnum):
    """How close the imported tensor is to the file's."""

    EXACT = "exact"
    ROUNDED = "scales rounded to float16"
    REQUANTIZED = "requantized to 8 bits"


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type of GGUF."""

    name: str
    size: int  # values in a block
    nbytes: int  # bytes of a block
    pack: Callable[[Bytes], Packed]  # blocks (n, nbytes) to MLX's format; ValueError: a scale is not finite
    expand: Callable[[Bytes], Floats]  # blocks (n, nbytes) to the values they stand for, (n * size,)
    quantization: Quantization | None  # the format of an imported matrix; None: floating point
    fidelity: Fidelity = Fidelity.EXACT


def _half(data: Bytes) -> Floats:
    """Convert float16 numbers of two bytes each: (n, 2) -> float32 (n, 1)."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes, run: int) -> Bytes:
    """Unpack 4-bit numbers, of each ``run`` bytes all low halves first: (n, bytes) -> (n, 2 * bytes)."""
    runs = data.reshape(len(data), -1, 1, run)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(len(data), -1)


def _fifth_bits(data: Bytes) -> Bytes:
    """Unpack each number's fifth bit, lowest first, as 16 or 0: (n, bytes) -> (n, 8 * bytes)."""
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
    for number in range(8):
        stream |= eights[:, number].astype(np.uint64) << np.uint64(number * bits)
    packed = np.ascontiguousarray(stream.view(np.uint8).reshape(-1, 8)[:, :bits])
    return mx.array(packed.reshape(len(numbers), -1).view(np.uint32))


def _read_32(bits: int, has_minimum: bool, blocks: Bytes) -> Groups:
    """Read Q4_0, Q4_1, Q5_0 and Q5_1: a scale, a minimum (_1 types), fifth bits (Q5), low halves."""
    numbers = _nibbles(blocks[:, -16:], 16)
    if bits == 5:
        numbers |= _fifth_bits(blocks[:, -20:-16])
    scale = _half(blocks[:, :2])
    return numbers, scale, _half(blocks[:, 2:4]) if has_minimum else -(2 ** (bits - 1)) * scale


def _read_q8_0(blocks: Bytes) -> Groups:
    scale = _half(blocks[:, :2])
    return blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale  # add 128 to each int8


def _read_k(bits: int, blocks: Bytes) -> Groups:
    """Read Q4_K and Q5_K: two float16, 12 bytes of 6-bit numbers, in Q5_K fifth bits, and low halves.

    The 6-bit numbers are eight scales and eight minima. The first four of each lie in the low 6 bits of bytes
    0 to 3 and 4 to 7. The last four have their low halves in bytes 8 to 11, scales in the low nibbles and
    minima in the high ones, and their top two bits above the first four's.
    """
    scales = blocks[:, 4:8]
    minima = blocks[:, 8:12]
    low = blocks[:, 12:16]
    # (n, 8)
    scale = np.concatenate([scales & 0x3F, low & 0x0F | scales >> 6 << 4], axis=1).astype(np.float32)
    minimum = np.concatenate([minima & 0x3F, low >> 4 | minima >> 6 << 4], axis=1).astype(np.float32)
    numbers = _nibbles(blocks[:, -128:], 32)
    if bits == 5:
        # Bit j of the 32 bytes is the fifth bit of the 32 values of group j: (n, 32, 8) -> (n, 8, 32).
        numbers |= _fifth_bits(blocks[:, 16:48]).reshape(-1, 32, 8).swapaxes(1, 2).reshape(-1, 256)
    scale *= _half(blocks[:, :2])
    minimum *= -_half(blocks[:, 2:4])
    return numbers.reshape(-1, GROUP), scale.reshape(-1, 1), minimum.reshape(-1, 1)


def _read_q6_k(blocks: Bytes) -> Groups:
    """Read Q6_K, in groups of 16.

    Low halves lie in 128 bytes, 64 for each half of the block; the top two bits in 64 bytes, 32 for each
    half, whose bit pairs 0 to 3 belong to its four quarters of 32; then 16 int8 scales and a float16.
    """
    low = _nibbles(blocks[:, :128], 64)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = np.concatenate([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 256)
    numbers = (low | high << 4).view(np.int8) - np.int8(32)
    scales = (_half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)).reshape(-1, 1)  # (16 n, 1)
    return numbers.reshape(-1, 16), scales, np.zeros_like(scales)


def _expand(read: Read, blocks: Bytes) -> Floats:
    numbers, scales, biases = read(blocks)
    return (numbers.astype(np.float32) * scales + biases).reshape(-1)


def _affine(
    name: str, size: int, nbytes: int, bits: int, read: Read, fidelity: Fidelity = Fidelity.EXACT
) -> BlockType:
    """Describe a type that is imported in MLX's affine format of ``bits`` bits."""

    def pack(blocks: Bytes) -> Packed:
        if fidelity is Fidelity.REQUANTIZED:
            arrays = mx.quantize(_float16(_expand(read, blocks)).reshape(-1, GROUP), GROUP, bits)
        else:
            numbers, scales, biases = read(blocks)
            arrays = (pack_bits(numbers, bits), _float16(scales), _float16(biases))
        return dict(zip(PARTS, arrays, strict=True))

    return BlockType(name, size, nbytes, pack, partial(_expand, read), Quantization(bits, GROUP), fidelity)


def _floats(name: str) -> BlockType:
    """Describe a type of plain numbers, which are imported unchanged."""
    dtype = DTYPES[name]

    def pack(blocks: Bytes) -> Packed:
        return {"weight": mx.array(blocks).view(dtype)}

    def expand(blocks: Bytes) -> Floats:
        return np.array(pack(blocks)["weight"].astype(mx.float32)).reshape(-1)

    return BlockType(name, 1, dtype.size, pack, expand, None)


def _pack_mxfp4(blocks: Bytes) -> Packed:
    # Both formats store a byte of 2^(byte - 127) and 4-bit floating-point numbers; only the order differs.
    return {"weight": pack_bits(_nibbles(blocks[:, 1:], 16), 4), "scales": mx.array(blocks[:, :1])}


def _expand_mxfp4(blocks: Bytes) -> Floats:
    packed = _pack_mxfp4(blocks)
    values = mx.dequantize(packed["weight"], packed["scales"], group_size=GROUP, bits=4, mode="mxfp4")
    return np.array(values.astype(mx.float32)).reshape(-1)


# By GGUF's type number.
BLOCK_TYPES = {
    0: _floats("F32"),
    1: _floats("F16"),
    2: _affine("Q4_0", 32, 18, 4, partial(_read_32, 4, False)),
    3: _affine("Q4_1", 32, 20, 4, partial(_read_32, 4, True)),
    6: _affine("Q5_0", 32, 22, 5, partial(_read_32, 5, False)),
    7: _affine("Q5_1", 32, 24, 5, partial(_read_32, 5, True)),
    8: _affine("Q8_0", 32, 34, 8, _read_q8_0),
    12: _affine("Q4_K", 256, 144, 4, partial(_read_k, 4), Fidelity.ROUNDED),
    13: _affine("Q5_K", 256, 176, 5, partial(_read_k, 5), Fidelity.ROUNDED),
    14: _affine("Q6_K", 256, 210, 8, _read_q6_k, Fidelity.REQUANTIZED),
    30: _floats("BF16"),
    39: BlockType("MXFP4", 32, 17, _pack_mxfp4, _expand_mxfp4, Quantization(4, GROUP, "mxfp4")),
}
# Types that are not imported, named in messages.
TYPE_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28:
    "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
