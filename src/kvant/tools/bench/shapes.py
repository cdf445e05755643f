"""Write models of known shapes with random weights to disk: real sizes without a download."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.errors import KvantError, one_line
from kvant.models.architectures import ARCHITECTURES
from kvant.models.config import ModelConfig
from kvant.sizes import format_bytes

DISK_RESERVE_BYTES = 1024 * 1024  # for headers, config.json and the index
# Qwen2's key biases are far larger than its keys without them. A bias of this many times their spread makes
# the bias split store one rotary pair per layer outside the cache, as in a real checkpoint. Without it the
# split would cost nothing here.
LARGE_KEY_BIAS = 30.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, named as in config.json. Its other settings are defaults.

    A model with experts has them in every layer, and the weights of a token's experts add up to 1.
    """

    name: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int = 32768
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    large_key_bias: bool = False
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None


# From the config.json of Qwen/Qwen2.5-{0.5B,1.5B,7B}-Instruct and Qwen/Qwen3-0.6B, and of the embedded model,
# here with a longer context so that long prompts can be measured.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen2.5-0.5b", "qwen2", 896, 24, 14, 2, 64, 4864, 151936, True, large_key_bias=True),
        Shape("qwen2.5-1.5b", "qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True, large_key_bias=True),
        Shape("qwen2.5-7b", "qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False, large_key_bias=True),
        Shape("qwen3-0.6b", "qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True, max_position_embeddings=40960),
        # none of the model's real key biases is large
        Shape("pocket", "qwen2", 256, 4, 4, 2, 64, 640, 1280, True),
    )
}


@contextmanager
def random_model(shape: Shape, *, bits: int, group_size: int = 64, seed: int = 0) -> Iterator[Path]:
    """Write a random model to a temporary folder with :func:`write_random`; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="kvant-", ignore_cleanup_errors=True) as name:
        write_random(shape, Path(name), bits=bits, group_size=group_size, seed=seed)
        yield Path(name)


def write_random(shape: Shape, folder: Path, *, bits: int, group_size: int = 64, seed: int = 0) -> None:
    """Write config.json and one safetensors file per layer, readable by kvant and mlx-lm, with no tokenizer.

    Weights preserve the scale of activations: a matrix has mean 0 and variance 1 / inputs. Quantized weights,
    4 or 8 bits, are random bits with one scale and bias for all groups; with 0 bits, weights are bfloat16.
    The same seed writes the same bytes.
    """
    size = shape_bytes(shape, bits, group_size)
    needed = size + DISK_RESERVE_BYTES
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise KvantError(
            f"{folder}: {shape.name} needs {format_bytes(needed)} of disk; {format_bytes(free)} are free"
        )
    shards = _shards(shape)
    keys = _keys(seed)
    weight_map: dict[str, str] = {}
    try:
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = _tensors(shard, shape, bits, group_size, keys)
            mx.save_safetensors(str(folder / file), tensors, metadata={"format": "mlx"})
            weight_map |= dict.fromkeys(tensors, file)
            del tensors  # free them before the next shard is drawn
            mx.clear_cache()
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (folder / "config.json").write_text(json.dumps(_config(shape, bits, group_size), indent=1))
    except (OSError, RuntimeError) as error:  # MLX raises RuntimeError when a disk is full
        raise KvantError(f"{folder}: {shape.name} cannot be written: {one_line(error)}") from error


def shape_bytes(shape: Shape, bits: int, group_size: int = 64) -> int:
    """Return the size of :func:`write_random`'s tensors; raise a ValueError if it cannot quantize so."""
    if bits not in (0, 4, 8):
        raise ValueError(f"bits is {bits!r}; expected 0, 4 or 8")
    shards = _shards(shape)
    widths = {dims[-1] for shard in shards for dims in shard.values() if len(dims) > 1}
    if bits and (group_size not in (32, 64, 128) or any(width % group_size for width in widths)):
        raise ValueError(
            f"group_size is {group_size!r}; expected 32, 64 or 128, a divisor of {sorted(widths)}"
        )
    # The arrays are lazy, so nothing is computed.
    keys = _keys(0)
    return sum(x.nbytes for shard in shards for x in _tensors(shard, shape, bits, group_size, keys).values())


def _shards(shape: Shape) -> list[dict[str, tuple[int, ...]]]:
    """Return the contents of each file: a matrix's path -> (out, in), then a vector's name -> (size,)."""
    config = ModelConfig.from_dict(_config(shape, 0, 0))
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(shape.num_hidden_layers + 2)]
    for path, layer, row in config.parameters():
        if row.role == "head" and shape.tie_word_embeddings:
            continue
        number = layer + 1 if layer is not None else 0 if row.role == "embedding" else -1
        sizes = config.shape(row)
        shards[number][path if len(sizes) > 1 else f"{path}.weight"] = sizes
        if len(sizes) > 1 and row.bias in config.biases:
            shards[number][f"{path}.bias"] = sizes[:1]
    return [dict(sorted(shard.items(), key=lambda item: len(item[1]) == 1)) for shard in shards]


def _config(shape: Shape, bits: int, group_size: int) -> dict[str, Any]:
    config = asdict(shape) | {"architectures": [ARCHITECTURES[shape.model_type].name]}
    config |= {"hidden_act": "silu", "torch_dtype": "bfloat16"}
    del config["name"], config["large_key_bias"]  # not part of config.json
    config = {key: value for key, value in config.items() if value is not None}
    if shape.num_experts is not None:  # mlx-lm requires all of these
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    if bits:
        config["quantization"] = {"group_size": group_size, "bits": bits}
    return config


def _tensors(
    shard: dict[str, tuple[int, ...]], shape: Shape, bits: int, group_size: int, keys: Iterator[mx.array]
) -> dict[str, mx.array]:
    """Return the tensors of one file by name; each is drawn with the next key."""
    tensors: dict[str, mx.array] = {}
    levels = 2**bits  # quantized values are uniform in 0 .. levels - 1: their variance is (levels^2 - 1) / 12
    for name, (*rows, width) in shard.items():
        dims = (*rows, width)
        if name.endswith("norm.weight"):
            tensors[name] = mx.ones(dims, mx.bfloat16)
        elif name.endswith(".bias"):
            tensors[name] = bias = mx.random.normal(dims, mx.bfloat16, scale=0.1, key=next(keys))
            # the pair (D/2 - 1, D - 1) rotates slowest
            if shape.large_key_bias and name.endswith("k_proj.bias"):
                bias[shape.head_dim // 2 - 1 :: shape.head_dim] = LARGE_KEY_BIAS
        elif not bits:
            scale = width**-0.5
            tensors[f"{name}.weight"] = mx.random.normal(dims, mx.bfloat16, scale=scale, key=next(keys))
        else:
            stored = mx.random.randint(0, 256, (*rows, width * bits // 8), mx.uint8, next(keys))
            step = mx.array((12 / (levels**2 - 1) / width) ** 0.5).astype(mx.bfloat16)
            zero = (step.astype(mx.float32) * (1 - levels) / 2).astype(mx.bfloat16)
            groups = (*rows, width // group_size)
            tensors |= {
                f"{name}.weight": stored.view(mx.uint32),
                f"{name}.scales": mx.broadcast_to(step, groups),
                f"{name}.biases": mx.broadcast_to(zero, groups),
            }
    return tensors


def _keys(seed: int) -> Iterator[mx.array]:
    key = mx.random.key(seed)
    while True:
        key, drawn = mx.random.split(key)
        yield drawn
