"""LoRA and DoRA adapters in mlx-lm's format, applied to a model's matrices while they are loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from kvant.errors import CheckpointError, ModelError
from kvant.files import read_json
from kvant.models.architectures.table import Parameter
from kvant.models.config import ModelConfig
from kvant.models.share import Share, TensorSelection, divides_inputs
from kvant.models.tensors import Piece, TensorFiles

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapters.safetensors"
PARTS = {"lora": ("lora_a", "lora_b"), "dora": ("lora_a", "lora_b", "m")}  # by fine_tune_type
MAX_SCALE = 1e4  # mlx-lm's default is 20
MAX_VALUE = 65504.0  # float16's largest


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's change to an (out, in) matrix: it adds ``(down @ up)^T``, and DoRA then sets row norms.

    For experts, arrays have a leading axis of experts; only LoRA supports them.
    """

    down: mx.array  # (in, r) float32
    up: mx.array  # (r, out) float32, including the adapter's scale
    magnitude: mx.array | None  # (out,) float32, DoRA's row norms; None: LoRA
    sums_squares: bool  # other ranks have other inputs of the same rows: add up row norms


class Adapter:
    """An adapter folder: checked completely, and read as far as a selection of the model needs it.

    Each matrix applies its change once, when it is loaded.
    """

    def __init__(self, folder: Path, config: ModelConfig, selection: TensorSelection) -> None:
        """``folder``: from mlx_lm.lora. ``config``: the whole model's. ``selection``: what is loaded."""
        settings = _read_settings(folder, config.hidden_size, len(config.matrices()))
        tensors = TensorFiles(folder, [tensors_file(folder)])
        self._all_sum = selection.all_sum
        self._low_ranks = {
            path: _read_low_rank(path, row, config, selection.share, tensors, settings)
            for path, (layer, row) in _targets(tensors, settings, config).items()
            if selection.has(config, row, layer)
        }
        if settings.kind == "lora":
            changes = any(low.down.any() and low.up.any() for low in self._low_ranks.values())
            if not self._all_sum(mx.array([float(changes)])).item():
                raise CheckpointError(
                    f"{folder / TENSORS_FILE}: every lora_a or lora_b is zero; it would change nothing"
                )

    def fuse(self, path: str, weight: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return the (out, in) floating-point matrix or stack of experts at ``path``, with its change.

        It is computed in float32. A matrix without a change is returned as it is.
        """
        low = self._low_ranks.pop(path, None)
        if low is None:
            return weight
        fused = weight.astype(mx.float32) + (low.down @ low.up).swapaxes(-1, -2)
        if low.magnitude is not None:
            squares = mx.square(fused).sum(axis=1)
            if low.sums_squares:
                squares = self._all_sum(squares)
            fused *= (low.magnitude * mx.rsqrt(squares))[:, None]
        fused = fused.astype(dtype)
        if not mx.isfinite(fused).all().item():
            raise CheckpointError(f"{path}: not finite after the adapter's change")
        return fused

    def take(self, sizes: Mapping[str, int], dtype: mx.Dtype) -> tuple[mx.array, mx.array] | None:
        """Return the factors of the change to quantized matrices that are joined to one, or None.

        They are ``down`` (in, R) and ``up`` (R, sum of outputs), stacked for experts; R is the sum of the
        ranks. ``sizes`` has the outputs of each matrix by path, in order.
        """
        low_ranks = {path: self._low_ranks.pop(path) for path in sizes if path in self._low_ranks}
        if not low_ranks:
            return None
        ups = []
        first = 0
        total = sum(sizes.values())
        for path, out in sizes.items():
            if path in low_ranks:
                if low_ranks[path].magnitude is not None:
                    raise ModelError(
                        f"{path} is quantized; a DoRA adapter scales rows of floating-point matrices only"
                    )
                up = low_ranks[path].up
                sides = [(0, 0)] * (up.ndim - 1) + [(first, total - first - out)]
                ups.append(mx.pad(up, sides))  # zero for the other matrices
            first += out
        down = mx.concatenate([low.down for low in low_ranks.values()], axis=-1)
        return down.astype(dtype), mx.concatenate(ups, axis=-2).astype(dtype)

    def check_all_used(self) -> None:
        """Refuse a change that no loaded matrix applied, such as that of a tied output head."""
        for path in self._low_ranks:
            raise CheckpointError(f"adapter tensor {path}.lora_a: the model has no matrix {path} of its own")


def tensors_file(folder: Path) -> Path:
    """Return the file of an adapter's tensors, or refuse a folder without it."""
    path = folder / TENSORS_FILE
    if not path.is_file():
        raise ModelError(f"{folder}: no {TENSORS_FILE}; an adapter folder has it and {CONFIG_FILE}")
    return path


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of adapter_config.json that affect the computation."""

    kind: str
    num_layers: int
    rank: int
    scale: float
    keys: frozenset[str] | None


def _read_settings(folder: Path, max_rank: int, num_matrices: int) -> _Settings:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(f"{folder}: no {CONFIG_FILE}; an adapter folder has it and {TENSORS_FILE}")
    raw = read_json(path)
    if "peft_type" in raw or (folder / "adapter_model.safetensors").exists():
        raise ModelError(
            f"{folder}: an adapter in PEFT's format; expected mlx-lm's: {CONFIG_FILE} and {TENSORS_FILE}"
        )
    kind = raw.get("fine_tune_type", "lora")
    if kind == "full":
        raise ModelError(
            f"{path}: fine_tune_type is 'full', which is no adapter; make it a model with mlx_lm.fuse"
        )
    if not isinstance(kind, str) or kind not in PARTS:
        raise ModelError(f"{path}: fine_tune_type is {kind!r}; expected 'lora' or 'dora'")
    parameters = raw.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise ModelError(f"{path}: lora_parameters is {parameters!r}; expected an object with rank and scale")
    rank = parameters.get("rank")
    num_layers = raw.get("num_layers")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise ModelError(
            f"{path}: rank is {rank!r}; expected an int from 1 to the model's hidden_size, {max_rank}"
        )
    if type(num_layers) is not int:
        raise ModelError(
            f"{path}: num_layers is {num_layers!r}; expected an int, the number of adapted layers"
        )
    scale = parameters.get("scale")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < abs(scale) <= MAX_SCALE:
        raise ModelError(f"{path}: scale is {scale!r}; expected a number other than 0, at most {MAX_SCALE:g}")
    keys = parameters.get("keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise ModelError(f"{path}: keys is {str(keys)[:80]}; expected a list of module paths")
    if keys is not None and len(keys) > num_matrices:
        raise ModelError(
            f"{path}: {len(keys)} keys; expected at most {num_matrices}, one for each matrix of the model"
        )
    return _Settings(kind, num_layers, rank, float(scale), None if keys is None else frozenset(keys))


def _targets(
    tensors: TensorFiles, settings: _Settings, config: ModelConfig
) -> dict[str, tuple[int | None, Parameter]]:
    """Return the adapted matrices by path, after comparing the file's tensors with adapter_config.json.

    As in mlx-lm, a key is a path in each of the last ``num_layers`` layers (all layers if that is not
    positive), or from the model's root. Without keys, the file's tensors determine the projections in these
    layers that are adapted.
    """
    rows = [(path, layer, row) for path, layer, row in config.parameters() if len(row.shape) > 1]
    most = len(rows) * len(PARTS[settings.kind])
    if len(tensors.names) > most:
        raise CheckpointError(
            f"{TENSORS_FILE}: {len(tensors.names)} tensors; expected at most {most} for this model"
        )
    first = max(0, config.num_hidden_layers - settings.num_layers) if settings.num_layers > 0 else 0
    known = {path: (layer, row) for path, layer, row in rows}
    keys = {row.path for _, _, row in rows} if settings.keys is None else settings.keys
    inside = {path for path, layer, row in rows if layer is not None and layer >= first and row.path in keys}
    described = inside | (known.keys() & (settings.keys or ()))
    paths = {name.rpartition(".")[0] for name in tensors.names}
    if not paths:
        raise CheckpointError(f"{TENSORS_FILE} holds no tensors; it would change nothing")
    for name in sorted(tensors.names):
        path, _, kind = name.rpartition(".")
        if kind not in PARTS[settings.kind]:
            parts = ", ".join(PARTS[settings.kind])
            raise CheckpointError(f"unexpected adapter tensor {name}; expected for {settings.kind}: {parts}")
        if path not in known:
            raise CheckpointError(f"adapter tensor {name}: the model has no matrix {path}")
        if path not in described:
            raise CheckpointError(
                f"adapter tensor {name}: {CONFIG_FILE}'s num_layers and keys do not include {path}"
            )
    # A tied head is not a matrix of its own.
    missing = sorted(described - paths - {config.architecture.head.path}) if settings.keys is not None else []
    if missing:
        raise CheckpointError(f"adapter tensor {missing[0]}.lora_a is missing; {CONFIG_FILE} describes it")
    return {path: known[path] for path in sorted(paths)}


def _read_low_rank(
    path: str, row: Parameter, config: ModelConfig, share: Share, tensors: TensorFiles, settings: _Settings
) -> LowRank:
    """Read the adapter's change to a rank's share of a matrix."""
    rank = settings.rank
    size = config.shape(row)
    *experts, out, width = size
    is_divided = share.piece(config, row, size) is not None

    def read(name: str, shape: Sequence[int], axis: int, *, outputs: bool) -> mx.array:
        """Read a tensor whose ``axis`` runs over the matrix's outputs, or else over its inputs."""
        piece = (
            Piece(axis, (share.range(config, row),))
            if is_divided and divides_inputs(row) != outputs
            else None
        )
        return _bounded(
            f"{path}.{name}", tensors.take(f"{path}.{name}", tuple(shape), piece=piece).astype(mx.float32)
        )

    magnitude = None
    if experts:  # mlx-lm transposes their factors
        if settings.kind == "dora":
            raise ModelError(f"{path} has experts; a DoRA adapter scales rows of single matrices only")
        down = read("lora_a", (*experts, rank, width), 2, outputs=False).swapaxes(-1, -2)
        up = read("lora_b", (*experts, out, rank), 1, outputs=True).swapaxes(-1, -2)
    elif row.role == "embedding":  # its lora_a belongs to the tokens, unlike a projection's
        up = read("lora_a", (out, rank), 0, outputs=True).T
        down = read("lora_b", (rank, width), 1, outputs=False).T
    else:
        down = read("lora_a", (width, rank), 0, outputs=False)
        up = read("lora_b", (rank, out), 1, outputs=True)
    if settings.kind == "dora":
        magnitude = read("m", (out,), 0, outputs=True)
    sums_squares = is_divided and divides_inputs(row)
    return LowRank(
        down, _bounded(f"{path}.lora_b times the scale", up * settings.scale), magnitude, sums_squares
    )


def _bounded(name: str, array: mx.array) -> mx.array:
    largest = mx.abs(array).max().item()
    if not largest <= MAX_VALUE:  # type: ignore[operator]  # not >, which is false for NaN
        raise CheckpointError(
            f"adapter tensor {name} reaches {largest}; expected finite values up to {MAX_VALUE:g}"
        )
    return array
