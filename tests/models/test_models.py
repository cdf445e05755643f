"""The decoder against mlx-lm's qwen2 on the same weights, in float32."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.checkpoints import quantize_reference, qwen2_config, reference_logits, reference_model, save_checkpoint
from support.numbers import relative_error

from kvant.cache import FullKVCache
from kvant.errors import ContextError
from kvant.models import Decoder, load_decoder

TOLERANCE = 1e-4  # of the largest logit
SHAPES = [
    pytest.param({}, id="ratio 1"),
    pytest.param({"hidden_size": 256, "num_attention_heads": 4}, id="ratio 2"),
    pytest.param({"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1}, id="ratio 7"),
    pytest.param({"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}, id="head_dim 128"),
    pytest.param({"tie_word_embeddings": False, "num_hidden_layers": 3}, id="untied"),
    pytest.param({"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "intermediate_size": 288}, id="other constants"),
]
FORMATS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (2, 64), (3, 32), (5, 64), (6, 64)]


def _ids(count: int, vocab_size: int = 300) -> list[int]:
    mx.random.seed(7)
    return mx.random.randint(0, vocab_size, (count,)).tolist()


def _check_three_ways(model: Decoder, expected: mx.array, ids: list[int]) -> None:
    """Without a cache, in chunks of uneven length, and token by token through a cache without quantization."""
    assert relative_error(model(mx.array([ids]))[0], expected) < TOLERANCE
    for bounds in ([0, 7, 20, 21, len(ids)], list(range(len(ids) + 1))):
        cache = model.make_cache(len(ids), kv_bits=0)
        parts = [model(mx.array([ids[a:b]]), cache=cache)[0] for a, b in pairwise(bounds)]
        assert relative_error(mx.concatenate(parts), expected) < TOLERANCE


@pytest.mark.parametrize("changes", SHAPES)
def test_float_checkpoint(make_checkpoint: Callable[..., tuple[Path, nn.Module]], changes: dict[str, Any]) -> None:
    folder, reference = make_checkpoint(**changes)
    ids = _ids(40)
    _check_three_ways(load_decoder(folder), reference_logits(reference, ids), ids)


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_quantized_checkpoint(tmp_path: Path, bits: int, group_size: int, tied: bool) -> None:
    config = qwen2_config(tie_word_embeddings=tied)
    reference = reference_model(config)
    config = quantize_reference(config, reference, bits, group_size)
    ids = _ids(24)
    model = load_decoder(save_checkpoint(tmp_path, config, reference))
    _check_three_ways(model, reference_logits(reference, ids), ids)


def test_projections_of_different_formats_stay_separate(tmp_path: Path) -> None:
    config = qwen2_config()
    reference = reference_model(config)
    fine = {"group_size": 32, "bits": 8}

    def choose(path: str, module: nn.Module) -> bool | dict[str, int]:
        if path.endswith("down_proj") or not hasattr(module, "to_quantized"):
            return False
        return fine if path.endswith(("v_proj", "up_proj")) else {"group_size": 64, "bits": 4}

    nn.quantize(reference, class_predicate=choose)
    overrides: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        overrides[f"model.layers.{layer}.self_attn.v_proj"] = fine
        overrides[f"model.layers.{layer}.mlp.up_proj"] = fine
        overrides[f"model.layers.{layer}.mlp.down_proj"] = False
    config["quantization"] = {"group_size": 64, "bits": 4, **overrides}
    model = load_decoder(save_checkpoint(tmp_path, config, reference))
    assert [len(layer.self_attn.qkv_proj.matrices) for layer in model.layers] == [3, 3]
    ids = _ids(24)
    _check_three_ways(model, reference_logits(reference, ids), ids)


def test_projections_of_one_format_are_one_matrix(make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    model = load_decoder(make_checkpoint()[0])
    assert all(len(layer.self_attn.qkv_proj.matrices) == 1 for layer in model.layers)
    assert all(len(layer.mlp.gate_up_proj.matrices) == 1 for layer in model.layers)


def test_sharded_checkpoint(make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    folder, reference = make_checkpoint(shards=3)
    assert len(list(folder.glob("*.safetensors"))) == 3
    ids = _ids(12)
    assert relative_error(load_decoder(folder)(mx.array([ids]))[0], reference_logits(reference, ids)) < TOLERANCE


def test_tied_checkpoint_may_carry_a_head(make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    folder, reference = make_checkpoint()
    weights = mx.load(str(folder / "model.safetensors"))
    weights["lm_head.weight"] = mx.zeros((300, 128))  # must not be read
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    ids = _ids(12)
    assert relative_error(load_decoder(folder)(mx.array([ids]))[0], reference_logits(reference, ids)) < TOLERANCE


def test_config_written_by_transformers(make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    """transformers 5 writes rope_parameters and no rope_theta of its own; mlx-lm is told the value by hand."""
    from transformers import Qwen2Config

    theta = 10000.0
    folder, reference = make_checkpoint(rope_theta=theta)
    names = (
        "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    )  # fmt: skip
    written = Qwen2Config(
        **{name: qwen2_config()[name] for name in names},
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        architectures=["Qwen2ForCausalLM"],
    )
    written.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    assert "rope_theta" not in raw
    assert raw["rope_parameters"]["rope_theta"] == theta
    ids = _ids(40)
    _check_three_ways(load_decoder(folder), reference_logits(reference, ids), ids)


def test_checkpoint_quantized_by_mlx_lm(tmp_path: Path, make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    from mlx_lm.utils import load_model, quantize_model, save_config

    folder, _ = make_checkpoint()
    reference, config = load_model(folder)
    reference, config = quantize_model(reference, config, group_size=64, bits=4)
    save_checkpoint(tmp_path / "quantized", config, reference)
    save_config(dict(config), tmp_path / "quantized" / "config.json")
    ids = _ids(24)
    _check_three_ways(load_decoder(tmp_path / "quantized"), reference_logits(reference, ids), ids)


def test_pocket_model(pocket: tuple[Decoder, Any], pocket_mlx_lm: nn.Module, heldout_ids: list[int]) -> None:
    ids = heldout_ids[:96]
    _check_three_ways(pocket[0], reference_logits(pocket_mlx_lm, ids), ids)


def test_an_offset_can_only_confirm_the_cache(make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    model = load_decoder(make_checkpoint()[0])
    cache = model.make_cache(16)
    model(mx.array([[1, 2, 3]]), offset=0, cache=cache)
    assert [layer.offset for layer in cache] == [3, 3]
    model(mx.array([[4]]), offset=3, cache=cache)
    with pytest.raises(ValueError, match="offset is 3; the cache holds 4 tokens"):
        model(mx.array([[5]]), offset=3, cache=cache)
    with pytest.raises(ValueError, match="offset is 2; the cache holds 0 tokens"):
        model(mx.array([[5]]), offset=2)
    assert [layer.offset for layer in cache] == [4, 4]
    for ids in ([[300]], [[-1]], [[10**8]]):
        with pytest.raises(ValueError, match="the model knows 0 to 299"):
            model(mx.array(ids), cache=cache)
    with pytest.raises(ValueError, match="expected integer token ids"):
        model(mx.array([[1.0]]), cache=cache)
    with pytest.raises(ValueError, match="offset is False"):
        model(mx.array([[1]]), offset=False)
    with pytest.raises(ValueError, match="offset is 5; the cache holds 0 tokens"):  # two sequences, none there yet
        model(mx.array([[5], [6]]), offset=5, cache=[FullKVCache() for _ in model.layers])
    with pytest.raises(ContextError, match="this machine has"):
        model.make_cache(10**12)
    with pytest.raises(ValueError, match="the cache has 1 layers; expected 2"):
        model(mx.array([[5]]), cache=cache[:1])
    with pytest.raises(ValueError, match=r"expected \(B, S\) token ids"):
        model(mx.array([1, 2]))


def test_an_offset_that_is_none_is_refused(make_checkpoint: Any) -> None:
    model = load_decoder(make_checkpoint()[0])
    cache = model.make_cache(16)
    model(mx.array([[1, 2, 3]]), cache=cache)
    expected = r"expected an int or an array of integers \(1,\)"
    for offset, message in (
        (mx.array([3.0]), rf"offset is an array of mlx.core.float32 \(1,\); {expected}"),
        (mx.array([3, 1]), rf"offset is an array of mlx.core.int32 \(2,\); {expected}"),
        (mx.array(3), rf"offset is an array of mlx.core.int32 \(\); {expected}"),
        ([3], rf"offset is \[3\]; {expected}"),
        (3.0, rf"offset is 3.0; {expected}"),
        (2, "offset is 2; the cache holds 3 tokens"),
        (mx.array([1]), r"offset is \[1\]; the cache holds 3 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            model(mx.array([[5]]), offset=offset, cache=cache)
    with pytest.raises(ValueError, match=r"offset is \[1, 0\]; the cache holds 0 tokens"):
        model(mx.array([[5], [6]]), offset=mx.array([1, 0]))
    with pytest.raises(ValueError, match="inputs has 3 sequences; a cache has one"):
        model(mx.array([[5], [6], [7]]), cache=cache)
    model(mx.array([[5]]), offset=mx.array([3]), cache=cache)
    assert {layer.offset for layer in cache} == {4}
    cache[1].trim(1)
    assert {layer.offset for layer in cache} == {3}  # one cache: of every layer
