"""Random checkpoints on disk, and mlx-lm's own model on the same files, to compare kvant with."""

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING

from kvant.models import Decoder, ModelConfig
from support.numbers import relative_error

TOLERANCE = 1e-4  # of the largest logit
ROPE_THETA = 1e6


Make = Callable[..., dict[str, Any]]


def qwen2_config(**changes: Any) -> dict[str, Any]:
    """A small config.json as transformers 4 wrote it."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 300}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    others = {"tie_word_embeddings": True, "hidden_act": "silu", "eos_token_id": 0, "rms_norm_eps": 1e-6}
    rows = {"rope_theta": ROPE_THETA, "use_sliding_window": False, "sliding_window": 16}
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **sizes,
        **heads,
        **others,
        **rows,
        **changes,
    }


def _like(base: Make, architecture: str, model_type: str, heads: int, kv_heads: int, **own: Any) -> Make:
    named = {"architectures": [architecture], "model_type": model_type}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return lambda **changes: base(**named, **counts, **own) | changes


# A head_dim that is not hidden / heads, no bias; a Llama with every bias; a Mistral without a bias or a
# window; a second layer that does not rotate; a first layer that is dense.
qwen3_config = _like(qwen2_config, "Qwen3ForCausalLM", "qwen3", 6, 3, head_dim=32, attention_bias=False)
llama_config = _like(
    qwen2_config, "LlamaForCausalLM", "llama", 4, 2, head_dim=64, attention_bias=True, mlp_bias=True
)
mistral_config = _like(
    llama_config,
    "MistralForCausalLM",
    "mistral",
    4,
    2,
    sliding_window=None,
    attention_bias=False,
    mlp_bias=False,
)
smollm3_config = _like(qwen2_config, "SmolLM3ForCausalLM", "smollm3", 4, 2, no_rope_layers=[1, 0])
olmo2_config = _like(qwen2_config, "Olmo2ForCausalLM", "olmo2", 4, 2, tie_word_embeddings=False)
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
_SPARSE = {"tie_word_embeddings": False, "mlp_only_layers": [0], "decoder_sparse_step": 1}
qwen3_moe_config = _like(qwen3_config, "Qwen3MoeForCausalLM", "qwen3_moe", 4, 2, **_EXPERTS, **_SPARSE)

# One of each architecture, every width a multiple of 128 as groups of weights need. The tests of any
# architecture take these.
CONFIGS = {
    "qwen2": qwen2_config(),
    "qwen3": qwen3_config(num_attention_heads=4, num_key_value_heads=2),
    "llama": llama_config(tie_word_embeddings=False),
    "mistral": mistral_config(),
    "smollm3": smollm3_config(),
    "olmo2": olmo2_config(),
    "qwen3_moe": qwen3_moe_config(),
}


def mlx_lm_module(kind: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")


def mlx_lm_model(config: dict[str, Any]) -> nn.Module:
    """mlx-lm's model, with weights as it makes them. What its qwen3_moe asks for and does not find is
    given to it.
    """
    kind = config["model_type"]
    if kind == "qwen3_moe":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        count = config.get("num_experts", config.get("num_local_experts"))
        given = {"mlp_only_layers": [], "decoder_sparse_step": 1, "head_dim": head_dim}
        config = given | config | {"num_experts": count}
    module = mlx_lm_module(kind)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    return model


def reference_model(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """mlx-lm's model with random float32 weights of unit-scale activations, and biases and norms that
    matter.
    """
    model = mlx_lm_model(config)
    mx.random.seed(seed)
    weights = []
    for name, array in tree_flatten(model.parameters()):
        size = 1.0 if name.endswith(".bias") else 0.5 if "embed_tokens" in name else array.shape[-1] ** -0.5
        noise = mx.random.normal(array.shape)
        weights.append((name, 1 + 0.2 * noise if name.endswith("norm.weight") else noise * size))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def save_checkpoint(
    folder: Path, config: dict[str, Any], model: nn.Module | dict[str, mx.array], shards: int = 1
) -> Path:
    """Write config.json and safetensors, in shards with an index where more than one is asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters())) if isinstance(model, nn.Module) else model
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return folder
    files = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
        for i, name in enumerate(sorted(weights))
    }
    for file in set(files.values()):
        mx.save_safetensors(
            str(folder / file), {name: weights[name] for name in weights if files[name] == file}
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def change_tensors(path: Path, changes: Mapping[str, mx.array | None]) -> None:
    """Rewrite a safetensors file with other tensors; None takes one away."""
    weights = {name: mx.array(x) for name, x in mx.load(str(path)).items()}
    mx.eval(weights)  # before their file is written
    mx.save_safetensors(str(path), {name: x for name, x in (weights | {**changes}).items() if x is not None})


class _Float32Embedding(nn.QuantizedEmbedding):
    """MLX unpacks its floating-point formats to bfloat16, exactly.

    A norm makes float32 of it, but OLMo 2 multiplies it before: rounded, so that nothing could be compared.
    """

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x).astype(mx.float32)


def format_of(bits: int, group_size: int, mode: str = "affine") -> dict[str, Any]:
    """As mlx-lm's converter writes it."""
    return {"group_size": group_size, "bits": bits} | ({} if mode == "affine" else {"mode": mode})


def quantize_reference(
    config: dict[str, Any],
    model: nn.Module,
    bits: int,
    group_size: int,
    mode: str = "affine",
    own: Mapping[str, Any] | None = None,
    others: bool = True,
) -> dict[str, Any]:
    """Quantize mlx-lm's model in place as mlx-lm does; return the config that says so.

    own: by the ends of names, another format or False. others: whether what is not named is quantized.
    """
    said: dict[str, Any] = format_of(bits, group_size, mode)

    def choose(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        for end, chosen in (own or {}).items():
            if path.endswith(end):
                said[path] = chosen
                return dict(chosen) if chosen else False
        return others

    nn.quantize(model, group_size=group_size, bits=bits, mode=mode, class_predicate=choose)
    if isinstance(model.model.embed_tokens, nn.QuantizedEmbedding):
        model.model.embed_tokens.__class__ = _Float32Embedding
    mx.eval(model.parameters())
    return config | {"quantization": said}


def write_reference(folder: Path, config: dict[str, Any], *quantized: Any) -> tuple[Path, nn.Module]:
    """mlx-lm's random model on disk; quantized if arguments of :func:`quantize_reference` are given."""
    reference = reference_model(config)
    if quantized:
        config = quantize_reference(config, reference, *quantized)
    return save_checkpoint(folder, config, reference), reference


def stored_by_transformers(weights: dict[str, mx.array], way: str) -> dict[str, mx.array]:
    """The stacked tensors of mlx-lm as transformers writes them, each by itself or joined."""
    found = {}
    for name, array in weights.items():
        prefix, is_experts, rest = name.partition("switch_mlp.")
        projection = rest.removesuffix(".weight")
        if not is_experts:
            found[name] = array
        elif way == "each":
            found |= {f"{prefix}experts.{e}.{rest}": array[e] for e in range(array.shape[0])}
        elif projection == "down_proj":
            found[f"{prefix}experts.down_proj"] = array
        elif projection == "gate_proj":
            up = weights[name.replace("gate_proj", "up_proj")]
            found[f"{prefix}experts.gate_up_proj"] = mx.concatenate([array, up], axis=1)
    return found


def load_reference(folder: Path) -> nn.Module:
    """mlx-lm's model of a float checkpoint, in float32, given rotary positions and joined experts as it reads
    them.

    mlx-lm 0.32.2 reads transformers 5's rope_parameters in qwen3 alone; a Mistral's window it does not look
    at.
    """
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    config["rope_theta"] = (rope if "rope_theta" in rope else config)["rope_theta"]
    config["rope_scaling"] = rope or None
    model = mlx_lm_model(config)
    weights = {name: x.astype(mx.float32) for name, x in mx.load(str(folder / "model.safetensors")).items()}
    for name in [name for name in weights if ".mlp.experts." in name and not name.endswith(".weight")]:
        whole, prefix = weights.pop(name), name.replace("experts", "switch_mlp").removesuffix("gate_up_proj")
        if name.endswith("gate_up_proj"):
            gate, up = mx.split(whole, 2, axis=1)
            weights |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        else:
            weights[f"{prefix}.weight"] = whole
    model.load_weights(list(model.sanitize(weights).items()))
    mx.eval(model.parameters())
    return model


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Each tensor's name and shape in kvant's table, if nothing is quantized; of the head even if it is
    tied.
    """
    shapes = {}
    for path, _, row in config.parameters():
        shapes[f"{path}.weight"] = config.shape(row)
        if row.bias in config.biases:
            shapes[f"{path}.bias"] = config.shape(row)[:1]
    return shapes


def reference_logits(model: nn.Module, ids: list[int]) -> mx.array:
    """(S, vocab) logits of mlx-lm's model with its own cache."""
    return model(mx.array([ids]), cache=make_prompt_cache(model))[0]


def in_steps(model: Decoder, ids: Sequence[int], bounds: Iterable[int], cache: Any) -> mx.array:
    """(S, vocab) logits of steps that end at these bounds."""
    return mx.concatenate([model(mx.array([ids[a:b]]), cache=cache)[0] for a, b in pairwise(bounds)])


def check_three_ways(model: Decoder, expected: mx.array, ids: Sequence[int], **options: Any) -> None:
    """In one pass, in uneven chunks and token by token, through a cache without quantization: (S, vocab)
    logits.
    """
    assert relative_error(model(mx.array([ids]))[0], expected) < TOLERANCE
    for bounds in ([0, 7, 9, len(ids) - 1, len(ids)], range(len(ids) + 1)):
        cache = model.make_cache(len(ids), kv_bits=0, **options)
        assert relative_error(in_steps(model, ids, bounds, cache), expected) < TOLERANCE
