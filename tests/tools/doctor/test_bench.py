"""`kvant doctor --bench`: a file of every part's rounds, and the page of machines made from such files."""

import json
from pathlib import Path

import machines_tried
import pytest
from support.command import call, refusal

from kvant.tools.doctor import bench

PARTS = ("the whole command", "a token of pocket", "attention to 256 tokens", "a token of qwen2.5-0.5b")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of every part, with the small model in the place of the random one."""
    monkeypatch.setattr(bench, "CONTEXTS", (256,))
    monkeypatch.setattr(bench, "PROMPTS", {"pocket": (8,), "qwen2.5-0.5b": (8,)})
    monkeypatch.setattr(bench, "SHAPES", {"qwen2.5-0.5b": bench.SHAPES["pocket"]})
    monkeypatch.setattr(bench, "measure_bandwidth", lambda: 10.0)
    for name, value in {"LAYERS_BYTES": 2**21, "MAX_TOKENS": 3, "ROUNDS": 2}.items():
        monkeypatch.setattr(bench, name, value)


@pytest.mark.usefixtures("small")
def test_every_part_is_measured_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    done = call("doctor", "--bench", str(file), "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text("utf-8"))
    assert record == json.loads(done.stdout)
    assert record["left_out"] == []
    assert [f"measuring {part}" for part in PARTS] == [line for line in done.stderr.splitlines() if "measuring" in line]
    (attention,) = record["attention"]
    assert {name: len(times) for name, times in attention["ms"].items()} == {"MLX": 2, "8 bits": 2, "4 bits": 2}
    assert len(record["command_ms"]) == 2
    for model in record["models"]:
        assert {(run["engine"], run["run"]) for run in model["runs"]} == {
            (engine, number) for engine in ("kvant 8-bit", model["baseline"]) for number in range(2)
        }
        (memory,) = model["memory"]
        assert 0 < memory["peak"] <= memory["planned"]
        assert memory["tokens"] == 11
    said = [name for name, _ in bench.figures(record)]
    assert [name for name in said if "divided by its plan" in name] == [
        f"peak of {name} with 11 tokens, divided by its plan" for name in ("pocket", "qwen2.5-0.5b")
    ]
    assert sum("a token of" in name for name in said) == 2
    page = machines_tried.page({"machine.json": record})
    assert all(f"| {what} | {figure} |" in page for what, figure in bench.figures(record))
    assert f"## {record['environment']['device']}" in page


def test_what_there_is_no_time_for_is_left_out_and_named(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LATEST_S", -1)
    record = bench.measure_machine(print)
    assert record["left_out"] == [f"{part}: -1 seconds had passed" for part in PARTS]
    assert bench.figures(record) == []


def test_a_file_that_is_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text("mine")
    assert f"--bench: {file} exists" in refusal(2, "doctor", "--bench", str(file))
    assert "--bench: the folder of" in refusal(2, "doctor", "--bench", str(tmp_path / "no" / "machine.json"))
    assert file.read_text() == "mine"


def test_the_page_is_made_of_the_recorded_files() -> None:
    assert machines_tried.read()
    assert machines_tried.PAGE.read_text("utf-8") == machines_tried.page(machines_tried.read())
