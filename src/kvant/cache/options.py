"""How a model's caches store their tokens, as a user chooses it."""

from dataclasses import dataclass
from typing import TypedDict

from kvant.errors import ArgumentError
from kvant.operators.dispatch import KERNELS
from kvant.operators.quantization import QUANT_BITS, check_quantization

DEFAULT_KV_BITS, DEFAULT_KV_GROUP_SIZE = 8, 32


class CacheFields(TypedDict, total=False):
    """The fields of :class:`CacheOptions`, as keywords of ``make_cache`` and ``make_pool``."""

    kv_bits: int
    kv_group_size: int
    bias_split: bool
    kernels: str | None
    checkpoints: int


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How caches and pools store their tokens.

    Attributes:
        kv_bits: of a key or value: 8, 4, or 0 for the compute dtype.
        kv_group_size: elements of a head that share one scale; without meaning at 0 bits.
        bias_split: the projections' biases stay out of the cache, and attention adds them exactly.
        kernels: "fused" or "unfused"; None: KVANT_KERNELS, else fused on a GPU that it works on.
        checkpoints: places in texts that can be gone back to, where windows and states move on: so many at once.

    Raises:
        ArgumentError: a field out of range. Whether a group divides a head is checked with the model.
    """

    kv_bits: int = DEFAULT_KV_BITS
    kv_group_size: int = DEFAULT_KV_GROUP_SIZE
    bias_split: bool = True
    kernels: str | None = None
    checkpoints: int = 0

    def __post_init__(self) -> None:
        if type(self.kv_bits) is not int or self.kv_bits not in QUANT_BITS:
            raise ArgumentError("kv_bits", f"is {self.kv_bits!r:.80}; expected 8, 4, or 0 for no quantization")
        if type(self.kv_group_size) is not int or self.kv_group_size < 1:
            raise ArgumentError("kv_group_size", f"is {self.kv_group_size!r:.80}; expected a positive int")
        if self.kernels not in (None, *KERNELS):
            raise ArgumentError("kernels", f"is {self.kernels!r:.80}; expected {' or '.join(map(repr, KERNELS))}")
        if type(self.checkpoints) is not int or self.checkpoints < 0:
            raise ArgumentError("checkpoints", f"is {self.checkpoints!r:.80}; expected an int, 0 or more")

    @property
    def fields(self) -> CacheFields:
        """The fields by name."""
        return {
            "kv_bits": self.kv_bits,
            "kv_group_size": self.kv_group_size,
            "bias_split": self.bias_split,
            "kernels": self.kernels,
            "checkpoints": self.checkpoints,
        }

    def check_head(self, width: int) -> None:
        """Raise a ValueError unless heads of this width can be stored so."""
        check_quantization(self.kv_bits, self.kv_group_size, width, names=("kv_bits", "kv_group_size"))


DEFAULT_OPTIONS = CacheOptions()
