"""``kvant plan`` of one machine and of several, and a run that does not fit, as their user meets them."""

import json
import os
import re
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx.utils import tree_flatten
from support.bridged import write_mlx_lm
from support.checkpoints import qwen2_config, qwen3_config, qwen3_moe_config, reference_model, save_checkpoint
from support.command import call, refusal

from kvant import weights
from kvant.cache import CacheOptions
from kvant.cli import plan as command
from kvant.cli import session
from kvant.cli.fitting import ranks_for, ranks_that_fit
from kvant.cli.options import BadValueError
from kvant.engine.load import POCKET, find_model
from kvant.errors import ContextError, KvantError, ModelError
from kvant.machine import Device, Machine, machine_with
from kvant.models import Decoder
from kvant.plan import Checkpoint, RankPlanner, Settings, plan, split_pairs
from kvant.sizes import format_bytes
from kvant.tools.bench.shapes import SHAPES


def machine(limit_bytes: int, device: Device = "cpu") -> Machine:
    return Machine(device, 2 * limit_bytes, limit_bytes, "a small machine")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
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
    sizes = {
        "weights": made.weights,
        "cache": made.cache,
        "prefill scratch": made.scratch,
        "total": made.total,
    }
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
    (tmp_path / "config.json").write_text(
        json.dumps(_raw("qwen2.5-0.5b" if memory == "2000MB" else "qwen2.5-7b"))
    )
    run = [
        "plan",
        str(tmp_path),
        "--device",
        "gpu",
        "--memory",
        memory,
        "--max-kv-size",
        "32768",
        "--kv-bits",
        "0",
    ]
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


def test_heads_that_32_does_not_divide_have_every_format(tmp_path: Path) -> None:
    """In groups of 16, of heads of 80."""
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config(head_dim=80)))
    for memory, expected in (("8GB", 0), ("100MB", 1)):
        done = call("plan", str(tmp_path), "--kv-bits", "0", "--device", "cpu", "--memory", memory)
        assert done.returncode == expected
        assert " 32 bits " in done.stdout
        assert " 8 bits " in done.stdout
    assert call("plan", str(tmp_path)).returncode == 0
    assert call("plan", str(tmp_path), "--kv-group-size", "32").returncode == 2


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
    monkeypatch.setattr(
        command, "find_model", lambda name: (_ for _ in ()).throw(ModelError(f"{name} is not here"))
    )
    done = call("plan", "qwen2.5-0.5b", "--json", "--device", "cpu", "--memory", "8GB")
    assert done.returncode == 0
    assert json.loads(done.stdout)["bytes"]["weights"] > 494_000_000 * 4
    assert "unlisted is not here" in call("plan", "unlisted").stderr


def test_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = qwen2_config()
    del raw["tie_word_embeddings"]
    untied = Checkpoint.from_facts(raw | {"tie_word_embeddings": False}).stored_bytes
    sizes = {
        "config.json": 500,
        "a.safetensors": untied - 3000,
        "b.safetensors": 4000,
        "tokenizer.json": 10**9,
    }
    monkeypatch.setattr(weights, "remote_facts", {"owner/model@main": (raw, sizes)}.__getitem__)
    done = call("plan", "owner/model@main", "--remote", "--json", "--device", "gpu", "--memory", "8GB")
    assert (
        json.loads(done.stdout)["bytes"]["weights"]
        == Checkpoint.from_facts(raw, untied).loading(on_cpu=False).resident
    )


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


def test_auto_reserves_the_longest_that_fits(
    small: Any, pocket_folder: Path, pocket: tuple[Decoder, Any]
) -> None:
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
    for version, refused in (("14.7.1", True), ("15.0", False), ("26.1", False)):
        monkeypatch.setattr("platform.mac_ver", lambda version=version: (version, ("", "", ""), "arm64"))
        with (
            pytest.raises(BadValueError, match=r"macOS 14\.7\.1 .*expected 15") if refused else nullcontext()
        ):
            session.wire(7)
    assert wired[1:] == [7, 7]


def test_an_adapter_is_counted(tmp_path: Path) -> None:
    (tmp_path / "adapters.safetensors").write_bytes(bytes(1000))
    without, with_it = (
        json.loads(call("plan", "--json", "--device", "cpu", *flags).stdout)["bytes"]["weights"]
        for flags in ([], ["--adapter-path", str(tmp_path)])
    )
    assert with_it == without + 3000


def _with_pockets_tokenizer(folder: Path, config: dict[str, Any], model: Any) -> str:
    save_checkpoint(folder, config, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_model(POCKET) / name, folder)
    return str(folder)


def test_what_is_planned_is_what_generate_reserves(tmp_path: Path) -> None:
    """To the byte, where no bias decides of tables."""
    config = qwen3_config(vocab_size=1280)
    folder = _with_pockets_tokenizer(tmp_path, config, reference_model(config))
    for flags in (
        ["--kv-bits", "4"],
        ["--max-kv-size", "auto"],
        ["--max-kv-size", "33", "--kv-group-size", "8"],
    ):
        made = json.loads(call("plan", folder, "--json", *flags).stdout)
        done = call("generate", "Hello", "--model", folder, "-m", "1", *flags)
        line = f"cache: {made['max_kv_size']} tokens reserved, {made['kv_bits']} bits in groups of"
        fitted = ", keys rotated"
        if made["kv_bits"] == 4:
            fitted = ", scales fitted, keys and values rotated, first 4 and last 108 tokens exact"
        size = format_bytes(made["bytes"]["cache"])
        assert done.stderr.startswith(f"{line} {made['kv_group_size']}{fitted}, {size}\n")


def test_what_the_weights_split_off_is_planned_again_once_it_is_known(tmp_path: Path, small: Any) -> None:
    """Large biases in every rotary pair: their tables are many times what was guessed from config.json."""
    config = qwen2_config(vocab_size=1280)
    model = reference_model(config)
    model.load_weights(
        [(k, 1e4 * v) for k, v in tree_flatten(model.parameters()) if k.endswith("k_proj.bias")], False
    )
    run = ["generate", "Hello", "--model", _with_pockets_tokenizer(tmp_path, config, model)]
    run += ["-m", "1", "--prefill-step-size", "8"]
    checkpoint, settings = Checkpoint.from_folder(tmp_path), Settings(prefill_step_size=8)
    guessed, known = (
        plan(checkpoint, max_kv_size=1024, settings=settings, device="cpu", split_pairs=pairs)
        for pairs in (None, [config["hidden_size"] // config["num_attention_heads"] // 2] * 2)
    )
    small((guessed.total + known.total) // 2)
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


GB = 2**30


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(_raw("qwen2.5-7b")))
    return str(tmp_path)


def machines(*sizes: int) -> list[Machine]:
    return [machine_with(size * GB, "gpu") for size in sizes]


def test_table_and_json_have_the_numbers_of_each_machine(folder: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(
        json.dumps([{"ssh": name, "ips": [f"10.0.0.{n}"]} for n, name in enumerate(["studio", "mini"])])
    )
    run = ("plan", folder, "--hostfile", str(hosts), "--device", "gpu", "--memory", "16GB,8GB")
    done = call(*run)
    assert (done.returncode, done.stderr) == (0, "")
    assert "on 2 machines, --parallel pipeline" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("/"))
    record = json.loads(call(*run, "--json").stdout)
    assert (record["parallel"], record["fits"], record["max_kv_size"]) == ("pipeline", True, 4096)
    planner = RankPlanner(Checkpoint.from_folder(Path(folder)), machines(16, 8), "pipeline")
    made = planner.plan(4096)
    cells = {line.split("  ")[0]: re.split(r" {2,}", line)[1:] for line in done.stdout.splitlines()}
    for rank, (held, own, longest) in enumerate(zip(made.plans, made.layers, made.longest(), strict=True)):
        found, host = record["ranks"][rank], ["studio", "mini"][rank]
        assert (found["rank"], found["host"], found["fits"]) == (rank, host, True)
        assert (found["layers"], found["longest_context"]) == ([own.start, own.stop], longest.tokens)
        assert cells["host"][rank] == host
        assert cells["layers"][rank] == f"{own.start} to {own.stop - 1}"
        assert cells["longest"][rank] == str(longest.tokens)
        for name in ("weights", "cache", "scratch", "total"):
            assert found["bytes"][name] == getattr(held, name)
            assert cells[name][rank] == format_bytes(getattr(held, name))
    assert re.search(rf"^  pipeline +\d+ +{planner.longest().tokens} +\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^  tensor +none +none +none$", done.stdout, re.MULTILINE)
    assert [found["bits"] for found in record["longest_context"]["pipeline"]] == [16, 8, 4]
    assert all(found["tokens"] == 0 for found in record["longest_context"]["tensor"])


def test_machines_that_are_alike(folder: str) -> None:
    for flags in (["--ranks", "3", "--memory", "8GB"], ["--memory", "8GB,8GB,8GB"]):
        record = json.loads(call("plan", folder, "--device", "gpu", "--json", *flags).stdout)
        assert [each["machine"]["memory_bytes"] for each in record["ranks"]] == [8 * GB] * 3
        layers = [each["layers"] for each in record["ranks"]]
        assert [layers[0][0], layers[-1][1]] == [0, 28]
        assert [last for _, last in layers[:-1]] == [first for first, _ in layers[1:]]
    done = call("plan", "pocket", "--ranks", "2", "--device", "cpu")
    assert "all machines are assumed to be like this one; --memory says what they have" in done.stdout
    words = call("plan", folder, "--ranks", "7", "--memory", "16GB", "--device", "gpu").stdout
    assert "\nrank 6" in words  # a line for each, where so many columns would be too wide
    assert "  tensor: 7 ranks cannot divide" not in words


def test_a_model_that_cannot_be_divided(tmp_path: Path) -> None:
    run = ("plan", str(write_mlx_lm(tmp_path / "model", "gemma3_text")), "--ranks", "2", "--memory", "8GB")
    done = call(*run)
    assert done.returncode == 0
    assert "  tensor: gemma3_text is mlx-lm's model" in done.stdout
    for flags in (["--parallel", "tensor"], ["--sequences", "2"]):
        assert call(*run, *flags).returncode == 1


def test_a_run_is_refused_with_the_numbers() -> None:
    checkpoint, settings = Checkpoint.from_facts(_raw("qwen2.5-7b")), Settings(cache=CacheOptions(kv_bits=0))
    made = ranks_for(checkpoint, settings, 32768, machines(16, 8))
    held = made.plans[made.fullest]
    own = made.layers[made.fullest]
    with pytest.raises(ContextError) as refused:
        ranks_that_fit(checkpoint, settings, 32768, machines(16, 8))
    line = str(refused.value)
    assert line.startswith(
        f"32768 tokens need {format_bytes(held.total)} on rank {made.fullest} of 2 with layers "
    )
    assert f"{own.start} to {own.stop - 1} (weights {format_bytes(held.weights)}, cache " in line
    assert f"there are {format_bytes(made.machines[made.fullest].limit_bytes)} (" in line
    tokens = int(re.findall(r"; --max-kv-size (\d+)", line)[0])
    assert ranks_that_fit(checkpoint, settings, tokens, machines(16, 8)).fits
    assert ranks_that_fit(checkpoint, settings, "auto", machines(16, 8)).plans[0].max_kv_size == tokens
    for asked, count, words in (
        (tokens + 1, [16, 8], f"need .*; --max-kv-size {tokens} "),
        (40_000, [16, 8], "40000; the model's context is 32768"),
        (100, [16] * 29, "29 ranks"),
    ):
        with pytest.raises(KvantError, match=words):
            ranks_that_fit(checkpoint, settings, asked, machines(*count))


def test_tensor_parallel_is_chosen_where_it_alone_fits() -> None:
    """A long step's scratch is that of all heads in a stage, and of some in a share."""
    checkpoint = Checkpoint.from_facts(_raw("qwen2.5-0.5b"))
    settings = Settings(prefill_step_size=8192)
    found = [
        RankPlanner(checkpoint, machines(8, 8), kind, settings).plan(32768) for kind in ("pipeline", "tensor")
    ]
    most = [max(plan.total for plan in made.plans) for made in found]
    assert most[1] < most[0]
    between = [Machine("gpu", limit, limit, "a test") for limit in [sum(most) // 2] * 2]
    assert ranks_for(checkpoint, settings, 32768, between).parallel == "tensor"
    assert ranks_for(checkpoint, settings, 32768, machines(8, 8)).parallel == "pipeline"
    assert not ranks_for(checkpoint, settings, 32768, between, "pipeline").fits
