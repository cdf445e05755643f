"""``kvant convert``: what it writes is read by kvant and by mlx-lm with the same logits; whole or not at
all.
"""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx_lm.convert import configure_parser
from support.checkpoints import (
    CONFIGS,
    change_tensors,
    llama_config,
    qwen2_config,
    reference_logits,
    reference_model,
    save_checkpoint,
    stored_by_transformers,
)
from support.command import QUESTION, call
from support.numbers import relative_error
from support.runs import Run

import kvant
from kvant.engine.load import POCKET, find_model, load_model
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


def _source(folder: Path, config: dict[str, Any], model: nn.Module, shards: int = 1) -> Path:
    save_checkpoint(folder, config, model, shards)
    for name in TOKENIZER:
        shutil.copy(find_model(POCKET) / name, folder)
    return folder


Make = Callable[..., Path]


@pytest.fixture
def make_source(tmp_path: Path) -> Make:
    (tmp_path / "out").mkdir()
    return lambda shards=1, **changes: _source(
        tmp_path / "source", _config(**changes), _reference(**changes), shards
    )


def _check_loads(folder: Path) -> mx.array:
    """kvant and mlx-lm load it, with the same logits; kvant generates. The logits. Its tokenizer:
    test_the_command.
    """
    model = load_model(folder)
    logits = model(mx.array([IDS]))[0]
    reference, _ = mlx_lm.utils.load_model(folder)
    reference.set_dtype(mx.float32)  # as kvant computes on a CPU
    assert relative_error(logits, reference_logits(reference, IDS)) < TOLERANCE
    cache = model.make_cache(len(IDS) + 3, kv_bits=0)
    tokens = [token for token, _ in Run(model, IDS, cache, max_tokens=3)]
    assert tokens[0] == logits[-1].argmax().item()
    return logits


def _tensors(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "model.safetensors"))  # type: ignore[return-value]


def _settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def _change(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None leaves one out."""
    raw = {key: value for key, value in (_settings(folder) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))


def _refused(source: Path, kind: type[KvantError], message: str, to: WeightFormat = FOUR_BITS) -> None:
    """One line; nothing is written, not even beside the destination."""
    out = source.parent / "out"
    with pytest.raises(kind, match=message) as caught:
        convert_folder(source, out / "dest", to)
    assert "\n" not in str(caught.value)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("bits", "group_size", "mode", "tied"),
    [(4, 32, "affine", True), (8, 64, "affine", False), (3, 64, "affine", True), (6, 128, "affine", False),
     (4, 32, "mxfp4", True), (8, 32, "mxfp8", True), (4, 16, "nvfp4", True)],
)  # fmt: skip
def test_every_format(
    make_source: Make, tmp_path: Path, bits: int, group_size: int, mode: str, tied: bool
) -> None:
    source, dest = make_source(tie_word_embeddings=tied), tmp_path / "dest"
    done = convert_folder(source, dest, WeightFormat.choose(bits, group_size, mode))
    expected = _reference(tie_word_embeddings=tied)
    nn.quantize(expected, group_size, bits, mode=mode)
    assert relative_error(_check_loads(dest), reference_logits(expected, IDS)) < TOLERANCE
    sizes = [sum(array.nbytes for array in _tensors(folder).values()) for folder in (source, dest)]
    assert [done.source_bytes, done.bytes] == sizes
    # A scale and a bias in float32 for each group, or a byte; 0.5 % of the weights are norms and biases in
    # float32.
    assert done.bits_per_weight == pytest.approx(bits + (64 if mode == "affine" else 8) / group_size, abs=0.2)
    assert done.unquantized == ()
    config = _settings(dest)
    assert config["quantization"] == {"group_size": group_size, "bits": bits, "mode": mode}
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": THETA}
    assert config["rope_theta"] == load_model(dest).config.rope.theta == THETA
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "out", "source"]


@pytest.mark.filterwarnings("ignore:config.json ties the output head")
@pytest.mark.parametrize("alone", [False, True])
def test_a_head_that_config_json_ties(tmp_path: Path, alone: bool) -> None:
    """One that differs is converted too; one without an embedding is written as the embedding."""
    model = _reference(tie_word_embeddings=alone)
    source = _source(tmp_path / "source", _config(tie_word_embeddings=True), model)
    if alone:
        embedding = model.model.embed_tokens.weight
        changes = {"lm_head.weight": embedding, "model.embed_tokens.weight": None}
        change_tensors(source / "model.safetensors", changes)
    convert_folder(source, tmp_path / "dest", FOUR_BITS)
    assert _settings(tmp_path / "dest")["tie_word_embeddings"] == alone
    nn.quantize(model, 32, 4)
    assert relative_error(_check_loads(tmp_path / "dest"), reference_logits(model, IDS)) < TOLERANCE


def test_the_flags_of_mlx_lm_mean_what_they_mean_there(make_source: Make, tmp_path: Path) -> None:
    """Those of its documentation, which its own parser takes; -q is no --quiet."""
    source, flags = str(make_source()), ["-q", "--q-bits", "8", "--q-group-size", "32"]
    folders = [tmp_path / name for name in ("ours", "theirs")]
    theirs = configure_parser().parse_args(["--hf-path", source, "--mlx-path", str(folders[1]), *flags])
    mlx_lm.convert(**vars(theirs) | {"trust_remote_code": False})
    done = call("convert", "--hf-path", source, "--mlx-path", str(folders[0]), *flags)
    assert (done.returncode, "bits a weight" in done.stderr) == (0, True), done.stderr
    ours, expected = (_settings(folder)["quantization"] for folder in folders)
    assert ours == {key: value for key, value in expected.items() if key in ours}
    assert (ours["bits"], ours["group_size"]) == (8, 32)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    kind: (config, "affine") for kind, config in CONFIGS.items()
} | {
    # mlx-lm reads the converted file's rotary positions: it does not read transformers 5's.
    "yarn": (llama_config(rope_parameters=YARN), "affine"),
    "yarn, mxfp4": (llama_config(rope_parameters=YARN), "mxfp4"),
    # Groups of 32 divide a width of 96; those of 64 that mlx-lm takes for a router do not.
    "router": (CONFIGS["qwen3_moe"] | {"hidden_size": 96, "head_dim": 32}, "affine"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_architecture(tmp_path: Path, case: str) -> None:
    config = CASES[case][0] | {"vocab_size": 1280}
    source = _source(tmp_path / "source", config, reference_model(config))
    if "rope_parameters" in config:
        _change(source, rope_theta=None)
    done = convert_folder(source, tmp_path / "dest", WeightFormat.choose(4, 32, mode=CASES[case][1]))
    assert done.unquantized == (("model.layers.1.mlp.gate",) if case == "router" else ())
    _check_loads(tmp_path / "dest")


@pytest.mark.parametrize("way", ["each", "joined"])
@pytest.mark.parametrize(
    "to", [FOUR_BITS, WeightFormat.choose(mode="mxfp4"), WeightFormat.choose(0, dtype="bfloat16")]
)
def test_experts_as_transformers_stores_them(tmp_path: Path, way: str, to: WeightFormat) -> None:
    config = CONFIGS["qwen3_moe"] | {"vocab_size": 1280}
    stacked = _source(tmp_path / "stacked", config, reference_model(config))
    del config["num_experts"], config["decoder_sparse_step"]
    source = _source(tmp_path / "source", config | {"num_local_experts": 8}, nn.Module())
    mx.save_safetensors(str(source / "model.safetensors"), stored_by_transformers(_tensors(stacked), way))
    done = convert_folder(source, tmp_path / "dest", to)
    convert_folder(stacked, tmp_path / "other", to)
    assert mx.array_equal(_check_loads(tmp_path / "dest"), load_model(tmp_path / "other")(mx.array([IDS]))[0])
    assert done.unquantized == ()
    if to.bits:
        gate = _settings(tmp_path / "dest")["quantization"]["model.layers.1.mlp.gate"]
        assert gate == {"group_size": 64, "bits": 8}


def test_another_dtype(make_source: Make, tmp_path: Path) -> None:
    source = make_source()
    done = convert_folder(source, tmp_path / "half", WeightFormat.choose(0, dtype="float16"))
    _check_loads(tmp_path / "half")
    assert (done.bits_per_weight, done.bytes, done.unquantized) == (16, done.source_bytes / 2, ())
    convert_folder(source, tmp_path / "dest", WeightFormat.choose(4, 64, dtype="bfloat16"))
    _check_loads(tmp_path / "dest")
    assert {array.dtype for array in _tensors(tmp_path / "dest").values()} == {mx.uint32, mx.bfloat16}
    assert _settings(tmp_path / "dest")["dtype"] == "bfloat16"


def test_widths_that_groups_do_not_divide(make_source: Make, tmp_path: Path) -> None:
    """mlx-lm leaves such a matrix in floating point and says nothing; kvant says so."""
    done = call(
        "convert", str(make_source(intermediate_size=288)), str(tmp_path / "dest"), "--group-size", "64"
    )
    assert done.returncode == 0
    assert done.stderr.splitlines()[1:] == [
        "not quantized, groups of 64 do not divide the width: model.layers.0.mlp.down_proj and 1 more"
    ]
    _check_loads(tmp_path / "dest")
    none = make_source(hidden_size=96, intermediate_size=96, num_attention_heads=3, num_key_value_heads=3)
    _refused(none, ConvertError, "groups of 64 divide the width of no matrix", WeightFormat.choose())


def test_an_output_head_that_config_does_not_mention(make_source: Make, tmp_path: Path) -> None:
    """transformers leaves tie_word_embeddings out where it has its default; mlx-lm's own would drop the
    head.
    """
    source = make_source(tie_word_embeddings=False)
    _change(source, tie_word_embeddings=None)
    logits = load_model(source)(mx.array([IDS]))[0]
    convert_folder(source, tmp_path / "dest", WeightFormat.choose(8, 32))
    assert relative_error(_check_loads(tmp_path / "dest"), logits) < 0.05


def test_shards_and_what_is_carried_over(
    make_source: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halves(weights: dict[str, mx.array]) -> list[dict[str, mx.array]]:
        names = list(weights)
        middle = len(names) // 2
        return [{name: weights[name] for name in half} for half in (names[:middle], names[middle:])]

    source, dest = make_source(shards=3), tmp_path / "dest"
    monkeypatch.setattr(mlx_lm.utils, "make_shards", halves)
    dest.mkdir()  # an empty folder is as good as none
    (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ 1 }}")
    (source / "modeling.py").write_text("raise SystemExit('executed')")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    convert_folder(source, dest, FOUR_BITS)
    tensors = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    carried = [*TOKENIZER, "chat_template.jinja", "additional_chat_templates/tool.jinja"]
    files = {str(path.relative_to(dest)) for path in dest.rglob("*") if path.is_file()}
    assert files == {"config.json", *tensors, "model.safetensors.index.json", *carried}
    assert all((dest / name).read_bytes() == (source / name).read_bytes() for name in carried)
    _check_loads(dest)
    assert (
        kvant.load(dest)[1].apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    )


def test_sources_that_are_refused(make_source: Make, tmp_path: Path) -> None:
    source = make_source()
    dest = tmp_path / "dest"
    convert_folder(source, dest, FOUR_BITS)
    _refused(dest, ConvertError, "already quantized")
    _change(dest, quantization=None, quantization_config=None)
    _refused(dest, ConvertError, "already quantized")
    (source / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    _refused(source, ModelError, r"no tokenizer\.json")
    (tmp_path / "tokenizer.json").rename(source / "tokenizer.json")
    (source / "model.py").write_text("raise SystemExit('executed')")
    _change(source, model_file="model.py")
    _refused(source, ModelError, "model_file")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        ({NORM: mx.full(128, float("nan"))}, None, f"{NORM} has values that are not finite in float32"),
        ({NORM: mx.full(128, 1e5)}, "float16", f"{NORM} has values that are not finite in float16"),
        ({NORM: mx.ones(7)}, None, f"{NORM} has shape"),
        ({"model.extra.weight": mx.ones(2)}, None, "unexpected tensor model.extra.weight"),
        ({"model.layers.0.mlp.up_proj.scales": mx.ones((256, 4))}, None, "already quantized"),
    ],
)
def test_bad_tensors(make_source: Make, change: dict[str, mx.array], dtype: str | None, message: str) -> None:
    source = make_source()
    weights = {name: mx.array(array) for name, array in _tensors(source).items()}
    mx.eval(weights)
    mx.save_safetensors(str(source / "model.safetensors"), weights | change)
    _refused(source, KvantError, message, WeightFormat.choose(4, 32, dtype=dtype))


def test_destinations_in_use(make_source: Make, tmp_path: Path) -> None:
    source = make_source()
    file, full, link = tmp_path / "file", tmp_path / "full", tmp_path / "link"
    file.write_text("mine")
    (full / "mine").mkdir(parents=True)
    link.symlink_to(tmp_path / "nowhere")
    taken = "exists already; expected a new folder's path or an empty folder"
    cases = [(str(dest), taken) for dest in (file, full, link, source)]
    cases += [
        (str(tmp_path / "no" / "such" / "dest"), r"no/such: no such folder; expected one to put dest into")
    ]
    cases += [(name, "cannot be a folder") for name in ("x" * 5000, "~nosuchuser/x")]
    for dest, message in cases:
        with pytest.raises(ConvertError, match=message):
            convert_folder(source, Path(dest), FOUR_BITS)
    assert (file.read_text(), [path.name for path in full.iterdir()]) == ("mine", ["mine"])


def test_no_room(make_source: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    _refused(make_source(), ConvertError, r"out: .* [kM]B are needed, 1.00 kB are free")


def test_a_write_that_fails(tmp_path: Path) -> None:
    """A file may not grow past a megabyte: MLX's own writer fails half-way."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, allowed[1]))
    try:
        done = call("convert", "pocket", str(tmp_path / "dest"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvant: error: ")
    assert "cannot be written" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path: Path) -> None:
    dest = tmp_path / "pocket-4bit"
    done = call("convert", "pocket", str(dest), "--bits", "4", "--group-size", "64")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"{dest}: 6.17 MB became 1.74 MB, 4.52 bits a weight\n"
    told = call("generate", "--model", str(dest), QUESTION, "-q", "-m", "24", "--temp", "0")
    assert (told.returncode, told.stderr) == (0, "cut at --max-tokens 24\n")
    assert "Pip" in told.stdout
