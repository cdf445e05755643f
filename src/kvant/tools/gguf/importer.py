"""Import a GGUF file as a model folder: config.json, tokenizer files, generation_config.json, safetensors."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvant.errors import ConvertError
from kvant.models.checkpoint import Progress, check_folder
from kvant.models.config import ModelConfig
from kvant.models.tensors import DTYPES
from kvant.text.tokenizer import load_tokenizer
from kvant.tools.convert.new_folder import appearing, check_new, check_space
from kvant.tools.gguf.blocks import Packed
from kvant.tools.gguf.layout import Place, places, read_config
from kvant.tools.gguf.reader import GGUFFile, naming, open_gguf
from kvant.tools.gguf.tokenizer import build_tokenizer, end_ids

SHARD_BYTES = 2**30  # bytes per file; a shard is in memory until it is written
PIECE_VALUES = 2**24  # values of a tensor that are converted at once
MOST_GROWTH = 288 / 210  # Q6_K grows by this factor, more than any other type
ROUTER = "mlp.gate"  # llama.cpp stores it as float32 in files of every type

Convert = Callable[[GGUFFile, Place], Packed]


@dataclass(frozen=True, slots=True)
class CensusRow:
    """The tensors of one type."""

    kind: str  # its name in GGUF
    tensors: int
    fidelity: str  # a value of blocks.Fidelity
    bytes_before: int
    bytes_after: int


def import_gguf(path: Path, dest: Path, progress: Progress = lambda done, total: None) -> list[CensusRow]:
    """Convert a GGUF file to a model folder, which appears complete or not at all.

    Nothing in the file is executed.

    Args:
        dest: a new path or an empty folder.
        progress: called with (tensors done, tensors in all).

    Returns:
        One row per tensor type, the largest first.

    Raises:
        ConvertError: the file or the folder cannot be used; the message names the actual and the expected
            value.
    """
    dest = check_new(dest)
    with open_gguf(path) as file:
        with naming(path):
            raw = read_config(file)
            placed = places(file, ModelConfig.from_dict(raw))
            raw |= _quantization(placed)
            settings = _text_files(file, raw)
        check_space(dest.parent, MOST_GROWTH * sum(place.tensor.nbytes for place in placed))
        with appearing(dest) as folder, naming(path):
            for name, content in settings.items():
                write_json(folder / name, content)
            load_tokenizer(folder)
            after = write_tensors(file, placed, folder, partial(_pack, _float_dtype(placed)), progress)
            check_folder(folder, whole=False)
    return _census(placed, after)


def _text_files(file: GGUFFile, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of the JSON files by name."""
    tokenizer, tokenizer_config = build_tokenizer(file.metadata)
    count = len(tokenizer["model"]["vocab"])
    rows = raw["vocab_size"]
    if count > rows:
        raise ConvertError(f"tokenizer.ggml.tokens has {count} tokens; the embedding has {rows} rows")
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config, "config.json": raw}
    if ends := end_ids(file.metadata):
        raw["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        files["generation_config.json"] = {"eos_token_id": raw["eos_token_id"]}
    return files


def _quantization(placed: list[Place]) -> dict[str, Any]:
    """Return config.json's ``quantization``: the most common format, and the modules that differ."""
    matrices = [place for place in placed if len(place.tensor.shape) > 1]
    formats = {place.module: place.tensor.kind.quantization for place in matrices}
    counts = Counter(form for form in formats.values() if form is not None)
    if not counts:
        return {}
    common = counts.most_common(1)[0][0]
    others = {module: form for module, form in formats.items() if form != common}
    # false means floating point
    overrides = {module: False if form is None else form.form for module, form in others.items()}
    return {"quantization": {**common.form, **overrides}}


def _float_dtype(placed: list[Place]) -> mx.Dtype:
    """Return the dtype to which float32 tensors are narrowed if that is exact.

    llama.cpp stores norms as float32 whatever the model's dtype is, and the last norm's dtype becomes that of
    the activations.
    """
    matrices = (
        place for place in placed if len(place.tensor.shape) > 1 and not place.module.endswith(ROUTER)
    )
    kinds = {place.tensor.kind.name for place in matrices}
    return next((DTYPES[kind] for kind in ("F32", "BF16") if kind in kinds), mx.float16)


def write_tensors(
    file: GGUFFile, placed: list[Place], folder: Path, convert: Convert, progress: Progress
) -> dict[str, int]:
    """Write converted tensors shard by shard, one shard in memory; return each tensor's new size in bytes."""
    shards = _shards(placed)
    sizes: dict[str, int] = {}
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = (
            "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        arrays: dict[str, mx.array] = {}
        for place in shard:
            try:
                converted = convert(file, place)
            except ValueError as error:
                raise ConvertError(f"tensor {place.tensor.name} {error}") from error
            sizes[place.tensor.name] = sum(array.nbytes for array in converted.values())
            for key, array in converted.items():
                shaped = array.reshape(*place.tensor.shape[:-1], -1)
                name = f"{place.module}.{place.suffix if key == 'weight' else key}"
                arrays[name] = _in_order(shaped, place.interleaved_heads)
            progress(len(sizes), len(placed))
        mx.save_safetensors(str(folder / file_name), arrays, {"format": "mlx"})
        index |= dict.fromkeys(arrays, file_name)
    if len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": index})
    return sizes


def _shards(placed: list[Place]) -> list[list[Place]]:
    shards: list[list[Place]] = []
    size = SHARD_BYTES
    for place in placed:
        size += place.tensor.nbytes
        if size > SHARD_BYTES:
            shards.append([])
            size = place.tensor.nbytes
        shards[-1].append(place)
    return shards


def _pack(floats: mx.Dtype, file: GGUFFile, place: Place) -> Packed:
    """Convert a tensor to MLX's format, piece by piece; float32 to ``floats`` if that is exact."""
    tensor = place.tensor
    step = PIECE_VALUES // tensor.kind.size
    starts = range(0, tensor.nbytes // tensor.kind.nbytes, step)
    with np.errstate(invalid="ignore"):  # a NaN scale, which pack refuses
        pieces = [tensor.kind.pack(file.blocks(tensor, start, step)) for start in starts]
    packed = {key: mx.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}
    if tensor.kind.name == "F32":
        narrow = packed["weight"].astype(floats)
        if mx.array_equal(narrow.astype(mx.float32), packed["weight"]):
            packed["weight"] = narrow
    return packed


def _in_order(array: mx.array, heads: int) -> mx.array:
    """Undo the interleaving of a head's rows: rows 2p and 2p + 1 of the file are p and p + D/2 here."""
    if heads == 0:
        return array
    rows = array.reshape(heads, -1, 2, *array.shape[1:])  # (H * D, ...) -> (H, D/2, 2, ...)
    return mx.contiguous(rows.swapaxes(1, 2)).reshape(array.shape)


def _census(placed: list[Place], after: Mapping[str, int]) -> list[CensusRow]:
    rows = []
    for kind in {place.tensor.kind.name: place.tensor.kind for place in placed}.values():
        tensors = [place.tensor for place in placed if place.tensor.kind is kind]
        bytes_before = sum(tensor.nbytes for tensor in tensors)
        bytes_after = sum(after[tensor.name] for tensor in tensors)
        rows.append(CensusRow(kind.name, len(tensors), kind.fidelity, bytes_before, bytes_after))
    return sorted(rows, key=lambda row: -row.bytes_before)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
