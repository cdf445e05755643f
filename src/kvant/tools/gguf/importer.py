"""A GGUF file to a model folder: config.json, tokenizer files, generation_config.json and safetensors."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.errors import ConvertError, ModelError
from kvant.models.checkpoint import check_folder
from kvant.models.config import ModelConfig
from kvant.models.quantization import Quantization
from kvant.sizes import format_bytes
from kvant.text.tokenizer import load_tokenizer
from kvant.tools.convert.new_folder import appearing, check_new
from kvant.tools.gguf.layout import Place, kind_of, places, read_config
from kvant.tools.gguf.reader import GGUFFile, open_gguf
from kvant.tools.gguf.tokenizer import build_tokenizer, end_ids

SHARD_BYTES = 2**30  # of a file of tensors; what is held in memory until it is written
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CensusRow:
    """The tensors of one type."""

    kind: str  # its name in GGUF
    tensors: int
    fidelity: str  # exact, rounded or requantized
    bytes_before: int
    bytes_after: int


def import_gguf(path: Path, dest: Path, progress: Progress | None = None) -> list[CensusRow]:
    """Turn a GGUF file into a model folder. The folder appears whole or not at all.

    Args:
        path: the file. Nothing in it is executed.
        dest: the folder to make: a new path or an empty folder.
        progress: called with (tensors done, tensors in all).

    Returns:
        What became of the tensors, a row for each type, the largest first.

    Raises:
        ConvertError: the file or the folder cannot be used; the message names what was found and what was
            expected.
    """
    dest = check_new(dest)
    with open_gguf(path) as file:
        try:
            return _import(file, dest, progress or (lambda done, total: None))
        except ModelError as error:
            raise ConvertError(f"{path}: {error}") from error
        except ConvertError as error:
            if str(error).startswith(str(dest)):
                raise
            raise ConvertError(f"{path}: {error}") from error


def _import(file: GGUFFile, dest: Path, progress: Progress) -> list[CensusRow]:
    raw = read_config(file)
    config = ModelConfig.from_dict(raw)
    placed = [*places(file, config)]
    raw |= _quantization(file, placed)
    tokenizer, tokenizer_config = build_tokenizer(file.metadata)
    ends = end_ids(file.metadata)
    if ends:
        raw["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    needed = 2 * sum(tensor.nbytes for tensor in file.tensors.values())
    free = shutil.disk_usage(dest.parent).free
    if free < needed:
        raise ConvertError(f"{dest.parent}: {format_bytes(needed)} are needed, {format_bytes(free)} are free")
    with appearing(dest) as folder:
        write_json(folder / "tokenizer.json", tokenizer)
        write_json(folder / "tokenizer_config.json", tokenizer_config)
        write_json(folder / "config.json", raw)
        if ends:
            write_json(folder / "generation_config.json", {"eos_token_id": raw["eos_token_id"]})
        load_tokenizer(folder)
        after = _write_tensors(file, placed, folder, progress)
        check_folder(folder, whole=False)
    return _census(file, placed, after)


def _quantization(file: GGUFFile, placed: list[Place]) -> dict[str, Any]:
    """The key of config.json: the commonest format for every matrix, and the modules that differ."""
    formats = {place.module: kind_of(file, place).quantization for place in placed if place.part == "weight"}
    found = Counter(form for form in formats.values() if form is not None)
    if not found:
        return {}
    common = found.most_common(1)[0][0]
    matrices = {place.module for place in placed if len(file.tensors[place.source].shape) > 1}
    overrides = {module: _form(form) for module, form in formats.items() if module in matrices and form != common}
    return {"quantization": {**_form(common), **overrides}}


def _form(quantization: Quantization | None) -> Any:
    """A format as config.json has it; false: floating point."""
    return False if quantization is None else quantization.form


def _write_tensors(file: GGUFFile, placed: list[Place], folder: Path, progress: Progress) -> dict[str, int]:
    """Write the tensors in shards, one at a time in memory; return the new bytes of each tensor."""
    shards = _shards(file, placed)
    sizes: dict[str, int] = {}
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        arrays: dict[str, mx.array] = {}
        for place in shard:
            own = _arrays(file, place)
            sizes[place.source] = sum(array.nbytes for array in own.values())
            arrays |= own
            progress(len(sizes), len(placed))
        mx.save_safetensors(str(folder / name), arrays, {"format": "mlx"})
        index |= dict.fromkeys(arrays, name)
    if len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": index})
    return sizes


def _shards(file: GGUFFile, placed: list[Place]) -> list[list[Place]]:
    shards: list[list[Place]] = []
    size = SHARD_BYTES
    for place in placed:
        size += file.tensors[place.source].nbytes
        if size > SHARD_BYTES:
            shards.append([])
            size = file.tensors[place.source].nbytes
        shards[-1].append(place)
    return shards


def _arrays(file: GGUFFile, place: Place) -> dict[str, mx.array]:
    """The arrays of a tensor by their names in the checkpoint."""
    tensor = file.tensors[place.source]
    if len(tensor.shape) == 1 and tensor.kind.quantization is not None:
        raise ConvertError(f"tensor {place.source} is {tensor.kind.name}; expected floats for a bias or a norm")
    try:
        packed = tensor.kind.pack(file.blocks(place.source), tensor.shape)
    except ValueError as error:
        raise ConvertError(f"tensor {place.source} {error}") from error
    named = {place.part: packed.weight, "scales": packed.scales, "biases": packed.biases}
    return {
        f"{place.module}.{name}": in_order(array, place.interleaved_heads)
        for name, array in named.items()
        if array is not None
    }


def in_order(array: mx.array, heads: int) -> mx.array:
    """Undo the interleaving of a head's rows: pair p is rows 2p and 2p + 1 there, p and p + D/2 here."""
    if heads == 0:
        return array
    rows = array.reshape(heads, -1, 2, *array.shape[1:])  # (H * D, ...) -> (H, D/2, 2, ...)
    return mx.contiguous(rows.swapaxes(1, 2)).reshape(array.shape)


def _census(file: GGUFFile, placed: list[Place], after: dict[str, int]) -> list[CensusRow]:
    kinds = {kind_of(file, place).name: kind_of(file, place) for place in placed}
    rows = []
    for name, kind in kinds.items():
        own = [place.source for place in placed if kind_of(file, place) is kind]
        before = sum(file.tensors[source].nbytes for source in own)
        rows.append(CensusRow(name, len(own), kind.fidelity, before, sum(after[source] for source in own)))
    return sorted(rows, key=lambda row: -row.bytes_before)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
