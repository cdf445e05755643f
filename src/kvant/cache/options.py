"""The user's choice of how a model's caches store their tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from kvant.cache.kv_format import PMX, KVFormat, LayerChoice
from kvant.errors import ArgumentError
from kvant.operators.dispatch import KERNELS
from kvant.operators.packing import PACKINGS
from kvant.operators.quantization import FITTED_BITS, QUANT_BITS, check_quantization

DEFAULT_KV_BITS = 8
DEFAULT_KV_GROUP_SIZE = 32
BITS_TO_QUANTIZE = " or ".join(map(str, PACKINGS))
BITS_IN_WORDS = f"{', '.join(map(str, PACKINGS))}, or 0 for no quantization"


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How caches and pools store their tokens.

    Attributes:
        kv_bits: of a key or value: 8, 4, or 0 for the compute dtype. With a format: its fewest quantized
            bits.
        kv_group_size: elements of a head that share one scale; ignored at 0 bits. With a format: its smallest
            group. None: 32, or the greatest common divisor of 32 and the heads' width.
        bias_split: store tokens without the projections' biases, which attention adds exactly.
        kernels: "fused" or "unfused"; None: KVANT_KERNELS, or else fused on a GPU where it works.
        checkpoints: the most places in texts to which sequences with windows or states can go back.
        kv_format: the format of each layer, as ``kvant report --tune`` measured it; None: all are alike.
        rotates: without a format, quantized keys go through a Hadamard transform, as in
            :class:`kvant.operators.key_transform.KeyTransform`. ``kv_format="pmx"`` turns it off.
        rotates_values: with ``rotates``, 4-bit values do too. False is for files of earlier versions.
        tail: whether quantizing layers also store the first and the last tokens of a sequence exactly
            (:mod:`kvant.operators.exact_rows`). None: at 4 bits, unless ``kv_format`` is ``"pmx"``.

    Raises:
        ArgumentError: a field is out of range. The group is checked against heads with the model.
    """

    kv_bits: int = DEFAULT_KV_BITS
    kv_group_size: int | None = None
    bias_split: bool = True
    kernels: str | None = None
    checkpoints: int = 0
    kv_format: KVFormat | None = None
    rotates: bool = True
    rotates_values: bool = True
    tail: bool | None = None

    def __post_init__(self) -> None:
        if type(self.kv_format) not in (KVFormat, type(None)):
            shown = f"{self.kv_format!r:.80}"
            raise ArgumentError(
                "kv_format", f"is {shown}; CacheOptions.from_keywords takes a file, or {PMX!r}"
            )
        if self.kv_format is not None:
            quantized = [layer for layer in self.kv_format.layers if layer.kv_bits] or self.kv_format.layers
            object.__setattr__(
                self, "kv_bits", min(min(layer.kv_bits, layer.value_bits) for layer in quantized)
            )
            object.__setattr__(self, "kv_group_size", min(layer.kv_group_size for layer in quantized))
        if type(self.kv_bits) is not int or self.kv_bits not in QUANT_BITS:
            raise ArgumentError("kv_bits", f"is {self.kv_bits!r:.80}; expected {BITS_IN_WORDS}")
        group = DEFAULT_KV_GROUP_SIZE if self.kv_group_size is None else self.kv_group_size
        if type(group) is not int or group < 1:
            raise ArgumentError("kv_group_size", f"is {self.kv_group_size!r:.80}; expected a positive int")
        if self.kernels not in (None, *KERNELS):
            raise ArgumentError(
                "kernels", f"is {self.kernels!r:.80}; expected {' or '.join(map(repr, KERNELS))}"
            )
        if type(self.bias_split) is not bool:
            raise ArgumentError("bias_split", f"is {self.bias_split!r:.80}; expected True or False")
        if type(self.tail) not in (bool, type(None)):
            raise ArgumentError("kv_tail", f"is {self.tail!r:.80}; expected True, False or None")
        if self.tail and not self.kv_bits:
            raise ArgumentError("kv_tail", "is True; without quantization every token is exact", "kv_bits")
        if type(self.checkpoints) is not int or self.checkpoints < 0:
            raise ArgumentError("checkpoints", f"is {self.checkpoints!r:.80}; expected an int, 0 or more")

    @classmethod
    def from_keywords(
        cls,
        *,
        kv_bits: int | None = None,
        kv_group_size: int | None = None,
        bias_split: bool = True,
        kernels: str | None = None,
        checkpoints: int = 0,
        kv_format: KVFormat | str | Path | None = None,
        kv_tail: bool | None = None,
    ) -> Self:
        """Return the options for a caller's keywords.

        Args:
            kv_bits, kv_group_size: None: the default or those of ``kv_format``; others must equal those.
            bias_split, kernels, checkpoints: see :class:`CacheOptions`.
            kv_format: a tuned format, its file, or ``"pmx"``.
            kv_tail: the ``tail`` of :class:`CacheOptions`.

        Raises:
            ArgumentError: a value is out of range, or two contradict each other.
        """
        bits = DEFAULT_KV_BITS if kv_bits is None else kv_bits
        if kv_format == PMX and not bits:
            problem = f"is {PMX}, which quantizes; the cache has 0 bits: choose {BITS_TO_QUANTIZE} with"
            raise ArgumentError("kv_format", problem, "kv_bits")
        tuned = None if kv_format in (None, PMX) else KVFormat.of(kv_format)
        made = cls(
            bits,
            kv_group_size,
            bias_split,
            kernels,
            checkpoints,
            tuned,
            rotates=kv_format != PMX,
            tail=kv_tail,
        )
        for name, value in (("kv_bits", kv_bits), ("kv_group_size", kv_group_size)):
            if value not in (None, getattr(made, name)):
                raise ArgumentError(name, f"is {value!r:.80}; it goes by the", "kv_format")
        return made

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        stored = {option.name: getattr(self, option.name) for option in fields(self)}
        return stored | {"kv_format": self.kv_format and self.kv_format.as_json()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Parse the result of :meth:`as_json`."""
        kv_format = stored["kv_format"]
        return cls(**{**stored, "kv_format": kv_format and KVFormat.of(kv_format)})

    def layer(self, number: int, *, can_rotate: bool = True, can_rotate_values: bool = True) -> LayerChoice:
        """Return how a layer stores its tokens.

        Args:
            number: of the layer, among those with keys and values.
            can_rotate, can_rotate_values: whether its keys and its values can go through a Hadamard
                transform; ignored with a tuned format.
        """
        if self.kv_format is not None:
            return self.kv_format.layers[number]
        rotates = self.rotates and can_rotate and bool(self.kv_bits)
        rotates_values = self.rotates_values and self.rotates and can_rotate_values
        return LayerChoice(
            self.kv_bits,
            self.group_size,
            rotates,
            rotates_values=rotates_values and self.kv_bits == FITTED_BITS,
        )

    @property
    def any_tail(self) -> bool:
        """Return whether quantizing layers have an exact tail, all of them or none."""
        if self.tail is None:
            return self.rotates and self.kv_bits == FITTED_BITS
        return self.tail

    @property
    def warning(self) -> str:
        """Return a warning about the format's known loss of quality, or ""."""
        if self.kv_bits != FITTED_BITS or self.any_tail:
            return ""
        share = "11 %" if self.rotates else "20 %"
        return (
            f"{FITTED_BITS} bits without an exact tail change the likeliest token in {share} of the places "
            "on SmolLM2-135M; with one (--kv-tail) in 3 %"
        )

    def has_tail(self, choice: LayerChoice) -> bool:
        """Return whether a layer with this choice has an exact tail."""
        return self.any_tail and bool(choice.kv_bits)

    def of_layer(self, number: int) -> "CacheOptions":
        """Return the options for a cache of only this layer."""
        tuned = self.kv_format and replace(self.kv_format, layers=(self.layer(number),))
        return replace(self, kv_format=tuned)

    def at(self, kv_bits: int) -> "CacheOptions":
        """Return the same options with these bits in every layer, and no format."""
        group = self.kv_group_size if self.kv_format is None else None
        return replace(self, kv_bits=kv_bits, kv_group_size=group, kv_format=None)

    @property
    def group_size(self) -> int:
        """Return the group size before it is fitted to head widths."""
        return self.kv_group_size or DEFAULT_KV_GROUP_SIZE

    def fitted(self, width: int) -> "CacheOptions":
        """Return the options with a group size that divides heads of this width.

        Raises:
            ValueError: heads of this width cannot be stored with these options.
        """
        group = self.kv_group_size or math.gcd(DEFAULT_KV_GROUP_SIZE, width)
        made = self if group == self.kv_group_size else replace(self, kv_group_size=group)
        made.check_head(width)
        return made

    def check_head(self, width: int) -> None:
        """Raise a ValueError unless heads of this width can be stored with these options."""
        layers = [self.layer(0)] if self.kv_format is None else self.kv_format.layers
        kinds = [(bits, each.kv_group_size) for each in layers for bits in (each.kv_bits, each.value_bits)]
        for kind in dict.fromkeys(kinds):
            check_quantization(*kind, width, names=("kv_bits", "kv_group_size"))


DEFAULT_OPTIONS = CacheOptions()


def check_cache_options(options: object) -> None:
    """Raise a TypeError unless these are CacheOptions."""
    if not isinstance(options, CacheOptions):
        raise TypeError(f"options is a {type(options).__name__}; expected a kvant.cache.CacheOptions")
