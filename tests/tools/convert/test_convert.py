"""``kvant convert``: what it writes is read by kvant and by mlx-lm with the same logits; whole or not at all."""

import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from support.checkpoints import (
    CONFIGS,
    llama_config,
    qwen2_config,
    reference_logits,
    reference_model,
    save_checkpoint,
    stored_by_transformers,
)
from support.command import QUESTION, call
from support.numbers import relative_error

import kvant
from kvant.engine.load import load_model
from kvant.engine.run import Run
from kvant.errors import ConvertError, KvantError, ModelError
from kvant.tools.convert.convert import convert_folder
from kvant.tools.convert.weight_format import WeightFormat

TOLERANCE = 1e-4  # of the largest logit
IDS = [5, 290, 17, 3, 88, 141, 60, 7, 299, 1, 44, 230]
THETA = 1e4  # not mlx-lm's default for qwen2, which it takes where rope_theta is not at the top
FOUR_BITS = WeightFormat.choose(4, 32)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def _config(**changes: Any) -> dict[str, Any]:
    """config.json as transformers 5 writes it, for the embedded model's tokenizer."""
    config = qwen2_config(vocab_size=1280, dtype="float32", **changes)
    del config["rope_theta"]
    return config | {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}


def _reference(**changes: Any) -> nn.Module:
    return reference_model(_config(**changes) | {"rope_theta": THETA})


def _source(folder: Path, config: dict[str, Any], model: nn.Module, pocket_folder: Path, shards: int = 1) -> Path:
    save_checkpoint(folder, config, model, shards)
    for name in TOKENIZER:
        shutil.copy(pocket_folder / name, folder)
    return folder


@pytest.fixture
def make_source(tmp_path: Path, pocket_folder: Path) -> Callable[..., Path]:
    """A function (config changes) -> folder of a random model with a tokenizer."""
    return lambda shards=1, **changes: _source(
        tmp_path / "source", _config(**changes), _reference(**changes), pocket_folder, shards
    )


def _mlx_lm_logits(folder: Path) -> mx.array:
    """Of mlx-lm's own model on the converted files, in float32 as kvant computes on a CPU."""
    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    return reference_logits(model, IDS)


def _check_loads(folder: Path) -> mx.array:
    """kvant and mlx-lm load it, with the same logits; kvant generates. The logits. Its tokenizer: test_the_command."""
    model = load_model(folder)
    logits = model(mx.array([IDS]))[0]
    assert relative_error(logits, _mlx_lm_logits(folder)) < TOLERANCE
    cache = model.make_cache(len(IDS) + 3, kv_bits=0)
    tokens = [token for token, _ in Run(model, IDS, cache, max_tokens=3)]
    assert tokens[0] == logits[-1].argmax().item()
    return logits


@pytest.mark.parametrize(
    ("bits", "group_size", "mode", "tied"),
    [(4, 32, "affine", True), (8, 64, "affine", False), (3, 64, "affine", True), (6, 128, "affine", False),
     (4, 32, "mxfp4", True), (8, 32, "mxfp8", True), (4, 16, "nvfp4", True)],
)  # fmt: skip
def test_every_format(
    make_source: Callable[..., Path], tmp_path: Path, bits: int, group_size: int, mode: str, tied: bool
) -> None:
    source, dest = make_source(tie_word_embeddings=tied), tmp_path / "dest"
    done = convert_folder(source, dest, WeightFormat.choose(bits, group_size, mode))
    expected = _reference(tie_word_embeddings=tied)
    nn.quantize(expected, group_size, bits, mode=mode)
    assert relative_error(_check_loads(dest), reference_logits(expected, IDS)) < TOLERANCE

    before, after = (mx.load(str(folder / "model.safetensors")) for folder in (source, dest))
    assert done.source_bytes == sum(array.nbytes for array in before.values())  # type: ignore[union-attr]
    assert done.bytes == sum(array.nbytes for array in after.values())  # type: ignore[union-attr]
    # A scale and a bias in float32 for each group, or a byte; 0.5 % of the weights are norms and biases in float32.
    assert done.bits_per_weight == pytest.approx(bits + (64 if mode == "affine" else 8) / group_size, abs=0.2)
    assert done.unquantized == ()
    config = json.loads((dest / "config.json").read_text())
    assert config["quantization"] == {"group_size": group_size, "bits": bits, "mode": mode}
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": THETA}
    assert config["rope_theta"] == load_model(dest).config.rope.theta == THETA
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "out", "source"]


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
CASES: dict[str, tuple[dict[str, Any], str]] = {kind: (config, "affine") for kind, config in CONFIGS.items()} | {
    # mlx-lm reads the converted file's rotary positions: it does not read transformers 5's.
    "yarn": (llama_config(rope_parameters=YARN), "affine"),
    "yarn, mxfp4": (llama_config(rope_parameters=YARN), "mxfp4"),
    # Groups of 32 divide a width of 96; those of 64 that mlx-lm takes for a router do not.
    "router": (CONFIGS["qwen3_moe"] | {"hidden_size": 96, "head_dim": 32}, "affine"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_architecture(tmp_path: Path, pocket_folder: Path, case: str) -> None:
    config = CASES[case][0] | {"vocab_size": 1280}
    source = _source(tmp_path / "source", config, reference_model(config), pocket_folder)
    if "rope_parameters" in config:
        _change(source, rope_theta=None)
    done = convert_folder(source, tmp_path / "dest", WeightFormat.choose(4, 32, mode=CASES[case][1]))
    assert done.unquantized == (("model.layers.1.mlp.gate",) if case == "router" else ())
    _check_loads(tmp_path / "dest")


@pytest.mark.parametrize("way", ["each", "joined"])
@pytest.mark.parametrize("to", [FOUR_BITS, WeightFormat.choose(mode="mxfp4"), WeightFormat.choose(0, dtype="bfloat16")])
def test_experts_as_transformers_stores_them(tmp_path: Path, pocket_folder: Path, way: str, to: WeightFormat) -> None:
    """They are stacked as mlx-lm has them; its router keeps the bits that mlx-lm gives it, or its own dtype."""
    config = CONFIGS["qwen3_moe"] | {"vocab_size": 1280}
    stacked = _source(tmp_path / "stacked", config, reference_model(config), pocket_folder)
    del config["num_experts"], config["decoder_sparse_step"]
    source = _source(tmp_path / "source", config | {"num_local_experts": 8}, nn.Module(), pocket_folder)
    weights = mx.load(str(stacked / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.save_safetensors(str(source / "model.safetensors"), stored_by_transformers(weights, way))
    done = convert_folder(source, tmp_path / "dest", to)
    assert mx.array_equal(_check_loads(tmp_path / "dest"), _converted_logits(stacked, tmp_path / "other", to))
    assert done.unquantized == ()
    if to.bits:
        said = json.loads((tmp_path / "dest" / "config.json").read_text())["quantization"]
        assert said["model.layers.1.mlp.gate"] == {"group_size": 64, "bits": 8}


def _converted_logits(source: Path, dest: Path, to: WeightFormat) -> mx.array:
    convert_folder(source, dest, to)
    return load_model(dest)(mx.array([IDS]))[0]


def test_another_dtype(make_source: Callable[..., Path], tmp_path: Path) -> None:
    source = make_source()
    done = convert_folder(source, tmp_path / "half", WeightFormat.choose(0, dtype="float16"))
    _check_loads(tmp_path / "half")
    assert (done.bits_per_weight, done.bytes, done.unquantized) == (16, done.source_bytes / 2, ())
    convert_folder(source, tmp_path / "dest", WeightFormat.choose(4, 64, dtype="bfloat16"))
    _check_loads(tmp_path / "dest")
    written = mx.load(str(tmp_path / "dest" / "model.safetensors"))
    assert {array.dtype for array in written.values()} == {mx.uint32, mx.bfloat16}  # type: ignore[union-attr]
    assert json.loads((tmp_path / "dest" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_width_that_groups_do_not_divide(make_source: Callable[..., Path], tmp_path: Path) -> None:
    """mlx-lm leaves such a matrix in floating point and says nothing; kvant says so."""
    done = call("convert", str(make_source(intermediate_size=288)), str(tmp_path / "dest"), "--group-size", "64")
    assert done.returncode == 0
    assert done.stderr.splitlines()[1:] == [
        "not quantized, groups of 64 do not divide the width: model.layers.0.mlp.down_proj and 1 more"
    ]
    _check_loads(tmp_path / "dest")


def test_groups_that_divide_no_width(make_source: Callable[..., Path], tmp_path: Path) -> None:
    source = make_source(hidden_size=96, intermediate_size=96, num_attention_heads=3, num_key_value_heads=3)
    _refused(source, tmp_path, ConvertError, "groups of 64 divide the width of no matrix", WeightFormat.choose())


def test_an_output_head_that_config_does_not_mention(make_source: Callable[..., Path], tmp_path: Path) -> None:
    """transformers leaves tie_word_embeddings out where it has its default; mlx-lm's own would drop the head."""
    source = make_source(tie_word_embeddings=False)
    _change(source, tie_word_embeddings=None)
    logits = load_model(source)(mx.array([IDS]))[0]
    convert_folder(source, tmp_path / "dest", WeightFormat.choose(8, 32))
    assert relative_error(_check_loads(tmp_path / "dest"), logits) < 0.05
    assert json.loads((tmp_path / "dest" / "config.json").read_text())["tie_word_embeddings"] is False


def test_shards(make_source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = make_source(shards=3), tmp_path / "dest"
    monkeypatch.setattr(mlx_lm.utils, "make_shards", _two_shards)
    convert_folder(source, dest, FOUR_BITS)
    assert sorted(path.name for path in dest.glob("*.safetensors*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    _check_loads(dest)


def _two_shards(weights: dict[str, mx.array]) -> list[dict[str, mx.array]]:
    names = list(weights)
    return [{name: weights[name] for name in half} for half in (names[: len(names) // 2], names[len(names) // 2 :])]


def test_what_is_carried_over(make_source: Callable[..., Path], tmp_path: Path) -> None:
    source, dest = make_source(), tmp_path / "dest"
    dest.mkdir()  # an empty folder is as good as none
    (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ 1 }}")
    (source / "modeling.py").write_text("raise SystemExit('executed')")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    convert_folder(source, dest, FOUR_BITS)
    for name in (*TOKENIZER, "chat_template.jinja", "additional_chat_templates/tool.jinja"):
        assert (dest / name).read_bytes() == (source / name).read_bytes()
    assert not list(dest.glob("*.py")) + list(dest.glob("*.bin"))
    assert kvant.load(dest)[1].apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def _refused(source: Path, tmp_path: Path, kind: type[KvantError], message: str, to: WeightFormat = FOUR_BITS) -> None:
    """One line; nothing is written, not even beside the destination."""
    with pytest.raises(kind, match=message) as caught:
        convert_folder(source, tmp_path / "out" / "dest", to)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture(autouse=True)
def _out(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()


def test_quantized_sources_are_refused(make_source: Callable[..., Path], tmp_path: Path) -> None:
    source = make_source()
    convert_folder(source, tmp_path / "dest", FOUR_BITS)
    _refused(tmp_path / "dest", tmp_path, ConvertError, "already quantized")
    _change(tmp_path / "dest", quantization=None, quantization_config=None)
    _refused(tmp_path / "dest", tmp_path, ConvertError, "already quantized")


def test_sources_that_cannot_be_loaded(make_source: Callable[..., Path], tmp_path: Path) -> None:
    source = make_source()
    (source / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    _refused(source, tmp_path, ModelError, r"no tokenizer\.json")
    (tmp_path / "tokenizer.json").rename(source / "tokenizer.json")
    _change(source, head_dim=32)
    _refused(source, tmp_path, ModelError, "has shape")
    _change(source, head_dim=64, model_type="mamba")
    _refused(source, tmp_path, ModelError, "is not supported")
    (source / "model.py").write_text("raise SystemExit('executed')")
    _change(source, model_type="qwen2", model_file="model.py")
    _refused(source, tmp_path, ModelError, "model_file")


NORM = "model.norm.weight"
BAD_TENSORS = [
    ({NORM: mx.full(128, float("nan"))}, None, f"{NORM} has values that are not finite in float32"),
    ({NORM: mx.full(128, 1e5)}, "float16", f"{NORM} has values that are not finite in float16"),
    ({NORM: mx.ones(7)}, None, f"{NORM} has shape"),
    ({NORM: mx.ones(128, mx.int32)}, None, f"{NORM} has dtype I32"),
    ({"model.extra.weight": mx.ones(2)}, None, "unexpected tensor model.extra.weight"),
    ({"model.layers.0.mlp.up_proj.scales": mx.ones((256, 4))}, None, "already quantized"),
]


@pytest.mark.parametrize(("change", "dtype", "message"), BAD_TENSORS)
def test_bad_tensors(
    make_source: Callable[..., Path], tmp_path: Path, change: dict[str, mx.array], dtype: str | None, message: str
) -> None:
    source = make_source()
    path = str(source / "model.safetensors")
    weights = {name: mx.array(array) for name, array in mx.load(path).items()}  # type: ignore[union-attr]
    mx.eval(weights)
    mx.save_safetensors(path, weights | change)
    _refused(source, tmp_path, KvantError, message, WeightFormat.choose(4, 32, dtype=dtype))


def test_destinations_in_use(make_source: Callable[..., Path], tmp_path: Path) -> None:
    source = make_source()
    file, full, link = tmp_path / "file", tmp_path / "full", tmp_path / "link"
    file.write_text("mine")
    full.mkdir()
    (full / "mine").write_text("mine")
    link.symlink_to(tmp_path / "nowhere")
    for dest in (file, full, link, source):
        with pytest.raises(ConvertError, match="is there already; expected a new folder's path or an empty folder"):
            convert_folder(source, dest, FOUR_BITS)
    with pytest.raises(ConvertError, match=r"no/such: no such folder; expected one to put dest into"):
        convert_folder(source, tmp_path / "no" / "such" / "dest", FOUR_BITS)
    for name in ("x" * 5000, "~nosuchuser/x"):
        with pytest.raises(ConvertError, match="cannot be a folder"):
            convert_folder(source, Path(name), FOUR_BITS)
    assert (file.read_text(), [path.name for path in full.iterdir()]) == ("mine", ["mine"])


def test_no_room(make_source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    _refused(make_source(), tmp_path, ConvertError, r"out: .* [kM]B are needed, 1.00 kB are free")


@pytest.mark.parametrize("moment", ["mlx_lm.utils.save_model", "mlx_lm.utils.save_config", "shutil.copyfile"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device")])
def test_nothing_is_left_half_written(
    make_source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: Any
) -> None:
    """Interrupted, or failed, when a part of it is on the disk."""
    source = make_source()
    module, name = moment.rsplit(".", 1)
    whole = getattr(sys.modules[module], name)

    def stop(*arguments: Any, **keywords: Any) -> None:
        whole(*arguments, **keywords)
        assert list((tmp_path / "out").iterdir()) != []
        raise error

    monkeypatch.setattr(f"{module}.{name}", stop)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ConvertError) as caught:
        convert_folder(source, tmp_path / "out" / "dest", FOUR_BITS)
    assert list((tmp_path / "out").iterdir()) == []
    if error is not KeyboardInterrupt:
        assert str(caught.value).endswith("dest: cannot be written: No space left on device")


def test_a_write_that_fails(tmp_path: Path) -> None:
    """A file may not grow past a megabyte: MLX's own writer fails half-way."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, allowed[1]))
    try:
        done = call("convert", "pocket", str(tmp_path / "out" / "dest"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvant: error: ")
    assert "cannot be written" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command(tmp_path: Path) -> None:
    dest = tmp_path / "pocket-4bit"
    done = call("convert", "pocket", str(dest), "--bits", "4", "--group-size", "64")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"{dest}: 6.17 MB became 1.74 MB, 4.52 bits a weight\n"
    told = call("generate", "--model", str(dest), QUESTION, "-q", "-m", "24", "--temp", "0")
    assert (told.returncode, told.stderr) == (0, "cut at --max-tokens 24\n")
    assert "Pip" in told.stdout
    again = call("convert", "pocket", str(dest))
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith(f"kvant: error: {dest}: is there already")


USAGE_ERRORS = [
    (["--bits", "7"], "--bits is 7; expected for affine: 2, 3, 4, 5, 6, 8"),
    (["--group-size", "48"], "--group-size is 48; expected for affine: 32, 64, 128"),
    (["--mode", "mxfp4", "--group-size", "64"], "--group-size is 64; expected for mxfp4: 32"),
    (["--mode", "nvfp4", "--bits", "8"], "--bits is 8; expected for nvfp4: 4"),
    (["--mode", "gptq"], "--mode is 'gptq'; expected affine, mxfp4, mxfp8, nvfp4"),
    (["--dtype", "int8"], "--dtype is 'int8'; expected float16, bfloat16, float32"),
    (["--bits", "0"], "--bits is 0, which changes nothing without --dtype"),
    (["--bits", "0", "--dtype", "float16", "--group-size", "32"], "--group-size is 32, but 0 bits do not quantize"),
    (["--bits", "0", "--dtype", "float16", "--mode", "mxfp4"], "--mode is 'mxfp4', but 0 bits do not quantize"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE_ERRORS)
def test_usage_errors(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = call("convert", "pocket", str(tmp_path / "dest"), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvant: error: ")
    assert message in done.stderr
    assert not (tmp_path / "dest").exists()
