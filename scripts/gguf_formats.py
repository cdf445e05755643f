"""Imported GGUF files: what becomes of the tensors, and how far predictions are from those of the file's own
values.

Run: python scripts/gguf_formats.py FILE.gguf

FILE is a Llama model's, such as the one of `kvant pull smollm2-135m-q4`. Its values are written anew in other
types, as llama.cpp chooses them, and each file is imported and checked as by `kvant import --check`. The
package gguf is needed: its quantizers make the other types; it has none of K types, which
tests/support/gguf_files.py has. Prints JSON.
"""

import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvant.machine import environment  # isort: skip  (before MLX: kvant loads a faster BLAS)

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.gguf_files import Content

from kvant.tools.gguf.check import check_import
from kvant.tools.gguf.importer import import_gguf
from kvant.tools.gguf.reader import GGUFFile, open_gguf

# The type of most matrices of a file, and of those that llama.cpp gives more bits: the head, or the embedding
# if it is the head, and in files of a K mixture half of two kinds of matrices.
FILES = {
    "Q4_0": ("Q4_0", "Q4_0"),
    "Q8_0": ("Q8_0", "Q8_0"),
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
}
IF_NOT_WHOLE = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that are no whole blocks of 256
MORE_BITS = ("attn_v", "ffn_down")


def kind_of(name: str, width: int, layers: int, most: str, better: str, head: str) -> str:
    """Return the type llama.cpp gives a matrix."""
    kind = most
    if name == head:
        kind = "Q8_0" if most == "Q8_0" else "Q6_K"
    elif name.split(".")[2:3] and name.split(".")[2] in MORE_BITS:
        layer, eighth = int(name.split(".")[1]), layers // 8
        outer = layer < eighth or layer >= 7 * layers // 8
        kind = better if outer or (layer - eighth) % 3 == 2 else most
    return IF_NOT_WHOLE.get(kind, kind) if width % 256 else kind


def rewrite(file: GGUFFile, path: Path, most: str, better: str) -> None:
    metadata = {key: value for key, value in file.metadata.items() if not key.startswith("general.")}
    content = Content(file.metadata["general.architecture"], metadata)
    layers = metadata[f"{content.architecture}.block_count"]
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    for name, tensor in file.tensors.items():
        values = tensor.kind.expand(file.blocks(tensor)).reshape(tensor.shape).astype(np.float32)
        kind = "F32" if values.ndim == 1 else kind_of(name, tensor.shape[-1], layers, most, better, head)
        content.tensors[name] = (values, kind)
    content.write(path)


def measure(path: Path, folder: Path) -> dict[str, Any]:
    census = import_gguf(path, folder)
    figures = check_import(path, folder)
    return {"census": [asdict(row) for row in census], "check": asdict(figures)}


def main() -> None:
    source = Path(sys.argv[1])
    found: dict[str, Any] = {}
    with TemporaryDirectory() as scratch:
        found["as published"] = measure(source, Path(scratch, "published"))
        for name, (most, better) in FILES.items():
            path = Path(scratch, f"{name}.gguf")
            with open_gguf(source) as file:
                rewrite(file, path, most, better)
            found[name] = measure(path, Path(scratch, name))
            path.unlink()
    record = {
        "source": source.name,
        "gguf": version("gguf"),
        "environment": asdict(environment()),
        "files": found,
    }
    json.dump(record, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
