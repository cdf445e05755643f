"""The architectures of mlx-lm that kvant loads, by name.

Other names are refused, so that a new mlx-lm does not add architectures that were never tested.
tests/bridge/test_allow_list.py compares the names and the remapping with the installed mlx-lm;
docs/data/architectures.md has the measurements.
"""

from collections.abc import Mapping
from typing import Any

from kvant.errors import ModelError

# Modules of mlx_lm.models: the model_type of config.json unless REMAPPED has an entry for it.
_NAMES = """
    afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 bitnet cohere
    cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone exaone4
    exaone_moe falcon_h1 gear gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid
    helium hunyuan hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear
    kimi_vl Klear laguna lfm2 lfm2-vl lfm2_moe lille-130m llama llama4 llama4_text longcat_flash
    longcat_flash_ngram
    mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax minimax_m3_vl ministral3 mistral3 mistral4
    mixtral muse_glimmer muse_spark nanbeige nanochat nemotron nemotron-nas nemotron_h olmo2 olmo3 olmo_hybrid
    olmoe openelm phi phi3 phi3small phimoe phixtral pixtral plamo plamo2 plamo3 prism_hadamard_qwen35 qwen
    qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
    recurrent_gemma rwkv7 seed_oss smollm3 solar_open spark2_5 stablelm starcoder2 step3p5 talkie telechat3
    youtu_llm
"""
ALLOWED = frozenset(_NAMES.split())

REFUSED = {
    "deepseek_v41": "its layers keep their rows in a cache of mlx-lm's own, which grows with the text",
    "olmo": "mlx-lm's module ends the whole process where the package ai2-olmo is missing",
}

# Their layers exist only as Metal kernels.
NEEDS_METAL = frozenset({"bitnet", "muse_spark"})

# Modules that cannot step several sequences at once, although short texts may come out right.
ONE_AT_A_TIME = {
    "minimax_m3_vl": "selects blocks of keys by their place among padded rows",
    **dict.fromkeys(NEEDS_METAL, "needs Metal, where no step of several sequences was tried"),
}

# Copies of mlx_lm.utils.MODEL_REMAPPING and MODEL_ARCHITECTURE_REMAPPING (0.32.2), because an entry in a new
# version must not allow more, and because listing the architectures must not import mlx-lm.
REMAPPED = {
    "deepseek_v41_text": "deepseek_v41",
    "falcon_mamba": "mamba",
    "gemma4_unified": "gemma4",
    "iquestcoder": "llama",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "llava": "mistral3",
    "minimax_m2": "minimax",
    "mistral": "llama",
    "phi-msft": "phixtral",
    "qwen2_5_vl": "qwen2_vl",
    "xverse": "llama",
}
REMAPPED_BY_CLASS = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}


def module_name(config: Mapping[str, Any]) -> str:
    """Return the name, in ``ALLOWED``, of the module that mlx-lm would use for a config.json."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"config.json: model_type is {model_type!r}; expected the name of an architecture")
    classes = config.get("architectures") or ()
    classes = classes if isinstance(classes, list) else [classes]
    by_class = (REMAPPED_BY_CLASS.get((model_type, each)) for each in classes if isinstance(each, str))
    name = next(filter(None, by_class), REMAPPED.get(model_type, model_type))
    if name in REFUSED:
        raise ModelError(f"config.json: architecture {model_type} is not supported: {REFUSED[name]}")
    if name not in ALLOWED:
        raise ModelError(
            f"config.json: architecture {model_type} is not supported; "
            "`kvant models --architectures` names those that are"
        )
    return name
