"""Write tests/data/golden: small random checkpoints and the logits transformers computes from them, in
float32.

Run: python scripts/golden.py (needs the extra ``train`` for torch)

    weights/NAME.safetensors   a model's weights, as transformers wrote them
    CASE/config.json           as transformers writes it, or, where the case says so, as older versions did
    CASE/logits.npy            (tokens, vocab) of one pass over the ids without a cache
    cases.json                 the ids, each case's weights, and the versions that computed all this
    frequencies.json           frequencies and factor of many settings, by transformers' RoPE functions
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "golden"
TOKENS, VOCAB = 24, 32
WINDOW = 5  # the ids run far past it
IDS = [(5 + 17 * i + i * i) % VOCAB for i in range(TOKENS)]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
# Name -> class, settings. Together: tied and untied, head_dim hidden / heads and not, with and without each
# bias, layers that do not rotate, norms in other places.
MODELS: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": False}),
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-bias": (
        transformers.LlamaConfig,
        {
            "head_dim": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-3,
        },
    ),
    "mistral": (
        transformers.MistralConfig,
        {"head_dim": 20, "tie_word_embeddings": False, "sliding_window": None},
    ),
    "smollm3": (
        transformers.SmolLM3Config,
        {"tie_word_embeddings": True, "no_rope_layer_interval": 2, "pad_token_id": None},
    ),
    "olmo2": (transformers.Olmo2Config, {"tie_word_embeddings": False}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        EXPERTS | {"tie_word_embeddings": False, "norm_topk_prob": True},
    ),
    "qwen3-moe-mixed": (
        transformers.Qwen3MoeConfig,
        EXPERTS
        | {
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
}
# written as transformers 5 holds experts, gate and up in one tensor of all of them
JOINED = ("qwen3-moe-mixed",)
# without these
FEW_ROPES = {"llama-bias": ("linear", "llama3"), "qwen3-moe-mixed": ("linear", "llama3", "dynamic")}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.1}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "dynamic": {"factor": 1.5},
}
# of dynamic: times 1.5 it is the number of ids; for that length transformers has kvant's frequencies
ORIGINAL = 16


def main() -> None:
    """Write everything anew."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    (GOLDEN / "weights").mkdir(parents=True)
    weights_of: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        for seed, model in enumerate(MODELS):
            write_weights(model, seed, Path(name))
        for case, (model, config) in cases().items():
            write_case(case, model, config)
            weights_of[case] = model
    by = {"transformers": transformers.__version__, "torch": torch.__version__}
    (GOLDEN / "cases.json").write_text(
        json.dumps({"by": by, "ids": IDS, "weights": weights_of}, indent=1) + "\n"
    )
    write_frequencies()


def cases() -> dict[str, tuple[str, transformers.PreTrainedConfig | dict[str, Any]]]:
    """Name -> weights and a config object, which transformers writes, or the text of an older file."""
    found: dict[str, tuple[str, transformers.PreTrainedConfig | dict[str, Any]]] = {}
    for model in MODELS:
        for kind, settings in ROPES.items():
            if kind in FEW_ROPES.get(model, ()):
                continue
            original = {"max_position_embeddings": ORIGINAL} if kind == "dynamic" else {}
            found[f"{model} {kind}"] = (model, config_of(model, {"rope_type": kind, **settings}, **original))
    yarn = {"rope_type": "yarn", **YARN}
    found["llama yarn attention_factor"] = ("llama", config_of("llama", yarn | {"attention_factor": 1.5}))
    found["llama yarn untruncated"] = ("llama", config_of("llama", yarn | {"truncate": False}))
    found["llama yarn mscale"] = ("llama", config_of("llama", yarn | {"mscale": 2.0, "mscale_all_dim": 0.5}))
    found["llama yarn mscale alone"] = ("llama", config_of("llama", yarn | {"mscale": 2.0}))
    found["qwen2 old"] = ("qwen2", old_config("qwen2", None))
    found["qwen2 old yarn"] = ("qwen2", old_config("qwen2", {"type": "yarn", **YARN}))
    found["llama old llama3"] = ("llama", old_config("llama", {"rope_type": "llama3", **LLAMA3}))
    found["mistral old dynamic"] = (
        "mistral",
        old_config("mistral", {"type": "dynamic", "factor": 3}) | {"max_position_embeddings": 8},
    )
    found["smollm3 old"] = ("smollm3", old_config("smollm3", None))
    found["qwen3-moe old"] = ("qwen3-moe", old_config("qwen3-moe", None))
    found["mistral window"] = ("mistral", config_of("mistral", PLAIN, sliding_window=WINDOW))
    found["qwen2 window"] = (
        "qwen2",
        config_of("qwen2", PLAIN, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    )
    for model in ("smollm3", "qwen3-moe"):
        found[f"{model} window"] = (
            model,
            config_of(model, PLAIN, use_sliding_window=True, sliding_window=WINDOW),
        )
    return found


def config_of(model: str, rope: dict[str, Any], **changes: Any) -> transformers.PreTrainedConfig:
    """The model's config with these rotary positions."""
    kind, settings = MODELS[model]
    return kind(**(SIZES | settings | changes), rope_parameters=PLAIN | rope)


def old_config(model: str, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """The same as transformers 4 wrote it."""
    kind, settings = MODELS[model]
    name = kind.__name__.replace("Config", "ForCausalLM")
    config = (
        SIZES | settings | {"architectures": [name], "model_type": kind.model_type, "torch_dtype": "float32"}
    )
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 300.0}
    return config if scaling is None else config | {"rope_scaling": scaling}


def write_weights(model: str, seed: int, scratch: Path) -> None:
    """Random ones that keep activations at unit scale, with biases and norms that matter."""
    torch.manual_seed(seed)
    network = transformers.AutoModelForCausalLM.from_config(config_of(model, PLAIN), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(noise)
            elif "embed_tokens" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    network.save_pretrained(scratch / model, save_original_format=model not in JOINED)
    shutil.copy(scratch / model / "model.safetensors", GOLDEN / "weights" / f"{model}.safetensors")


def write_case(case: str, model: str, config: transformers.PreTrainedConfig | dict[str, Any]) -> None:
    """The config, and the logits of the model transformers loads with it."""
    folder = GOLDEN / case.replace(" ", "-")
    folder.mkdir()
    if isinstance(config, dict):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    else:
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder)
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(folder / "config.json", name)
        shutil.copy(GOLDEN / "weights" / f"{model}.safetensors", Path(name) / "model.safetensors")
        network, report = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    with torch.no_grad():
        logits = network(torch.tensor([IDS]), use_cache=False).logits[0]
    np.save(folder / "logits.npy", logits.numpy())


def write_frequencies() -> None:
    """Settings of published models, and the edges of each kind."""
    qwen = {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    llama = {"rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama |= {"original_max_position_embeddings": 8192}
    settings: list[
        tuple[dict[str, Any], int, int, int]
    ] = [  # rope_parameters, head_dim, max_position_embeddings, length
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, 64, 2048, 10),
        ({"rope_type": "llama3", **llama, "factor": 8.0}, 128, 131072, 10),
        ({"rope_type": "llama3", **llama, "factor": 32.0}, 64, 131072, 10),
        (
            {"rope_type": "llama3", **llama, "factor": 4, "low_freq_factor": 0.1, "high_freq_factor": 9},
            96,
            9000,
            10,
        ),
        ({"rope_type": "yarn", **qwen}, 128, 131072, 10),
        ({"rope_type": "yarn", **qwen, "truncate": False}, 128, 131072, 10),
        ({"rope_type": "yarn", **qwen, "beta_fast": 16, "beta_slow": 4.0}, 64, 131072, 10),
        ({"rope_type": "yarn", **qwen, "attention_factor": 0.75}, 64, 131072, 10),
        ({"rope_type": "yarn", **qwen, "mscale": 0.7, "mscale_all_dim": 1.2}, 64, 131072, 10),
        ({"rope_type": "yarn", **qwen, "mscale": 0.7}, 64, 131072, 10),
        ({"rope_type": "yarn", **qwen, "mscale": 0.7, "mscale_all_dim": 0}, 64, 131072, 10),
        ({"rope_type": "yarn", **qwen, "factor": 1.0}, 64, 32768, 10),
        # without its original context
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, 64, 4096, 10),
        # a ramp of no length
        ({"rope_type": "yarn", **qwen, "original_max_position_embeddings": 3}, 64, 12, 10),
        ({"rope_type": "yarn", **qwen, "rope_theta": 10.0}, 16, 131072, 10),  # one that ends before it starts
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0}, 64, 2048, 2048),  # at the context limit
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 64, 2048, 4096),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.7}, 128, 1999, 5397),
        ({"rope_type": "dynamic", "rope_theta": 5e5, "factor": 8.0}, 4, 2048, 16384),
    ]
    found = []
    for rope, head_dim, context, length in settings:
        raw = SIZES | {
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rope_parameters": dict(rope),
        }
        config = transformers.LlamaConfig(**raw | {"rope_parameters": dict(rope)})
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=length)
        raw |= {"model_type": "llama"}
        found.append({"config": raw, "length": length, "frequencies": frequencies.tolist(), "factor": factor})
    text = ",\n".join(json.dumps(entry) for entry in found)
    (GOLDEN / "frequencies.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
