"""A model folder to mlx-lm's model: kvant's checks, mlx-lm's class by the allow-list, and weights that fit
it.

Nothing of the folder is executed. Modules are made lazily: an array is computed once every name, shape and
dtype is known to be right. What mlx-lm's code raises on the way becomes one line of kvant's.
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

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # some exporters leave them behind; mlx-lm computes them
# Quantizations that other libraries wrote and mlx-lm's classes unpack: MLX's own formats, and float8 in
# blocks.
FOREIGN_METHODS = ("mxfp4", "mxfp8", "fp8")

TIED = "tie_word_embeddings"
# Last names of the modules that embed tokens, in checkpoints whose classes may tie the head to them.
EMBEDDINGS = ("embed_tokens", "word_embeddings", "wte", "embedding", "embeddings", "tok_embeddings")

Progress = Callable[[int, int], None]
Weights = dict[str, mx.array]


def load_bridged(
    folder: Path, progress: Progress | None = None, adapter: Path | None = None, *, head: bool = False
) -> BridgedModel:
    """Load a folder of an architecture that mlx-lm has and kvant has not.

    On a CPU activations and all floating-point weights have float32. On a GPU they keep the checkpoint's
    dtype. ``progress`` is called with (layers loaded, layers in all). An ``adapter`` is refused.
    ``head``: with the head for drafts.
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
            f"{adapter}: adapters are applied to architectures of kvant's own; this model is mlx-lm's"
        )


def check_bridged(
    folder: Path, *, in_float32: bool = False, whole: bool = True, head: bool = False
) -> tuple[Module, BridgedConfig]:
    """mlx-lm's model with the folder's weights, which fit it and of which none has been read.

    Args:
        in_float32: it computes in float32. Floats are cast before mlx-lm's class rearranges them: it adds 1
            to the weights of some norms, which half precision would round.
        whole: this machine is to hold all of them.
        head: with the head for drafts; the model is a :class:`HeadedModule` then.
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
    """Return config.json as the stored tensors say it: a head that differs from the embedding is not tied.

    mlx-lm's classes drop it where config.json, or their own default, ties it. A head without an embedding is
    renamed to be the embedding. Where a head is no other than the embedding, config.json stays as it is.
    """
    head, embedding = _ends(tensors)
    text = raw.get("text_config")
    holders = [raw, *([text] if isinstance(text, dict) else [])]
    said = [holder[TIED] for holder in holders if holder.get(TIED) is not None]
    if head is None or (said and not any(said)) or _is_copy(head, tensors):
        return raw
    if embedding is None:
        for part in stored_parts(head, tensors):
            tensors.rename(f"{head}.{part}", f"{head.removesuffix('lm_head')}model.embed_tokens.{part}")
    elif said:
        warn_of_head(f"{head}.weight")
    tied = {TIED: embedding is None}
    return {**raw, **tied, **({"text_config": text | tied} if isinstance(text, dict) else {})}


def _ends(tensors: TensorFiles) -> tuple[str | None, str | None]:
    """The paths of the stored head and embedding; that of a part for text is the shortest of several."""
    paths = sorted(
        (name.removesuffix(".weight") for name in tensors.names if name.endswith(".weight")), key=len
    )
    heads = (path for path in paths if path.rpartition(".")[2] == "lm_head")
    embeddings = (path for path in paths if path.rpartition(".")[2] in EMBEDDINGS)
    return next(heads, None), next(embeddings, None)


def _is_copy(head: str, tensors: TensorFiles) -> bool:
    """Whether a head of floats is the embedding once more."""
    _, embedding = _ends(tensors)
    return stored_parts(head, tensors) == PARTS[:1] and tensors.are_same(
        f"{head}.weight", f"{embedding}.weight"
    )


def build(raw: Mapping[str, Any]) -> tuple[Module, BridgedConfig]:
    """mlx-lm's model of a config.json that :func:`kvant.bridge.config.check` let pass; no array of it is
    computed.
    """
    name = module_name(raw)
    if name in NEEDS_METAL and not mx.metal.is_available():
        raise ModelError(
            f"config.json: architecture {raw['model_type']} has layers that are Metal kernels; no Metal here"
        )
    with library_errors(ModelError, f"config.json: mlx-lm's class for {raw['model_type']} does not take it"):
        module = import_module(f"mlx_lm.models.{name}")
        args = module.ModelArgs.from_dict(translated(for_mlx_lm(raw), name))
        model: Module = module.Model(args)
        # a call that is never evaluated: settings that fit each other badly show there
        entries = probe(model)
    _check_layers(entries)
    model.eval()
    return model, read_config(raw, args)


def _check_layers(entries: Sequence[Entry]) -> None:
    """Refuse windows that are no numbers of tokens, and keys without heads or width."""
    for leaf in leaves_of(entries, Attention):
        for what, value in (("window", leaf.window), ("chunk", leaf.chunk)):
            if value is not None and (type(value) is not int or value < 1):
                raise ModelError(
                    f"config.json: a layer has a {what} of {shown(value)} tokens; expected an int from 1"
                )
        if leaf.num_kv_heads < 1 or leaf.key_dim < 1:
            raise ModelError(
                f"config.json: a layer has {leaf.num_kv_heads} kv heads of {leaf.key_dim} numbers"
            )


def describe_formats(raw: Mapping[str, Any]) -> str:
    """How config.json says that the matrices are quantized, in a few words; empty: it does not."""
    default, _ = _formats(raw)
    if default is None:
        return ""
    return default.text


def quantize_modules(model: Module, raw: Mapping[str, Any], weights: Weights | None = None) -> None:
    """Make the modules quantized whose tensors are, in the format that the tensors' shapes tell.

    Without ``weights`` every one that can be and whose width fits, as mlx-lm's converter does.
    """
    default, overrides = _formats(raw)
    if default is None:
        return

    def chosen(path: str, module: Module) -> bool | dict[str, Any]:
        can, own = hasattr(module, "to_quantized"), overrides.get(path, default)
        if weights is None:
            return (
                own.form
                if own is not None and can and module.weight.shape[-1] % own.group_size == 0
                else False
            )
        if path not in overrides:
            own = _format_of(path, module, weights) if can and f"{path}.scales" in weights else None
        if own is None:
            return False
        check_device(own)
        return own.form

    quantize(model, default.group_size, default.bits, mode=default.mode, class_predicate=chosen)


def _take_weights(
    model: Module, raw: Mapping[str, Any], tensors: TensorFiles, in_float32: bool, place: HeadPlace | None
) -> None:
    """Put the folder's tensors into the model, as mlx-lm's load_model does; they are read when they are
    computed. ``place``: of the head, which becomes the model's last layer.
    """
    weights: Weights = {
        name: tensors.take(name, tensors.shape(name), tuple(BITS)) for name in sorted(tensors.names)
    }
    if in_float32:
        weights = {name: _float32(array) for name, array in weights.items()}
    sanitize = getattr(model, "sanitize", None)  # an optional part of mlx-lm's models
    with library_errors(CheckpointError, f"its tensors are not those of a {raw['model_type']}"):
        before = without_heads(raw, weights) if place is None else place.placed(weights)
        weights = dict(before if sanitize is None else sanitize(dict(before)))
        if place is not None:
            place.shorten(model)
            weights = place.moved(weights, before)
        quantize_modules(model, raw, weights)
    head, _ = _ends(tensors)
    if head is not None and f"{head}.weight" not in parameters(model) and _is_copy(head, tensors):
        weights.pop(f"{head}.weight", None)  # some classes leave it
    _check(model, weights)
    model.load_weights(list(weights.items()))


def _formats(raw: Mapping[str, Any]) -> tuple[Quantization | None, Mapping[str, Quantization | None]]:
    """As :func:`kvant.models.quantization.read_quantization`, with what mlx-lm reads beside MLX's own
    formats.
    """
    text = raw.get("text_config")
    foreign = raw.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, dict) else None
    )
    if raw.get("quantization") or not isinstance(foreign, dict) or "quant_method" not in foreign:
        return read_quantization(raw)
    method = foreign["quant_method"]
    if method not in FOREIGN_METHODS:
        read_quantization({"quantization_config": foreign})  # refuses it by name
    if method == "fp8":  # the class makes floats of it
        return None, {}
    bits, group_size = FLOAT_MODES[method]
    return Quantization(bits, group_size, method), {}


def _format_of(path: str, module: Module, weights: Weights) -> Quantization:
    """The format of a stored matrix: mlx-lm goes by the shapes too, config.json's may be that of others."""
    width, scales, words = module.weight.shape[-1], weights[f"{path}.scales"], weights.get(f"{path}.weight")
    if words is None or not scales.ndim or not scales.shape[-1] or not words.ndim:
        raise CheckpointError(f"tensor {path}.weight is missing; {path}.scales is there")
    found = format_of_shapes(width, words.shape[-1], scales.shape[-1], in_bytes=scales.dtype == mx.uint8)
    if found is None:
        raise CheckpointError(
            f"{path}: {words.shape[-1]} words and {scales.shape[-1]} scales for {width} values; MLX has no "
            f"such format"
        )
    return found


def _check(model: Module, weights: Weights) -> None:
    """Refuse tensors that are not exactly the model's parameters, before one of them is computed."""
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
        own = expected[name]
        if array.shape != own.shape:
            raise CheckpointError(
                f"tensor {name} has shape {tuple(array.shape)}; expected {tuple(own.shape)}"
            )
        given, wanted = (
            "a float" if mx.issubdtype(dtype, mx.floating) else str(dtype).removeprefix("mlx.core.")
            for dtype in (array.dtype, own.dtype)
        )
        if given != wanted:
            given = str(array.dtype).removeprefix("mlx.core.")
            raise CheckpointError(f"tensor {name} has dtype {given}; expected {wanted}")


def main_dtype(model: Module) -> mx.Dtype:
    """The dtype of most of the floating-point numbers among the weights."""
    counts: dict[mx.Dtype, int] = {}
    for array in parameters(model).values():
        if mx.issubdtype(array.dtype, mx.floating):
            counts[array.dtype] = counts.get(array.dtype, 0) + array.size
    return max(counts, key=lambda dtype: counts[dtype], default=mx.float32)


def compute_in_float32(model: Module) -> None:
    """Cast every floating-point weight, lazily: a CPU multiplies half precision many times slower."""
    model.apply(_float32)
    for module in model.modules():
        if isinstance(module, QuantizedEmbedding) and module.mode != "affine":
            module.__class__ = _Float32Embedding


def _float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


class _Float32Embedding(QuantizedEmbedding):
    """MLX unpacks its floating-point formats to bfloat16, exactly. The layers after it are to compute in
    float32.
    """

    def __call__(self, x: mx.array) -> mx.array:
        rows: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
        return rows.astype(mx.float32)


def evaluate(
    model: Module, folder: Path, progress: Progress | None, names: Collection[str] | None = None
) -> None:
    """Read the weights, those with these ``names`` or all, and have a CPU turn positions by matrices.

    They are read layer by layer, so that only one is held in two forms.
    """
    layers = [
        [own[name] for name in own if names is None or name in names] for own in by_layer(model).values()
    ]
    layers = [own for own in layers if own]
    with library_errors(CheckpointError, f"{folder}: MLX does not read its tensors"):
        for done, own in enumerate(layers, start=1):
            mx.eval(own)
            if progress is not None:
                progress(done, len(layers))
    layers.clear()  # no weight is held here while another takes its place
    multiply_few_rows(model, names)
    rotate_by_matrices(model)
