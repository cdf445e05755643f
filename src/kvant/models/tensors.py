"""The tensors of a model folder: safetensors only, shape and dtype checked before an array is made."""

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from kvant.errors import CheckpointError, one_line

FLOATS = ("F32", "F16", "BF16")
MAX_INDEX_BYTES = 64 * 1024 * 1024


class TensorFiles:
    """The tensors of a model folder by name. Headers are validated by the safetensors library; data is read lazily."""

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        """Read the headers of ``files``; None: those of the folder's model."""
        self._file_of: dict[str, Path] = {}
        self._shape_of: dict[str, tuple[int, ...]] = {}
        self._dtype_of: dict[str, str] = {}
        self._loaded: dict[Path, dict[str, mx.array]] = {}
        for path in _shards(folder) if files is None else files:
            try:
                with safe_open(path, framework="np") as file:
                    for name in file.keys():  # noqa: SIM118, the file is no mapping
                        if name in self._file_of:
                            raise CheckpointError(f"{path.name}: tensor {name} is also in {self._file_of[name].name}")
                        header = file.get_slice(name)
                        self._file_of[name] = path
                        self._shape_of[name] = tuple(header.get_shape())
                        self._dtype_of[name] = header.get_dtype()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a whole safetensors file: {one_line(error)}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> set[str]:
        """Every tensor's name."""
        return set(self._file_of)

    def dtype(self, name: str) -> str:
        """The dtype as safetensors writes it, such as BF16."""
        self._require(name)
        return self._dtype_of[name]

    def take(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOATS) -> mx.array:
        """The tensor, checked against what is expected of it."""
        self._require(name)
        if self._shape_of[name] != shape:
            raise CheckpointError(f"tensor {name} has shape {self._shape_of[name]}; expected {shape}")
        if self._dtype_of[name] not in dtypes:
            raise CheckpointError(f"tensor {name} has dtype {self._dtype_of[name]}; expected {' or '.join(dtypes)}")
        path = self._file_of[name]
        if path not in self._loaded:
            self._loaded[path] = mx.load(str(path))  # type: ignore[assignment]
        return self._loaded[path].pop(name)

    def _require(self, name: str) -> None:
        if name not in self._file_of:
            raise CheckpointError(f"tensor {name} is missing")


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder; a shard's name is a bare file name inside it, anything else is refused."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(f"{folder}: neither {single.name} nor {index.name} is there")
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{index}: {index.stat().st_size} bytes; expected at most {MAX_INDEX_BYTES}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no weight_map of tensor names to file names") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: shard {name!r}; expected the bare name of a .safetensors file")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: no such file; {index.name} names it")
    return [folder / name for name in names]
