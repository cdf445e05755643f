"""A checked call of a PMX operator, which reads and writes tokens of the caller's cache and scale.

MaxB and MaxS are the allocated batch and length of a static cache, MaxT the rows of a packed one, L the
layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvant.operators.kernels.launch import Backend
from kvant.operators.packing import stored_width
from kvant.operators.pmx.validation import ArrayRow, check_arrays, check_numbers
from kvant.operators.quantization import FLOAT_DTYPES, SCALE_DTYPES, check_quantization, quantized_dtype
from kvant.operators.stored_tokens import stored_tokens

# By cache_layout. The last axis is D, D * bits / 8 bytes or D/G.
STATIC_LAYOUTS = (("MaxB", "L", "2", "MaxS", "H"), ("L", "MaxB", "2", "H", "MaxS"))
PACKED_LAYOUTS = (
    ("MaxT", "L", "2", "H"),
    ("L", "MaxT", "2", "H"),
    ("L", "2", "MaxT", "H"),
    ("L", "2", "H", "MaxT"),
)
ORDER = ("MaxB", "2", "H", "MaxS", "MaxT", "last")  # of the axes of tokens read or written
At = dict[str, slice | mx.array]  # the indices along each axis that a call reads or writes


@dataclass(frozen=True, slots=True)
class CacheCall:
    """One checked call."""

    arrays: list[mx.array]  # the caller's cache and, if there is one, scale
    axes: tuple[str, ...]  # names of the axes of both, except the last
    layer_idx: int
    quant_bit: int
    quant_group: int

    def write(self, key: mx.array, value: mx.array, at: At, backend: Backend | None = None) -> None:
        """Write new keys and values (B, K, S, D) to cache and scale, in place."""
        new = stored_tokens(
            key, value, self.arrays, quant_bit=self.quant_bit, quant_group=self.quant_group, backend=backend
        )
        ordered = self._ordered
        for array, tokens in zip(self.arrays, new, strict=True):
            tokens = tokens if "MaxB" in ordered else tokens.squeeze(0)  # from (B, 2, K, S, last)
            array[self._index(at)] = tokens.transpose([ordered.index(axis) for axis in self._stored_axes])

    def read(self, at: At) -> list[mx.array]:
        """Return the values and scales at these indices: (B, 2, K, T, last), or (2, K, T, last) if packed."""
        stored_axes = self._stored_axes
        return [
            array[self._index(at)].transpose([stored_axes.index(axis) for axis in self._ordered])
            for array in self.arrays
        ]

    @property
    def _stored_axes(self) -> list[str]:
        return [axis for axis in (*self.axes, "last") if axis != "L"]

    @property
    def _ordered(self) -> list[str]:
        return [axis for axis in ORDER if axis in self._stored_axes]

    def _index(self, at: At) -> tuple[int | slice | mx.array, ...]:
        return tuple(self.layer_idx if axis == "L" else at.get(axis, slice(None)) for axis in self.axes)


def check_call(
    layouts: Sequence[tuple[str, ...]],
    lead: Sequence[str],
    sizes: dict[str, int],
    form: tuple[int, ...],
    query: Any,
    current_key: mx.array,
    current_value: mx.array,
    cache: mx.array,
    scale: mx.array | None,
) -> CacheCall:
    """Check the arrays of a call and its cache; raise a ValueError that names the first defect.

    Args:
        lead: the axes of the new tokens before heads and head_dim.
        sizes: known sizes of axes, to which the others are added. Without Hq there is no query.
        form: num_layer, layer_idx, quant_bit, quant_group and cache_layout.
    """
    num_layer, layer_idx, quant_bit, quant_group, cache_layout = form
    tokens = (*lead, "H", "Dh")
    sizes["2"] = 2
    dtypes: tuple[mx.Dtype, ...] = (*FLOAT_DTYPES, mx.int8)
    if "Hq" in sizes:
        check_arrays([("query", query, (*lead, "Hq", "Dh"), FLOAT_DTYPES)], sizes)
        dtypes = (query.dtype,)
    check_arrays([("current_key", current_key, tokens, dtypes)], sizes)
    check_arrays([("current_value", current_value, tokens, (current_key.dtype,))], sizes)
    D = sizes["Dh"]
    is_int8 = current_key.dtype == mx.int8
    check_quantization(quant_bit, quant_group, D)
    check_numbers([("cache_layout", cache_layout, 0, len(layouts) - 1)])
    axes = layouts[cache_layout]
    stored: tuple[mx.Dtype, ...] = (quantized_dtype(quant_bit),)
    if not quant_bit:
        stored = (mx.int8,) if is_int8 else FLOAT_DTYPES
        if scale is not None:
            raise ValueError("scale is given; expected none with quant_bit 0")
    elif scale is None:
        raise ValueError(f"scale is None; expected an array with quant_bit {quant_bit}")
    arrays: list[ArrayRow] = [("cache", cache, (*axes, stored_width(D, quant_bit)), stored)]
    if scale is not None:
        arrays.append(("scale", scale, (*axes, D // quant_group), SCALE_DTYPES))
    check_arrays(
        [("current_key", current_key, tokens, FLOAT_DTYPES if quant_bit else dtypes), *arrays], sizes
    )
    L = sizes["L"]
    check_numbers([("num_layer", num_layer, L, L), ("layer_idx", layer_idx, 0, L - 1)])
    return CacheCall(
        [cache] if scale is None else [cache, scale], axes, int(layer_idx), quant_bit, quant_group
    )
