"""Quantized weights of every format against mlx-lm's model on the same files, and formats that cannot be loaded."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.checkpoints import (
    CONFIGS,
    llama_config,
    load_reference,
    quantize_reference,
    qwen2_config,
    reference_logits,
    reference_model,
    save_checkpoint,
)
from support.counts import count
from support.numbers import relative_error

from kvant.errors import CheckpointError, ModelError
from kvant.models import Quantization, load_decoder
from kvant.models import matrix as matrix_module
from kvant.models.matrix import QuantizedMatrix
from kvant.models.matrix_loading import quantized_matrix

TOLERANCE = 1e-4  # of the largest logit
IDS = [(7 + 31 * i) % 300 for i in range(24)]
FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
FORMATS = [("affine", 4, 64), ("affine", 3, 32), ("affine", 8, 128), *((mode, *FLOATS[mode]) for mode in FLOATS)]
# The values of 4-bit floating-point numbers, one bit of sign, two of exponent, one of mantissa (OCP MX 1.0).
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _three_ways(folder: Path, expected: mx.array) -> None:
    """In one pass, in uneven chunks, and token by token: products of many rows and of one."""
    model = load_decoder(folder)
    assert relative_error(model(mx.array([IDS]))[0], expected) < TOLERANCE
    for bounds in ([0, 7, 9, len(IDS)], list(range(len(IDS) + 1))):
        cache = model.make_cache(len(IDS), kv_bits=0)
        parts = [model(mx.array([IDS[a:b]]), cache=cache)[0] for a, b in pairwise(bounds)]
        assert relative_error(mx.concatenate(parts), expected) < TOLERANCE


# Each architecture in three formats, and in all of them in the long run.
EVERY_OTHER = [
    (kind, *made) for i, kind in enumerate(CONFIGS) for j, made in enumerate(FORMATS) if count((i + j) % 2 == 0, True)
]


@pytest.mark.parametrize(("kind", "mode", "bits", "group_size"), EVERY_OTHER)
def test_logits_are_mlx_lms(tmp_path: Path, kind: str, mode: str, bits: int, group_size: int) -> None:
    config = CONFIGS[kind]
    reference = reference_model(config)
    config = quantize_reference(config, reference, bits, group_size, mode)
    folder = save_checkpoint(tmp_path, config, reference)
    _three_ways(folder, reference_logits(reference, IDS))
    layers = load_decoder(folder).layers
    assert {len(layer.self_attn.qkv_proj.matrices) for layer in layers} == {1}  # fused
    quantized = layers[0].mlp.gate_up_proj.matrices[0]
    assert quantized.quantization == Quantization(bits, group_size, mode)
    assert (quantized.biases is None) == (mode != "affine")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_float_weights(tmp_path: Path, kind: str, dtype: mx.Dtype) -> None:
    """On a CPU both engines compute in float32 with them."""
    reference = reference_model(CONFIGS[kind])
    reference.set_dtype(dtype)
    folder = save_checkpoint(tmp_path, CONFIGS[kind], reference)
    _three_ways(folder, load_reference(folder)(mx.array([IDS]))[0])


def test_modes_mixed_by_layer(tmp_path: Path) -> None:
    """As mlx-lm's converter writes overrides; projections of one format are fused, those of several are not."""
    config = llama_config()
    reference = reference_model(config)
    own: dict[str, Any] = {}

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path.endswith("o_proj") or not hasattr(module, "to_quantized"):
            return False
        for part, mode in (("v_proj", "mxfp8"), ("gate_proj", "nvfp4"), ("up_proj", "nvfp4")):
            if path.endswith(part):
                bits, group_size = FLOATS[mode]
                own[path] = {"group_size": group_size, "bits": bits, "mode": mode}
                return dict(own[path])
        return {"group_size": 32, "bits": 4, "mode": "mxfp4"}

    nn.quantize(reference, class_predicate=choose)
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": "mxfp4", **own}
    folder = save_checkpoint(tmp_path, config, reference)
    _three_ways(folder, reference_logits(reference, IDS))
    for layer in load_decoder(folder).layers:
        assert (len(layer.self_attn.qkv_proj.matrices), len(layer.mlp.gate_up_proj.matrices)) == (3, 1)


@pytest.mark.parametrize("mode", FLOATS)
def test_a_checkpoint_converted_by_mlx_lm(tmp_path: Path, mode: str) -> None:
    from mlx_lm.utils import load_model, quantize_model, save_config

    source = save_checkpoint(tmp_path / "source", llama_config(), reference_model(llama_config()))
    reference, config = quantize_model(*load_model(source), group_size=None, bits=None, mode=mode)
    folder = save_checkpoint(tmp_path / "converted", config, reference)
    save_config(dict(config), folder / "config.json")
    _three_ways(folder, reference_logits(reference, IDS))


def _float64(matrix: QuantizedMatrix) -> np.ndarray:
    """(out, in) from the bits, by the formats' definitions."""
    packed, scales = (np.array(x) for x in (matrix.weight, matrix.scales))
    raw = packed.view(np.uint8)
    if matrix.quantization.bits == 4:
        raw = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)  # the lower half first
        values = E2M1[raw & 7] * np.where(raw & 8, -1.0, 1.0)
    else:
        values = _e4m3(raw)
    scale = _e4m3(scales) if matrix.quantization.mode == "nvfp4" else 2.0 ** (scales.astype(float) - 127)  # E8M0
    return (values.reshape(*scale.shape, -1) * scale[..., None]).reshape(values.shape)


def _e4m3(raw: np.ndarray) -> np.ndarray:
    """One bit of sign, four of exponent, three of mantissa; no infinities."""
    exponent, mantissa = (raw >> 3 & 15).astype(int), (raw & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    return size * np.where(raw & 128, -1.0, 1.0)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("mode", FLOATS)
def test_every_way_to_multiply(monkeypatch: pytest.MonkeyPatch, mode: str, parallel: bool) -> None:
    """Against float64, with a thread for each core and without, dequantized in parts and not."""
    if parallel:
        monkeypatch.setattr(matrix_module, "PARALLEL_ELEMENTS", 1)
        monkeypatch.setattr(matrix_module, "DEQUANTIZED_ELEMENTS", 5 * 256)
    bits, group_size = FLOATS[mode]
    parts = []
    for rows, seed in ((20, 0), (17, 1)):
        weight = mx.random.normal((rows, 256), key=mx.random.key(seed))
        packed, scales = mx.quantize(weight, group_size=group_size, bits=bits, mode=mode)
        parts.append(QuantizedMatrix(packed, scales, None, Quantization(bits, group_size, mode)))
    matrix = quantized_matrix(parts)
    weight = np.concatenate([_float64(part) for part in parts])
    assert np.array_equal(np.array(matrix.rows(mx.arange(37)).astype(mx.float32)), weight)
    for shape in ((1, 256), (3, 256), (9, 256), (2, 3, 256), (256,)):
        x = mx.random.normal(shape, key=mx.random.key(2))
        output = matrix.project(x)
        assert output.dtype == mx.float32
        rows = np.array(x, np.float64)
        assert (np.abs(np.array(output) - rows @ weight.T) <= 1e-6 * (np.abs(rows) @ np.abs(weight.T))).all()


BAD_TENSORS = [
    ("scales", lambda x: x.astype(mx.float32), "scales has dtype F32; expected U8"),
    ("scales", lambda x: x[:, :1], r"scales has shape \(300, 1\); expected \(300, 4\)"),
    ("weight", lambda x: x[:, :5], r"weight has shape \(300, 5\); expected \(300, 16\)"),
    ("biases", lambda x: mx.ones((300, 4)), "unexpected tensor model.embed_tokens.biases"),
]


@pytest.mark.parametrize(("part", "change", "message"), BAD_TENSORS)
def test_bad_tensors(tmp_path: Path, part: str, change: Any, message: str) -> None:
    reference = reference_model(qwen2_config())
    config = quantize_reference(qwen2_config(), reference, 4, 32, "mxfp4")
    folder = save_checkpoint(tmp_path, config, reference)
    weights = {name: mx.array(x) for name, x in mx.load(str(folder / "model.safetensors")).items()}
    mx.eval(weights)
    name = f"model.embed_tokens.{part}"
    weights[name] = change(weights.get(name))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(CheckpointError, match=message):
        load_decoder(folder)


def test_a_format_the_device_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a tensor is read, in a line."""
    reference = reference_model(qwen2_config())
    config = quantize_reference(qwen2_config(), reference, 4, 16, "nvfp4")
    folder = save_checkpoint(tmp_path, config, reference)

    def fail(*_: object, **__: object) -> mx.array:
        raise RuntimeError("[quantized_matmul] no kernel\nfor this device")

    monkeypatch.setattr(mx, "quantized_matmul", fail)
    with pytest.raises(ModelError, match=r"MLX cannot use 4-bit nvfp4 weights in groups of 16 .*no kernel$"):
        load_decoder(folder)
