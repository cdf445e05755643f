"""Read the quantization of a checkpoint's matrices from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvant.errors import ModelError
from kvant.fields import shown, size

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
# The floating-point formats, with their only number of bits and group size.
FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The format of a matrix: ``bits`` per value, and a scale for each group of a row.

    ``affine`` has float scales and biases. The modes of :data:`FLOAT_MODES` are small floating-point numbers
    (OCP microscaling, and NVIDIA's variant of it) with scales of one byte and no biases.
    """

    bits: int
    group_size: int
    mode: str = "affine"

    def __post_init__(self) -> None:
        if self.mode in FLOAT_MODES:
            if (self.bits, self.group_size) != FLOAT_MODES[self.mode]:
                bits, group = FLOAT_MODES[self.mode]
                raise ModelError(
                    f"config.json: quantization mode {self.mode} with bits {self.bits} and group_size "
                    f"{self.group_size}; expected bits {bits} and group_size {group}"
                )
            return
        if self.mode != "affine":
            modes = ", ".join(map(repr, ("affine", *FLOAT_MODES)))
            raise ModelError(
                f"config.json: quantization mode {shown(self.mode)} is not supported; supported: {modes}"
            )
        if self.bits not in AFFINE_BITS:
            raise ModelError(f"config.json: quantization bits is {self.bits!r}; expected 2, 3, 4, 5, 6 or 8")
        if self.group_size not in AFFINE_GROUPS:
            raise ModelError(
                f"config.json: quantization group_size is {self.group_size!r}; expected 32, 64 or 128"
            )

    @property
    def form(self) -> dict[str, Any]:
        """The arguments for MLX's functions."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @property
    def text(self) -> str:
        """A short description."""
        kind = "" if self.mode == "affine" else f" ({self.mode})"
        return f"{self.bits} bits, groups of {self.group_size}{kind}"

    @property
    def has_biases(self) -> bool:
        """Whether groups have a bias in addition to their scale."""
        return self.mode == "affine"


def format_of_shapes(width: int, words: int, groups: int, *, in_bytes: bool) -> Quantization | None:
    """Return the format that the stored shapes of a row imply, or None if MLX has no such format.

    Args:
        width: the number of values.
        words, groups: the number of 32-bit words and of scales.
        in_bytes: a scale is one byte, as in the formats of :data:`FLOAT_MODES`.
    """
    if groups < 1 or width % groups or words * 32 % width:
        return None
    form = words * 32 // width, width // groups
    if in_bytes:
        return next((Quantization(*form, mode) for mode, sizes in FLOAT_MODES.items() if sizes == form), None)
    return Quantization(*form) if form[0] in AFFINE_BITS and form[1] in AFFINE_GROUPS else None


def read_quantization(raw: Mapping[str, Any]) -> tuple[Quantization | None, dict[str, Quantization | None]]:
    """Return the default format and exceptions by module path. None means floating point."""
    foreign = raw.get("quantization_config")
    if isinstance(foreign, dict) and not raw.get("quantization") and "quant_method" in foreign:
        raise ModelError(
            f"config.json: quantization method {shown(foreign['quant_method'])} is not supported; "
            "supported: float weights and MLX's quantization"
        )
    settings = raw.get("quantization") or foreign
    if not settings:
        return None, {}
    if not isinstance(settings, dict):
        raise ModelError(f"config.json: quantization is {shown(settings)}; expected an object")
    overrides: dict[str, Quantization | None] = {}
    for path, entry in settings.items():
        if isinstance(entry, dict):
            for name in entry:
                if name not in ("bits", "group_size", "mode"):
                    raise ModelError(f"config.json: quantization of {path} has {name} {shown(entry[name])}")
            overrides[path] = _format(entry)
        elif entry is False and path not in ("bits", "group_size"):
            overrides[path] = None
        elif path not in ("bits", "group_size", "mode", "quant_method") and entry is not True:
            raise ModelError(
                f"config.json: quantization has {path} {shown(entry)}; expected an object or false"
            )
    return _format(settings), overrides


def _format(entry: Mapping[str, Any]) -> Quantization:
    mode = entry.get("mode", "affine")
    if not isinstance(mode, str):
        raise ModelError(f"config.json: quantization mode is {shown(mode)}; expected a string")
    return Quantization(bits=size(entry, "bits"), group_size=size(entry, "group_size"), mode=mode)
