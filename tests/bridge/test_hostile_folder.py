"""Bridged folders that a stranger made: refused with one line, before anything large is allocated or is run."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvant  # noqa: F401  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.bridged import copy_folder, write_config, write_mlx_lm
from support.command import COMMAND, call
from support.counts import count
from support.tiny_models import CONFIGS

from kvant.bridge.folder import build
from kvant.bridge.translation import translated
from kvant.engine.load import load_folder, load_model
from kvant.errors import CheckpointError, ModelError
from kvant.tools.plan import read_facts

Weights = dict[str, mx.array]
NORM = "model.layers.0.input_layernorm.weight"


def _without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: value for key, value in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(NORM), f"tensor {NORM} is missing"),
        (_without("model.layers.0.mlp.router.weight"), r"mlp.router.weight is missing"),
        (lambda weights: weights | {"model.layers.7.x": mx.zeros(3)}, "tensor model.layers.7.x is unexpected"),
        (lambda weights: weights | {NORM: mx.zeros(5)}, rf"tensor {NORM} has shape \(5,\); expected \(32,\)"),
        (lambda weights: weights | {NORM: mx.zeros(32, mx.int32)}, f"tensor {NORM} has dtype int32; expected a float"),
        (lambda weights: {}, "is missing"),
        (
            lambda weights: (
                weights | {"model.layers.0.mlp.experts.down_proj_blocks": mx.zeros((4, 32, 1, 9), mx.uint8)}
            ),
            "its tensors are not those of a gpt_oss",
        ),
    ],
)
def test_tensors_that_are_not_the_model_s(change: Callable[[Weights], Weights], message: str, tmp_path: Path) -> None:
    folder = copy_folder("gpt-oss", tmp_path)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    changed = change(weights) or {"x": mx.zeros(1)}
    mx.eval(list(changed.values()))
    mx.save_safetensors(str(folder / "model.safetensors"), changed)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "gpt_oss_2"}, "architecture gpt_oss_2 is not supported"),
        ({"model_type": "olmo"}, "architecture olmo is not supported: mlx-lm's module ends the whole process"),
        ({"model_type": "../gpt_oss"}, "is not supported"),
        ({"model_type": "cache"}, "architecture cache is not supported"),
        ({"model_type": "bitnet"}, "layers that are Metal kernels"),
        ({"model_file": "model.py"}, "model_file names code in the model folder"),
        ({"auto_map": {"AutoModel": "x.py"}}, "auto_map names code"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; expected at most 1024"),
        ({"num_local_experts": 10**5}, "num_local_experts is 100000; expected at most 4096"),
        (
            {"num_hidden_layers": 900, "num_local_experts": 4000},
            "x num_local_experts is 3600000; expected at most 131072",
        ),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776; expected at most 16777216"),
        ({"hidden_size": -(2**60)}, "hidden_size is -1152921504606846976"),
        ({"vocab_size": 2**24}, r"has shape \(64, 32\); expected \(16777216, 32\)"),
        ({"hidden_size": 2**24, "intermediate_size": 2**24}, "MLX has no such format"),
        ({"hidden_size": "32"}, "mlx-lm's class for gpt_oss does not take it"),
        ({"num_attention_heads": 0}, "mlx-lm's class for gpt_oss does not take it"),
        ({"num_hidden_layers": 0}, "does not take it|is unexpected"),
        ({"layer_types": ["sliding_attention"] * 2}, "mlx-lm's class for gpt_oss does not take it"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many'"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization method 'awq' is not supported"),
        ({"quantization_config": None}, "is unexpected"),
        ({"quantization": {"bits": 7, "group_size": 64}, "quantization_config": None}, "quantization bits is 7"),
        ({"quantization": {"bits": 4, "group_size": 64, "mode": "x"}, "quantization_config": None}, "mode 'x'"),
        ({"vocab_size": True}, "does not take it|vocab_size is True"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    """By loading, with one line, fast, and without the memory that the settings speak of."""
    folder = copy_folder("gpt-oss", tmp_path, **settings)
    mx.reset_peak_memory()
    before, started = mx.get_active_memory(), time.monotonic()
    with pytest.raises(ModelError, match=message) as raised:
        load_model(folder)
    assert "\n" not in str(raised.value)
    assert time.monotonic() - started < 5
    assert mx.get_peak_memory() - before < 10**7


BOMBS: dict[str, tuple[str, dict[str, Any]]] = {
    "emb_neighbor_num": ("longcat_flash_ngram", {"emb_neighbor_num": 3000, "emb_split_num": 1}),
    "emb_split_num": ("longcat_flash_ngram", {"emb_neighbor_num": 2, "emb_split_num": 2**24 - 1}),
    "hybrid_override_pattern": ("nemotron_h", {"hybrid_override_pattern": "-" * 800_000}),
    "layer_types": ("granitemoehybrid", {"layer_types": ["mamba"] * 320_000}),
    "altup_num_inputs": ("gemma3n", {"altup_num_inputs": 46_000}),
    "num_attention_heads": ("bailing_moe_linear", {"num_attention_heads": 2**24}),
    "num_loops": ("nanbeige", {"num_loops": 2**24}),
}


# Runs a command; prints its exit code, memory and seconds. A child of a large process would begin with its memory.
USED = """
import json, resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_maxrss, used.ru_utime + used.ru_stime]))
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_config_that_would_take_all_memory(name: str, tmp_path: Path) -> None:
    """Small files whose classes would make objects without end, before a tensor is looked at."""
    kind, changes = BOMBS[name]
    raw = {"model_type": kind, **CONFIGS[kind]}
    write_config(tmp_path, raw | ({"text_config": raw["text_config"] | changes} if "text_config" in raw else changes))
    done = subprocess.run([sys.executable, "-c", USED, *COMMAND, "plan", str(tmp_path)], capture_output=True, text=True)
    code, memory, seconds = json.loads(done.stdout)
    assert code == 1
    assert done.stderr.count("\n") == 1
    assert name in done.stderr
    assert memory * (1 if sys.platform == "darwin" else 1024) < 300_000_000
    assert seconds < 15  # Python starts in 1 s, on a busy machine in 5; the bombs had no end


def test_no_size_is_allocated_by_asking_a_class() -> None:
    """dbrx's reads which experts a token goes to, which would compute its random weights."""
    mx.reset_peak_memory()
    build({"model_type": "dbrx", **CONFIGS["dbrx"], "vocab_size": 2**24})
    assert mx.get_peak_memory() - mx.get_active_memory() < 10**7


def test_the_command_says_it_in_a_line(tmp_path: Path) -> None:
    folder = copy_folder("gpt-oss", tmp_path, num_attention_heads=0)
    for command in (["generate", "--model", str(folder), "hi"], ["plan", str(folder)]):
        done = call(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("kvant: error: ")


def test_nothing_of_the_folder_is_executed(tmp_path: Path) -> None:
    folder = copy_folder("gpt-oss", tmp_path)
    for name in ("gpt_oss.py", "model.py", "modeling_gpt_oss.py", "__init__.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    folder = copy_folder("gpt-oss", tmp_path, tokenizer=True)
    with pytest.raises(ModelError, match="adapters are applied to architectures of kvant's own"):
        load_folder(folder, adapter_path=folder)


def test_a_folder_without_a_tokenizer_says_what_else_is_wrong_first(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such file|no tokenizer\.json"):
        load_folder(copy_folder("gpt-oss", tmp_path))
    with pytest.raises(ModelError, match="is not supported"):
        load_folder(copy_folder("gemma3", tmp_path, model_type="gpt_oss_2"))


def test_any_settings(tmp_path: Path) -> None:
    """Values of config.json put in place of others: a model, or a ModelError."""
    rng = random.Random(0)
    junk: list[Any] = [
        None,
        True,
        0,
        -1,
        3,
        2**24,
        2**70,
        0.5,
        float("nan"),
        float("inf"),
        "x",
        "",
        [],
        [0],
        {},
        {"a": 1},
    ]
    folders = [copy_folder("gpt-oss", tmp_path), write_mlx_lm(tmp_path / "quantized", "qwen3_next", 4)]
    loaded = 0
    for _ in range(count(75, 3000)):
        folder = rng.choice(folders)
        original = json.loads((folder / "config.json").read_text())
        changed = json.loads(json.dumps(original))
        for key in rng.sample(sorted(original), rng.choice([1, 1, 2])):
            holder, name = (
                (changed[key], rng.choice(sorted(changed[key])))
                if changed[key] and isinstance(changed[key], dict)
                else (changed, key)
            )
            holder[name] = rng.choice(junk)
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            model = load_model(folder)
            model.make_cache(8)
            loaded += 1
        except ModelError as error:
            assert "\n" not in str(error)  # noqa: PT017
        (folder / "config.json").write_text(json.dumps(original))
    assert loaded


def test_layers_that_mlx_lm_s_class_cannot_have() -> None:
    full, linear = "full_attention", "linear_attention"
    types = [linear, full, linear, full]
    assert translated({"layer_types": types}, "qwen3_next")["full_attention_interval"] == 2
    assert (
        translated({"layer_types": types, "full_attention_interval": 2}, "qwen3_next")["full_attention_interval"] == 2
    )
    assert "full_attention_interval" not in translated({"layer_types": types}, "gpt_oss")
    for wrong in ([full, linear], [linear, full, full]):
        with pytest.raises(ModelError, match="takes every nth layer for full"):
            translated({"text_config": {"layer_types": wrong}}, "qwen3_5")
    sizes = {"layer_types": ["sliding_attention", full], "per_layer_config": {"1": {"head_dim": 64}}}
    assert translated(sizes, "gemma4_text")["global_head_dim"] == 64
    for module, own in (("gemma3", sizes), ("gemma4", sizes | {"per_layer_config": {"0": {"head_dim": 64}}})):
        with pytest.raises(ModelError, match="has no such layers"):
            translated(own, module)


def test_where_rotary_positions_are_said() -> None:
    plain = {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5}
    own = translated({"rope_parameters": plain}, "x")
    assert (own["rope_theta"], own["partial_rotary_factor"], own["rope_scaling"]) == (5.0, 0.5, None)
    yarn = {"rope_type": "yarn", "rope_theta": 5.0, "factor": 2.0}
    own = translated({"text_config": {"rope_parameters": yarn, "rope_theta": 7.0}}, "x")["text_config"]
    assert (own["rope_theta"], own["rope_scaling"]) == (7.0, yarn)
    two = {"full_attention": yarn, "sliding_attention": plain | {"rope_theta": 3.0}}
    own = translated({"rope_parameters": two}, "x")
    assert (own["rope_theta"], own["rope_local_base_freq"], own["rope_scaling"]) == (5.0, 3.0, yarn)


def test_facts_that_are_refused() -> None:
    with pytest.raises(ModelError, match="is not supported"):
        read_facts({"model_type": "gpt_oss_2"})
    with pytest.raises(ModelError, match="names code"):
        read_facts({"model_type": "gpt_oss", "auto_map": {"a": "b"}})
    with pytest.raises(ModelError, match=r"missing .* required positional argument"):
        read_facts({"model_type": "mixtral_2", "vocab_size": 5} | {"model_type": "llama4_text"})
