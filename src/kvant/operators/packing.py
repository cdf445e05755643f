"""Packings: the layout of quantized values in a cache's bytes.

To support another number of bits, add an entry to :data:`PACKINGS`: quantization, storage, unfused attention,
planning and saving follow it. The fused kernel has its own list of bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Packing:
    """How values of a number of bits are stored.

    Attributes:
        dtype: of the stored array.
        unit: number of values packed together; it must divide head_dim.
        pack: converts rounded floats (..., D/G, G) to stored values (..., D * bits / 8).
        unpack: converts stored values to int8 (..., D).
        unpack_numpy: the same for NumPy arrays. It must not import NumPy, which short runs do not need.
    """

    dtype: mx.Dtype
    unit: int
    pack: Callable[[mx.array], mx.array]
    unpack: Callable[[mx.array], mx.array]
    unpack_numpy: Callable[[Any], Any]


def _pack_bytes(quantized: mx.array) -> mx.array:
    return quantized.astype(mx.int8).flatten(-2)


def _unpack_bytes(stored: mx.array) -> mx.array:
    return mx.view(stored, mx.int8)


def _unpack_bytes_numpy(stored: Any) -> Any:
    return stored.view("int8")


def _pack_nibbles(quantized: mx.array) -> mx.array:
    # (..., D/G, G) floats -> (..., D/2) bytes. n + 8 is at least 0, and (n + 8) ^ 8 is n in two's complement.
    # Two bytes form a little-endian word.
    words = mx.view((quantized + 8).astype(mx.uint8).flatten(-2), mx.uint16)
    return (words | (words >> 4)).astype(mx.uint8) ^ mx.array(0x88, mx.uint8)


def _unpack_nibbles(packed: mx.array) -> mx.array:
    # Put the two nibbles of a byte into the two bytes of a 16-bit word. On little-endian machines (MLX runs
    # on no others) they are then in the order of the elements. (n ^ 8) - 8 sign-extends the nibble n. This
    # takes a half to a third of the time of stacking the two.
    words = packed.astype(mx.uint16)
    words = ((words | (words << 4)) & mx.array(0x0F0F, mx.uint16)) ^ mx.array(0x0808, mx.uint16)
    return mx.view(words, mx.int8) - mx.array(8, mx.int8)  # (..., D/2) -> (..., D)


def _unpack_nibbles_numpy(packed: Any) -> Any:
    words = packed.astype("uint16")
    words |= words << 4
    words &= 0x0F0F
    words ^= 0x0808
    numbers = words.view("int8")
    numbers -= 8
    return numbers


# By bits: int8 from -127 to 127, and two 4-bit values in a byte, the first in the low nibble.
PACKINGS = {
    8: Packing(mx.int8, 1, _pack_bytes, _unpack_bytes, _unpack_bytes_numpy),
    4: Packing(mx.uint8, 2, _pack_nibbles, _unpack_nibbles, _unpack_nibbles_numpy),
}


def stored_width(head_dim: int, bits: int) -> int:
    """Return the length of the last axis of stored values; without quantization that is head_dim."""
    return head_dim * bits // 8 if bits else head_dim
