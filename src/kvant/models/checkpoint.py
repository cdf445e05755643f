"""Files to arrays, safely: safetensors only, every shape and dtype checked before an array is made."""

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from kvant.errors import CheckpointError, ModelError
from kvant.models.adapter import Adapter
from kvant.models.bias import divide_bias
from kvant.models.config import ModelConfig
from kvant.models.decoder import MLP, Attention, Block, Decoder
from kvant.models.linear import (
    AdaptedMatrix,
    DenseMatrix,
    Linear,
    Matrix,
    QuantizedMatrix,
    check_device,
    dense_matrix,
    quantized_matrix,
)
from kvant.models.parameters import matrices, vectors
from kvant.models.tensors import FLOATS, Expected, TensorFiles
from kvant.threads import check_process

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # what some exporters leave behind; recomputed here

Progress = Callable[[int, int], None]


def load_decoder(folder: Path, progress: Progress | None = None, adapter: Path | None = None) -> Decoder:
    """Load a model folder: config.json and model.safetensors, or shards named by model.safetensors.index.json.

    On a GPU activations have the checkpoint's dtype; on a CPU float32, which it multiplies many times faster than
    half precision. Quantized weights keep their bits, with scales and biases in the compute dtype.

    Args:
        folder: the model folder.
        progress: called with (layers loaded, layers in all).
        adapter: the folder of a LoRA or DoRA adapter in mlx-lm's format. It is added to floating-point matrices as they
            are loaded; beside quantized ones, which keep their bits, its low rank stays as it is.

    Raises:
        ModelError: a folder that does not hold a supported model or adapter.
        CheckpointError: tensors that are truncated, missing, unexpected, or of the wrong shape or dtype.
    """
    check_process()
    config, tensors = check_folder(folder)
    adapted = None if adapter is None else Adapter(adapter, config)
    builder = _Builder(config, tensors, _compute_dtype(tensors), adapted)
    builder.check_formats()
    decoder = builder.decoder(progress or (lambda done, total: None))
    if adapted is not None:
        adapted.check_taken()
    return decoder


def check_folder(folder: Path) -> tuple[ModelConfig, TensorFiles]:
    """The config and the tensors of a model folder, whose names, shapes and dtypes agree; no tensor has been read.

    Raises:
        ModelError, CheckpointError: as :func:`load_decoder`.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    config = ModelConfig.from_folder(folder)
    tensors = TensorFiles(folder)
    _Builder(config, tensors, mx.float32, None).check()
    return config, tensors


def is_tied(config: ModelConfig, tensors: TensorFiles) -> bool:
    """Whether the embedding is the output head too; where config.json leaves that out, as exporters do with what is
    their default, and defaults differ, it is tied exactly where no head is stored.
    """
    tied = config.tie_word_embeddings
    return "lm_head.weight" not in tensors if tied is None else tied


class _Builder:
    """Arrays to layers. A tensor is named by its module's path in the checkpoint."""

    def __init__(self, config: ModelConfig, tensors: TensorFiles, dtype: mx.Dtype, adapter: Adapter | None) -> None:
        self.config = config
        self.tensors = tensors
        self.dtype = dtype
        self.adapter = adapter
        self._tied = is_tied(config, tensors)

    def decoder(self, progress: Progress) -> Decoder:
        config = self.config
        vocab_size, hidden = config.vocab_size, config.hidden_size
        embed_tokens = self._matrix("model.embed_tokens", vocab_size, hidden)
        lm_head = None if self._tied else self._matrix("lm_head", vocab_size, hidden)
        norm = self._vector("model.norm.weight", hidden)
        mx.eval(norm, embed_tokens.arrays, lm_head.arrays if lm_head else [])
        layers = []
        for index in range(config.num_hidden_layers):
            layer = self._block(f"model.layers.{index}")
            mx.eval(layer.arrays)  # layer by layer, so that only one is held in two dtypes
            layers.append(layer)
            progress(index + 1, config.num_hidden_layers)
        return Decoder(config, self.dtype, embed_tokens=embed_tokens, layers=layers, norm=norm, lm_head=lm_head)

    def check(self) -> None:
        """Refuse a checkpoint that is not what its config.json claims before any of it is read.

        Tensors nothing would read are refused too: they say that the model is another.
        """
        expected: dict[str, tuple[tuple[int, ...], Sequence[str]]] = {}
        for path, (out, width) in matrices(self.config).items():
            if path != "lm_head" or not self._tied:
                expected |= self._stored(path, out, width)
        expected |= {name: ((size,), FLOATS) for name, size in vectors(self.config).items()}
        known = {*expected, *(f"lm_head.{part}" for part in ("weight", "scales", "biases") if self._tied)}
        extra = sorted(name for name in self.tensors.names - known if not name.endswith(IGNORED_SUFFIXES))
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(f"unexpected tensor {extra[0]}{more}; config.json describes a model without it")
        self.tensors.check(expected)

    def check_formats(self) -> None:
        """Refuse a quantization that MLX does not have on this device, before any matrix is read."""
        stored = [path for path in matrices(self.config) if f"{path}.scales" in self.tensors]
        for quantization in {self.config.quantization_of(path) for path in stored}:
            if quantization is not None:
                check_device(quantization)

    def _block(self, path: str) -> Block:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        sizes = {f"{path}.self_attn.{name}_proj": count * config.head_dim for name, count in heads.items()}
        norm = self._vector(f"{path}.input_layernorm.weight", hidden)
        qkv = Linear(self._fused(sizes, hidden))
        qkv_bias = None
        if config.attention_bias:
            qkv_bias = divide_bias(config, qkv, self._bias(sizes), norm)
        o_proj = self._linear(
            {f"{path}.self_attn.o_proj": hidden}, config.num_attention_heads * config.head_dim, config.output_bias
        )
        gate_up = self._linear({f"{path}.mlp.{name}_proj": inner for name in ("gate", "up")}, hidden, config.mlp_bias)
        down = self._linear({f"{path}.mlp.down_proj": hidden}, inner, config.mlp_bias)
        return Block(
            self_attn=Attention(config, qkv, qkv_bias, self._query_key_norm(f"{path}.self_attn"), o_proj),
            mlp=MLP(gate_up, down),
            input_layernorm=norm,
            post_attention_layernorm=self._vector(f"{path}.post_attention_layernorm.weight", hidden),
            rms_norm_eps=config.rms_norm_eps,
        )

    def _query_key_norm(self, path: str) -> mx.array | None:
        """The weight of each head's RMSNorm, the queries' H times and the keys' K times: (H + K, 1, D)."""
        config = self.config
        if not config.query_key_norm:
            return None
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        D = config.head_dim
        weights = {name: self._vector(f"{path}.{name}_norm.weight", D) for name in heads}
        return mx.concatenate([mx.broadcast_to(weights[name], (count, 1, D)) for name, count in heads.items()])

    def _vector(self, name: str, size: int) -> mx.array:
        return self.tensors.take(name, (size,)).astype(self.dtype)

    def _bias(self, sizes: dict[str, int]) -> mx.array:
        return mx.concatenate([self._vector(f"{path}.bias", out) for path, out in sizes.items()])

    def _linear(self, sizes: dict[str, int], width: int, biased: bool) -> Linear:
        return Linear(self._fused(sizes, width), self._bias(sizes) if biased else None)

    def _matrix(self, path: str, out: int, width: int) -> Matrix:
        (matrix,) = self._fused({path: out}, width)
        return matrix

    def _fused(self, sizes: dict[str, int], width: int) -> tuple[Matrix, ...]:
        """The matrices (size, width) at these paths as one where their storage agrees, else one each."""
        if not any(f"{path}.scales" in self.tensors for path in sizes):
            return (dense_matrix([self._weight(path, out, width) for path, out in sizes.items()], self.dtype),)
        parts = [self._one(path, out, width) for path, out in sizes.items()]
        quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
        if len(quantized) == len(parts) and len({part.quantization for part in quantized}) == 1:
            return (self._adapted(quantized_matrix(quantized), sizes),)
        return tuple(self._adapted(part, {path: sizes[path]}) for part, path in zip(parts, sizes, strict=True))

    def _weight(self, path: str, out: int, width: int) -> mx.array:
        """A floating-point matrix (out, width), with what an adapter adds to it."""
        weight = self.tensors.take(f"{path}.weight", (out, width))
        return weight if self.adapter is None else self.adapter.fuse(path, weight, self.dtype)

    def _adapted(self, matrix: DenseMatrix | QuantizedMatrix, sizes: dict[str, int]) -> Matrix:
        """A quantized matrix, of the matrices at these paths side by side, with what an adapter adds to them."""
        factors = None if self.adapter is None else self.adapter.take(sizes, self.dtype)
        return matrix if factors is None else AdaptedMatrix(matrix, *factors)

    def _one(self, path: str, out: int, width: int) -> DenseMatrix | QuantizedMatrix:
        quantization = self.config.quantization_of(path)
        stored = self._stored(path, out, width)
        if len(stored) == 1 or quantization is None:
            return dense_matrix([self._weight(path, out, width)], self.dtype)
        weight, scales, *biases = (self.tensors.take(name, *expected) for name, expected in stored.items())
        if not biases:
            return QuantizedMatrix(weight, scales, None, quantization)
        return QuantizedMatrix(weight, scales.astype(self.dtype), biases[0].astype(self.dtype), quantization)

    def _stored(self, path: str, out: int, width: int) -> Expected:
        """The tensors of a matrix (out, width): its weight, or its quantized weight, scales and biases."""
        if f"{path}.scales" not in self.tensors:
            return {f"{path}.weight": ((out, width), FLOATS)}
        quantization = self.config.quantization_of(path)
        if quantization is None:
            raise CheckpointError(f"tensor {path}.scales: config.json has no quantization for {path}")
        bits, group = quantization.bits, quantization.group_size
        if width % group:
            raise CheckpointError(f"{path}: quantization group_size {group} does not divide its width {width}")
        groups = (out, width // group)
        scales = {f"{path}.scales": (groups, FLOATS if quantization.has_biases else ("U8",))}
        biases = {f"{path}.biases": (groups, FLOATS)} if quantization.has_biases else {}
        return {f"{path}.weight": ((out, width * bits // 32), ("U32",)), **scales, **biases}


def _compute_dtype(tensors: TensorFiles) -> mx.Dtype:
    if mx.default_device().type == mx.cpu:
        return mx.float32
    dtypes = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    return dtypes.get(tensors.dtype("model.norm.weight"), mx.float32)
