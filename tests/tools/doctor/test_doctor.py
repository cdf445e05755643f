"""`kvant doctor`: as its user meets it, of a GPU that is the host's Metal run, right and wrong, and of a
group.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from support.command import call, refusal
from support.counts import count
from support.fused_path import host_kernel
from support.metal_host import host_pytest_skip
from support.ranks import run_script

from kvant import machine
from kvant.cli.doctor import _group_parts
from kvant.machine import environment, machine_with
from kvant.operators import dispatch, kernel_record, probe
from kvant.operators.kernels import attend, launch
from kvant.operators.kernels.attend import HEAD_DIMS
from kvant.operators.probe import KernelUse
from kvant.tools.doctor import diagnosis, kernels
from kvant.tools.doctor.ranks import RankDiagnosis, RankFindings


def test_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it cannot check it says; a terminal gets the same as a program."""
    monkeypatch.delenv("KVANT_KERNELS", raising=False)
    done = call("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["environment"]["versions"] == machine.environment().versions
    assert found["device_info"] == mx.device_info()
    assert found["machine"]["memory_bytes"] >= found["machine"]["limit_bytes"] > 2**28
    assert found["compiler"]
    assert found["healthy"] is True
    assert all(path["reason"] for path in found["paths"])
    if mx.default_device().type == mx.cpu:
        assert found["kernels"] == []
        assert [text for text in found["unchecked"] if "was not run" in text and "host" in text]
        assert {path["path"] for path in found["paths"]} == {"unfused"}
        assert "not a GPU" in found["paths"][0]["reason"]
        assert min(found["memory_speed"].values()) > 0.01
    done = call("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("device: ", "memory: ", "BLAS: ", "compiler: ", "KeyValueCache", "not checked", "\nto do: "):
        assert text in done.stdout


def test_a_bad_variable_or_flag_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANT_KERNELS", "fused")
    assert call("generate", "hi", "--kernels", "unfused", "-m", "2").returncode == 0  # the flag wins
    monkeypatch.setenv("KVANT_KERNELS", "metal")
    for command in ("doctor", "report", "bench", "chat"):
        assert "KVANT_KERNELS is 'metal'; expected" in refusal(2, command)
    monkeypatch.delenv("KVANT_KERNELS")
    assert "--kernels is 'quick'; expected 'unfused' or 'fused'" in refusal(
        2, "generate", "hi", "--kernels", "quick"
    )


PLAIN = KernelUse(64, 64, mx.float16, 8, 32)


@pytest.fixture
def host_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor sees a GPU, whose kernel runs on the host. It tries a few small cases."""
    monkeypatch.setattr(kernels, "TIMED", ((4, 2, 64, 8), (2, 2, 64, 4), (2, 2, 64, 0), (2, 1, 128, 8)))
    monkeypatch.setattr(kernels, "TOKENS", 64)
    monkeypatch.setattr(probe, "ROWS", 128)
    monkeypatch.setattr(probe, "KV_HEADS", 2)
    monkeypatch.setattr(launch, "_kernel", host_kernel)
    for module in (diagnosis, machine):
        monkeypatch.setattr(module, "gpu_backend", lambda: "metal")
    monkeypatch.setattr(diagnosis, "this_machine", lambda: machine_with(2**34, "gpu"))
    monkeypatch.setattr(kernels, "REPEATS", 1)
    monkeypatch.setattr(kernels, "probe_failure", lambda use, backend: None)


def diagnosed(code: int) -> tuple[dict[str, Any], str]:
    """What the command finds, as JSON, and what it says of the same findings; both end with this code."""
    machine, person = (call("doctor", *flags) for flags in (["--json"], []))
    found = json.loads(machine.stdout)
    assert (machine.returncode, person.returncode, found["healthy"]) == (code, code, code == 0)
    return found, person.stdout


@host_pytest_skip
def test_a_kernel_that_is_right(host_gpu: None) -> None:
    found, text = diagnosed(0)
    start = found["start"]
    assert (start["cold_instances"], start["warm_instances"]) == (3, 3)  # 7 queries and 56 are groups of 4
    assert start["cold_ms"] > start["warm_ms"] > 0
    assert f"start of {start['use']}: 3 instances, " in text
    assert len(found["kernels"]) == len(kernels.TIMED)
    for result in found["kernels"]:
        assert result["problem"] is None
        assert 0 <= result["error"] <= result["tolerance"]
        assert min(result["fused_ms"], result["unfused_ms"]) > 0
    assert found["paths"][0]["path"] == "fused (metal)"


@host_pytest_skip
def test_a_format_that_the_kernel_does_not_run_for(host_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def failure(use: KernelUse, backend: str) -> str | None:
        return (
            f"{use}, 3 queries of a kv head: too large" if (use.head_dim, use.quant_bit) == (256, 4) else None
        )

    monkeypatch.setattr(kernels, "probe_failure", failure)
    monkeypatch.setattr(kernels, "TIMED", ())
    kernel_record.keep({replace(PLAIN, heads=7): "failed once"}, "metal")
    found, text = diagnosed(1)
    assert dispatch.resolve(uses=[replace(PLAIN, heads=7)]) == "metal"  # what was recorded is tried again
    wide = replace(PLAIN, head_dim=256, value_dim=256, quant_bit=4, tail_dtype=mx.float16)
    with pytest.warns(
        RuntimeWarning,
        match="heads of 256, 4 bits g32, float16, exact tail, 3 queries of a kv head: too large",
    ):
        assert dispatch.resolve(uses=[wide]) is None
    record = f"{kernel_record.path()}: {len(found['uses']) - 2} formats right on this device, 2 not"
    assert found["record"] == record
    assert f"record: {record}" in text
    assert len(found["uses"]) == len(HEAD_DIMS) * 6
    of = "3 queries of a kv head: too large"
    said = [f"heads of 256, 4 bits g32, {dtype}, exact tail, {of}" for dtype in ("float16", "bfloat16")]
    assert [result["problem"] for result in found["uses"] if result["problem"] is not None] == said
    for line in said:
        assert f"wrong: the kernel does not run: {line}" in text
    assert f"kernel as caches use it: {len(found['uses']) - 2} of {len(found['uses'])} formats run" in text


def _does_not_compile(*arguments: Any, **options: Any) -> list[mx.array]:
    raise RuntimeError("Unable to build metal library from source\nprogram_source:1:1: error: no")


def _spoiled(change: Callable[[mx.array], mx.array]) -> Callable[..., list[mx.array]]:
    run = attend.launch

    def spoiled(name: str, *arguments: Any, **options: Any) -> list[mx.array]:
        results = run(name, *arguments, **options)
        return [change(results[0])] if name == "combine" else results

    return spoiled


OFF = _spoiled(lambda x: x * 1.1 if x.shape[-1] == 128 else x)
NO_NUMBER = _spoiled(lambda x: x * float("nan"))  # which JSON has as null


@host_pytest_skip
@pytest.mark.parametrize(
    ("kernel", "wrong", "unknown", "said", "forced"),
    [
        (OFF, 1, 0, "off by", True),
        (OFF, 1, 0, "off by", False),
        (NO_NUMBER, 4, 4, "off by", False),
        (_does_not_compile, 4, 4, "Unable to build metal", True),
    ],
)
def test_a_kernel_that_is_wrong(
    host_gpu: None, monkeypatch: Any, kernel: Any, wrong: int, unknown: int, said: str, forced: bool
) -> None:
    monkeypatch.setattr(attend, "launch", kernel)
    if forced:
        monkeypatch.setenv("KVANT_KERNELS", "fused")
    once = diagnosis.diagnose(lambda done, total: None)
    monkeypatch.setattr("kvant.tools.doctor.diagnosis.diagnose", lambda progress: once)
    found, text = diagnosed(1)
    assert sum(result["problem"] is not None for result in found["kernels"]) == wrong
    assert sum(result["error"] is None for result in found["kernels"]) == unknown
    assert text.count("wrong: ") == wrong
    assert said in text
    assert f"{4 - wrong} of 4 agree" in text


def test_a_wrong_kernel_that_is_asked_for_ends_a_command(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "launch", _does_not_compile)
    monkeypatch.setattr(dispatch, "probe_failure", probe.probe_failure)
    error = refusal(1, "generate", "hi", "-q", "--kernels", "fused")
    assert "failed: the fused kernel is asked for, but fails here: " in error


def _result(fused_ms: float, unfused_ms: float, problem: str | None = None) -> kernels.KernelResult:
    return kernels.KernelResult("a case", 0.0, 1.0, problem, fused_ms, unfused_ms)


FAST, SLOW, WRONG = _result(1, 2), _result(3, 2), _result(1, 2, "off by 1")


@pytest.mark.parametrize(
    ("tried", "device", "library", "settings", "expected"),
    [
        ([], "cpu", "OpenBLAS, scipy_openblas32 1", {}, []),
        ([FAST, FAST, SLOW], "gpu", "mlx: not installed", {}, []),
        ([FAST, SLOW, SLOW], "gpu", "", {}, ["set KVANT_KERNELS=unfused, or pass --kernels"]),
        ([WRONG], "gpu", "", {}, ["by default kvant uses the unfused operator; report"]),
        ([WRONG], "gpu", "", {"KVANT_KERNELS": "fused"}, ["unset KVANT_KERNELS; by default"]),
        (
            [],
            "cpu",
            "mlx: scipy_openblas32 is not installed",
            {},
            ["install kvant with its extra cpu: MLX's own BLAS"],
        ),
        (
            [],
            "cpu",
            "mlx: KVANT_BLAS asks for it",
            {"KVANT_BLAS": "mlx"},
            ["unset KVANT_BLAS: MLX's own BLAS"],
        ),
    ],
)
def test_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    tried: Any,
    device: Any,
    library: str,
    settings: dict[str, str],
    expected: Any,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("KVANT_KERNELS", "KVANT_BLAS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    here = replace(machine.environment(), blas=library)
    found = diagnosis.Diagnosis(here, machine_with(2**34, device), {}, "", [], tried, [], [])
    for said, text in zip(found.to_do, expected, strict=True):
        assert said.startswith(text)
    assert found.as_json()["to_do"] == found.to_do


HERE = environment()
SOUND = RankFindings(0, "mini", HERE, 2**34, True, 0.05)

# In turns: nothing is wrong; rank 1's sums are.
SCRIPT = """
import json, os
from kvant.ranks.environment import find_place
from kvant.ranks.group import Ranks, connect
from kvant.tools.doctor import ranks as doctor

class WrongSums(Ranks):
    def all_sum(self, x):
        return super().all_sum(x) + (self.rank == 1)

ranks = connect(find_place(os.environ).backend)
doctor.ROUND_TRIPS, doctor.SUMS = 3, 1
found = [doctor.check_ranks(ranks), doctor.check_ranks(WrongSums(ranks.group))]
print(json.dumps([each.as_json() for each in found], allow_nan=False))
"""


@pytest.mark.parametrize("size", count([2], [2, 3, 4]))
def test_a_group(size: int) -> None:
    outputs = [json.loads(text) for text in run_script(size, SCRIPT)]
    right, wrong = outputs[0]
    assert all(other[0]["ranks"] == right["ranks"] for other in outputs)
    assert (right["healthy"], right["problems"]) == (True, [])
    assert [each["rank"] for each in right["ranks"]] == list(range(size))
    assert all(each["host"] and each["memory_bytes"] > 2**28 for each in right["ranks"])
    trips = [each["round_trip_ms"] for each in right["ranks"]]
    # each cable once
    assert [trip is not None for trip in trips] == ([True, False] if size == 2 else [True] * size)
    assert (right["sum_bytes"], right["sum_ms"] > 0) == (16 * 2**20, True)
    assert not wrong["healthy"]
    assert wrong["problems"] == [f"rank 1 ({right['ranks'][1]['host']}) gets a wrong sum of whole numbers"]


def group(**wrong: Any) -> RankDiagnosis:
    ranks = [SOUND, replace(SOUND, rank=1), replace(SOUND, rank=2, host="studio", **wrong)]
    return RankDiagnosis(ranks, 2**24, 16.0)


def test_what_is_wrong_is_named_and_printed() -> None:
    found = group(environment=replace(HERE, versions=HERE.versions | {"mlx": "0.31.0"}))
    assert found.problems == [f"rank 2 (studio) has mlx 0.31.0; rank 0 has {HERE.versions['mlx']}"]
    _, *lines = _group_parts(group(sum_right=False))
    assert lines == [
        *(f"4 bytes from rank {rank} to rank {(rank + 1) % 3} and back: 0.050 ms" for rank in range(3)),
        "sum of 16.78 MB: 16.0 ms, 1.05 GB/s",
        "wrong: rank 2 (studio) gets a wrong sum of whole numbers",
        "the 3 ranks do not agree",
    ]
