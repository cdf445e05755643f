"""LoRA and DoRA adapters against mlx-lm's own model with the adapter beside its weights, and each refusal."""

import json
import shutil
import subprocess
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from support.adapters import PROJECTIONS, RANK, adapted_reference, adapter_config, save_adapter
from support.checkpoints import (
    CONFIGS,
    load_reference,
    quantize_reference,
    qwen2_config,
    reference_logits,
    reference_model,
    save_checkpoint,
)
from support.command import QUESTION, run
from support.hostile import file_bytes
from support.numbers import relative_error

import kvant
from kvant.errors import CheckpointError, ModelError
from kvant.models import ModelConfig, load_decoder
from kvant.models.adapted import AdaptedMatrix
from kvant.models.adapter import Adapter
from kvant.models.matrix import DenseMatrix
from kvant.models.share import everything

TOLERANCE = 1e-4  # of the largest logit
IDS = [5, 290, 17, 3, 88, 141, 60, 7, 299, 1, 44, 230]
ALL = [*PROJECTIONS, "model.embed_tokens"]
SOME = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
ADAPTERS = [
    pytest.param(adapter_config(), id="every projection"),
    pytest.param(adapter_config(SOME), id="some projections"),
    pytest.param(adapter_config(["self_attn.k_proj"], num_layers=1), id="the last layer"),
    pytest.param(adapter_config(SOME, num_layers=100), id="more layers than there are"),
    pytest.param(adapter_config(["model.layers.0.mlp.up_proj", "mlp.gate_proj"], num_layers=1), id="a whole path"),
    pytest.param(adapter_config(ALL), id="and the embedding"),
]
DORA = [pytest.param(adapter_config(keys, kind="dora"), id=f"dora {name}") for name, keys in
        (("projections", SOME), ("and the embedding", ALL))]  # fmt: skip


def _check(folder: Path, adapter: Path, base: nn.Module, adapted: nn.Module, tolerance: float = TOLERANCE) -> None:
    """kvant's logits are mlx-lm's, without and with the adapter, at once and through a cache; and they do differ."""
    expected, plain = reference_logits(adapted, IDS), reference_logits(base, IDS)
    assert relative_error(plain, expected) > 100 * TOLERANCE
    assert relative_error(load_decoder(folder)(mx.array([IDS]))[0], plain) < tolerance
    model = load_decoder(folder, adapter=adapter)
    assert relative_error(model(mx.array([IDS]))[0], expected) < tolerance
    cache = model.make_cache(len(IDS), kv_bits=0)
    steps = [model(mx.array([[token]]), cache=cache)[0] for token in IDS]
    assert relative_error(mx.concatenate(steps), expected) < tolerance


@pytest.mark.parametrize("settings", ADAPTERS + DORA)
def test_adapter_of_a_float_checkpoint(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = qwen2_config(num_hidden_layers=3)
    folder = save_checkpoint(tmp_path / "model", config, reference_model(config))
    adapter = save_adapter(tmp_path / "adapter", settings, reference_model(config))
    _check(folder, adapter, reference_model(config), adapted_reference(reference_model(config), adapter))
    layers = load_decoder(folder, adapter=adapter).layers
    assert all(isinstance(layer.self_attn.qkv_proj.matrices[0], DenseMatrix) for layer in layers)  # fused: no more work


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapter_of_other_models(tmp_path: Path, kind: str) -> None:
    config = CONFIGS[kind]
    keys = [*SOME, "self_attn.o_proj"] + ([] if config["tie_word_embeddings"] else ["lm_head"])
    folder = save_checkpoint(tmp_path / "model", config, reference_model(config))
    adapter = save_adapter(tmp_path / "adapter", adapter_config(keys), reference_model(config))
    _check(folder, adapter, reference_model(config), adapted_reference(reference_model(config), adapter))


@pytest.mark.parametrize("settings", ADAPTERS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64)])
def test_adapter_of_a_quantized_checkpoint(
    tmp_path: Path, settings: dict[str, Any], bits: int, group_size: int
) -> None:
    config, base = _quantized(bits, group_size)
    folder = save_checkpoint(tmp_path / "model", config, base)
    adapter = save_adapter(tmp_path / "adapter", settings, _quantized(bits, group_size)[1])
    _check(folder, adapter, base, adapted_reference(_quantized(bits, group_size)[1], adapter))


def _quantized(bits: int, group_size: int) -> tuple[dict[str, Any], nn.Module]:
    config = qwen2_config(num_hidden_layers=3)
    model = reference_model(config)
    return quantize_reference(config, model, bits, group_size), model


def test_quantized_matrices_keep_their_bits_and_stay_one(tmp_path: Path) -> None:
    """An adapter costs its own bytes, and what it adds is exact: mlx-lm's fuse, which quantizes the sum, is not."""
    config, model = _quantized(4, 64)
    folder = save_checkpoint(tmp_path / "model", config, model)
    adapter = save_adapter(tmp_path / "adapter", adapter_config(SOME), _quantized(4, 64)[1], size=0.05)
    base, adapted = load_decoder(folder), load_decoder(folder, adapter=adapter)
    for layer in adapted.layers:
        (qkv,) = layer.self_attn.qkv_proj.matrices
        assert isinstance(qkv, AdaptedMatrix)
        assert qkv.down.shape == (128, 2 * RANK)  # of q and v
    qkv_bytes = (128 * 2 * RANK + 2 * RANK * 3 * 128) * 4
    down_bytes = (256 * RANK + RANK * 128) * 4
    assert adapted.nbytes - base.nbytes == 3 * (qkv_bytes + down_bytes)

    expected = reference_logits(adapted_reference(model, adapter), IDS)
    fused = [(name, module.fuse()) for name, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(tree_unflatten(fused))
    assert relative_error(adapted(mx.array([IDS]))[0], expected) < TOLERANCE
    assert relative_error(reference_logits(model, IDS), expected) > 100 * TOLERANCE


def test_projections_of_different_formats(tmp_path: Path) -> None:
    """q quantized, k and v not: each is adapted by itself, exactly."""

    def mixed() -> nn.Module:
        model = reference_model(qwen2_config())
        nn.quantize(model, 64, 4, class_predicate=lambda path, _: path.endswith(("q_proj", "up_proj")))
        return model

    config = qwen2_config(quantization={"group_size": 64, "bits": 4})
    folder = save_checkpoint(tmp_path / "model", config, mixed())
    adapter = save_adapter(tmp_path / "adapter", adapter_config(), mixed())
    _check(folder, adapter, mixed(), adapted_reference(mixed(), adapter))


def test_the_bias_split_is_of_the_fused_weights(tmp_path: Path) -> None:
    """Which key biases outweigh what is projected changes with the projection."""
    config = qwen2_config()
    reference = reference_model(config)
    for layer in reference.layers:
        layer.self_attn.k_proj.weight *= 0.01
    folder = save_checkpoint(tmp_path / "model", config, reference)
    adapter = save_adapter(tmp_path / "adapter", adapter_config(["self_attn.k_proj"]), reference, size=50.0)
    pairs = [
        [layer.self_attn.qkv_bias.pairs for layer in load_decoder(folder, adapter=path).layers]  # type: ignore[union-attr]
        for path in (None, adapter)
    ]
    assert pairs[0] != pairs[1] == [(), ()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A float checkpoint and a sound adapter for it, which tests copy and break."""
    root = tmp_path_factory.mktemp("saved")
    config = qwen2_config()
    model = reference_model(config)
    folder = save_checkpoint(root / "model", config, model)
    return folder, save_adapter(root / "adapter", adapter_config(SOME), model)


def _broken(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(saved[1], tmp_path / "broken")


def _refused(saved: tuple[Path, Path], adapter: Path, kind: type[ModelError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        load_decoder(saved[0], adapter=adapter)
    assert "\n" not in str(caught.value)


def _lora(**changes: Any) -> dict[str, Any]:
    return {"lora_parameters": adapter_config(SOME)["lora_parameters"] | changes}


BAD_CONFIGS = [
    ({"fine_tune_type": "full"}, "fine_tune_type is 'full': whole tensors"),
    ({"fine_tune_type": "loha"}, "fine_tune_type is 'loha'; expected 'lora' or 'dora'"),
    ({"fine_tune_type": ["lora"]}, r"fine_tune_type is \['lora'\]"),
    ({"peft_type": "LORA"}, "PEFT's format; expected mlx-lm's"),
    ({"lora_parameters": None}, "lora_parameters is None"),
    ({"num_layers": None}, "num_layers is None"),
    ({"num_layers": "2"}, "num_layers is '2'"),
    ({"num_layers": 1}, "layers.0.* num_layers and keys do not include"),
    (_lora(rank=0), "rank is 0"),
    (_lora(rank=True), "rank is True"),
    (_lora(rank=129), "rank is 129; expected an int from 1 to the model's hidden_size, 128"),
    (_lora(rank=5), r"lora_a has shape \(256, 4\); expected \(256, 5\)"),
    (_lora(scale=None, alpha=16), "scale is None"),
    (_lora(scale=0), "scale is 0"),
    (_lora(scale=float("nan")), "scale is nan"),
    (_lora(scale=float("inf")), "scale is inf"),
    (_lora(scale=1e5), "scale is 100000.0; expected a number other than 0, at most 10000"),
    (_lora(scale="20"), "scale is '20'"),
    (_lora(keys="q_proj"), "keys is q_proj; expected a list"),
    (_lora(keys=[1]), r"keys is \[1\]"),
    (_lora(keys=["self_attn.q_proj"]), "do not include model.layers.0.mlp.down_proj"),
    (_lora(keys=[*SOME, "mlp.up_proj"]), "model.layers.0.mlp.up_proj.lora_a is missing"),
    ({"fine_tune_type": "dora"}, r"down_proj.m is missing"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_bad_adapter_config(saved: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    adapter = _broken(saved, tmp_path)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    _refused(saved, adapter, ModelError, message)


Q = "model.layers.1.self_attn.q_proj"
BAD_TENSORS = [  # a tensor to add, or a part of names to remove
    ("lora", "holds no tensors; it would change nothing"),
    (f"{Q}.lora_a", f"{Q}.lora_a is missing"),
    (f"{Q}.lora_b", f"{Q}.lora_b is missing"),
    (Q, f"{Q}.lora_a is missing; adapter_config.json describes it"),
    ({f"{Q}.m": mx.ones(128)}, "unexpected adapter tensor .*q_proj.m; expected for lora"),
    ({f"{Q}.weight": mx.ones((128, 128))}, "unexpected adapter tensor .*q_proj.weight"),
    ({"x": mx.ones(1)}, "unexpected adapter tensor x"),
    ({"model.layers.2.mlp.up_proj.lora_a": mx.ones((128, 4))}, "the model has no matrix model.layers.2"),
    ({"model.layers.0.mlp.switch_mlp.up_proj.lora_a": mx.ones((8, 4, 4))}, "has no matrix .*switch_mlp"),
    ({"model.embed_tokens.lora_a": mx.ones((300, 4))}, "do not include model.embed_tokens"),
    ({f"{Q}.lora_a": mx.ones((4, 128))}, r"lora_a has shape \(4, 128\); expected \(128, 4\)"),
    ({f"{Q}.lora_b": mx.ones((4, 64))}, r"lora_b has shape \(4, 64\); expected \(4, 128\)"),
    ({f"{Q}.lora_b": mx.ones((4, 128), mx.int32)}, "lora_b has dtype I32"),
    ({f"{Q}.lora_a": mx.full((128, 4), float("nan"))}, "lora_a reaches nan"),
    ({f"{Q}.lora_b": mx.full((4, 128), float("inf"))}, "lora_b reaches inf"),
    ({f"{Q}.lora_b": mx.full((4, 128), 1e4)}, "times the scale reaches 100000"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS)
def test_bad_adapter_tensors(
    saved: tuple[Path, Path], tmp_path: Path, change: str | dict[str, mx.array], message: str
) -> None:
    adapter = _broken(saved, tmp_path)
    weights = _weights(adapter)
    if isinstance(change, str):
        change, weights = {}, {name: array for name, array in weights.items() if change not in name}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights | change)
    _refused(saved, adapter, CheckpointError, message)


@pytest.mark.parametrize("part", ["lora_a", "lora_b"])
def test_an_adapter_of_zeros_is_refused(saved: tuple[Path, Path], tmp_path: Path, part: str) -> None:
    adapter = _broken(saved, tmp_path)
    weights = {name: x * 0 if name.endswith(part) else x for name, x in _weights(adapter).items()}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    _refused(saved, adapter, CheckpointError, "every lora_a or lora_b is zero; it would change nothing")


@pytest.fixture
def deep(tmp_path: Path) -> ModelConfig:
    """The config of a model of 1,200 layers, 8,402 matrices."""
    raw = qwen2_config(num_hidden_layers=1200, hidden_size=16, num_attention_heads=1, num_key_value_heads=1)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_folder(tmp_path)


@contextmanager
def _little_memory(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def _adapter_of_one(folder: Path, keys: list[str]) -> Path:
    config = adapter_config(keys, num_layers=-1)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    part = {"lora_a": mx.ones((16, RANK)), "lora_b": mx.ones((RANK, 16))}
    mx.save_safetensors(str(folder / "adapters.safetensors"), {f"{Q}.{name}": x for name, x in part.items()})
    return folder


def test_keys_without_end(tmp_path: Path, deep: ModelConfig) -> None:
    """A name a key and layer took over 8 GB for 4 MB of them."""
    adapter = _adapter_of_one(tmp_path, [f"{i:x}" for i in range(400_000)])
    with _little_memory(100_000_000), pytest.raises(ModelError, match="400000 keys; expected at most 8402"):
        Adapter(adapter, deep, everything(deep))


def test_as_many_keys_as_matrices(tmp_path: Path, deep: ModelConfig) -> None:
    adapter = _adapter_of_one(tmp_path, [Q, *(f"{i:x}" for i in range(8401))])
    with _little_memory(20_000_000):
        assert Adapter(adapter, deep, everything(deep)).take({Q: 16}, mx.float32) is not None


def test_more_tensors_than_the_model_has(tmp_path: Path, deep: ModelConfig) -> None:
    adapter = _adapter_of_one(tmp_path, [Q])
    names = [f"{i:x}.lora_a" for i in range(2 * 8402 + 1)]
    header = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    (adapter / "adapters.safetensors").write_bytes(file_bytes(header, 0))
    with _little_memory(50_000_000), pytest.raises(CheckpointError, match="16805 tensors; expected at most 16804"):
        Adapter(adapter, deep, everything(deep))


def _weights(adapter: Path) -> dict[str, mx.array]:
    weights = {name: mx.array(x) for name, x in mx.load(str(adapter / "adapters.safetensors")).items()}  # type: ignore[union-attr]
    mx.eval(weights)
    return weights


def test_bad_adapter_files(saved: tuple[Path, Path], tmp_path: Path) -> None:
    adapter = _broken(saved, tmp_path)
    path = adapter / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    _refused(saved, adapter, CheckpointError, "not a whole safetensors file")
    path.unlink()
    _refused(saved, adapter, ModelError, r"no adapters\.safetensors")
    (adapter / "adapter_config.json").write_text("[1]")
    _refused(saved, adapter, ModelError, "a JSON list; expected an object")
    (adapter / "adapter_config.json").unlink()
    _refused(saved, adapter, ModelError, r"no adapter_config\.json")


def test_a_tied_head_has_no_matrix_of_its_own(saved: tuple[Path, Path], tmp_path: Path) -> None:
    adapter = _broken(saved, tmp_path)
    (adapter / "adapter_config.json").write_text(json.dumps(adapter_config(["lm_head"])))
    mx.save_safetensors(
        str(adapter / "adapters.safetensors"),
        {"lm_head.lora_a": mx.ones((128, RANK)), "lm_head.lora_b": mx.ones((RANK, 300))},
    )
    _refused(saved, adapter, CheckpointError, "lm_head.lora_a: the model has no matrix lm_head of its own")


def test_dora_of_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    config, model = _quantized(4, 64)
    folder = save_checkpoint(tmp_path / "model", config, model)
    adapter = save_adapter(tmp_path / "adapter", adapter_config(SOME, kind="dora"), model)
    _refused((folder, adapter), adapter, ModelError, r"q_proj is quantized; a DoRA adapter")


def test_dora_of_a_row_of_zeros_is_refused(tmp_path: Path) -> None:
    """Its norm is zero, and what is scaled to a norm is divided by it."""
    config = qwen2_config()
    model = reference_model(config)
    adapter = save_adapter(tmp_path / "adapter", adapter_config(SOME, kind="dora"), model, size=0.0)
    weights = dict(tree_flatten(reference_model(config).parameters()))
    weights[f"{Q}.weight"] = mx.zeros((128, 128))
    folder = save_checkpoint(tmp_path / "model", config, reference_model(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    _refused((folder, adapter), adapter, CheckpointError, "q_proj: not finite with the adapter's part in it")


@pytest.fixture(scope="module")
def pocket_adapter(pocket_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter for the embedded model."""
    folder = tmp_path_factory.mktemp("pocket") / "adapter"
    return save_adapter(folder, adapter_config(SOME), load_reference(pocket_folder))


def test_load_takes_an_adapter(pocket_folder: Path, pocket_adapter: Path) -> None:
    model, _ = kvant.load("pocket", adapter_path=pocket_adapter)
    expected = reference_logits(adapted_reference(load_reference(pocket_folder), pocket_adapter), IDS)
    assert relative_error(model(mx.array([IDS]))[0], expected) < TOLERANCE
    for path in ("", "no/such", "x" * 5000, "~nosuchuser/x", "a\0b"):
        with pytest.raises(ModelError, match="is not a folder; expected one as mlx_lm"):
            kvant.load("pocket", adapter_path=path)


def test_the_command_applies_it(pocket_adapter: Path) -> None:
    def text(*arguments: str) -> str:
        done = run(*arguments, "-q", "-m", "100", "--temp", "0", stdin=f"{QUESTION}\n")
        assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr  # that it was cut
        return done.stdout

    generate, adapted = ["generate"], ["--adapter-path", str(pocket_adapter)]
    assert text(*generate) != text(*generate, *adapted) == text("chat", *adapted)
    refused: subprocess.CompletedProcess[str] = run(*generate, QUESTION, "--adapter-path", "no/such")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("kvant: error: adapter 'no/such' is not a folder")
