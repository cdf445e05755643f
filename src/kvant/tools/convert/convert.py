"""Convert a model folder to quantized or recast weights with mlx-lm's converter.

kvant uses mlx-lm's model classes, quantizer and writer, but not its ``convert``, which reads every
model*.safetensors, drops an output head if config.json has no tie_word_embeddings, rewrites the tokenizer's
files and copies the folder's Python files.
"""

import importlib
import io
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from kvant.errors import CheckpointError, ConvertError, one_line
from kvant.files import read_json
from kvant.models.as_stored import open_folder
from kvant.models.checkpoint import Progress, expected_tensors
from kvant.models.config import ModelConfig
from kvant.models.share import everything
from kvant.models.stacking import expert_roles, expert_tensors, take_stacked
from kvant.models.tensors import TensorFiles
from kvant.text.tokenizer import load_tokenizer
from kvant.tools.convert.new_folder import appearing, carried_files, check_new, check_space
from kvant.tools.convert.weight_format import DTYPES, WeightFormat

Shapes = Mapping[str, tuple[int, ...]]  # by tensor name


@dataclass(frozen=True, slots=True)
class Conversion:
    source_bytes: int  # bytes of the source's tensors
    bytes: int  # bytes of the new tensors
    bits_per_weight: float  # average, including scales and floating-point tensors
    # paths of matrices that stay in floating point because the group size does not divide their width
    unquantized: tuple[str, ...]


def convert_folder(
    source: Path, dest: Path, to: WeightFormat, progress: Progress | None = None
) -> Conversion:
    """Convert a model folder with floating-point weights.

    The new folder is written under a temporary name next to ``dest`` and renamed at the end, so it appears
    complete or not at all. Nothing in ``source`` is executed. ``progress`` is called with (tensors checked,
    tensors in all) before anything is written.
    """
    dest = check_new(dest)
    raw = read_json(source / "config.json")
    ModelConfig.from_folder(source)
    load_tokenizer(source)  # refuse a folder that could not be used afterwards
    config, tensors = open_folder(source)
    expected = _checked(config, tensors, to, progress or (lambda done, total: None))
    # This imports transformers too, so it waits until the checks are done.
    from mlx_lm.utils import compute_bits_per_weight, save_config, save_model

    model, settings, source_bytes = _build(source, raw, config, to, expected)
    arrays = dict(tree_flatten(model.parameters()))
    names = set(arrays)
    quantized = {name.removesuffix(".scales") for name in arrays if name.endswith(".scales")}
    if to.bits and not quantized:
        raise ConvertError(
            f"groups of {to.group_size} divide the width of no matrix; nothing would be quantized"
        )
    floats = [
        path for path in config.matrices() if to.bits and f"{path}.weight" in names and path not in quantized
    ]
    size = sum(array.nbytes for array in arrays.values())
    result = Conversion(source_bytes, size, float(compute_bits_per_weight(model)), tuple(floats))
    arrays.clear()  # so that the writer can free each shard after writing it
    carried = carried_files(source)
    check_space(dest.parent, size + sum(path.stat().st_size for path in carried))
    with appearing(dest) as folder:
        # save_model computes and writes one shard of 5 GB at a time.
        save_model(folder, model, donate_model=True)
        save_config(settings, folder / "config.json")
        for path in carried:
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        if TensorFiles(folder).names != names:
            raise ConvertError(f"{dest}: the written folder lacks some tensors")
    return result


def _checked(config: ModelConfig, tensors: TensorFiles, to: WeightFormat, progress: Progress) -> Shapes:
    """Return the shapes of all tensors to convert, after checking that the model has these and no others.

    Refuse weights that are not finite, as stored or in the new dtype: after quantization nobody would notice.
    """
    if config.quantization or any(name.endswith(".scales") for name in tensors.names):
        raise ConvertError(
            "the model is already quantized; expected floating-point weights: quantizing twice loses more"
        )
    expected = {name: shape for name, (shape, _) in expected_tensors(config, tensors).items()}
    # one at a time; the conversion reads them again
    for count, (name, shape) in enumerate(expected.items(), start=1):
        array = tensors.take(name, shape)
        dtype = DTYPES[to.dtype] if to.dtype else array.dtype
        if not mx.isfinite(array.astype(dtype)).all().item():
            raise CheckpointError(
                f"tensor {name} has values that are not finite in {str(dtype).split('.')[-1]}"
            )
        progress(count, len(expected))
    return expected


def _explicit(raw: Mapping[str, Any], config: ModelConfig, tied: bool) -> dict[str, Any]:
    """Return config.json with every key for which readers such as mlx-lm have different defaults."""
    # Dynamic rope is computed from the original context, not from the extended limit.
    positions = (
        config.rope.original_context if config.rope.kind == "dynamic" else config.max_position_embeddings
    )
    understood: dict[str, Any] = {
        "head_dim": config.head_dim,
        "max_position_embeddings": positions,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
    }
    if config.experts is not None:  # transformers 5 names the key num_local_experts
        understood |= config.experts.as_config()
    missing = {key: value for key, value in understood.items() if raw.get(key) is None and value is not None}
    # transformers 5 writes all of this to rope_parameters, which mlx-lm's qwen2 and llama do not read
    # (0.32.2).
    if raw.get("rope_parameters"):
        missing["rope_scaling"] = raw["rope_parameters"]
    return {**raw, **missing, "rope_theta": config.rope.theta, "tie_word_embeddings": tied}


def _build(
    source: Path, raw: Mapping[str, Any], config: ModelConfig, to: WeightFormat, expected: Shapes
) -> tuple[Any, dict[str, Any], int]:
    """Return mlx-lm's model with lazy weights, its config.json, and the source's size in bytes."""
    from mlx_lm.utils import MODEL_REMAPPING, quantize_model

    (config, tensors) = open_folder(source)
    share = everything(config).share
    weights = {  # mlx-lm stacks experts
        f"{prefix}{row.path}.weight": stack
        for prefix, rows in expert_roles(config)
        for row, stack in zip(rows, take_stacked(config, tensors, prefix, rows, share), strict=True)
    }
    experts = {name for prefix, rows in expert_roles(config) for name in expert_tensors(config, prefix, rows)}
    weights |= {name: tensors.take(name, shape) for name, shape in expected.items() if name not in experts}
    settings = _explicit(raw, config, tied=f"{config.architecture.head.path}.weight" not in weights)
    kind = config.model_type
    arch = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    try:
        model = arch.Model(arch.ModelArgs.from_dict(settings))
        model.load_weights(list(weights.items()))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConvertError(f"mlx-lm has no such model: {one_line(error)}") from error
    if to.dtype:
        model.set_dtype(DTYPES[to.dtype])
        settings["dtype" if "dtype" in settings else "torch_dtype"] = to.dtype
    if to.bits:
        with redirect_stdout(io.StringIO()):  # mlx-lm prints
            model, settings = quantize_model(
                model, settings, to.group_size, to.bits, mode=to.mode, quant_predicate=_predicate(model)
            )
    return model, settings, sum(array.nbytes for array in weights.values())


def _predicate(model: Any) -> Callable[[str, Any], bool | dict[str, Any]]:
    """Return mlx-lm's choice for each module, or False if its group does not divide the module's width."""
    chosen = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def predicate(path: str, module: Any) -> bool | dict[str, Any]:
        choice: bool | dict[str, Any] = chosen(path, module)
        unfit = isinstance(choice, dict) and module.weight.shape[-1] % choice["group_size"]
        return False if unfit else choice

    return predicate
