"""The config.json of the models of weights.toml, which has only the keys that decide their memory.

What is added here is right if the file, written again, has the digest that weights.toml pins.
"""

import json
from typing import Any

from kvant.weights import known_models

COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
QWEN = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
BY_TYPE: dict[str, dict[str, Any]] = {
    "qwen2": {
        **COMMON,
        **QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "transformers_version": "4.43.1",
    },
    "qwen3": {
        **COMMON,
        **QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "max_window_layers": 28,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "transformers_version": "4.51.0",
    },
    "llama": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": LLAMA3_ROPE,
        "rope_theta": 500000.0,
        "transformers_version": "4.45.0.dev0",
    },
    "mistral": {
        **COMMON,
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "transformers_version": "4.42.0.dev0",
    },
}
BY_NAME: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {"max_window_layers": 28, "sliding_window": 131072},
    "qwen3-4b-4bit": {"max_window_layers": 36},
    "qwen3-8b-4bit": {"max_window_layers": 36},
    "llama3.1-8b-4bit": {
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "transformers_version": "4.42.3",
    },
    # The one whose config.json is not written again: only what decides the result.
    "smollm2-135m": {"rope_scaling": None, "rope_theta": 100000.0},
}
WITHOUT_HEAD_DIM = ("qwen2", "mistral")  # they leave it to hidden_size / num_attention_heads


def pinned_facts(name: str) -> dict[str, Any]:
    """Return the keys and values of a model's config.json, and its head_dim."""
    known = known_models()[name].config
    return {**known, **BY_TYPE[known["model_type"]], **BY_NAME.get(name, {})}


def written_config(name: str) -> str:
    """Return the text of a model's config.json."""
    facts = pinned_facts(name)
    kind = facts["model_type"]
    quantization = facts.pop("quantization", None)
    if kind in WITHOUT_HEAD_DIM or name == "llama3.1-8b-4bit":
        head_dim = facts.pop("head_dim")
        assert head_dim * facts["num_attention_heads"] == facts["hidden_size"]
    if quantization:
        facts["quantization"] = quantization
        if kind in ("qwen3", "llama"):  # a later mlx-lm wrote it twice
            facts["quantization_config"] = quantization
    written = json.dumps(dict(sorted(facts.items())), indent=4 if quantization else 2)
    return written + ("\n" if kind in WITHOUT_HEAD_DIM and not quantization else "")
