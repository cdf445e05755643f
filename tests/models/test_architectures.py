"""Every architecture's table, against mlx-lm's modules and the bytes that are held."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.checkpoints import (
    CONFIGS,
    reference_model,
    save_checkpoint,
    smollm3_config,
    write_reference,
)
from support.hostile import one_line

from kvant.cache import CacheOptions
from kvant.errors import CheckpointError, ModelError
from kvant.models import ModelConfig, load_decoder
from kvant.models.architectures import ARCHITECTURES
from kvant.plan import Checkpoint, Settings, plan

IDS = [(7 + 31 * i) % 300 for i in range(40)]
TIED_AND_NOT = [(kind, tied) for kind in CONFIGS for tied in (True, False)]


def test_every_architecture_is_tested() -> None:
    assert {*CONFIGS} == {*ARCHITECTURES}
    for kind, architecture in ARCHITECTURES.items():
        assert CONFIGS[kind]["architectures"] == [architecture.name]


@pytest.mark.parametrize(("kind", "tied"), TIED_AND_NOT)
@pytest.mark.parametrize("weights", [(), (4, 32, "affine"), (4, 32, "mxfp4")])
def test_the_plan_is_what_is_held(tmp_path: Path, kind: str, tied: bool, weights: tuple[Any, ...]) -> None:
    write_reference(tmp_path, CONFIGS[kind] | {"tie_word_embeddings": tied}, *weights)
    checkpoint, model = Checkpoint.from_folder(tmp_path), load_decoder(tmp_path)
    assert checkpoint.stored_bytes == sum(
        x.nbytes for x in mx.load(str(tmp_path / "model.safetensors")).values()
    )
    for bits in (0, 8, 4):
        settings = Settings(cache=CacheOptions(kv_bits=bits, bias_split=False))
        planned = plan(checkpoint, max_kv_size=50, settings=settings, device="cpu")
        assert planned.weights == model.nbytes
        cache = model.make_cache(50, kv_bits=bits, bias_split=False)
        assert planned.cache == sum(layer.nbytes for layer in cache)


@pytest.mark.parametrize("kind", CONFIGS)
def test_any_tensor_that_is_missing_or_wrong_is_named(tmp_path: Path, kind: str) -> None:
    folder, reference = write_reference(tmp_path, CONFIGS[kind])
    weights = dict(tree_flatten(reference.parameters()))

    def refused(changed: dict[str, mx.array], message: str) -> None:
        mx.save_safetensors(str(folder / "model.safetensors"), changed)
        with one_line(CheckpointError, message):
            load_decoder(folder)

    for number, (name, array) in enumerate(weights.items()):
        rest = {other: x for other, x in weights.items() if other != name}
        refused(rest, f"tensor {name} is missing")
        refused(rest | {name: mx.zeros((array.shape[0] + 1, *array.shape[1:]))}, f"tensor {name} has shape")
        refused(rest | {name: array.astype(mx.int32)}, f"tensor {name} has dtype I32")
        stem = name.rpartition(".")[0]
        extra = (f"{stem}.scale", f"{name}.more", f"model.{name}", f"{stem}.bias")[number % 4]
        if extra not in weights:
            refused(weights | {extra: mx.zeros(1)}, f"unexpected tensor {extra};")


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_an_architecture_does_not_have_is_refused_by_name(kind: str) -> None:
    table = ARCHITECTURES[kind]
    changes: list[tuple[dict[str, object], str]] = [
        *(
            ({name: True}, f"{name} is true; supported for {kind}: false")
            for name in {"attention_bias", "mlp_bias"} - {*table.biases, *table.optional_biases}
        ),
        *(
            ({name: 8}, f"{name} is 8; {kind} has no such experts")
            for name in ("n_routed_experts", "num_experts", "num_local_experts", "num_experts_per_tok")
            if name == "n_routed_experts" or not table.experts
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_traditional": True}, "rope_traditional is true"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
    ]
    for change, message in changes:
        with one_line(ModelError, message):
            ModelConfig.from_dict(CONFIGS[kind] | change)
    with one_line(ModelError, r"config.json: \w+ is missing$"):
        ModelConfig.from_dict({"model_type": kind})


def test_a_smollm3_whose_layers_all_rotate_is_a_llama(tmp_path: Path) -> None:
    """Its biases too, which mlx-lm's does not have: they are split off as a Llama's."""
    config = smollm3_config(attention_bias=True, mlp_bias=True, no_rope_layers=[1, 1], rope_theta=1e4)
    llama = {**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    reference, logits = reference_model(llama), []
    for raw in (llama, config):
        model = load_decoder(save_checkpoint(tmp_path / raw["model_type"], raw, reference))
        cache = model.make_cache(len(IDS))
        assert all(layer.transform.bias_split is not None for layer in cache)
        logits.append(model(mx.array([IDS]), cache=cache))
    assert mx.array_equal(*logits)
