"""The engines a benchmark compares, with their settings."""

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
# Engines that load the model themselves, and what may follow a colon, one of each group. The other engine is
# a server.
SETTINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "kvant": (tuple(KERNELS),),
    "mlx-lm": (DTYPES, (OPENBLAS,)),
}
MLX_LM_GROUPS = (64, 32, 128)  # those MLX quantizes, mlx-lm's own default first
DRAFTS, ONE_BY_ONE = ", drafts", ", one by one"  # end the labels of two ways of one engine


@dataclass(frozen=True, slots=True)
class EngineSpec:
    name: str  # one of SETTINGS, or "server"
    kv_bits: int | None = None  # of a cached key or value, 0 for no quantization; None: a server
    kv_group_size: int | None = None  # cached values that share a scale; None without quantization
    dtype: str | None = None  # that mlx-lm's floating-point weights are cast to; None: the checkpoint's
    openblas: bool = False  # mlx-lm is lent the BLAS that kvant brings (kvant.blas); False: it has MLX's own
    kernels: str | None = None  # of kvant: "unfused" or "fused"; None: KVANT_KERNELS and the device decide
    url: str | None = None  # of a server
    server_model: str | None = None  # the model's name there
    one_by_one: bool = False  # kvant serves several requests one after another, not together
    title: str = "server"  # a server's label
    draft: str = "none"  # kvant's drafts come from "prompt" or "model"
    draft_model: str | None = None  # the folder of the model that drafts
    num_draft_tokens: int | None = None  # its tokens a step
    kv_format: str | None = None  # of kvant: the file of a tuned format, in place of bits and group; or "pmx"

    @property
    def label(self) -> str:
        """Its name in tables, recordings and errors."""
        if self.name == "server":
            return self.title
        if self.name == "kvant":
            own = f"kvant {self.kv_bits}-bit" if self.kv_bits else "kvant full"
            if self.kv_format is not None:
                own = f"{own} PMX" if self.kv_format == PMX else "kvant tuned"
            own += f" {self.kernels}" if self.kernels else ""
            return own + DRAFTS * (self.draft != "none") + ONE_BY_ONE * self.one_by_one
        bits = f"{self.kv_bits}-bit" if self.kv_bits else None
        return " ".join(part for part in (self.name, self.dtype, self.openblas and "OpenBLAS", bits) if part)


def engine_specs(
    names: Sequence[str],
    kv_bits: Sequence[int],
    kv_group_size: int | None,
    head_dim: int | None,
    *,
    kv_format: str | None = None,
    streams: bool = False,
) -> list[EngineSpec]:
    """The engines to run, each once for every number of bits, kvant with a ``kv_format`` too.

    Args:
        names: ``kvant`` or ``mlx-lm``, with settings after colons: ``kvant:unfused``,
            ``mlx-lm:float32:openblas``.
        kv_group_size: None: each engine's own default, kvant's as it fits the model.
        head_dim: of the model, which a group must divide; None: its layers differ, and any group will do.
        streams: several requests come at once. Each kvant is also run one by one, and mlx-lm in full
            precision alone: it does not batch with a quantized cache.
    """
    specs: list[EngineSpec] = []
    for given in names:
        name, *settings = given.split(":")
        if name not in SETTINGS:
            raise ValueError(
                f"engine is {given!r}; expected one of {', '.join(SETTINGS)}; a server is named by its URL"
            )
        chosen = [[setting for setting in settings if setting in group] for group in SETTINGS[name]]
        if sum(map(len, chosen)) < len(settings) or any(len(group) > 1 for group in chosen):
            takes = " and ".join(f"one of {', '.join(group)}" for group in SETTINGS[name])
            raise ValueError(f"engine is {given!r}; {name} takes {takes} after a colon, each at most once")
        first = chosen[0][0] if chosen[0] else None
        dtype, kernels = (first, None) if name == "mlx-lm" else (None, first)
        if kv_format is not None and name == "kvant":
            stored: tuple[int, int | None]
            if kv_format == PMX:
                stored = FITTED_BITS, _group_size(name, kv_group_size, head_dim)
            else:
                own = CacheOptions.from_keywords(kv_format=kv_format)
                stored = own.kv_bits, own.kv_group_size
            specs.append(EngineSpec(name, *stored, dtype, OPENBLAS in settings, kernels, kv_format=kv_format))
        for bits in [0] if streams and name == "mlx-lm" else kv_bits:
            group = _group_size(name, kv_group_size, head_dim) if bits else None
            spec = EngineSpec(name, bits, group, dtype, OPENBLAS in settings, kernels)
            if spec in specs:
                raise ValueError(f"engine {given!r} is named twice")
            specs.append(spec)
    if not streams:
        return specs
    kvant = [spec for spec in specs if spec.name == "kvant"]
    others = [spec for spec in specs if spec.name != "kvant"]
    return [*kvant, *(replace(spec, one_by_one=True) for spec in kvant), *others]


def with_drafts(specs: Sequence[EngineSpec], **drafts: Any) -> list[EngineSpec]:
    """Beside each kvant the same with these attributes of drafts."""
    pairs = ([spec, replace(spec, **drafts)] if spec.name == "kvant" else [spec] for spec in specs)
    return [spec for pair in pairs for spec in pair]


def _group_size(name: str, given: int | None, head_dim: int | None) -> int:
    """The given group size, or the engine's own that fits the head."""
    width = head_dim or 0
    if name == "kvant":
        group = math.gcd(DEFAULT_KV_GROUP_SIZE, width) if given is None else given
        if width:
            check_quantization(8, group, width, names=("kv_bits", "kv_group_size"))
        return group
    groups = mlx_lm_groups(head_dim)
    if not groups:
        sizes = ", ".join(map(str, MLX_LM_GROUPS))
        raise ValueError(
            f"{name} quantizes groups of {sizes}, and none divides the head dimension {head_dim}; "
            f"expected kvant alone, or --kv-bits 0"
        )
    if given is not None and given not in groups:
        raise ValueError(f"kv_group_size is {given}; {name} takes one of {', '.join(map(str, groups))} here")
    return groups[0] if given is None else given


def mlx_lm_groups(head_dim: int | None) -> list[int]:
    """The groups in which mlx-lm can quantize heads of this width; None: not known."""
    return [size for size in MLX_LM_GROUPS if (head_dim or 0) % size == 0]
