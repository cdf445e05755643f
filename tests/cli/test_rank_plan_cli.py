"""``kvant plan`` of several machines, and a run on them that is refused, as their user meets them."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from support.bridged import write_mlx_lm
from support.command import call

from kvant.cache import CacheOptions
from kvant.cli.fitting import ranks_for, ranks_that_fit
from kvant.errors import ContextError, KvantError
from kvant.machine import Machine, machine_with
from kvant.sizes import format_bytes
from kvant.tools.bench.shapes import SHAPES
from kvant.tools.plan import Checkpoint, RankPlanner, Settings

GB = 2**30
RAW = {  # published config.json's
    name: asdict(SHAPES[name]) | {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16"}
    for name in ("qwen2.5-0.5b", "qwen2.5-7b")
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Of a model of 15 GB; its config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(RAW["qwen2.5-7b"]))
    return str(tmp_path)


@pytest.fixture
def hosts(tmp_path: Path) -> str:
    """MLX's host file of two machines."""
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([{"ssh": name, "ips": [f"10.0.0.{n}"]} for n, name in enumerate(["studio", "mini"])]))
    return str(path)


def machines(*sizes: int) -> list[Machine]:
    """Macs with so many GB."""
    return [machine_with(size * GB, "gpu") for size in sizes]


def test_table_and_json_have_the_numbers_of_each_machine(folder: str, hosts: str) -> None:
    run = ("plan", folder, "--hostfile", hosts, "--device", "gpu", "--memory", "16GB,8GB")
    done = call(*run)
    assert (done.returncode, done.stderr) == (0, "")
    assert "on 2 machines, --parallel pipeline" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("/"))
    record = json.loads(call(*run, "--json").stdout)
    assert (record["parallel"], record["fits"], record["max_kv_size"]) == ("pipeline", True, 4096)
    planner = RankPlanner(Checkpoint.from_folder(Path(folder)), machines(16, 8), "pipeline")
    made = planner.plan(4096)
    cells = {line.split("  ")[0]: re.split(r" {2,}", line)[1:] for line in done.stdout.splitlines()}
    assert made.layers is not None
    for rank, (plan, own, longest) in enumerate(zip(made.plans, made.layers, made.longest(), strict=True)):
        found, host = record["ranks"][rank], ["studio", "mini"][rank]
        assert (found["rank"], found["host"], found["fits"]) == (rank, host, True)
        assert (found["layers"], found["longest_context"]) == ([own.start, own.stop], longest.tokens)
        assert cells["host"][rank] == host
        assert cells["layers"][rank] == f"{own.start} to {own.stop - 1}"
        assert cells["longest"][rank] == str(longest.tokens)
        for name in ("weights", "cache", "scratch", "total"):
            assert found["bytes"][name] == getattr(plan, name)
            assert cells[name][rank] == format_bytes(getattr(plan, name))
    assert re.search(rf"^  pipeline +\d+ +{planner.longest().tokens} +\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^  tensor +none +none +none$", done.stdout, re.MULTILINE)
    assert [found["bits"] for found in record["longest_context"]["pipeline"]] == [16, 8, 4]
    assert all(found["tokens"] == 0 for found in record["longest_context"]["tensor"])


def test_machines_that_are_alike(folder: str) -> None:
    """--ranks, with one size for all, or with none: as this machine."""
    for flags in (["--ranks", "3", "--memory", "8GB"], ["--memory", "8GB,8GB,8GB"]):
        record = json.loads(call("plan", folder, "--device", "gpu", "--json", *flags).stdout)
        assert [each["machine"]["memory_bytes"] for each in record["ranks"]] == [8 * GB] * 3
        layers = [each["layers"] for each in record["ranks"]]
        assert [layers[0][0], layers[-1][1]] == [0, 28]
        assert [last for _, last in layers[:-1]] == [first for first, _ in layers[1:]]
    done = call("plan", "pocket", "--ranks", "2", "--device", "cpu")
    assert "all machines are taken to be like this one; --memory says what they have" in done.stdout
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
    """And with what would fit, which does; one token more does not."""
    checkpoint, settings = Checkpoint.from_facts(RAW["qwen2.5-7b"]), Settings(cache=CacheOptions(kv_bits=0))
    made = ranks_for(checkpoint, settings, 32768, machines(16, 8))
    plan = made.plans[made.fullest]
    assert made.layers is not None
    own = made.layers[made.fullest]
    with pytest.raises(ContextError) as refused:
        ranks_that_fit(checkpoint, settings, 32768, machines(16, 8))
    line = str(refused.value)
    assert line.startswith(f"32768 tokens need {format_bytes(plan.total)} on rank {made.fullest} of 2 with layers ")
    assert f"{own.start} to {own.stop - 1} (weights {format_bytes(plan.weights)}, cache " in line
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
    checkpoint = Checkpoint.from_facts(RAW["qwen2.5-0.5b"])
    settings = Settings(prefill_step_size=8192)
    found = [RankPlanner(checkpoint, machines(8, 8), kind, settings).plan(32768) for kind in ("pipeline", "tensor")]
    most = [max(plan.total for plan in made.plans) for made in found]
    assert most[1] < most[0]
    between = [Machine("gpu", limit, limit, "a test") for limit in [sum(most) // 2] * 2]
    assert ranks_for(checkpoint, settings, 32768, between).parallel == "tensor"
    assert ranks_for(checkpoint, settings, 32768, machines(8, 8)).parallel == "pipeline"
    assert not ranks_for(checkpoint, settings, 32768, between, "pipeline").fits
