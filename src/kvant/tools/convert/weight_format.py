"""The formats to which a model's weights can be converted."""

from dataclasses import dataclass

import mlx.core as mx

from kvant.errors import ArgumentError
from kvant.models.quantization import AFFINE_BITS, AFFINE_GROUPS, FLOAT_MODES

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
MODES = ("affine", *FLOAT_MODES)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    bits: int  # bits of a quantized matrix's weight; 0: matrices stay in floating point
    group_size: int  # weights that share a scale; 0 if bits is 0
    mode: str = "affine"  # MLX's quantization mode
    dtype: str | None = None  # of scales and everything in floating point; None: as stored

    @classmethod
    def choose(
        cls,
        bits: int | None = None,
        group_size: int | None = None,
        mode: str = "affine",
        dtype: str | None = None,
    ) -> "WeightFormat":
        """Check a format and fill in defaults: affine 4 bits in groups of 64, or what the mode prescribes."""
        if mode not in MODES:
            raise ArgumentError("mode", f"is {mode!r}; expected {', '.join(MODES)}")
        if dtype is not None and dtype not in DTYPES:
            raise ArgumentError("dtype", f"is {dtype!r}; expected {', '.join(DTYPES)}")
        if bits == 0:
            for name, value, unset in (("mode", mode, "affine"), ("group_size", group_size, None)):
                if value != unset:
                    raise ArgumentError(name, f"is {value!r}, but 0 bits do not quantize")
            if dtype is None:
                raise ArgumentError("bits", "is 0, which changes nothing without", "dtype")
            return cls(0, 0, mode, dtype)
        default_bits, default_group = FLOAT_MODES.get(mode, (4, 64))
        bits = default_bits if bits is None else bits
        group_size = default_group if group_size is None else group_size
        allowed_bits = AFFINE_BITS if mode == "affine" else (default_bits,)
        allowed_groups = AFFINE_GROUPS if mode == "affine" else (default_group,)
        for name, value, allowed in (
            ("bits", bits, allowed_bits),
            ("group_size", group_size, allowed_groups),
        ):
            if value not in allowed:
                raise ArgumentError(name, f"is {value}; expected for {mode}: {', '.join(map(str, allowed))}")
        return cls(bits, group_size, mode, dtype)
