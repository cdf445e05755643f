"""Qwen3 against mlx-lm's qwen3 on the same weights, in float32, and Qwen3 folders that cannot be loaded."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.checkpoints import quantize_reference, qwen3_config, reference_logits, reference_model, save_checkpoint
from support.numbers import relative_error

from kvant.errors import CheckpointError, ModelError
from kvant.models import ModelConfig, load_decoder

TOLERANCE = 1e-4  # of the largest logit
IDS = [(7 + 31 * i) % 300 for i in range(40)]
NORM = "model.layers.0.self_attn.q_norm.weight"


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize(
    "changes", [{}, {"head_dim": 64, "num_key_value_heads": 2}, {"tie_word_embeddings": False}], ids=str
)
def test_three_ways(tmp_path: Path, bits: int, changes: dict[str, Any]) -> None:
    """Without a cache, in chunks of uneven length, and token by token through a cache without quantization."""
    config = qwen3_config(**changes)
    reference = reference_model(config)
    if bits:
        config = quantize_reference(config, reference, bits, 64)
    expected = reference_logits(reference, IDS)
    model = load_decoder(save_checkpoint(tmp_path, config, reference))
    assert relative_error(model(mx.array([IDS]))[0], expected) < TOLERANCE
    for bounds in ([0, 7, 20, 21, len(IDS)], list(range(len(IDS) + 1))):
        cache = model.make_cache(len(IDS), kv_bits=0)
        parts = [model(mx.array([IDS[a:b]]), cache=cache)[0] for a, b in pairwise(bounds)]
        assert relative_error(mx.concatenate(parts), expected) < TOLERANCE


@pytest.mark.parametrize(("bits", "group", "largest"), [(8, 32, 0.02), (8, 8, 0.01), (4, 32, 0.3), (4, 16, 0.2)])
def test_a_quantized_cache_stays_near(tmp_path: Path, bits: int, group: int, largest: float) -> None:
    config = qwen3_config()
    reference = reference_model(config)
    model = load_decoder(save_checkpoint(tmp_path, config, reference))
    cache = model.make_cache(len(IDS), kv_bits=bits, kv_group_size=group)
    logits = [model(mx.array([part]), cache=cache)[0] for part in (IDS[:20], *([i] for i in IDS[20:]))]
    assert 0 < relative_error(mx.concatenate(logits), reference_logits(reference, IDS)) < largest


@pytest.mark.parametrize("bias_split", [True, False])
def test_without_a_bias_there_is_nothing_to_split(tmp_path: Path, bias_split: bool) -> None:
    config = qwen3_config()
    model = load_decoder(save_checkpoint(tmp_path, config, reference_model(config)))
    cache = model.make_cache(64, bias_split=bias_split)
    assert [layer.bias_split for layer in cache] == [None, None]
    assert [layer.self_attn.qkv_bias for layer in model.layers] == [None, None]


def test_a_config_as_transformers_writes_it(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    raw = qwen3_config(rope_theta=1e4)
    reference = reference_model(raw)
    folder = save_checkpoint(tmp_path, raw, reference)
    same = {k: v for k, v in raw.items() if k not in ("rope_theta", "use_sliding_window", "sliding_window")}
    Qwen3Config(**same, rope_parameters={"rope_type": "default", "rope_theta": 1e4}).save_pretrained(folder)
    expected = reference_logits(reference, IDS)
    assert relative_error(load_decoder(folder)(mx.array([IDS]))[0], expected) < TOLERANCE


BAD_CONFIGS = [
    ({"head_dim": None}, "head_dim is missing"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"head_dim": -32}, "head_dim is -32"),
    ({"head_dim": 33}, "head_dim is 33; rotary positions need an even one"),
    ({"head_dim": 10**12}, "head_dim is 1000000000000"),
    ({"head_dim": 2**24}, r"shape \(192, 128\); expected \(100663296, 128\)"),
    ({"head_dim": 64}, r"q_proj.weight has shape \(192, 128\); expected \(384, 128\)"),
    ({"attention_bias": True}, "attention_bias is true; supported for qwen3: false"),
    ({"attention_bias": "no"}, "attention_bias is 'no'"),
    ({"model_type": "qwen2"}, "architecture Qwen3ForCausalLM with model_type 'qwen2'; expected 'qwen3'"),
    ({"architectures": ["Qwen2ForCausalLM"]}, "architecture Qwen2ForCausalLM with model_type 'qwen3'"),
    ({"architectures": None, "model_type": "qwen2"}, "unexpected tensor model.layers.0.self_attn.k_norm.weight"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_bad_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = save_checkpoint(tmp_path, qwen3_config() | changes, reference_model(qwen3_config()))
    with pytest.raises(ModelError, match=message) as caught:
        load_decoder(folder)
    assert "\n" not in str(caught.value)


BAD_TENSORS = [
    (lambda w: w.pop(NORM), f"tensor {NORM} is missing"),
    (lambda w: w.pop(NORM.replace("q_", "k_")), r"k_norm.weight is missing"),
    (lambda w: w.update({NORM: mx.ones(64)}), r"q_norm.weight has shape \(64,\); expected \(32,\)"),
    (lambda w: w.update({NORM: mx.ones((6, 32))}), r"q_norm.weight has shape \(6, 32\); expected \(32,\)"),
    (lambda w: w.update({NORM: mx.ones(32, mx.int32)}), "q_norm.weight has dtype I32; expected F32"),
    (lambda w: w.update({NORM.replace("q_norm", "v_norm"): mx.ones(32)}), "unexpected tensor .*v_norm"),
    (lambda w: w.update({NORM.replace("q_norm.weight", "q_proj.bias"): mx.ones(192)}), "unexpected tensor .*q_proj.b"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS)
def test_bad_tensors(tmp_path: Path, change: Callable[[dict[str, mx.array]], object], message: str) -> None:
    folder = save_checkpoint(tmp_path, qwen3_config(), reference_model(qwen3_config()))
    weights = {name: mx.array(x) for name, x in mx.load(str(folder / "model.safetensors")).items()}
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_decoder(folder)
    assert "\n" not in str(caught.value)


def test_qwen2_has_a_bias_and_no_norm() -> None:
    raw = qwen3_config(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    qwen2, qwen3 = ModelConfig.from_dict(raw), ModelConfig.from_dict(qwen3_config())
    assert (qwen2.attention_bias, qwen2.query_key_norm) == (True, False)
    assert (qwen3.attention_bias, qwen3.query_key_norm) == (False, True)
