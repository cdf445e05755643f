"""What a benchmark compares: engines with their settings, as the user asked for them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvant.operators.dispatch import KERNELS

LOCAL = ("kvant", "mlx-lm", "concat", "none")  # engines that load the model themselves; the other is a server
DTYPES = ("float32", "float16", "bfloat16")
OPENBLAS = "openblas"
WITH_KV_BITS = ("kvant", "mlx-lm")
KVANT_GROUP = 32
MLX_LM_GROUPS = (64, 32, 128)  # those MLX quantizes, mlx-lm's own default first


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine as it is to run.

    Attributes:
        name: one of LOCAL, or "server".
        kv_bits: bits of a cached key or value, 0 for no quantization; None where the engine has no such setting.
        kv_group_size: cached values that share a scale; None without quantization.
        dtype: what mlx-lm's floating-point weights are cast to; None leaves the checkpoint's.
        openblas: lend mlx-lm the BLAS that kvant brings (kvant.blas); without, it has MLX's own, as its users have.
        kernels: of kvant: "unfused" or "fused"; None: the environment variable KVANT_KERNELS and the device decide.
        url: of a server.
        server_model: the name a server knows the model by; None: it is not said.

    Raises:
        ValueError: settings the engine does not have.
    """

    name: str
    kv_bits: int | None = None
    kv_group_size: int | None = None
    dtype: str | None = None
    openblas: bool = False
    kernels: str | None = None
    url: str | None = None
    server_model: str | None = None

    def __post_init__(self) -> None:
        if self.name not in (*LOCAL, "server"):
            raise ValueError(f"engine is {self.name!r}; expected one of {', '.join(LOCAL)}")
        if self.dtype is not None and (self.name != "mlx-lm" or self.dtype not in DTYPES):
            raise ValueError(
                f"engine is '{self.name}:{self.dtype}'; only mlx-lm takes a dtype: {', '.join(DTYPES)} after a colon"
            )
        if self.openblas and self.name != "mlx-lm":
            raise ValueError(f"engine is '{self.name}:{OPENBLAS}'; kvant's engines have it, only mlx-lm is lent it")
        if self.kernels is not None and (self.name != "kvant" or self.kernels not in KERNELS):
            raise ValueError(
                f"engine is '{self.name}:{self.kernels}'; only kvant takes {' or '.join(KERNELS)} after a colon"
            )
        if (self.url is not None) != (self.name == "server") or (self.server_model is not None and self.url is None):
            raise ValueError(f"engine {self.name} with URL {self.url!r}, model {self.server_model!r} there")
        if (self.kv_bits is not None) != (self.name in WITH_KV_BITS):
            raise ValueError(f"kv_bits is {self.kv_bits}; {', '.join(WITH_KV_BITS)} have it, other engines do not")
        if (self.kv_group_size is not None) != bool(self.kv_bits):
            raise ValueError(
                f"kv_group_size is {self.kv_group_size} with kv_bits {self.kv_bits}; expected both or none"
            )

    @property
    def label(self) -> str:
        """How tables, recordings and errors call it."""
        if self.name == "kvant":
            own = f"kvant {self.kv_bits}-bit" if self.kv_bits else "kvant full"
            return f"{own} {self.kernels}" if self.kernels else own
        bits = f"{self.kv_bits}-bit" if self.kv_bits else None
        return " ".join(part for part in (self.name, self.dtype, self.openblas and "OpenBLAS", bits) if part)


def engine_specs(
    names: Sequence[str], kv_bits: Sequence[int], kv_group_size: int | None, head_dim: int
) -> list[EngineSpec]:
    """The engines to run: each that quantizes its cache once for every number of bits, the others once.

    Args:
        names: engines of LOCAL, mlx-lm also with a dtype, kvant's BLAS or both: ``mlx-lm:float32:openblas``; kvant also
            with the kernels it uses: ``kvant:unfused``.
        kv_bits: 0, 8 or 4.
        kv_group_size: for every engine; None: each engine's own default.
        head_dim: of the model, which a group must divide.

    Raises:
        ValueError: an engine that is not known or named twice, or a group size it cannot use.
    """
    specs: list[EngineSpec] = []
    for given in names:
        name, *settings = given.split(":")
        kernels = [setting for setting in settings if setting in KERNELS]
        dtypes = [setting for setting in settings if setting != OPENBLAS and setting not in KERNELS]
        if (
            "" in settings
            or len(dtypes) > 1
            or len(kernels) > 1
            or len(set(settings)) < len(settings)
            or name == "server"
        ):
            raise ValueError(f"engine is {given!r}; expected one of {', '.join(LOCAL)}; a server is named by its URL")
        for bits in kv_bits if name in WITH_KV_BITS else [None]:
            group = _group_size(name, kv_group_size, head_dim) if bits else None
            spec = EngineSpec(
                name,
                bits,
                group,
                dtypes[0] if dtypes else None,
                OPENBLAS in settings,
                kernels[0] if kernels else None,
            )
            if spec in specs:
                raise ValueError(f"engine {given!r} is named twice")
            specs.append(spec)
    return specs


def _group_size(name: str, given: int | None, head_dim: int) -> int:
    """The group size an engine quantizes with: the given one or its own default."""
    if name == "kvant":
        group = KVANT_GROUP if given is None else given
        usable = head_dim % group == 0
    else:
        # mlx-lm's default where the head takes it: what its users have.
        group = (
            next((size for size in MLX_LM_GROUPS if head_dim % size == 0), MLX_LM_GROUPS[0]) if given is None else given
        )
        usable = group in MLX_LM_GROUPS and head_dim % group == 0
    if not usable:
        allowed = "" if name == "kvant" else f", of {name} also one of {', '.join(map(str, sorted(MLX_LM_GROUPS)))}"
        raise ValueError(f"kv group size is {group}; expected a divisor of the head dimension {head_dim}{allowed}")
    return group
