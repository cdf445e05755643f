"""What a checkpoint holds, from its config.json and the sizes of its files: nothing else is read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvant.errors import ModelError
from kvant.models.config import ModelConfig, Quantization
from kvant.models.files import read_json
from kvant.models.parameters import matrices, vectors

HEAD = "lm_head"
FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# What is held as one matrix, in the order of loading.
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The facts of a checkpoint that decide its memory.

    Attributes:
        config: what config.json said.
        float_bytes: of a stored floating-point number, 2 or 4.
        tied: the embedding is the output head too.
    """

    config: ModelConfig
    float_bytes: int
    tied: bool

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
        try:
            return cls.from_facts(read_json(folder / "config.json"), folder_bytes(folder))
        except ModelError as error:
            text = str(error)
            raise ModelError(f"{folder / text}" if text.startswith("config.json") else text) from error

    def quantized(self, bits: int, group_size: int) -> "Checkpoint":
        """As if converted by mlx-lm: every matrix, the embedding and the head too, in groups along its inputs.

        Raises:
            ModelError: a checkpoint that is quantized already, bits or a group MLX does not have, or a group that does
                not divide a matrix.
        """
        if self.config.quantization is not None:
            bits_now = self.config.quantization.bits
            raise ModelError(f"the weights are quantized already, to {bits_now} bits; only float ones can be")
        quantization = Quantization(bits=bits, group_size=group_size)
        for path, (_, width) in matrices(self.config).items():
            if width % group_size:
                raise ModelError(f"{path}: a group of {group_size} does not divide its width {width}")
        return replace(self, config=replace(self.config, quantization=quantization, quantization_overrides={}))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        total = sum(vectors(self.config).values()) * self.float_bytes
        return total + sum(self._matrix_bytes(path, size, self.float_bytes) for path, size in self._matrices())

    def held_bytes(self, itemsize: int) -> int:
        """Bytes of all weights as the decoder holds them, floats in ``itemsize`` bytes.

        Some are held twice or more: a projection's bias with and without what a cache splits off, and the weight of a
        head's norm once for each head.
        """
        return sum(kept for kept, _ in self._loaded(itemsize)) + self._vector_bytes(itemsize)

    def loading_bytes(self, itemsize: int, *, on_cpu: bool) -> int:
        """The most bytes held while loading: what is there already, and a matrix in the forms it goes through.

        A float matrix is held as stored, side by side with those it is fused with, cast, and on a CPU turned, one
        matrix after the other. Of a quantized layer everything is read at once.
        """
        done = most = 0
        vectors_bytes = self._vector_bytes(itemsize)  # next to nothing: counted as if there from the beginning
        for kept, passing in self._loaded(itemsize, on_cpu=on_cpu):
            most = max(most, done + kept + passing)
            done += kept
        return most + vectors_bytes

    def _loaded(self, itemsize: int, *, on_cpu: bool = True) -> Iterator[tuple[int, int]]:
        """What is evaluated together, in order: the bytes that stay, and those held only on the way."""
        for _, together in groupby(self._in_order(), key=itemgetter(0)):
            kept = passing = 0
            for _, path, size in together:
                fused = path.rpartition(".")[2] in FUSED
                stored, held = (self._matrix_bytes(path, size, number) for number in (self.float_bytes, itemsize))
                kept += held
                quantization = self.config.quantization_of(path)
                if quantization is None:
                    cast, turned = itemsize != self.float_bytes, on_cpu
                    passing += stored * (1 + fused) + held * (cast + turned) - held  # the last of these forms stays
                else:
                    levels = size[0] * size[1] * quantization.bits // 8
                    passing += (stored - levels if itemsize != self.float_bytes else 0) + held * fused
            yield kept, passing

    def _in_order(self) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """(what is evaluated together, path, size) of each matrix in the order of loading: the head first."""
        found = dict(self._matrices())
        first = [path for path in found if not path.startswith("model.layers.")]
        rest = [path for path in found if path.startswith("model.layers.")]
        for path in first:
            yield path, path, found[path]
        for path in rest:
            layer, _, name = path.rpartition(".")
            index = ".".join(layer.split(".")[:3])
            quantized = self.config.quantization_of(path) is not None
            yield index if quantized else f"{index}.{FUSED.get(name, name)}", path, found[path]

    def _matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        return ((path, size) for path, size in matrices(self.config).items() if path != HEAD or not self.tied)

    def _matrix_bytes(self, path: str, size: tuple[int, int], itemsize: int) -> int:
        quantization = self.config.quantization_of(path)
        elements = size[0] * size[1]
        if quantization is None:
            return elements * itemsize
        # Levels, and a scale and a bias for each group.
        return elements * quantization.bits // 8 + 2 * elements // quantization.group_size * itemsize

    def _vector_bytes(self, itemsize: int) -> int:
        config = self.config
        times = {
            **dict.fromkeys((f"self_attn.{name}_proj.bias" for name in "qkv"), 2),
            "self_attn.q_norm.weight": config.num_attention_heads,
            "self_attn.k_norm.weight": config.num_key_value_heads,
        }
        named = ((name.split(".", 3)[-1], size) for name, size in vectors(config).items())
        return sum(size * times.get(name, 1) for name, size in named) * itemsize


def folder_bytes(folder: Path) -> int:
    """Bytes of a folder's safetensors files; where a whole one is there, of that alone, as it alone is read."""
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)
