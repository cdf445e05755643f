"""The bytes of a checkpoint, from its config.json and the sizes of its files: nothing else is read."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvant.errors import ModelError
from kvant.files import read_json
from kvant.models.adapter import tensors_file
from kvant.models.config import ModelConfig
from kvant.models.parameters import matrices, parameters, vectors
from kvant.models.quantization import Quantization

FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# An adapter's factors beside quantized matrices that are fused, three at the most, have zeros where the others lie.
ADAPTER_COPIES = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The facts of a checkpoint that decide its memory.

    Attributes:
        config: its config.json.
        float_bytes: of a stored floating-point number, 2 or 4.
        tied: the embedding is the output head too.
        adapter_bytes: of an adapter's tensors, as they lie in their file.
    """

    config: ModelConfig
    float_bytes: int
    tied: bool
    adapter_bytes: int = 0

    @classmethod
    def from_facts(cls, raw: Mapping[str, Any], file_bytes: int | None = None) -> "Checkpoint":
        """From a config.json already parsed.

        Where it leaves out whether the head is tied or which dtype floats have, the sizes of the files decide; without
        them the head counts as untied and floats as two bytes.

        Args:
            raw: config.json.
            file_bytes: of all safetensors files together; None: not known.

        Raises:
            ModelError: a model kvant does not support.
        """
        config = ModelConfig.from_dict(raw)
        said = FLOAT_BYTES.get(str(raw.get("dtype") or raw.get("torch_dtype")))
        tied = config.tie_word_embeddings
        if file_bytes is None:
            return cls(config, said or 2, bool(tied))
        possible = [
            cls(config, float_bytes, head)
            for float_bytes in ((said,) if said else (2, 4))
            for head in ((tied,) if tied is not None else (True, False))
        ]
        return min(possible, key=lambda checkpoint: abs(checkpoint.stored_bytes - file_bytes))

    @classmethod
    def from_folder(cls, folder: Path) -> "Checkpoint":
        """From a model folder.

        Raises:
            ModelError: a config.json that is missing or malformed, or a model kvant does not support.
        """
        raw, file_bytes = read_json(folder / "config.json"), folder_bytes(folder)
        try:
            return cls.from_facts(raw, file_bytes)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error

    def adapted(self, folder: Path) -> "Checkpoint":
        """With an adapter's folder; whether that can be loaded is said when it is.

        Raises:
            ModelError: it holds no tensors.
        """
        return replace(self, adapter_bytes=tensors_file(folder).stat().st_size)

    def quantized(self, bits: int, group_size: int) -> "Checkpoint":
        """As if converted: every matrix, the embedding and the head too, but where a group does not divide.

        A router has the bits that mlx-lm gives it.

        Raises:
            ModelError: a checkpoint that is quantized already, or bits or a group MLX does not have.
        """
        if self.config.quantization is not None:
            bits_now = self.config.quantization.bits
            raise ModelError(f"the weights are quantized already, to {bits_now} bits; only float ones can be")
        others: dict[str, Quantization | None] = {}
        for path, _, row in parameters(self.config):
            width = self.config.shape(row)[-1]
            own_bits, own_group = row.converted or (bits, group_size)
            if width % group_size or width % own_group:
                others[path] = None
            elif row.converted is not None:
                others[path] = Quantization(bits=own_bits, group_size=own_group)
        quantization = Quantization(bits=bits, group_size=group_size)
        left = {path: other for path, other in others.items() if path in matrices(self.config)}
        return replace(self, config=replace(self.config, quantization=quantization, quantization_overrides=left))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        total = sum(vectors(self.config).values()) * self.float_bytes
        return total + sum(self._matrix_bytes(path, size, self.float_bytes) for path, size in self._matrices())

    def held_bytes(self, itemsize: int) -> int:
        """Bytes of all weights as the decoder holds them, floats in ``itemsize`` bytes.

        Some are held twice or more: a projection's bias whole and without the part that a cache leaves out, and the
        weight of a head's norm once for each head.
        """
        kept = sum(kept for kept, _ in self._loaded(itemsize))
        return kept + self._vector_bytes(itemsize) + ADAPTER_COPIES * self.adapter_bytes

    def read_bytes(self, itemsize: int) -> int:
        """Bytes of the weights that one token reads: of the experts a few, and not a table that only embeds."""
        total, experts = self.held_bytes(itemsize), self.config.experts
        for path, _, row in parameters(self.config):
            size = self.config.shape(row)
            if row.role == "embedding" and not self.tied:
                total -= self._matrix_bytes(path, size, itemsize)
            elif len(size) > 2 and experts is not None:
                idle = experts.count - experts.per_token
                total -= self._matrix_bytes(path, size, itemsize) * idle // experts.count
        return total

    def loading_bytes(self, itemsize: int, *, on_cpu: bool) -> int:
        """The most bytes held while loading: the weights so far, and a matrix in the forms it goes through.

        A float matrix is held as stored, then side by side with those it is fused with, then cast, and on a CPU
        turned, one after the other. The matrices of a quantized layer are read together.
        """
        done = most = 0
        # Next to nothing: counted as if there from the beginning.
        others = self._vector_bytes(itemsize) + ADAPTER_COPIES * self.adapter_bytes
        for kept, passing in self._loaded(itemsize, on_cpu=on_cpu):
            most = max(most, done + kept + passing)
            done += kept
        return most + others

    def _loaded(self, itemsize: int, *, on_cpu: bool = True) -> Iterator[tuple[int, int]]:
        """(bytes that stay, bytes only held on the way) of matrices that are evaluated together, in order."""
        for _, together in groupby(self._in_order(), key=itemgetter(0)):
            kept = passing = 0
            for _, path, size, fused in together:
                stored, held = (self._matrix_bytes(path, size, number) for number in (self.float_bytes, itemsize))
                kept += held
                if self.config.quantization_of(path) is None:
                    cast, turned = itemsize != self.float_bytes, on_cpu
                    passing += stored * (1 + fused) + held * (cast + turned) - held  # the last of these forms stays
                else:
                    floats = stored - self._matrix_bytes(path, size, 0)
                    passing += floats * (itemsize != self.float_bytes) + held * fused
            yield kept, passing

    def _in_order(self) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
        """(a key that those evaluated together share, path, size, fused or not) of each matrix, in loading order."""
        sizes = dict(self._matrices())
        rows = [(path, layer, row) for path, layer, row in parameters(self.config) if path in sizes]
        for path, layer, row in sorted(rows, key=lambda entry: entry[1] is not None):  # the head before the layers
            quantized = self.config.quantization_of(path) is not None
            together = f"{layer}" if layer is not None and quantized else f"{layer} {row.role}"
            # Experts are put into one stack, which is as much as being fused with another matrix.
            fused = len(self.config.architecture.of_role(row.role)) > 1 or len(sizes[path]) > 2
            yield together, path, sizes[path], fused

    def _matrices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        head = self.config.architecture.head.path
        return ((path, size) for path, size in matrices(self.config).items() if path != head or not self.tied)

    def _matrix_bytes(self, path: str, size: tuple[int, ...], itemsize: int) -> int:
        quantization = self.config.quantization_of(path)
        elements = math.prod(size)
        if quantization is None:
            return elements * itemsize
        # Quantized values, and for each group a scale and a bias, or a scale of one byte.
        group_bytes = 2 * itemsize if quantization.has_biases else 1
        return elements * quantization.bits // 8 + elements // quantization.group_size * group_bytes

    def _vector_bytes(self, itemsize: int) -> int:
        config = self.config
        heads = {"query_norm": config.num_attention_heads, "key_norm": config.num_key_value_heads}
        total = sum(vectors(config).values())
        for row in config.architecture.layer:
            size = config.shape(row)[0] * config.num_hidden_layers
            if row.role == "qkv" and row.bias in config.biases:
                total += size
            elif row.shape == ("head",):
                total += size * (heads[row.role] - 1)
        return total * itemsize


def folder_bytes(folder: Path) -> int | None:
    """Bytes of a folder's safetensors files; where a whole one is there, of that alone, as it alone is read.

    None: there are none, and nothing can be learnt from them.
    """
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("model*.safetensors"))
    return sum(file.stat().st_size for file in files) or None
