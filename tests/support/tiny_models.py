"""Tiny models of mlx-lm's architectures, with random weights.

architectures.json holds one configuration a module of mlx_lm.models, as config.json would have it without its
``model_type``. Every kind of layer of an architecture occurs. Windows and chunks are 8 tokens: a short text
runs past them. Widths of cached rows are multiples of 32, the size of quantization groups. phi3small alone
has a large
vocabulary: its model writes to the logits of fixed tokens up to number 100,351.

Which fields an architecture needs follows tests/test_models.py of ml-explore/mlx-lm (MIT, commit d78bf58)
where it has the architecture, and the fields of its ``ModelArgs`` otherwise.
"""

import json
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map_with_path

from kvant.tools.bench.shapes import Shape

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("architectures.json").read_text("utf-8")
)
# Changes after which the fused kernel takes an architecture, two query heads to a kv head, and the bits to
# try. Windows are of 8; gpt-oss and MiMo have sinks, Gemma a scale that is not 1 / sqrt(D). Two of Gemma 4's
# layers read what others keep. MiMo's values are narrower than its keys.
SERVED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "gpt_oss": ({"head_dim": 64}, (0, 8)),
    "gemma3_text": ({"head_dim": 64, "num_key_value_heads": 2}, (0,)),
    "gemma4_text": ({"head_dim": 64, "global_head_dim": 512}, (0,)),
    "mimo_v2_flash": (
        {"head_dim": 192, "v_head_dim": 128, "swa_head_dim": 192, "swa_v_head_dim": 128},
        (0, 4),
    ),
}
EMBEDDING_GAIN, MATRIX_GAIN, VECTOR_NOISE = 0.3, 1.7, 0.1


def build(name: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model of one architecture and its configuration, with some changes, the same at every call.

    Weights are float32 and evaluated. They are mlx-lm's own random ones, with larger matrices and smaller
    embeddings: the context decides the next token, not the last token alone. Where mlx-lm starts with one
        number everywhere (norms,
    biases, sinks), noise is added.
    """
    # some ModelArgs change what they are given
    config = {"model_type": name, **deepcopy(CONFIGS[name]), **changes}
    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(deepcopy(config)))
    model.update(tree_map_with_path(_weights, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model, config


def _weights(path: str, given: mx.array) -> mx.array:
    if not mx.issubdtype(given.dtype, mx.floating):
        return given
    given = given.astype(mx.float32)
    if given.size and (given.min() == given.max()).item():
        noise = VECTOR_NOISE * mx.random.normal(given.shape)
        return noise if given.ndim > 1 else given + noise
    if given.ndim < 2:
        return given
    return given * (EMBEDDING_GAIN if "emb" in path or "wte" in path else MATRIX_GAIN)


def shape(kind: str, *sizes: Any) -> Shape:
    """Hidden, layers, heads, kv heads, head, inner, vocab, tied. A Qwen2 has one large pair of key biases
    a layer.
    """
    return Shape("test", kind, *sizes, max_position_embeddings=4096, large_key_bias=kind == "qwen2")
