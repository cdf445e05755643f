"""Load a decoder from safetensors files. Every shape and dtype is checked before an array is created."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mlx.core as mx

from kvant.errors import CheckpointError
from kvant.models.adapter import Adapter
from kvant.models.architectures.table import HEAD, HEAD_PREFIX, ExpertSettings, Parameter
from kvant.models.as_stored import PARTS, open_folder
from kvant.models.bias import divide_bias
from kvant.models.config import ModelConfig
from kvant.models.decoder import Attention, Block, Decoder, DecoderParts
from kvant.models.headed import HeadedDecoder
from kvant.models.key_norms import balance_norms
from kvant.models.matrix import (
    AdaptedMatrix,
    DenseMatrix,
    Linear,
    Matrix,
    QuantizedMatrix,
    check_device,
    dense_matrix,
    joined_matrix,
    quantized_matrix,
)
from kvant.models.mlp import MLP, Experts
from kvant.models.mtp import Head
from kvant.models.share import Share, TensorSelection, divides_inputs, everything, local_config
from kvant.models.stacking import joined_piece, stored_otherwise, take_stacked
from kvant.models.tensors import DTYPES, FLOATS, Expected, TensorFiles
from kvant.threads import check_process

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # written by some exporters; recomputed here
BLOCK_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")

Progress = Callable[[int, int], None]


def load_decoder(
    folder: Path,
    progress: Progress | None = None,
    adapter: Path | None = None,
    *,
    unpack: bool = False,
    head: bool = False,
) -> Decoder:
    """Load a model folder: config.json and model.safetensors, or shards with or without an index.

    Activations have the checkpoint's dtype on a GPU and float32 on a CPU, which multiplies half precision
    many times slower. Quantized weights keep their bits. Their scales and biases have the dtype of
    activations.

    Args:
        progress: called with the number of loaded layers and of all layers.
        adapter: the folder of a LoRA or DoRA adapter in mlx-lm's format. It is added to floating-point
            matrices as they are loaded. For quantized matrices its low-rank factors are stored separately.
        unpack: convert quantized matrices, except those of experts, to floating point.
        head: also load the head for drafts.
    """
    parts = load_shard(folder, progress=progress, adapter=adapter, unpack=unpack, with_head=head)
    return Decoder(parts) if parts.head is None else HeadedDecoder(parts, parts.head)


def load_shard(
    folder: Path,
    *,
    share: Share | None = None,
    layers: range | None = None,
    embedding: bool = True,
    head: bool = True,
    all_sum: Callable[[mx.array], mx.array] = lambda x: x,
    progress: Progress | None = None,
    adapter: Path | None = None,
    unpack: bool = False,
    with_head: bool = False,
) -> DecoderParts:
    """Load one rank's shard of a model folder, without reading the other tensors; see :func:`load_decoder`.

    Args:
        share: from :func:`kvant.ranks.shares.shares`; None: all of each layer.
        layers: numbers of the rank's layers; None: all.
        embedding: whether the rank embeds tokens.
        head: whether it has the output head and the norm before it.
        all_sum: returns the sum of an array over all ranks. It is called only if there is an adapter, and
            every rank calls it equally often.
        progress: called with counts of the rank's layers.
        unpack: see :func:`load_decoder`.
        with_head: load the head for drafts; needs all layers.
    """
    check_process()
    config, tensors = check_folder(folder, whole=False, head=with_head)
    whole = everything(config)
    selection = TensorSelection(
        share=whole.share if share is None else share,
        layers=whole.layers if layers is None else layers,
        embedding=embedding or (head and config.tie_word_embeddings is True),
        head=head,
        all_sum=all_sum,
    )
    tensors.check_memory(shard_bytes(config, tensors, selection))
    adapted = None if adapter is None else Adapter(adapter, config, selection)
    builder = _Builder(config, tensors, _compute_dtype(config, tensors), adapted, selection, unpack)
    builder.check_formats()
    parts = builder.parts(progress or (lambda done, total: None))
    if adapted is not None:
        adapted.check_all_used()
    return parts


def check_folder(folder: Path, *, whole: bool = True, head: bool = False) -> tuple[ModelConfig, TensorFiles]:
    """Return the config and the unread tensors of a model folder after checking names, shapes and dtypes.

    ``whole``: also check that all of it fits in memory. ``head``: include the head for drafts.
    """
    config, tensors = open_folder(folder, head=head)
    tensors.check(expected_tensors(config, tensors))
    if whole:
        tensors.check_memory(tensors.nbytes)
    return config, tensors


def expected_tensors(config: ModelConfig, tensors: TensorFiles) -> Expected:
    """Return the shape and dtypes of every tensor to load. ``config`` is from :func:`open_folder`."""
    expected: dict[str, tuple[tuple[int, ...], Sequence[str]]] = {}
    for _, _, stored in _stored_parameters(config, tensors):
        expected |= stored
    head = config.architecture.head.path
    tied = {f"{head}.{suffix}" for suffix in PARTS} if config.tie_word_embeddings else set()
    extra = sorted(
        name
        for name in tensors.names - expected.keys() - tied
        if not name.endswith(IGNORED_SUFFIXES) and (config.has_head or not name.startswith(HEAD_PREFIX))
    )
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(f"unexpected tensor {extra[0]}{more}; config.json describes a model without it")
    return expected


def shard_bytes(config: ModelConfig, tensors: TensorFiles, selection: TensorSelection) -> int:
    """Return the bytes of the tensors that a rank reads. The files must have been checked."""
    table, share = config.architecture, selection.share
    sizes = {}
    for row, layer, stored in _stored_parameters(config, tensors):
        if not selection.has(config, row, layer):
            continue
        for name, (shape, _) in stored.items():
            if row.joined is not None and name.endswith(row.joined):
                piece = joined_piece(config, table.of_role(row.role), share)
            elif name.endswith(".bias") and not adds_bias(row, share):
                continue
            else:
                piece = share.piece(config, row, shape)
            sizes[name] = tensors.piece_bytes(name, piece)
    return sum(sizes.values())


def adds_bias(row: Parameter, share: Share) -> bool:
    """Return whether a rank adds a projection's bias. If ranks sum their outputs, only the first one does."""
    return share.rank == 0 or not divides_inputs(row)


def _stored_parameters(
    config: ModelConfig, tensors: TensorFiles
) -> Iterator[tuple[Parameter, int | None, Expected]]:
    """Yield each parameter's table row, its layer (None: not in a layer), and the expected tensors."""
    tied, head = config.tie_word_embeddings, config.architecture.head
    for path, layer, row in config.parameters():
        if len(row.shape) == 1:
            yield row, layer, {f"{path}.weight": (config.shape(row), FLOATS)}
        elif row != head or not tied:
            stored = stored_otherwise(config, tensors, path, row)
            bias = {f"{path}.bias": (config.shape(row)[:1], FLOATS)} if row.bias in config.biases else {}
            yield (
                row,
                layer,
                {**(_stored(config, tensors, path, config.shape(row)) if stored is None else stored), **bias},
            )


def _stored(config: ModelConfig, tensors: TensorFiles, path: str, size: tuple[int, ...]) -> Expected:
    """Return the expected tensors of a matrix of this size: a weight, or quantized weight, scales and biases.

    ``size`` is (out, in), or (experts, out, in) for a stack.
    """
    *out, width = size
    if f"{path}.scales" not in tensors:
        return {f"{path}.weight": (size, FLOATS)}
    quantization = config.quantization_of(path)
    if quantization is None:
        raise CheckpointError(f"tensor {path}.scales: config.json has no quantization for {path}")
    bits, group = quantization.bits, quantization.group_size
    if width % group:
        raise CheckpointError(f"{path}: quantization group_size {group} does not divide its width {width}")
    groups = (*out, width // group)
    scales = {f"{path}.scales": (groups, FLOATS if quantization.has_biases else ("U8",))}
    biases = {f"{path}.biases": (groups, FLOATS)} if quantization.has_biases else {}
    return {f"{path}.weight": ((*out, width * bits // 32), ("U32",)), **scales, **biases}


class _Builder:
    """Builds layers from arrays, following the architecture's table."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: TensorFiles,
        dtype: mx.Dtype,
        adapter: Adapter | None,
        selection: TensorSelection,
        unpack: bool,
    ) -> None:
        self.config, self.tensors, self.dtype, self.adapter = config, tensors, dtype, adapter
        self.selection, self.share = selection, selection.share
        self.unpack = unpack
        self.local = local_config(config, selection.share, selection.layers)

    def parts(self, progress: Progress) -> DecoderParts:
        table, selection = self.config.architecture, self.selection
        has_separate_head = selection.head and not self.config.tie_word_embeddings
        embed_tokens = self._matrices("", [table.embedding])[0] if selection.embedding else None
        lm_head = self._matrices("", [table.head])[0] if has_separate_head else None
        norm = self._norm("", table.final_norm) if selection.head else None
        mx.eval([matrix.arrays for matrix in (embed_tokens, lm_head) if matrix is not None], norm)
        layers = []
        for index in selection.layers:
            layer = self._block(index)
            mx.eval(layer.arrays)  # so that only one layer at a time is in memory in two dtypes
            layers.append(layer)
            progress(len(layers), len(selection.layers))
        return DecoderParts(
            config=self.local,
            dtype=self.dtype,
            embed_tokens=embed_tokens,
            layers=tuple(layers),
            norm=norm,
            lm_head=lm_head,
            bytes_read=self.tensors.bytes_read,
            slices=(selection.layers, range(*selection.share.keys)),
            head=self._head(layers[-1]) if self.config.has_head else None,
        )

    def check_formats(self) -> None:
        """Raise an error for a quantization that MLX lacks on this device, before any matrix is read."""
        stored = [
            (path, size) for path, size in self.config.matrices().items() if f"{path}.scales" in self.tensors
        ]
        for quantization, experts in {
            (self.config.quantization_of(path), len(size) > 2) for path, size in stored
        }:
            if quantization is not None:
                check_device(quantization, gathers=experts)

    def _block(self, index: int) -> Block:
        config, table = self.config, self.config.architecture
        path = table.layers.format(index)
        norms = {row.role: self._norm(path, row) for role in BLOCK_NORMS for row in table.of_role(role)}
        qkv = self._linear(path, "qkv")
        qkv_bias = None
        if qkv.bias is not None:  # attention adds it, without what a cache with a split bias leaves out
            qkv_bias = divide_bias(self.local, qkv, qkv.bias, norms["before_attention"])
            qkv = Linear(qkv.matrices)
        head_norm, projection_norms, is_balanced = self._query_key_norms(path)
        return Block(
            self_attn=Attention(
                self.local,
                qkv,
                qkv_bias,
                head_norm,
                projection_norms,
                self._linear(path, "output"),
                rotates=config.rotates[index],
                window=config.windows[index],
                is_balanced=is_balanced,
            ),
            mlp=self._mlp(path, config.experts if config.has_experts(index) else None),
            norms=norms,
            rms_norm_eps=config.rms_norm_eps,
        )

    def _head(self, block: Block) -> Head:
        projection, hidden_norm, token_norm, final_norm = HEAD
        made = Head(
            input_proj=Linear(self._matrices("", [projection])),
            hidden_norm=self._norm("", hidden_norm),
            token_norm=self._norm("", token_norm),
            final_norm=self._norm("", final_norm),
            block=block,
            rms_norm_eps=self.config.rms_norm_eps,
        )
        mx.eval(made.arrays)
        return made

    def _mlp(self, path: str, settings: ExpertSettings | None) -> MLP | Experts:
        if settings is None:
            return MLP(self._linear(path, "gate_up"), self._linear(path, "down"))
        return Experts(
            router=self._linear(path, "router"),
            gate_up_proj=self._linear(path, "experts_gate_up"),
            down_proj=self._linear(path, "experts_down"),
            per_token=settings.per_token,
            normalized=settings.normalized,
        )

    def _query_key_norms(self, path: str) -> tuple[mx.array | None, tuple[mx.array, mx.array] | None, bool]:
        """Return the balanced norms of queries and keys, and whether balancing changed them.

        The first result is for norms of each head, the second for norms of all of a token's heads together.
        """
        config, table = self.local, self.config.architecture
        rows = [*table.of_role("query_norm"), *table.of_role("key_norm")]
        if not rows:
            return None, None, False
        weights = (self._norm(path, row) for row in rows)
        query, key, changed = balance_norms(next(weights), next(weights), config.head_dim)
        if rows[0].shape != ("head",):
            return None, (query, key), changed
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        return (
            mx.concatenate([mx.broadcast_to(query, (H, 1, D)), mx.broadcast_to(key, (K, 1, D))]),
            None,
            changed,
        )

    def _norm(self, prefix: str, row: Parameter) -> mx.array:
        return self._vector(f"{prefix}{row.path}.weight", row)

    def _vector(self, name: str, row: Parameter) -> mx.array:
        shape = self.config.shape(row)[:1]
        return self.tensors.take(name, shape, piece=self.share.piece(self.config, row, shape)).astype(
            self.dtype
        )

    def _linear(self, prefix: str, role: str) -> Linear:
        rows = self.config.architecture.of_role(role)
        biased = [row for row in rows if row.bias in self.config.biases and adds_bias(row, self.share)]
        biases = [self._vector(f"{prefix}{row.path}.bias", row) for row in biased]
        return Linear(self._matrices(prefix, rows), mx.concatenate(biases) if biases else None)

    def _matrices(self, prefix: str, rows: Sequence[Parameter]) -> tuple[Matrix, ...]:
        """Return the matrices, or stacks of them, concatenated into one if their formats agree."""
        outputs = {prefix + row.path: self.share.shape(self.config, row)[-2] for row in rows}
        if not any(f"{path}.scales" in self.tensors for path in outputs):
            return (dense_matrix(self._weights(prefix, rows), self.dtype),)
        matrices = [self._one(prefix, row) for row in rows]
        quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
        if len(quantized) == len(matrices) and len({matrix.quantization for matrix in quantized}) == 1:
            return (self._adapted(quantized_matrix(quantized), outputs),)
        if self.unpack and self.adapter is None and all(matrix.weight.ndim == 2 for matrix in matrices):
            return (joined_matrix(matrices, self.dtype),)
        return tuple(
            self._adapted(matrix, {path: outputs[path]})
            for matrix, path in zip(matrices, outputs, strict=True)
        )

    def _weights(self, prefix: str, rows: Sequence[Parameter]) -> list[mx.array]:
        """Return floating-point (out, in) matrices, or stacks of them, with the adapter fused."""
        weights = take_stacked(self.config, self.tensors, prefix, rows, self.share)
        if self.adapter is None:
            return weights
        paths = [prefix + row.path for row in rows]
        return [self.adapter.fuse(*one, self.dtype) for one in zip(paths, weights, strict=True)]

    def _adapted(self, matrix: DenseMatrix | QuantizedMatrix, outputs: dict[str, int]) -> Matrix:
        """Return a matrix with an adapter's factors. ``outputs``: the rows of each of its paths, in order."""
        if self.unpack and isinstance(matrix, QuantizedMatrix) and matrix.weight.ndim == 2:
            matrix = joined_matrix([matrix], self.dtype)
        factors = None if self.adapter is None else self.adapter.take(outputs, self.dtype)
        return matrix if factors is None else AdaptedMatrix(matrix, *factors)

    def _one(self, prefix: str, row: Parameter) -> DenseMatrix | QuantizedMatrix:
        path = prefix + row.path
        quantization = self.config.quantization_of(path)
        stored = _stored(self.config, self.tensors, path, self.config.shape(row))
        if len(stored) == 1 or quantization is None:
            return dense_matrix(self._weights(prefix, [row]), self.dtype)
        weight, *others = (
            self.tensors.take(name, shape, dtypes, self.share.piece(self.config, row, shape))
            for name, (shape, dtypes) in stored.items()
        )
        if quantization.has_biases:
            others = [array.astype(self.dtype) for array in others]
        return QuantizedMatrix(quantization, weight, *others)


def _compute_dtype(config: ModelConfig, tensors: TensorFiles) -> mx.Dtype:
    if mx.default_device().type == mx.cpu:
        return mx.float32
    return DTYPES.get(tensors.dtype(f"{config.architecture.final_norm.path}.weight"), mx.float32)
