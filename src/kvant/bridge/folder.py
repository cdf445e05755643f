"""Load a model folder with mlx-lm's class, if it is on kvant's allow-list.

No code of the folder is executed. Arrays are lazy: they are read after every name, shape and dtype was
checked. Errors from mlx-lm's code become one-line errors.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedEmbedding, quantize

from kvant.bridge.architectures import NEEDS_METAL, module_name
from kvant.bridge.config import BridgedConfig, for_mlx_lm, read_config, read_folder
from kvant.bridge.few_rows import multiply_few_rows
from kvant.bridge.heads import HeadedBridgedModel, HeadedModule, HeadPlace, without_heads
from kvant.bridge.model import BridgedModel, by_layer, parameters
from kvant.bridge.probe import Attention, Entry, leaves_of, probe
from kvant.bridge.rope import rotate_by_matrices
from kvant.bridge.translation import translated
from kvant.errors import CheckpointError, ModelError, library_errors
from kvant.fields import shown
from kvant.models.as_stored import PARTS, add_prefix, stored_parts, warn_of_head
from kvant.models.matrix import check_device
from kvant.models.quantization import FLOAT_MODES, Quantization, format_of_shapes, read_quantization
from kvant.models.tensors import TensorFiles, tensor_files
from kvant.tensor_header import BITS
from kvant.threads import check_process

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # written by some exporters; mlx-lm computes them
# Quantizations by other libraries that mlx-lm's classes unpack: MLX's formats, and float8 in blocks.
FOREIGN_METHODS = ("mxfp4", "mxfp8", "fp8")

TIED = "tie_word_embeddings"
# Last components of embedding paths, in checkpoints whose classes may tie the head to the embedding.
EMBEDDINGS = ("embed_tokens", "word_embeddings", "wte", "embedding", "embeddings", "tok_embeddings")

Progress = Callable[[int, int], None]
Weights = dict[str, mx.array]


def load_bridged(
    folder: Path, progress: Progress | None = None, adapter: Path | None = None, *, head: bool = False
) -> BridgedModel:
    """Load a folder whose architecture mlx-lm implements and kvant does not.

    Activations and floating-point weights are float32 on a CPU, and have the checkpoint's dtype on a GPU.
    ``progress`` is called with the number of loaded layers and of all layers. An ``adapter`` is refused.
    ``head``: also load the head for drafts.
    """
    check_process()
    refuse_adapter(adapter)
    model, config = check_bridged(folder, in_float32=mx.default_device().type == mx.cpu, head=head)
    evaluate(model, folder, progress)
    if isinstance(model, HeadedModule):
        return HeadedBridgedModel(model, config, main_dtype(model))
    return BridgedModel(model, config, main_dtype(model))


def refuse_adapter(adapter: Path | None) -> None:
    if adapter is not None:
        raise ModelError(
            f"{adapter}: adapters need an architecture that kvant implements; mlx-lm computes this model"
        )


def check_bridged(
    folder: Path, *, in_float32: bool = False, whole: bool = True, head: bool = False
) -> tuple[Module, BridgedConfig]:
    """Return mlx-lm's model with the folder's weights, checked but not read, and its config.

    Args:
        in_float32: compute in float32. Floats are cast before mlx-lm's class rearranges them, because it adds
            1 to the weights of some norms, which half precision would round.
        whole: also check that all weights fit in memory.
        head: include the head for drafts; the model is then a :class:`HeadedModule`.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    raw: Mapping[str, Any] = read_folder(folder)
    try:
        tensors = TensorFiles(folder, tensor_files(folder, head=True) if head else None)
        place = HeadPlace(raw, tensors) if head else None
        if place is not None:
            raw = place.extended(raw)
        model, config = build(raw)
        _, embedding = _ends(tensors)
        if embedding in EMBEDDINGS and f"model.{embedding}.weight" in parameters(model):
            add_prefix(tensors, f"model.{embedding}")
        settled = settle_head(raw, tensors)
        if settled is not raw:
            raw = settled
            model, config = build(raw)
        if whole:
            tensors.check_memory(tensors.nbytes)
        _take_weights(model, raw, tensors, in_float32, place)
        if place is not None:
            model = HeadedModule(model, place.layout)
        if in_float32:
            compute_in_float32(model)
    except ModelError as error:
        named = str(error).startswith(str(folder))
        raise type(error)(str(error) if named else f"{folder}: {error}") from error
    return model, config


def settle_head(raw: Mapping[str, Any], tensors: TensorFiles) -> Mapping[str, Any]:
    """Return config.json, corrected so that a head that differs from the embedding is not tied.

    mlx-lm's classes would drop the head if config.json, or their default, ties it. A head without an
    embedding is renamed to be the embedding. If the head is a copy of the embedding, nothing changes.
    """
    head, embedding = _ends(tensors)
    text = raw.get("text_config")
    holders = [raw, *([text] if isinstance(text, dict) else [])]
    configured = [holder[TIED] for holder in holders if holder.get(TIED) is not None]
    if head is None or (configured and not any(configured)) or _is_copy(head, tensors):
        return raw
    if embedding is None:
        for suffix in stored_parts(head, tensors):
            tensors.rename(f"{head}.{suffix}", f"{head.removesuffix('lm_head')}model.embed_tokens.{suffix}")
    elif configured:
        warn_of_head(f"{head}.weight")
    tied = {TIED: embedding is None}
    return {**raw, **tied, **({"text_config": text | tied} if isinstance(text, dict) else {})}


def _ends(tensors: TensorFiles) -> tuple[str | None, str | None]:
    """Return the paths of the stored head and embedding; of several, the shortest is the text model's."""
    paths = sorted(
        (name.removesuffix(".weight") for name in tensors.names if name.endswith(".weight")), key=len
    )
    heads = (path for path in paths if path.rpartition(".")[2] == "lm_head")
    embeddings = (path for path in paths if path.rpartition(".")[2] in EMBEDDINGS)
    return next(heads, None), next(embeddings, None)


def _is_copy(head: str, tensors: TensorFiles) -> bool:
    """Return whether a floating-point head is a copy of the embedding."""
    _, embedding = _ends(tensors)
    return stored_parts(head, tensors) == PARTS[:1] and tensors.are_same(
        f"{head}.weight", f"{embedding}.weight"
    )


def build(raw: Mapping[str, Any]) -> tuple[Module, BridgedConfig]:
    """Return mlx-lm's model of a config.json that :func:`kvant.bridge.config.check` accepted; it is lazy."""
    name = module_name(raw)
    if name in NEEDS_METAL and not mx.metal.is_available():
        raise ModelError(
            f"config.json: architecture {raw['model_type']} needs Metal kernels; this machine has no Metal"
        )
    with library_errors(ModelError, f"config.json: mlx-lm's class for {raw['model_type']} rejects it"):
        module = import_module(f"mlx_lm.models.{name}")
        args = module.ModelArgs.from_dict(translated(for_mlx_lm(raw), name))
        model: Module = module.Model(args)
        # a call that is never evaluated reveals settings that do not fit together
        entries = probe(model)
    _check_layers(entries)
    model.eval()
    return model, read_config(raw, args)


def _check_layers(entries: Sequence[Entry]) -> None:
    """Raise an error for windows that are not positive integers, and for keys without heads or width."""
    for leaf in leaves_of(entries, Attention):
        for what, value in (("window", leaf.window), ("chunk", leaf.chunk)):
            if value is not None and (type(value) is not int or value < 1):
                raise ModelError(
                    f"config.json: a layer has a {what} of {shown(value)} tokens; expected an int from 1"
                )
        if leaf.num_kv_heads < 1 or leaf.key_dim < 1:
            raise ModelError(
                f"config.json: a layer has {leaf.num_kv_heads} kv heads with a head_dim of {leaf.key_dim}; "
                "expected at least 1 each"
            )


def describe_formats(raw: Mapping[str, Any]) -> str:
    """Describe the quantization in config.json in a few words; empty if there is none."""
    default, _ = _formats(raw)
    if default is None:
        return ""
    return default.text


def quantize_modules(model: Module, raw: Mapping[str, Any], weights: Weights | None = None) -> None:
    """Quantize the modules that have quantized tensors, in the format given by the tensors' shapes.

    Without ``weights``, quantize every module whose class and width allow it, as mlx-lm's converter does.
    """
    default, overrides = _formats(raw)
    if default is None:
        return

    def chosen(path: str, module: Module) -> bool | dict[str, Any]:
        can, quantization = hasattr(module, "to_quantized"), overrides.get(path, default)
        if weights is None:
            return (
                quantization.form
                if quantization is not None and can and module.weight.shape[-1] % quantization.group_size == 0
                else False
            )
        if path not in overrides:
            quantization = _format_of(path, module, weights) if can and f"{path}.scales" in weights else None
        if quantization is None:
            return False
        check_device(quantization)
        return quantization.form

    quantize(model, default.group_size, default.bits, mode=default.mode, class_predicate=chosen)


def _take_weights(
    model: Module, raw: Mapping[str, Any], tensors: TensorFiles, in_float32: bool, place: HeadPlace | None
) -> None:
    """Put the folder's lazy tensors into the model, as mlx-lm's load_model does.

    ``place``: where the head's tensors go; the head becomes the model's last layer.
    """
    weights: Weights = {
        name: tensors.take(name, tensors.shape(name), tuple(BITS)) for name in sorted(tensors.names)
    }
    if in_float32:
        weights = {name: _float32(array) for name, array in weights.items()}
    sanitize = getattr(model, "sanitize", None)  # optional in mlx-lm's models
    with library_errors(CheckpointError, f"the tensors do not fit a {raw['model_type']}"):
        before = without_heads(raw, weights) if place is None else place.placed(weights)
        weights = dict(before if sanitize is None else sanitize(dict(before)))
        if place is not None:
            place.shorten(model)
            weights = place.moved(weights, before)
        quantize_modules(model, raw, weights)
    head, _ = _ends(tensors)
    if head is not None and f"{head}.weight" not in parameters(model) and _is_copy(head, tensors):
        weights.pop(f"{head}.weight", None)  # some classes do not drop it
    _check(model, weights)
    model.load_weights(list(weights.items()))


def _formats(raw: Mapping[str, Any]) -> tuple[Quantization | None, Mapping[str, Quantization | None]]:
    """Return the default quantization and the overrides, including formats that only mlx-lm reads."""
    text = raw.get("text_config")
    foreign = raw.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, dict) else None
    )
    if raw.get("quantization") or not isinstance(foreign, dict) or "quant_method" not in foreign:
        return read_quantization(raw)
    method = foreign["quant_method"]
    if method not in FOREIGN_METHODS:
        read_quantization({"quantization_config": foreign})  # raises an error that names it
    if method == "fp8":  # mlx-lm's class converts it to floats
        return None, {}
    bits, group_size = FLOAT_MODES[method]
    return Quantization(bits, group_size, method), {}


def _format_of(path: str, module: Module, weights: Weights) -> Quantization:
    """Return the format of a stored matrix by its shapes, as mlx-lm does; config.json may differ."""
    width, scales, words = module.weight.shape[-1], weights[f"{path}.scales"], weights.get(f"{path}.weight")
    if words is None or not scales.ndim or not scales.shape[-1] or not words.ndim:
        raise CheckpointError(f"tensor {path}.weight is missing, although {path}.scales exists")
    quantization = format_of_shapes(
        width, words.shape[-1], scales.shape[-1], in_bytes=scales.dtype == mx.uint8
    )
    if quantization is None:
        raise CheckpointError(
            f"{path}: {words.shape[-1]} words and {scales.shape[-1]} scales for {width} values; MLX has no "
            f"such format"
        )
    return quantization


def _check(model: Module, weights: Weights) -> None:
    """Raise an error unless the tensors are exactly the model's parameters. Nothing is evaluated."""
    expected = parameters(model)
    for name in [name for name in weights if name not in expected and name.endswith(IGNORED_SUFFIXES)]:
        del weights[name]
    for problem, names in (
        ("is missing", sorted(expected.keys() - weights.keys())),
        ("is unexpected; config.json describes a model without it", sorted(weights.keys() - expected.keys())),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"tensor {names[0]}{more} {problem}")
    for name, array in weights.items():
        parameter = expected[name]
        if array.shape != parameter.shape:
            raise CheckpointError(
                f"tensor {name} has shape {tuple(array.shape)}; expected {tuple(parameter.shape)}"
            )
        stored, needed = (
            "a float" if mx.issubdtype(dtype, mx.floating) else str(dtype).removeprefix("mlx.core.")
            for dtype in (array.dtype, parameter.dtype)
        )
        if stored != needed:
            stored = str(array.dtype).removeprefix("mlx.core.")
            raise CheckpointError(f"tensor {name} has dtype {stored}; expected {needed}")


def main_dtype(model: Module) -> mx.Dtype:
    """Return the dtype of most floating-point weights, counted by elements."""
    counts: dict[mx.Dtype, int] = {}
    for array in parameters(model).values():
        if mx.issubdtype(array.dtype, mx.floating):
            counts[array.dtype] = counts.get(array.dtype, 0) + array.size
    return max(counts, key=lambda dtype: counts[dtype], default=mx.float32)


def compute_in_float32(model: Module) -> None:
    """Cast all floating-point weights lazily, because a CPU multiplies half precision many times slower."""
    model.apply(_float32)
    for module in model.modules():
        if isinstance(module, QuantizedEmbedding) and module.mode != "affine":
            module.__class__ = _Float32Embedding


def _float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


class _Float32Embedding(QuantizedEmbedding):
    """An embedding that casts the bfloat16 rows of MLX's floating-point formats to float32, without loss."""

    def __call__(self, x: mx.array) -> mx.array:
        rows: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
        return rows.astype(mx.float32)


def evaluate(
    model: Module, folder: Path, progress: Progress | None, names: Collection[str] | None = None
) -> None:
    """Read the weights with these ``names``, or all, and install faster operators for a CPU.

    Weights are read layer by layer, so that only one layer at a time is in memory in two forms.
    """
    layers = [
        [arrays[name] for name in arrays if names is None or name in names]
        for arrays in by_layer(model).values()
    ]
    layers = [arrays for arrays in layers if arrays]
    with library_errors(CheckpointError, f"{folder}: MLX cannot read the tensors"):
        for done, arrays in enumerate(layers, start=1):
            mx.eval(arrays)
            if progress is not None:
                progress(done, len(layers))
    layers.clear()  # release weights that are replaced below
    multiply_few_rows(model, names)
    rotate_by_matrices(model)
