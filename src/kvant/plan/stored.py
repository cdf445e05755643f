"""The bytes of a checkpoint, computed only from its config.json and the sizes of its files."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any

from kvant.errors import CheckpointError, ModelError
from kvant.files import read_json
from kvant.models.adapter import tensors_file
from kvant.models.architectures.table import Parameter
from kvant.models.as_stored import as_stored
from kvant.models.config import ModelConfig
from kvant.models.mtp import with_head
from kvant.models.quantization import Quantization
from kvant.models.share import Share, divides_inputs, local_config
from kvant.models.tensors import TensorFiles, tensor_files

FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# With fused quantized matrices, at most three, an adapter's factors have zeros for the other matrices.
ADAPTER_COPIES = 3
UNPACKING_BYTES = 4096  # of shifts and masks; measured, 102


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's shard of a model, in addition to the sizes in its config."""

    rank: int  # rank 0 has the tokenizer and samples the logits
    # whether each rank has heads and features of every layer, the embedding, last norm and head
    divided: bool = False
    head_rows: int | None = None  # of an untied head; None: all

    @property
    def has_ends(self) -> bool:
        """Return whether it has the embedding, the last norm and the head."""
        return self.divided or self.rank == 0


@dataclass(frozen=True, slots=True)
class Loading:
    """Bytes of weights, and the peak while they are loaded one matrix after the other."""

    matrices: int = 0  # after loading
    most: int = 0  # peak of matrices
    others: int = 0  # of norms, biases and adapters: little, counted from the beginning

    def then(self, later: "Loading") -> "Loading":
        return Loading(
            self.matrices + later.matrices,
            max(self.most, self.matrices + later.most),
            self.others + later.others,
        )

    @property
    def resident(self) -> int:
        return self.matrices + self.others

    @property
    def peak(self) -> int:
        """Return the peak."""
        return self.most + self.others


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The facts of a checkpoint that decide its memory."""

    config: ModelConfig  # its config.json, with the sizes of the shard
    float_bytes: int  # of a stored floating-point number, 2 or 4
    tied: bool  # whether the embedding is also the output head
    adapter_bytes: int = 0  # of an adapter's file
    shard: Shard | None = None  # of one rank; None: the whole model
    unpacked: bool = False  # whether quantized matrices, except those of experts, are stored as floats

    @classmethod
    def from_facts(cls, raw: Mapping[str, Any], file_bytes: int | None = None) -> "Checkpoint":
        """Make it from a parsed config.json and the total bytes of all safetensors files, if known.

        The bytes decide what config.json leaves out; without them the head is untied and floats have 2 bytes.
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
    def from_folder(cls, folder: Path, *, head: bool = False) -> "Checkpoint":
        """``head``: with the head for drafts."""
        raw = read_json(folder / "config.json")
        try:
            try:
                tensors = TensorFiles(folder, tensor_files(folder, head=True) if head else None)
            except CheckpointError:
                if head:
                    raise
                # incomplete: the files so far may still show which floats they have
                file_bytes = sum(file.stat().st_size for file in folder.glob("model*.safetensors")) or None
                return cls.from_facts(raw, file_bytes)
            config = ModelConfig.from_dict(raw)
            config = as_stored(with_head(config, tensors) if head else config, tensors)
            made = cls.from_facts({**raw, "tie_word_embeddings": config.tie_word_embeddings}, tensors.nbytes)
            return replace(made, config=config)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error

    def adapted(self, folder: Path) -> "Checkpoint":
        """Return the checkpoint with an adapter's folder, which is checked when it is loaded."""
        return replace(self, adapter_bytes=tensors_file(folder).stat().st_size)

    def quantized(self, bits: int, group_size: int) -> "Checkpoint":
        """Return the converted checkpoint: quantized matrices where groups fit, routers as in mlx-lm."""
        if self.config.quantization is not None:
            bits_now = self.config.quantization.bits
            raise ModelError(f"the weights are quantized already, to {bits_now} bits; only float ones can be")
        quantization = Quantization(bits=bits, group_size=group_size)
        others = dict[str, Quantization | None]()
        for path, _, row in self.config.parameters():
            size = self.config.shape(row)
            own_bits, own_group = row.converted or (bits, group_size)
            if len(size) > 1 and (size[-1] % group_size or size[-1] % own_group):
                others[path] = None
            elif row.converted is not None:
                others[path] = Quantization(bits=own_bits, group_size=own_group)
        return replace(
            self, config=replace(self.config, quantization=quantization, quantization_overrides=others)
        )

    def unpack(self) -> "Checkpoint":
        """Return the checkpoint with quantized matrices, except those of experts, loaded as floats."""
        return replace(self, unpacked=True)

    @property
    def is_packed(self) -> bool:
        """Return whether any matrix is quantized."""
        return any(self.config.quantization_of(path) is not None for path, *_ in self._matrices())

    def stage(self, rank: int, layers: range) -> "Checkpoint":
        """Return a pipeline rank's shard: these layers, the adapter, and on rank 0 what is in no layer."""
        config = self.config
        table = self.config.architecture
        paths = {path: path for path in (table.embedding.path, table.head.path)}
        for number, layer in enumerate(layers if config.quantization_overrides else ()):
            old = table.layers.format(layer)
            new = table.layers.format(number)
            paths |= {old + row.path: new + row.path for row in table.of_layer(config.has_experts(layer))}
        formats = config.quantization_overrides
        overrides = {new: formats[old] for old, new in paths.items() if old in formats}
        local = replace(local_config(config, layers=layers), quantization_overrides=overrides)
        return replace(self, config=local, shard=Shard(rank))

    def share(self, share: Share) -> "Checkpoint":
        """Return a tensor-parallel rank's shard; embedding, norms and adapter are whole."""
        first, last = share.vocabulary
        shard = Shard(share.rank, divided=True, head_rows=last - first)
        return replace(self, config=local_config(self.config, share), shard=shard)

    def layer_kind(self, layer: int) -> tuple[int | None, bool]:
        """Return the layer's window and whether it has experts, which decide the bytes of a run."""
        return self.config.windows[layer], self.config.has_experts(layer)

    @property
    def has_head(self) -> bool:
        """Whether the head for drafts is among its layers."""
        return self.config.has_head

    @property
    def num_layers(self) -> int:
        """Return the number of layers of a pipeline."""
        return self.config.num_hidden_layers

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all tensors in the files."""
        total = sum(size for _, size in self._vectors()) * self.float_bytes
        return total + sum(
            self._matrix_bytes(path, size, self.float_bytes) for path, size, _, _ in self._matrices()
        )

    @property
    def moves_on(self) -> bool:
        """Return whether sequences cannot go back to every place, because layers have windows."""
        return any(window is not None for window in self.config.windows)

    def itemsize(self, *, on_cpu: bool) -> int:
        """Return the bytes of a number of the compute dtype."""
        return FLOAT_BYTES["float32"] if on_cpu else self.float_bytes

    def read_bytes(self, *, on_cpu: bool) -> int:
        """Return the bytes of weights that one token reads: a few experts, and no untied embedding."""
        itemsize = self.itemsize(on_cpu=on_cpu)
        experts = self.config.experts
        total = self.loading(on_cpu=on_cpu).resident
        for path, size, _, row in self._matrices():
            if row.role == "embedding" and not self.tied:
                total -= self._resident_bytes(path, size, itemsize)
            elif len(size) > 2 and experts is not None:
                idle = experts.count - experts.per_token
                total -= self._resident_bytes(path, size, itemsize) * idle // experts.count
        return total

    def loading(self, *, on_cpu: bool) -> Loading:
        """Return the bytes of a decoder's weights and of loading them; biases and norms may exist twice.

        A float matrix exists as stored, then fused with others, then cast, and on a CPU transposed, one after
        the other. The matrices of a quantized layer are read together.
        """
        others = self._vector_bytes(self.itemsize(on_cpu=on_cpu)) + ADAPTER_COPIES * self.adapter_bytes
        return reduce(Loading.then, self._loaded(on_cpu=on_cpu), Loading(others=others))

    def _loaded(self, *, on_cpu: bool) -> Iterator[Loading]:
        """Yield the bytes of matrices evaluated together, in order: the head before the layers."""

        def together(entry: tuple[str, tuple[int, ...], int | None, Parameter]) -> tuple[int | None, str]:
            path, _, layer, row = entry
            is_packed = self.config.quantization_of(path) is not None and not self.unpacked
            return layer, "" if layer is not None and is_packed else row.role

        itemsize = self.itemsize(on_cpu=on_cpu)
        for _, entries in groupby(
            sorted(self._matrices(), key=lambda entry: entry[2] is not None), key=together
        ):
            resident_bytes = passing = 0
            for path, size, _, row in entries:
                # Experts are stacked, which takes as much as fusing with another matrix.
                fused = len(self.config.architecture.of_role(row.role)) > 1 or len(size) > 2
                stored, packed = (
                    self._matrix_bytes(path, size, number) for number in (self.float_bytes, itemsize)
                )
                resident = self._resident_bytes(path, size, itemsize)
                resident_bytes += resident
                if self.config.quantization_of(path) is None:
                    cast = itemsize != self.float_bytes
                    transposed = on_cpu
                    # the last form stays
                    passing += stored * (1 + fused) + resident * (cast + transposed) - resident
                else:
                    floats = stored - self._matrix_bytes(path, size, 0)
                    passing += floats * (itemsize != self.float_bytes) + packed * fused
                    if resident != packed:  # as integers, as floats, and transposed
                        passing += packed + 2 * resident + UNPACKING_BYTES
            yield Loading(resident_bytes, resident_bytes + passing)

    def _parameters(self) -> Iterator[tuple[str, int | None, Parameter]]:
        """Return the parameters of the shard."""
        ends = self.shard is None or self.shard.has_ends
        return (entry for entry in self.config.parameters() if ends or entry[1] is not None)

    def _matrices(self) -> Iterator[tuple[str, tuple[int, ...], int | None, Parameter]]:
        """Yield path, size, layer and row of each matrix, without a tied head."""
        for path, layer, row in self._parameters():
            size = self.config.shape(row)
            if len(size) < 2 or (row.role == "head" and self.tied):
                continue
            if row.role == "head" and self.shard is not None and self.shard.head_rows is not None:
                size = (self.shard.head_rows, *size[1:])
            yield path, size, layer, row

    def _vectors(self) -> Iterator[tuple[Parameter, int]]:
        """Yield row and size of each norm and bias."""
        shard = self.shard
        for _, _, row in self._parameters():
            # If ranks divide the inputs, the first one adds the bias.
            elsewhere = shard is not None and shard.divided and shard.rank > 0 and divides_inputs(row)
            if len(row.shape) == 1 or (row.bias in self.config.biases and not elsewhere):
                yield row, self.config.shape(row)[0]

    def _matrix_bytes(self, path: str, size: tuple[int, ...], itemsize: int) -> int:
        quantization = self.config.quantization_of(path)
        elements = math.prod(size)
        if quantization is None:
            return elements * itemsize
        # Quantized values, and per group a scale and a bias, or a scale of one byte.
        group_bytes = 2 * itemsize if quantization.has_biases else 1
        return elements * quantization.bits // 8 + elements // quantization.group_size * group_bytes

    def _resident_bytes(self, path: str, size: tuple[int, ...], itemsize: int) -> int:
        is_unpacked = self.unpacked and len(size) == 2
        return math.prod(size) * itemsize if is_unpacked else self._matrix_bytes(path, size, itemsize)

    def _vector_bytes(self, itemsize: int) -> int:
        config = self.config
        heads = {"query_norm": config.num_attention_heads, "key_norm": config.num_key_value_heads}
        total = 0
        for row, size in self._vectors():
            if row.role == "qkv":  # a bias exists whole and without the pairs that a cache leaves out
                total += 2 * size
            else:
                total += size * (heads[row.role] if row.shape == ("head",) else 1)
        return total * itemsize
