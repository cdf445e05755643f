"""``kvant plan`` of several machines, and a run on them that is refused, as their user meets them."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.bridged import write_mlx_lm
from support.command import call

from kvant.cli.fitting import ranks_for, ranks_that_fit
from kvant.errors import ContextError, ModelError
from kvant.machine import Machine, machine_with
from kvant.sizes import format_bytes
from kvant.tools.bench.shapes import SHAPES
from kvant.tools.plan import Checkpoint, RankPlanner, Settings

GB = 2**30


def raw(name: str) -> dict[str, Any]:
    """A published config.json."""
    return asdict(SHAPES[name]) | {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16"}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Of a model of 15 GB; its config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(raw("qwen2.5-7b")))
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


def test_the_table_has_the_numbers_of_each_machine(folder: str, hosts: str) -> None:
    done = call("plan", folder, "--hostfile", hosts, "--device", "gpu", "--memory", "16GB,8GB")
    assert (done.returncode, done.stderr) == (0, "")
    made = RankPlanner(Checkpoint.from_folder(Path(folder)), machines(16, 8), "pipeline").plan(4096)
    lines = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert "on 2 GPUs, --parallel pipeline, which fits" in done.stdout
    assert lines["host"].split() == ["host", "studio", "mini"]
    assert made.layers is not None
    for rank, (plan, own, found) in enumerate(zip(made.plans, made.layers, made.longest(), strict=True)):
        cells = {name: re.split(r" {2,}", line)[1:] for name, line in lines.items()}
        assert cells["layers"][rank] == f"{own.start} to {own.stop - 1}"
        for name, size in (("weights", plan.weights), ("cache", plan.cache), ("scratch", plan.scratch)):
            assert cells[name][rank] == format_bytes(size)
        assert cells["total"][rank] == format_bytes(plan.total)
        assert cells["longest"][rank] == str(found.tokens)
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("/"))
    longest = RankPlanner(Checkpoint.from_folder(Path(folder)), machines(16, 8), "pipeline").longest().tokens
    assert re.search(rf"^  pipeline +\d+ +{longest} +\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^  tensor +none +none +none$", done.stdout, re.MULTILINE)


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


def test_json(folder: str, hosts: str) -> None:
    flags = ("--device", "gpu", "--memory", "16GB,8GB", "--max-kv-size", "1000")
    record = json.loads(call("plan", folder, "--hostfile", hosts, "--json", *flags).stdout)
    made = RankPlanner(Checkpoint.from_folder(Path(folder)), machines(16, 8), "pipeline").plan(1000)
    assert (record["parallel"], record["fits"], record["max_kv_size"]) == ("pipeline", True, 1000)
    for rank, (found, plan) in enumerate(zip(record["ranks"], made.plans, strict=True)):
        assert (found["rank"], found["host"], found["fits"]) == (rank, ["studio", "mini"][rank], True)
        assert found["bytes"]["total"] == plan.total
        assert found["bytes"]["weights"] == plan.weights
    assert [found["bits"] for found in record["longest_context"]["pipeline"]] == [16, 8, 4]
    assert all(found["tokens"] == 0 for found in record["longest_context"]["tensor"])
    done = call("plan", folder, "--ranks", "5", "--device", "gpu", "--memory", "16GB", "--parallel", "tensor", "--json")
    assert json.loads(done.stdout)["ranks"][4].keys() == {"rank", "bytes", "machine", "fits", "longest_context"}


def test_what_would_fit_does(folder: str) -> None:
    """Each way that the refusal names, given to the same command, is a plan that fits."""
    plans = [["--memory", "8GB,8GB"], ["--memory", "8GB,12GB", "--max-kv-size", "32768", "--kv-bits", "0"]]
    for flags in plans:
        run = ["plan", folder, "--device", "gpu", "--prefill-step-size", "4096", *flags]
        done = call(*run)
        assert done.returncode == 1
        verdict = next(line for line in done.stdout.splitlines() if line.startswith("does not fit: "))
        ways = re.findall(r"--.*?(?= or --| would fit|: )", verdict.partition("`kvant")[0])
        assert ways, verdict
        for way in ways:
            assert call(*run, *way.split()).returncode == 0, (verdict, way)
        more = re.search(r"; (\d+) (such machines|machines, the further ones with ([\d.]+ GB),) would fit$", verdict)
        assert more, verdict
        sizes = flags[1].split(",")
        fits = {
            number: call(*run, "--memory", ",".join([*sizes, *[sizes[-1]] * (number - 2)])).returncode == 0
            for number in (int(more[1]) - 1, int(more[1]))
        }
        assert list(fits.values()) == [False, True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "1"], "--ranks is 1; expected 2 to 256"),
        (["--ranks", "3", "--memory", "8GB,8GB"], "--memory has 2 sizes for 3 machines; expected one, or one for each"),
        (["--memory", "8GB,8"], "--memory is '8'; expected a size such as 8GB"),
        (["--parallel", "tensor"], "--parallel tensor divides a model among ranks; --ranks says how many"),
        (["--parallel", "both", "--ranks", "2"], "--parallel is 'both'; expected pipeline or tensor"),
        (["--hostfile", "no/such.json"], "--hostfile: "),
        (["--hostfile", "HOSTS", "--ranks", "2"], "--ranks is 2, and --hostfile names the machines"),
        (["--hostfile", "HOSTS", "--memory", "1GB,1GB,1GB"], "--memory has 3 sizes for 2 machines"),
    ],
)
def test_flags_that_do_not_go_together(hosts: str, flags: list[str], message: str) -> None:
    done = call("plan", *[hosts if flag == "HOSTS" else flag for flag in flags])
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_model_that_cannot_be_divided(tmp_path: Path) -> None:
    done = call("plan", "pocket", "--ranks", "5")
    assert (done.returncode, done.stdout) == (1, "")
    assert "4 layers cannot be dealt out to 5 ranks: each needs one" in done.stderr
    folder = write_mlx_lm(tmp_path / "model", "gemma3_text")
    done = call("plan", str(folder), "--ranks", "2", "--device", "cpu", "--memory", "8GB")
    assert done.returncode == 0
    assert "  tensor: gemma3_text is mlx-lm's model: its tensors are not divided" in done.stdout
    done = call("plan", str(folder), "--ranks", "2", "--parallel", "tensor")
    assert (done.returncode, done.stdout) == (1, "")
    done = call("plan", str(folder), "--ranks", "2", "--sequences", "2")
    assert done.returncode == 1
    assert "on several machines takes one sequence at a time" in done.stderr


def test_a_run_is_refused_with_the_numbers() -> None:
    checkpoint = Checkpoint.from_facts(raw("qwen2.5-7b"))
    with pytest.raises(ContextError) as refused:
        ranks_that_fit(checkpoint, Settings(kv_bits=0), 32768, machines(16, 8))
    made = ranks_for(checkpoint, Settings(kv_bits=0), 32768, machines(16, 8))
    assert not made.fits
    rank = made.fullest
    plan, line = made.plans[rank], str(refused.value)
    assert "\n" not in line
    assert made.layers is not None
    own = made.layers[rank]
    assert line.startswith(
        f"32768 tokens need {format_bytes(plan.total)} on rank {rank} of 2 with layers {own.start} to "
        f"{own.stop - 1} (weights {format_bytes(plan.weights)}, cache {format_bytes(plan.cache)}, prefill scratch "
        f"{format_bytes(plan.scratch)}); there are {format_bytes(made.machines[rank].limit_bytes)} (about 2/3 of the "
    )
    tokens = re.search(r"; --max-kv-size (\d+)", line)
    assert tokens
    assert ranks_that_fit(checkpoint, Settings(kv_bits=0), int(tokens[1]), machines(16, 8)).fits
    with pytest.raises(ContextError, match=f"need .*; --max-kv-size {tokens[1]} "):
        ranks_that_fit(checkpoint, Settings(kv_bits=0), int(tokens[1]) + 1, machines(16, 8))
    auto = ranks_that_fit(checkpoint, Settings(kv_bits=0), "auto", machines(16, 8))
    assert auto.plans[0].max_kv_size == int(tokens[1])
    with pytest.raises(ContextError, match="--max-kv-size is 40000; the model's context is 32768 tokens"):
        ranks_that_fit(checkpoint, Settings(), 40_000, machines(16, 8))
    with pytest.raises(ModelError, match="29 ranks"):
        ranks_that_fit(checkpoint, Settings(), 100, machines(*[16] * 29))


def test_tensor_parallel_is_chosen_where_it_alone_fits() -> None:
    """A long step's scratch is that of all heads in a stage, and of some in a share."""
    checkpoint = Checkpoint.from_facts(raw("qwen2.5-0.5b"))
    settings = Settings(prefill_step_size=8192)
    found = [RankPlanner(checkpoint, machines(8, 8), kind, settings).plan(32768) for kind in ("pipeline", "tensor")]
    most = [max(plan.total for plan in made.plans) for made in found]
    assert most[1] < most[0]
    between = [Machine("gpu", limit, limit, "a test") for limit in [sum(most) // 2] * 2]
    assert ranks_for(checkpoint, settings, 32768, between).parallel == "tensor"
    assert ranks_for(checkpoint, settings, 32768, machines(8, 8)).parallel == "pipeline"
    assert not ranks_for(checkpoint, settings, 32768, between, "pipeline").fits
