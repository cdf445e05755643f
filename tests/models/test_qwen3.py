"""Qwen3 folders that cannot be loaded. Its logits: test_golden.py and test_formats.py."""

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import qwen3_config, reference_model, save_checkpoint

from kvant.errors import ModelError
from kvant.models import load_decoder

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
