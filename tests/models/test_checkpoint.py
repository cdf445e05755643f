"""Model folders that cannot be loaded: one clear line each, that names what was given and what was expected."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from safetensors import SafetensorError, safe_open

from kvant.errors import CheckpointError, ModelError
from kvant.models import ModelConfig, load_decoder
from kvant.models.tensors import TensorFiles

Make = Callable[..., tuple[Path, nn.Module]]


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))


def _tensors(folder: Path, change: Callable[[dict[str, mx.array]], object]) -> None:
    path = folder / "model.safetensors"
    weights = {name: mx.array(x) for name, x in mx.load(str(path)).items()}
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(path), weights)


BAD_CONFIGS = [
    ({"architectures": ["GemmaForCausalLM"]}, "architecture GemmaForCausalLM is not supported"),
    ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM with model_type 'qwen2'; expected 'llama'"),
    ({"model_type": "mixtral", "architectures": "absent"}, "model_type 'mixtral'"),
    ({"hidden_size": "absent"}, "hidden_size is missing"),
    ({"hidden_size": -128}, "hidden_size is -128"),
    ({"hidden_size": "128"}, "hidden_size is '128'"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rope_theta": float("inf")}, "rope_theta is inf"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "has partial_rotary_factor 0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_scaling": {"factor": 4.0}}, "rope_scaling has factor 4.0"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 10.0}}}, "rope_parameters has full_attention"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}}, "rope_scaling and rope_par"),
    ({"rope_parameters": {"rope_type": "default", "type": "yarn"}}, "has rope type 'default' and rope type 'yarn'"),
    ({"rope_parameters": [1]}, r"rope_parameters is \[1\]"),
    ({"rope_theta": 1e-300}, "rope_theta is 1e-300"),
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps is x"),
    ({"architectures": "Qwen2ForCausalLM"}, "architectures is Qwen2ForCausalLM; expected a list"),
    ({"architectures": [{}]}, "architectures is"),
    ({"layer_types": 5}, "layer_types is 5"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
    ({"use_sliding_window": 1}, "use_sliding_window is 1"),
    ({"quantization_config": ["quant_method"]}, "quantization is"),
    ({"quantization": {"group_size": 64, "bits": 4, "lm_head": "8"}}, "lm_head '8'"),
    ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding_window is 0"),
    ({"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers is '1'"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 layers; num_hidden_layers is 2"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has 'linear_attention'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "method 'gptq'"),
    ({"quantization": {"group_size": 64, "bits": 7}}, "bits is 7"),
    ({"quantization": {"group_size": 48, "bits": 4}}, "group_size is 48"),
    ({"quantization": {"group_size": 64, "bits": 4, "mode": "mxfp4"}}, "mxfp4 with bits 4 and group_size 64; expected"),
    ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp8"}}, "expected bits 8 and group_size 32"),
    ({"quantization": {"group_size": 32, "bits": 4, "mode": "nvfp4"}}, "expected bits 4 and group_size 16"),
    ({"quantization": {"group_size": 16, "bits": 4}}, "group_size is 16"),
    (
        {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp6"}},
        "mode 'mxfp6' is not supported; supported: 'aff",
    ),
    ({"quantization": {"group_size": 32, "bits": 4, "mode": ["mxfp4"]}}, r"mode is \['mxfp4'\]"),
    (
        {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4", "lm_head": {"global_scale": True}}},
        "quantization of lm_head has global_scale True",
    ),
    ({"num_experts": 8}, "num_experts is 8; qwen2 has no such experts"),
    ({"rope_traditional": True}, "rope_traditional is true"),
    ({"mlp_bias": True}, "mlp_bias is true; supported for qwen2: false"),
    ({"num_key_value_heads": "absent"}, "num_attention_heads 2 is not a multiple of num_key_value_heads 32"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_bad_config(make_checkpoint: Make, changes: dict[str, Any], message: str) -> None:
    folder, _ = make_checkpoint()
    _config(folder, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_decoder(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100000])
def test_config_that_is_no_object(make_checkpoint: Make, text: str) -> None:
    folder, _ = make_checkpoint()
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_decoder(folder)


BAD_TENSORS = [
    (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"model.layers.1.mlp.up_proj.weight is missing"),
    (lambda w: w.pop("model.norm.weight"), r"model.norm.weight is missing"),
    (lambda w: w.update({"model.norm.weight": mx.ones(7)}), r"model.norm.weight has shape \(7,\); expected \(128,\)"),
    (
        lambda w: w.update({"model.layers.0.self_attn.k_proj.weight": mx.ones((64, 128))}),
        r"k_proj.weight has shape \(64, 128\); expected \(128, 128\)",
    ),
    (
        lambda w: w.update({"model.layers.0.self_attn.k_proj.bias": mx.ones(128, dtype=mx.int32)}),
        "k_proj.bias has dtype I32; expected F32 or F16 or BF16",
    ),
    (lambda w: w.update({"model.layers.2.mlp.up_proj.weight": mx.ones(3)}), "unexpected tensor model.layers.2"),
    (lambda w: w.update({"model.layers.0.self_attn.o_proj.bias": mx.ones(128)}), "unexpected tensor .*o_proj.bias"),
    (lambda w: w.update({"model.layers.0.mlp.gate_proj.biases": mx.ones(128)}), "unexpected tensor .*gate_proj.biases"),
    (lambda w: w.update({"model.norm.bias": mx.ones(128)}), "unexpected tensor model.norm.bias"),
    (lambda w: w.update({"model.layers.1.mlp.up_proj.lora_a": mx.ones(3)}), "unexpected tensor .*lora_a"),
    (lambda w: w.update({"model.embed_tokens.scales": mx.ones(3)}), "no quantization for model.embed_tokens"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS)
def test_bad_tensors(make_checkpoint: Make, change: Callable[[dict[str, mx.array]], object], message: str) -> None:
    folder, _ = make_checkpoint()
    _tensors(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_decoder(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_truncated_safetensors(make_checkpoint: Make, keep: int) -> None:
    folder, _ = make_checkpoint()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_decoder(folder)


def test_a_header_is_refused_where_the_safetensors_library_refuses_it(tmp_path: Path) -> None:
    """2,000 headers, most of them spoiled in one place."""
    rng = random.Random(0)
    path = tmp_path / "model.safetensors"
    agreed = {True: 0, False: 0}
    for _ in range(2000):
        sizes = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1, "I64": 8, "F4": 0.5, "F6_E2M3": 0.75}
        end, header = 0, {}
        for number in range(rng.randrange(4)):
            dtype, shape = rng.choice(list(sizes)), [4 * rng.randrange(3), rng.randrange(4)][: rng.randrange(3)]
            count = int(math.prod(shape) * sizes[dtype])
            header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count]}
            end += count
        entries: list[Any] = list(header.values())
        spoil = rng.randrange(8)
        if entries and spoil == 0:
            rng.choice(entries)["data_offsets"][rng.randrange(2)] += rng.choice([-1, 1, 8])
        elif entries and spoil == 1:
            rng.choice(entries)["shape"] = rng.choice([[-1], [2**63], [1.0], "x", None, [True], [[]], [2**40, 2**40]])
        elif entries and spoil == 2:
            rng.choice(entries)["dtype"] = rng.choice(["F33", "f32", None, 4, "I32", "C64"])
        elif entries and spoil == 3:
            rng.choice(entries).pop(rng.choice(["dtype", "shape", "data_offsets"]))
        elif entries and spoil == 4:
            rng.choice(entries)["data_offsets"] = rng.choice([[], [0], [0, 1, 2], None, ["0", "1"], [1, 0]])
        elif spoil == 5:
            header["__metadata__"] = rng.choice([{}, None, {"a": "b"}, {"a": 1}, [], "x"])
        text = json.dumps(header).encode() + b" " * rng.choice([0, 0, 3])
        length = len(text) + rng.choice([0] * 8 + [-1, 1])
        path.write_bytes(length.to_bytes(8, "little") + text + bytes(max(0, end + rng.choice([0] * 8 + [-1, 1]))))
        try:
            with safe_open(path, framework="np") as file:
                theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError:
            theirs = None
        try:
            tensors = TensorFiles(tmp_path, [path])
            ours = {name: tensors.shape(name) for name in tensors.names}
        except CheckpointError:
            ours = None
        assert ours == theirs, text
        agreed[ours is not None] += 1
    assert min(agreed.values()) > 300


def test_header_that_claims_ten_gigabytes(make_checkpoint: Make) -> None:
    folder, _ = make_checkpoint()
    path = folder / "model.safetensors"
    path.write_bytes((10 * 10**9).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_decoder(folder)


def test_missing_files(make_checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such model folder"):
        load_decoder(tmp_path / "nowhere")
    folder, _ = make_checkpoint()
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load_decoder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json: no such file"):
        load_decoder(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 7])
def test_shards_stay_inside_the_folder(make_checkpoint: Make, name: object) -> None:
    folder, _ = make_checkpoint(shards=2)
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError):
        load_decoder(folder)


def test_missing_shard(make_checkpoint: Make) -> None:
    folder, _ = make_checkpoint(shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: no such file"):
        load_decoder(folder)


def test_a_tensor_in_two_shards(make_checkpoint: Make) -> None:
    folder, _ = make_checkpoint(shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="is also in"):
        load_decoder(folder)


def test_generation_config_names_the_end(make_checkpoint: Make) -> None:
    folder, _ = make_checkpoint(eos_token_id=5)
    assert ModelConfig.from_folder(folder).eos_token_ids == (5,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert ModelConfig.from_folder(folder).eos_token_ids == (7, 8)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, -1]}')
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id is \[7, -1\]"):
        ModelConfig.from_folder(folder)


def test_disabled_sliding_window_is_ignored(make_checkpoint: Make) -> None:
    folder, _ = make_checkpoint(use_sliding_window=False, sliding_window=4, max_window_layers=1)
    assert ModelConfig.from_folder(folder).max_position_embeddings == 1024


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_that_does_not_say_is_tied_where_there_is_no_head(make_checkpoint: Make, tied: bool) -> None:
    folder, reference = make_checkpoint(tie_word_embeddings=tied)
    _config(folder, tie_word_embeddings="absent", max_position_embeddings="absent")
    ids = mx.array([[1, 2, 3]])
    assert mx.allclose(load_decoder(folder)(ids), reference(ids), rtol=1e-4, atol=1e-4)
