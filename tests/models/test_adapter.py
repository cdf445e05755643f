"""LoRA and DoRA adapters against mlx-lm's own model with the adapter beside its weights, and each refusal."""

import json
import re
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.adapters import PROJECTIONS, RANK, adapted_reference, adapter_config, save_adapter
from support.checkpoints import (
    CONFIGS,
    TOLERANCE,
    change_tensors,
    check_three_ways,
    format_of,
    load_reference,
    qwen2_config,
    qwen3_moe_config,
    reference_logits,
    reference_model,
    save_checkpoint,
    write_reference,
)
from support.command import QUESTION, call
from support.counts import count
from support.hostile import change, file_bytes, one_line, said
from support.numbers import relative_error

import kvant
from kvant.errors import CheckpointError, ModelError
from kvant.models import ModelConfig, load_decoder
from kvant.models.adapter import Adapter
from kvant.models.matrix import AdaptedMatrix
from kvant.models.share import everything

IDS = [(7 + 31 * i) % 300 for i in range(33)]  # of two experts each, enough to be sorted
ALL = [*PROJECTIONS, "model.embed_tokens"]
SOME = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
THREE = qwen2_config(num_hidden_layers=3)
SPARSE = qwen3_moe_config(mlp_only_layers=[])
OF_EXPERTS = ["self_attn.q_proj", "mlp.switch_mlp.gate_proj", "mlp.switch_mlp.down_proj", "mlp.gate"]
ADAPTERS = {
    "every projection": adapter_config(),
    "some projections": adapter_config(SOME),
    "the last layer": adapter_config(["self_attn.k_proj"], num_layers=1),
    "more layers than there are": adapter_config(SOME, num_layers=100),
    "a whole path": adapter_config(["model.layers.0.mlp.up_proj", "mlp.gate_proj"], num_layers=1),
    "and the embedding": adapter_config(ALL),
}
FORMATS = [(4, 32), (8, 64)]
Format = tuple[Any, ...] | None  # as of quantize_reference
MIXED = (4, 64, "affine", dict.fromkeys(("q_proj", "up_proj"), format_of(4, 64)), False)
CASES: dict[str, tuple[dict[str, Any], Format, dict[str, Any]]] = {
    **{
        f"{name}, {made}": (THREE, made, each)
        for i, (name, each) in enumerate(ADAPTERS.items())
        for made in (None, *count([FORMATS[i % 2]], FORMATS))
    },
    "projections of different formats": (THREE, MIXED, adapter_config()),
    "dora": (THREE, None, adapter_config(SOME, kind="dora")),
    "dora and the embedding": (THREE, None, adapter_config(ALL, kind="dora")),
    **{f"experts, {made}": (SPARSE, made, adapter_config(OF_EXPERTS)) for made in (None, (4, 64))},
    **{f"every expert, {made}": (SPARSE, made, adapter_config()) for made in (None, (4, 64))},
}
for kind, config in CONFIGS.items():
    head = [] if config["tie_word_embeddings"] else ["lm_head"]
    CASES[kind] = config, None, adapter_config([*SOME, "self_attn.o_proj", *head])


@pytest.mark.parametrize("name", CASES)
def test_logits_are_mlx_lms(tmp_path: Path, name: str) -> None:
    """And others than without the adapter; an adapter of floating-point weights is fused: no more work."""
    raw, made, settings = CASES[name]
    (folder, base), (_, own), (_, same) = (
        write_reference(tmp_path / "model", raw, *(made or ())) for _ in range(3)
    )
    adapter = save_adapter(tmp_path / "adapter", settings, own)
    expected = reference_logits(adapted_reference(same, adapter), IDS)
    assert relative_error(reference_logits(base, IDS), expected) > 100 * TOLERANCE
    model = load_decoder(folder, adapter=adapter)
    check_three_ways(model, expected, IDS)
    if made is None:
        matrices = [matrix for layer in model.layers for matrix in layer.self_attn.qkv_proj.matrices]
        assert not any(isinstance(matrix, AdaptedMatrix) for matrix in matrices)


def test_quantized_matrices_keep_their_bits_and_stay_one(tmp_path: Path) -> None:
    """An adapter costs its own bytes."""
    folder, own = write_reference(tmp_path / "model", THREE, 4, 64)
    adapter = save_adapter(tmp_path / "adapter", adapter_config(SOME), own)
    base, adapted = load_decoder(folder), load_decoder(folder, adapter=adapter)
    assert {len(layer.self_attn.qkv_proj.matrices) for layer in adapted.layers} == {1}
    qkv_bytes = (128 * 2 * RANK + 2 * RANK * 3 * 128) * 4  # of q and v
    down_bytes = (256 * RANK + RANK * 128) * 4
    assert adapted.nbytes - base.nbytes == 3 * (qkv_bytes + down_bytes)


def test_the_bias_split_is_of_the_fused_weights(tmp_path: Path) -> None:
    """Which key biases outweigh what is projected changes with the projection."""
    reference = reference_model(qwen2_config())
    for layer in reference.layers:
        layer.self_attn.k_proj.weight *= 0.01
    folder = save_checkpoint(tmp_path / "model", qwen2_config(), reference)
    adapter = save_adapter(tmp_path / "adapter", adapter_config(["self_attn.k_proj"]), reference, size=50.0)
    models = [load_decoder(folder, adapter=path) for path in (None, adapter)]
    split, fused = ([layer.self_attn.qkv_bias.pairs for layer in model.layers] for model in models)  # type: ignore[union-attr]
    assert split != fused == [(), ()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A float checkpoint and a sound adapter for it."""
    root = tmp_path_factory.mktemp("saved")
    folder, model = write_reference(root / "model", qwen2_config())
    return folder, save_adapter(root / "adapter", adapter_config(SOME), model)


def _refused(folder: Path, adapter: Path, message: str) -> None:
    with one_line(ModelError, message):
        load_decoder(folder, adapter=adapter)


Tensors = dict[str, mx.array | None]  # in place of the sound ones; None: not there
BAD_VALUES: dict[str, list[Any]] = {
    "fine_tune_type": ["full", "loha", ["lora"]],
    "lora_parameters": [None],
    "num_layers": [None, "2"],
    "rank": [0, True, 129],
    "scale": [None, 0, float("nan"), float("inf"), 1e5, "20"],
    "keys": ["q_proj", [1]],
}
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
NAMES = {part: [f"model.layers.{n}.{name}.lora_{part}" for n in (0, 1) for name in SOME] for part in "ab"}
NOTHING: Tensors = dict.fromkeys(NAMES["a"] + NAMES["b"])
ZEROS: dict[str, Tensors] = {
    "a": {name: mx.zeros((256 if "down" in name else 128, RANK)) for name in NAMES["a"]},
    "b": dict.fromkeys(NAMES["b"], mx.zeros((RANK, 128))),
}
HEAD = {"lm_head.lora_a": mx.ones((128, RANK)), "lm_head.lora_b": mx.ones((RANK, 300))}
TENSORS: list[tuple[Tensors, str]] = [
    *((zeros, "every lora_a or lora_b is zero; it would change nothing") for zeros in ZEROS.values()),
    (NOTHING, "holds no tensors; it would change nothing"),
    ({f"{Q}.lora_a": None}, f"{Q}.lora_a is missing"),
    ({f"{Q}.lora_a": None, f"{Q}.lora_b": None}, f"{Q}.lora_a is missing; adapter_config.json describes it"),
    ({f"{Q}.m": mx.ones(128)}, "unexpected adapter tensor .*q_proj.m; expected for lora"),
    ({"x": mx.ones(1)}, "unexpected adapter tensor x"),
    ({"model.layers.2.mlp.up_proj.lora_a": mx.ones((128, 4))}, "the model has no matrix model.layers.2"),
    ({"model.layers.0.mlp.switch_mlp.up_proj.lora_a": mx.ones((8, 4, 4))}, "has no matrix .*switch_mlp"),
    ({"model.embed_tokens.lora_a": mx.ones((300, 4))}, "do not include model.embed_tokens"),
    ({f"{Q}.lora_a": mx.ones((4, 128))}, r"lora_a has shape \(4, 128\); expected \(128, 4\)"),
    ({f"{Q}.lora_b": mx.ones((4, 64))}, r"lora_b has shape \(4, 64\); expected \(4, 128\)"),
    ({f"{Q}.lora_b": mx.ones((4, 128), mx.int32)}, "lora_b has dtype I32"),
    ({f"{Q}.lora_a": mx.full((128, 4), float("nan"))}, "lora_a reaches nan"),
    ({f"{Q}.lora_b": mx.full((4, 128), 1e4)}, "times the scale reaches 100000"),
]
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LORA"}, "PEFT's format; expected mlx-lm's"),
    (adapter_config(SOME, num_layers=1), "layers.0.* num_layers and keys do not include"),
    (adapter_config(["self_attn.q_proj"]), f"do not include {DOWN}"),
    (adapter_config([*SOME, "mlp.up_proj"]), r"mlp.up_proj.lora_a is missing"),
    (adapter_config(SOME, kind="dora"), r"down_proj.m is missing"),
    ({"lora_parameters": {"rank": 5, "scale": 1.0, "keys": SOME}}, r"shape \(256, 4\); expected \(256, 5\)"),
]


def _settings(key: str, value: Any) -> dict[str, Any]:
    if key not in ("rank", "scale", "keys"):
        return {key: value}
    return {"lora_parameters": adapter_config(SOME)["lora_parameters"] | {key: value}}


HARMS: list[tuple[dict[str, Any], Tensors, str]] = [
    *(
        (_settings(key, value), {}, said(key, value))
        for key, values in BAD_VALUES.items()
        for value in values
    ),
    *((settings, {}, message) for settings, message in SETTINGS),
    *(({}, tensors, message) for tensors, message in TENSORS),
    (adapter_config(["lm_head"]), NOTHING | HEAD, "the model has no matrix lm_head of its own"),
]


@pytest.mark.parametrize(("settings", "tensors", "message"), HARMS)
def test_what_is_missing_or_wrong_is_named(
    saved: tuple[Path, Path], tmp_path: Path, settings: dict[str, Any], tensors: Tensors, message: str
) -> None:
    adapter = Path(shutil.copytree(saved[1], tmp_path / "broken"))
    change(adapter / "adapter_config.json", **settings)
    change_tensors(adapter / "adapters.safetensors", tensors)
    _refused(saved[0], adapter, message)


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_config.json"])
def test_a_file_that_is_missing(saved: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    adapter = Path(shutil.copytree(saved[1], tmp_path / "broken"))
    (adapter / name).unlink()
    _refused(saved[0], adapter, f"no {re.escape(name)}")


def test_dora_where_it_cannot_be_is_refused(tmp_path: Path) -> None:
    """Of quantized weights; of experts, for which mlx-lm makes none; of a row of zeros, whose norm it
    divides by.
    """
    folder, model = write_reference(tmp_path / "4 bits", THREE, 4, 64)
    adapter = save_adapter(tmp_path / "adapter", adapter_config(SOME, kind="dora"), model)
    _refused(folder, adapter, r"q_proj is quantized; a DoRA adapter")
    folder, _ = write_reference(tmp_path / "zeros", THREE)
    change_tensors(folder / "model.safetensors", {f"{Q}.weight": mx.zeros((128, 128))})
    adapter = save_adapter(
        tmp_path / "of zeros", adapter_config(SOME, kind="dora"), reference_model(THREE), size=0.0
    )
    _refused(folder, adapter, "q_proj: not finite after the adapter")
    folder, _ = write_reference(tmp_path / "experts", SPARSE)
    experts = "model.layers.0.mlp.switch_mlp.up_proj"
    parts = {"lora_a": mx.ones((8, 4, 128)), "lora_b": mx.ones((8, 128, 4)), "m": mx.ones((8, 128))}
    (adapter / "adapter_config.json").write_text(json.dumps(adapter_config(kind="dora")))
    mx.save_safetensors(
        str(adapter / "adapters.safetensors"), {f"{experts}.{name}": x for name, x in parts.items()}
    )
    _refused(folder, adapter, f"{experts} has experts; a DoRA adapter")


@contextmanager
def _little_memory(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def _adapter_of_one(folder: Path, keys: list[str]) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(keys)))
    part = {"lora_a": mx.ones((16, RANK)), "lora_b": mx.ones((RANK, 16))}
    mx.save_safetensors(str(folder / "adapters.safetensors"), {f"{Q}.{name}": x for name, x in part.items()})
    return folder


def test_more_keys_or_tensors_than_the_model_has(tmp_path: Path) -> None:
    """Of 1,200 layers and 8,402 matrices: a name a key and layer took over 8 GB for 4 MB of them."""
    sizes = {"num_hidden_layers": 1200, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    deep = ModelConfig.from_dict(qwen2_config(**sizes))
    adapter = _adapter_of_one(tmp_path, [f"{i:x}" for i in range(400_000)])
    with _little_memory(100_000_000), one_line(ModelError, "400000 keys; expected at most 8402"):
        Adapter(adapter, deep, everything(deep))
    _adapter_of_one(tmp_path, [Q, *(f"{i:x}" for i in range(8401))])
    with _little_memory(20_000_000):
        assert Adapter(adapter, deep, everything(deep)).take({Q: 16}, mx.float32) is not None
    header = {
        f"{i:x}.lora_a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(2 * 8402 + 1)
    }
    (adapter / "adapters.safetensors").write_bytes(file_bytes(header, 0))
    with _little_memory(50_000_000), one_line(CheckpointError, "16805 tensors; expected at most 16804"):
        Adapter(adapter, deep, everything(deep))


def test_load_and_the_command_take_it(pocket_folder: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", adapter_config(SOME), load_reference(pocket_folder))
    model, _ = kvant.load("pocket", adapter_path=adapter)
    expected = reference_logits(adapted_reference(load_reference(pocket_folder), adapter), IDS)
    assert relative_error(model(mx.array([IDS]))[0], expected) < TOLERANCE

    def text(*arguments: str) -> str:
        done = call(*arguments, "-q", "-m", "30", "--temp", "0", stdin=f"{QUESTION}\n")
        assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr  # that it was cut
        return done.stdout

    adapted = ["--adapter-path", str(adapter)]
    assert text("generate") != text("generate", *adapted) == text("chat", *adapted)


def test_a_path_of_no_adapter_is_refused() -> None:
    for path in ("", "no/such", "x" * 5000, "~nosuchuser/x", "a\0b"):
        with one_line(ModelError, "is not a folder"):
            kvant.load("pocket", adapter_path=path)
    refused = call("generate", QUESTION, "--adapter-path", "no/such")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("kvant: error: adapter 'no/such' is not a folder")
