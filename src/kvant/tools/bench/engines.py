"""The engines that a benchmark compares, with their settings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvant.cache.kv_format import PMX
from kvant.cache.options import DEFAULT_KV_GROUP_SIZE, CacheOptions
from kvant.operators.dispatch import KERNELS
from kvant.operators.quantization import FITTED_BITS, check_quantization

DTYPES = ("float32", "float16", "bfloat16")
OPENBLAS = "openblas"
# Engines that load the model themselves, and the settings that may follow a colon, at most one of each group.
# The other engine is a server.
SETTINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "kvant": (tuple(KERNELS),),
    "mlx-lm": (DTYPES, (OPENBLAS,)),
}
MLX_LM_GROUPS = (64, 32, 128)  # group sizes that MLX quantizes, mlx-lm's default first
# suffixes of labels
DRAFTS = ", drafts"
ONE_BY_ONE = ", one by one"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    name: str  # one of SETTINGS, or "server"
    kv_bits: int | None = None  # bits of a cached value, 0 without quantization; None: a server
    kv_group_size: int | None = None  # cached values that share a scale; None without quantization
    dtype: str | None = None  # mlx-lm's floating-point weights are cast to it; None: the checkpoint's
    openblas: bool = False  # let mlx-lm use kvant's BLAS (kvant.blas) instead of MLX's own
    kernels: str | None = None  # kvant's "unfused" or "fused"; None: KVANT_KERNELS and the device decide
    url: str | None = None  # a server's address
    server_model: str | None = None  # the model's name on the server
    one_by_one: bool = False  # kvant serves requests one after another instead of together
    title: str = "server"  # a server's label
    draft: str = "none"  # where kvant's drafts come from: "prompt", "mtp" or "model"
    draft_model: str | None = None  # the draft model's folder
    num_draft_tokens: int | None = None  # tokens per step, drafted by a model or its own head
    kv_format: str | None = None  # kvant's: a tuned format's file, which replaces bits and group, or "pmx"

    @property
    def label(self) -> str:
        """The engine's name in tables, recordings and errors."""
        if self.name == "server":
            return self.title
        if self.name == "kvant":
            label = f"kvant {self.kv_bits}-bit" if self.kv_bits else "kvant full"
            if self.kv_format is not None:
                label = f"{label} PMX" if self.kv_format == PMX else "kvant tuned"
            label += f" {self.kernels}" if self.kernels else ""
            return label + DRAFTS * (self.draft != "none") + ONE_BY_ONE * self.one_by_one
        bits = f"{self.kv_bits}-bit" if self.kv_bits else None
        words = (self.name, self.dtype, self.openblas and "OpenBLAS", bits)
        return " ".join(word for word in words if word)


def engine_specs(
    names: Sequence[str],
    kv_bits: Sequence[int],
    kv_group_size: int | None,
    head_dim: int | None,
    *,
    kv_format: str | None = None,
    streams: bool = False,
) -> list[EngineSpec]:
    """Return the engines to run, one for every number of bits, and kvant with a ``kv_format`` too.

    Args:
        names: ``kvant`` or ``mlx-lm``, with settings after colons: ``kvant:unfused``,
            ``mlx-lm:float32:openblas``.
        kv_group_size: None: each engine's default, reduced for kvant to fit the model.
        head_dim: the model's, which a group size must divide; None: layers differ, and any group size works.
        streams: whether several requests come at once. Then each kvant is also run one by one, and mlx-lm
            only in full precision, since it does not batch with a quantized cache.
    """
    specs: list[EngineSpec] = []
    for argument in names:
        name, *settings = argument.split(":")
        if name not in SETTINGS:
            raise ValueError(
                f"engine is {argument!r}; expected one of {', '.join(SETTINGS)}; a server is named by its URL"
            )
        chosen = [[setting for setting in settings if setting in group] for group in SETTINGS[name]]
        if sum(map(len, chosen)) < len(settings) or any(len(group) > 1 for group in chosen):
            takes = " and ".join(f"one of {', '.join(group)}" for group in SETTINGS[name])
            raise ValueError(f"engine is {argument!r}; {name} takes {takes} after a colon, each at most once")
        first = chosen[0][0] if chosen[0] else None
        dtype, kernels = (first, None) if name == "mlx-lm" else (None, first)
        if kv_format is not None and name == "kvant":
            stored: tuple[int, int | None]
            if kv_format == PMX:
                stored = FITTED_BITS, _group_size(name, kv_group_size, head_dim)
            else:
                options = CacheOptions.from_keywords(kv_format=kv_format)
                stored = options.kv_bits, options.kv_group_size
            specs.append(EngineSpec(name, *stored, dtype, OPENBLAS in settings, kernels, kv_format=kv_format))
        for bits in [0] if streams and name == "mlx-lm" else kv_bits:
            group = _group_size(name, kv_group_size, head_dim) if bits else None
            spec = EngineSpec(name, bits, group, dtype, OPENBLAS in settings, kernels)
            if spec in specs:
                raise ValueError(f"engine {argument!r} is named twice")
            specs.append(spec)
    if not streams:
        return specs
    kvant = [spec for spec in specs if spec.name == "kvant"]
    others = [spec for spec in specs if spec.name != "kvant"]
    return [*kvant, *(replace(spec, one_by_one=True) for spec in kvant), *others]


def with_drafts(specs: Sequence[EngineSpec], **drafts: Any) -> list[EngineSpec]:
    """Add to each kvant one with these attributes of drafts."""
    pairs = ([spec, replace(spec, **drafts)] if spec.name == "kvant" else [spec] for spec in specs)
    return [spec for pair in pairs for spec in pair]


def _group_size(name: str, requested: int | None, head_dim: int | None) -> int:
    """Return the requested group size, or else the engine's default that fits the head."""
    width = head_dim or 0
    if name == "kvant":
        group = math.gcd(DEFAULT_KV_GROUP_SIZE, width) if requested is None else requested
        if width:
            check_quantization(8, group, width, names=("kv_bits", "kv_group_size"))
        return group
    groups = mlx_lm_groups(head_dim)
    if not groups:
        sizes = ", ".join(map(str, MLX_LM_GROUPS))
        raise ValueError(
            f"{name} quantizes groups of {sizes}, and none divides the head dimension {head_dim}; "
            f"expected only kvant, or --kv-bits 0"
        )
    if requested is not None and requested not in groups:
        raise ValueError(
            f"kv_group_size is {requested}; {name} takes one of {', '.join(map(str, groups))} here"
        )
    return groups[0] if requested is None else requested


def mlx_lm_groups(head_dim: int | None) -> list[int]:
    """Return the group sizes that mlx-lm can use for heads of this width, or all if it is None."""
    return [size for size in MLX_LM_GROUPS if (head_dim or 0) % size == 0]
