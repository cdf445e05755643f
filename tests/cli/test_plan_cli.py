"""``kvant plan``, and generate and chat refusing what does not fit, as their user meets them."""

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx.utils import tree_flatten
from support.checkpoints import qwen2_config, qwen3_config, qwen3_moe_config, reference_model, save_checkpoint
from support.command import call, refusal

from kvant import weights
from kvant.cache import CacheOptions
from kvant.cli import plan as command
from kvant.cli import session
from kvant.errors import ModelError
from kvant.machine import Device, Machine
from kvant.models import Decoder
from kvant.sizes import format_bytes
from kvant.tools.bench.shapes import SHAPES
from kvant.tools.plan import Checkpoint, Settings, plan, split_pairs


def machine(limit_bytes: int, device: Device = "cpu") -> Machine:
    """One with this little."""
    return Machine(device, 2 * limit_bytes, limit_bytes, "a small machine")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function (bytes): this machine has no more."""

    def make(limit_bytes: int) -> None:
        for module in (command, session):
            monkeypatch.setattr(module, "this_machine", lambda device=None: machine(limit_bytes))

    return make


def test_the_table_and_json(pocket_folder: Path) -> None:
    settings = Settings(cache=CacheOptions(kv_bits=4))
    made = plan(Checkpoint.from_folder(pocket_folder), max_kv_size=1000, settings=settings, device="cpu")
    flags = ["plan", "pocket", "--max-kv-size", "1000", "--kv-bits", "4", "--device", "cpu", "--memory"]
    done = call(*flags, "1GB")
    assert (done.returncode, done.stderr) == (0, "")
    sizes = {"weights": made.weights, "cache": made.cache, "prefill scratch": made.scratch, "total": made.total}
    for name, count in (sizes | {"process": made.process, "limit": 2**30}).items():
        assert re.search(rf"^{name} +{count:,} +[\d.]+ [kMG]B", done.stdout, re.MULTILINE), name
    assert "1000 tokens at 4 bits" in done.stdout
    assert "\nfits, " in done.stdout
    for bits in (32, 8, 4):
        assert re.search(rf"^ +{bits} bits +2048 tokens, the model's own$", done.stdout, re.MULTILINE)
    refused = call(*flags, "150MB", "--json")
    record = json.loads(refused.stdout)
    assert (refused.returncode, refused.stderr, record["fits"], record["max_kv_size"]) == (1, "", False, 1000)
    assert record["bytes"]["total"] == made.total > 150 * 2**20 == record["machine"]["limit_bytes"]
    assert [found["tokens"] for found in record["longest_context"]] == [0, 0, 0]
    settings_names = ("kv_bits", "kv_group_size", "kv_bias_split", "prefill_step_size", "sequences")
    assert [record[name] for name in settings_names] == [4, 32, True, 512, None]


def test_the_lines_add_up(tmp_path: Path) -> None:
    """If loading takes the most, its line has what it takes beyond the others."""
    config = qwen2_config(vocab_size=80_000, hidden_size=64, intermediate_size=64)
    save_checkpoint(tmp_path, config, reference_model(config))
    shown = call("plan", str(tmp_path), "--device", "cpu", "--memory", "8GB", "--max-kv-size", "1").stdout
    found = re.findall(r"^([a-z ]+?) +([\d,]+) +[\d.]+ ", shown, re.M)
    counts = {name.strip(): int(count.replace(",", "")) for name, count in found}
    total, _ = counts.pop("total"), counts.pop("limit")
    assert sum(counts.values()) == total
    assert "loading" in counts


@pytest.mark.parametrize(("memory", "count"), [("8GB", 0), ("2000MB", 2), ("24GB", 2)])
def test_a_plan_that_fails_names_flags_that_fit(tmp_path: Path, memory: str, count: int) -> None:
    """Each of them, given to the same command, is a plan that fits; if none is named, none does."""
    (tmp_path / "config.json").write_text(json.dumps(_raw("qwen2.5-0.5b" if memory == "2000MB" else "qwen2.5-7b")))
    run = ["plan", str(tmp_path), "--device", "gpu", "--memory", memory, "--max-kv-size", "32768", "--kv-bits", "0"]
    done = call(*run)
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if line.startswith("does not fit: "))
    ways = [way.split() for way in re.findall(r"--.*?(?= or --| would fit)", line)]
    assert len(ways) == count, line
    for way in ways:
        assert call(*run, *way).returncode == 0, way
    if not ways:
        assert "no context fits" in line
        assert call(*run, "--max-kv-size", "1", "--kv-bits", "4").returncode == 1
        assert call(*run, "--weight-bits", "4", "--kv-bits", "4", "--max-kv-size", "4096").returncode == 0


def test_a_format_that_the_model_cannot_have_is_left_out(tmp_path: Path) -> None:
    """Groups of 32 do not divide heads of 80."""
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config(head_dim=80)))
    for memory, expected in (("8GB", 0), ("100MB", 1)):
        done = call("plan", str(tmp_path), "--kv-bits", "0", "--device", "cpu", "--memory", memory)
        assert done.returncode == expected
        assert " 32 bits " in done.stdout
        assert " 8 bits " not in done.stdout
    assert call("plan", str(tmp_path)).returncode == 2


def test_experts_that_are_held_and_read(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config := qwen3_moe_config(), reference_model(config))
    made = plan(Checkpoint.from_folder(tmp_path), max_kv_size=100, device="cpu")
    flags = ("plan", str(tmp_path), "--max-kv-size", "100", "--device", "cpu", "--memory", "1GB")
    words = " ".join(call(*flags).stdout.split())
    assert f"32 bits, untied; a token reads {format_bytes(made.weights_read)}, 2 of 8 experts" in words
    sizes = json.loads(call(*flags, "--json").stdout)["bytes"]
    assert sizes["weights_read"] == made.weights_read < made.weights == sizes["weights"]


def _raw(name: str) -> dict[str, Any]:
    return asdict(SHAPES[name]) | {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16"}


def test_a_listed_model_that_was_not_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    files = (SimpleNamespace(name="model.safetensors", bytes=None),)
    listed = SimpleNamespace(config=_raw("qwen2.5-0.5b"), files=files)
    monkeypatch.setattr(weights, "known_models", lambda: {"qwen2.5-0.5b": listed})
    monkeypatch.setattr(command, "find_model", lambda name: (_ for _ in ()).throw(ModelError(f"{name} is not here")))
    done = call("plan", "qwen2.5-0.5b", "--json", "--device", "cpu", "--memory", "8GB")
    assert done.returncode == 0
    assert json.loads(done.stdout)["bytes"]["weights"] > 494_000_000 * 4
    assert "unlisted is not here" in call("plan", "unlisted").stderr


def test_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = qwen2_config()
    del raw["tie_word_embeddings"]
    untied = Checkpoint.from_facts(raw | {"tie_word_embeddings": False}).stored_bytes
    sizes = {"config.json": 500, "a.safetensors": untied - 3000, "b.safetensors": 4000, "tokenizer.json": 10**9}
    monkeypatch.setattr(weights, "remote_facts", {"owner/model@main": (raw, sizes)}.__getitem__)
    done = call("plan", "owner/model@main", "--remote", "--json", "--device", "gpu", "--memory", "8GB")
    assert json.loads(done.stdout)["bytes"]["weights"] == Checkpoint.from_facts(raw, untied).loading(on_cpu=False).held


def test_generate_refuses_before_it_loads(small: Any, monkeypatch: Any, pocket_folder: Path) -> None:
    monkeypatch.setattr(session, "load_folder", lambda *_: pytest.fail("the weights were loaded"))
    checkpoint = Checkpoint.from_folder(pocket_folder)
    limit = plan(checkpoint, max_kv_size=900, device="cpu").total
    small(limit)
    for arguments in (["generate", "Hello", "--max-kv-size", "2048"], ["chat", "--max-kv-size", "2048"]):
        error = refusal(1, *arguments)
        assert error.startswith("kvant: error: 2048 tokens need ")
        assert "(weights 12.35 MB, cache 2.36 MB, " in error
        assert f"there are {format_bytes(limit)} (a small machine)" in error
        found = re.search(r"; --max-kv-size (\d+)( or --kv-bits 4)? would fit$", error)
        assert found, error
    tokens = int(found[1])
    totals = [plan(checkpoint, max_kv_size=n, device="cpu").total for n in (tokens, tokens + 1)]
    assert totals[0] <= limit < totals[1]


def test_auto_reserves_the_longest_that_fits(small: Any, pocket_folder: Path, pocket: tuple[Decoder, Any]) -> None:
    def reserved(limit_bytes: int) -> int:
        small(limit_bytes)
        done = call("generate", "Hello", "-m", "2", "--max-kv-size", "auto")
        return int(re.findall(r"^cache: (\d+) tokens reserved", done.stderr, re.MULTILINE)[0])

    def total(tokens: int, pairs: Any = None) -> int:
        return plan(checkpoint, max_kv_size=tokens, device="cpu", split_pairs=pairs).total

    checkpoint, pairs = Checkpoint.from_folder(pocket_folder), split_pairs(pocket[0])
    assert reserved(10**10) == 2048
    assert (found := reserved(total(700))) >= 700
    assert total(found, pairs) <= total(700) < total(found + 1, pairs)


def test_memory_is_wired_when_it_is_asked_for_and_only_then(
    monkeypatch: pytest.MonkeyPatch, pocket_folder: Path
) -> None:
    wired: list[int] = []
    monkeypatch.setattr(session.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(session, "default_device", lambda: "gpu")
    monkeypatch.setattr(session.mx, "set_wired_limit", wired.append)
    monkeypatch.setattr(session, "this_machine", lambda: machine(10**10))
    for asked in (False, True):
        session.open_session(session.RunOptions(max_kv_size="50", wired=asked, quiet=True))
        assert len(wired) == asked
    assert wired == [plan(Checkpoint.from_folder(pocket_folder), max_kv_size=50, device="cpu").total]


def test_an_adapter_is_counted(tmp_path: Path) -> None:
    (tmp_path / "adapters.safetensors").write_bytes(bytes(1000))
    without, with_it = (
        json.loads(call("plan", "--json", "--device", "cpu", *flags).stdout)["bytes"]["weights"]
        for flags in ([], ["--adapter-path", str(tmp_path)])
    )
    assert with_it == without + 3000


@pytest.fixture
def save(tmp_path: Path, pocket_folder: Path) -> Any:
    """A function (config, model): its folder, with pocket's tokenizer."""

    def save(config: dict[str, Any], model: Any) -> Path:
        folder = save_checkpoint(tmp_path / "model", config, model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(pocket_folder / name, folder)
        return folder

    return save


def test_what_is_planned_is_what_generate_reserves(save: Any) -> None:
    """To the byte, where no bias decides of tables."""
    config = qwen3_config(vocab_size=1280)
    folder = str(save(config, reference_model(config)))
    for flags in (["--kv-bits", "4"], ["--max-kv-size", "auto"], ["--max-kv-size", "33", "--kv-group-size", "8"]):
        made = json.loads(call("plan", folder, "--json", *flags).stdout)
        done = call("generate", "Hello", "--model", folder, "-m", "1", *flags)
        line = f"cache: {made['max_kv_size']} tokens reserved, {made['kv_bits']} bits in groups of"
        assert done.stderr.startswith(f"{line} {made['kv_group_size']}, {format_bytes(made['bytes']['cache'])}\n")


def test_what_the_weights_split_off_is_planned_again_once_it_is_known(save: Any, small: Any) -> None:
    """Large biases in every rotary pair: their tables are many times what was guessed from config.json."""
    config = qwen2_config(vocab_size=1280)
    model = reference_model(config)
    model.load_weights([(k, 1e4 * v) for k, v in tree_flatten(model.parameters()) if k.endswith("k_proj.bias")], False)
    folder = save(config, model)
    checkpoint, settings = Checkpoint.from_folder(folder), Settings(prefill_step_size=8)
    guessed, known = (
        plan(checkpoint, max_kv_size=1024, settings=settings, device="cpu", split_pairs=pairs)
        for pairs in (None, [config["hidden_size"] // config["num_attention_heads"] // 2] * 2)
    )
    small((guessed.total + known.total) // 2)
    run = ["generate", "Hello", "--model", str(folder), "-m", "1", "--prefill-step-size", "8"]
    error = refusal(1, *run)
    assert f"1024 tokens need {format_bytes(known.total)}" in error
    (tokens,) = re.findall("; --max-kv-size ([0-9]+)", error)
    for size in (tokens, "auto"):
        assert call(*run, "--max-kv-size", size).stderr.startswith(f"cache: {tokens} tokens reserved")


def test_a_second_format_of_the_same_weights_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_raw("qwen2.5-0.5b"), "tie_word_embeddings": None}))
    for name in ("model-00001-of-00001.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 988_097_824)
        assert Checkpoint.from_folder(tmp_path).tied
