"""Weights of every format and shapes of every kind against mlx-lm's model on the same files."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from support.checkpoints import (
    CONFIGS,
    check_three_ways,
    format_of,
    load_reference,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    reference_logits,
    reference_model,
    save_checkpoint,
    smollm3_config,
    write_reference,
)
from support.counts import count
from support.hostile import one_line

from kvant.errors import ModelError
from kvant.models import Quantization, load_decoder

IDS = [(7 + 31 * i) % 300 for i in range(33)]  # of two experts each, enough to be sorted
FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
FORMATS = [
    ("affine", 4, 64),
    ("affine", 3, 32),
    ("affine", 8, 128),
    *((mode, *FLOATS[mode]) for mode in FLOATS),
]
FLOAT16 = [mx.float16, mx.bfloat16]
OTHERS = [(4, 32), (4, 128), (8, 32), (8, 64), (2, 64), (5, 64), (6, 64)]
SHAPES: dict[str, dict[str, Any]] = {
    "ratio 2": qwen2_config(hidden_size=256, num_attention_heads=4),
    "ratio 7": qwen2_config(hidden_size=448, num_attention_heads=7, num_key_value_heads=1),
    "head_dim 128": qwen2_config(hidden_size=256, num_attention_heads=2, num_key_value_heads=1),
    "untied": qwen2_config(tie_word_embeddings=False, num_hidden_layers=3),
    "other constants": qwen2_config(rope_theta=10000.0, rms_norm_eps=1e-5, intermediate_size=288),
    "heads wider than the model": qwen3_config(head_dim=64, num_key_value_heads=2),
    "first layer does not rotate": smollm3_config(no_rope_layers=[0, 1]),
    "every second layer rotates": smollm3_config(no_rope_layers=None, no_rope_layer_interval=2),
    "no layer rotates": smollm3_config(no_rope_layers=None, no_rope_layer_interval=1),
    "experts in each layer": qwen3_moe_config(mlp_only_layers=[]),
    "but the second": qwen3_moe_config(mlp_only_layers=[1], norm_topk_prob=False),
    "every second layer": qwen3_moe_config(mlp_only_layers=[], decoder_sparse_step=2, num_hidden_layers=3),
    "experts in none": qwen3_moe_config(mlp_only_layers=[0, 1]),
    "all experts": qwen3_moe_config(num_experts=3, num_experts_per_tok=3, norm_topk_prob=False),
}
EVERY = CONFIGS | SHAPES
# Each in every third format, and in all of them in the long run.
EVERY_THIRD = [
    (name, *made)
    for i, (name, config) in enumerate(EVERY.items())
    for j, made in enumerate(FORMATS)
    if count((i + j) % 3 == 0, True) and (config["hidden_size"] | config["intermediate_size"]) % made[2] == 0
]
HALVES = [(name, dtype) for i, name in enumerate(CONFIGS) for dtype in count(FLOAT16[i % 2 :][:1], FLOAT16)]


@pytest.mark.parametrize(
    ("name", "mode", "bits", "group_size"), [*EVERY_THIRD, *(("qwen2", "affine", *each) for each in OTHERS)]
)
def test_quantized_weights(tmp_path: Path, name: str, mode: str, bits: int, group_size: int) -> None:
    folder, reference = write_reference(tmp_path, EVERY[name], bits, group_size, mode)
    model = load_decoder(folder)
    check_three_ways(model, reference_logits(reference, IDS), IDS)
    assert {len(layer.self_attn.qkv_proj.matrices) for layer in model.layers} == {1}  # fused
    quantized = model.layers[0].mlp.gate_up_proj.matrices[0]
    assert quantized.quantization == Quantization(bits, group_size, mode)
    assert (quantized.biases is None) == (mode != "affine")


@pytest.mark.parametrize(("name", "dtype"), [*((name, mx.float32) for name in EVERY), *HALVES], ids=str)
def test_float_weights(tmp_path: Path, name: str, dtype: mx.Dtype) -> None:
    """On a CPU both engines compute in float32 with them."""
    reference = reference_model(EVERY[name])
    reference.set_dtype(dtype)
    folder = save_checkpoint(tmp_path, EVERY[name], reference)
    check_three_ways(load_decoder(folder), load_reference(folder)(mx.array([IDS]))[0], IDS)


OF_LLAMA = {"v_proj": format_of(8, 32, "mxfp8"), "o_proj": False}
OF_LLAMA |= dict.fromkeys(("gate_proj", "up_proj"), format_of(4, 16, "nvfp4"))
# The router as mlx-lm's converter quantizes it, gate and up that do not agree, down in floating point.
OF_EXPERTS = {
    "mlp.gate": format_of(8, 64),
    "switch_mlp.gate_proj": format_of(4, 64),
    "switch_mlp.up_proj": format_of(6, 32),
}
# A config, formats as of quantize_reference; how many matrices q, k, v and gate, up are.
MIXED: list[tuple[str, tuple[Any, ...], int, int]] = [
    (
        "qwen2",
        (4, 64, "affine", dict.fromkeys(("v_proj", "up_proj"), format_of(8, 32)) | {"down_proj": False}),
        3,
        2,
    ),
    ("llama", (4, 32, "mxfp4", OF_LLAMA), 3, 1),
    ("experts in each layer", (4, 64, "affine", OF_EXPERTS, False), 1, 2),
]


@pytest.mark.parametrize(("name", "formats", "attention", "mlp"), MIXED)
def test_formats_mixed_by_projection(
    tmp_path: Path, name: str, formats: tuple[Any, ...], attention: int, mlp: int
) -> None:
    """What has one format is fused, what has several is not."""
    folder, reference = write_reference(tmp_path, EVERY[name], *formats)
    model = load_decoder(folder)
    check_three_ways(model, reference_logits(reference, IDS), IDS)
    for layer in model.layers:
        assert (len(layer.self_attn.qkv_proj.matrices), len(layer.mlp.gate_up_proj.matrices)) == (
            attention,
            mlp,
        )


def test_a_format_the_device_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a tensor is read."""
    folder, _ = write_reference(tmp_path, qwen2_config(), 4, 16, "nvfp4")
    failing = Mock(side_effect=RuntimeError("[quantized_matmul] no kernel\nfor this device"))
    monkeypatch.setattr(mx, "quantized_matmul", failing)
    with one_line(ModelError, r"4-bit nvfp4 weights in groups of 16 .*no kernel$"):
        load_decoder(folder)
