"""`kvant evidence`: a file of every part's rounds, the check of such a file, and the page made of the
recorded ones.
"""

import copy
import json
import random
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import evidence_page
import pytest
from support.command import call, refusal
from support.counts import count
from support.recordings import InThisProcess

from kvant.tools.bench import runner
from kvant.tools.bench.runner import Worker
from kvant.tools.evidence import check, measure
from kvant.tools.statistics import drift

PARTS = (
    "the whole command",
    "a token of pocket",
    "the quality of pocket",
    "attention to 256 tokens",
    "a token of qwen2.5-0.5b",
)


def _worker(label: str, environment: dict[str, str]) -> Worker | InThisProcess:
    return (InThisProcess if label.startswith("mlx-lm") else Worker)(label, environment)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds of every part, with the small model in the place of the random one, and mlx-lm in this
    process.
    """
    monkeypatch.setattr(runner, "Worker", _worker)
    monkeypatch.setattr(measure, "CONTEXTS", (256,))
    monkeypatch.setattr(measure, "SHAPES", {"qwen2.5-0.5b": measure.SHAPES["pocket"]})
    monkeypatch.setattr(measure, "measure_bandwidth", lambda: 10.0)
    values = {"PROMPTS": (8,), "RANDOM_PROMPTS": (8,), "REPORT_TOKENS": 40}
    for name, value in {"LAYERS_BYTES": 2**21, "MAX_TOKENS": 3, "ROUNDS": 4, **values}.items():
        monkeypatch.setattr(measure, name, value)


@pytest.mark.usefixtures("small")
def test_every_part_is_measured_kept_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    done = call("evidence", "--output", str(file), "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text("utf-8"))
    assert record == json.loads(done.stdout)
    assert record["left_out"] == []
    assert [f"measuring {part}" for part in PARTS] == [
        line for line in done.stderr.splitlines() if "measuring" in line
    ]
    (attention,) = record["attention"]
    assert {name: len(times) for name, times in attention["ms"].items()} == {
        "MLX": 4,
        "8 bits": 4,
        "4 bits": 4,
    }
    assert len(record["command_ms"]) == 4
    assert [each["bits"] for each in record["report"]["formats"]] == [4, 8]
    for model in record["models"]:
        assert {(run["engine"], run["run"]) for run in model["runs"]} == {
            (engine, number) for engine in ("kvant 8-bit", model["header"]["baseline"]) for number in range(4)
        }
        assert len(model["drift"]) == 2
        (memory,) = model["memory"]
        assert 0 < memory["peak"] <= memory["planned"]
        assert memory["tokens"] == 11
    assert {name: len(digest) for name, digest in record["models"][0]["files"].items()} == {
        "model.safetensors": 64
    }
    assert record["models"][1]["files"] == {}
    said = [name for name, _ in measure.figures(record)]
    assert sum("a token of" in name for name in said) == 2
    assert sum("divided by its plan" in name for name in said) == 2
    assert sum("against a cache that is not quantized" in name for name in said) == 2
    assert check.problems(record) == []
    checked = call("evidence", "--check", str(file))
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.splitlines()[-1] == "the file is unaltered, and its figures follow from its rounds"
    assert "left out: the fused kernel" in checked.stdout
    _check_what_is_altered(record)
    altered = copy.deepcopy(record)
    altered["command_ms"][0] += 1
    file.write_text(json.dumps(altered), "utf-8")
    checked = call("evidence", "--check", str(file), "--json")
    assert checked.returncode == 1
    assert json.loads(checked.stdout)["wrong"] == ["altered: the digest does not match"]


def _check_what_is_altered(record: dict[str, Any]) -> None:
    """An edit is found by its digest, and by its rounds where the digest is made anew."""

    def edited(change: Callable[[Any], object]) -> list[str]:
        changed = copy.deepcopy(record)
        change(changed)
        first, *others = check.problems(changed)
        assert first.startswith("altered"), first
        del changed["format"], changed["sha256"]
        assert check.problems(check.sealed(changed)) == others
        return others

    assert edited(lambda own: own.update(date="2020-01-01")) == []
    model = record["models"][0]["header"]["model"]
    assert model == "pocket"

    def first(own: Any) -> Any:
        return own["models"][0]

    assert edited(lambda own: first(own)["summaries"][0].update(latency_p50_ms=0.1)) == [
        "not consistent: pocket, kvant 8-bit after 8: latency_p50_ms do not follow from its rounds"
    ]
    found = edited(lambda own: first(own)["runs"][0]["arrivals_ms"][0].__setitem__(-1, 1e6))
    assert any("kvant 8-bit after 8: latency" in text or "after 8: tokens_per_s" in text for text in found), (
        found
    )
    assert edited(lambda own: first(own)["memory"][0].update(peak=10**12))[0].startswith(
        "not consistent: pocket: a peak"
    )
    assert "weights differ" in edited(lambda own: first(own).update(files={"model.safetensors": "0" * 64}))[0]
    assert edited(lambda own: first(own)["drift"].update({"kvant 8-bit, 8": [99.0, 0.5]})) == [
        "not consistent: pocket: the drift does not follow from its rounds"
    ]
    assert edited(lambda own: own["models"].clear())[0].startswith(
        "not consistent: a token of pocket is neither"
    )
    assert edited(lambda own: own.update(healthy=False)) == ["not consistent: the fused kernel was wrong: "]
    assert edited(lambda own: own.pop("models")) == ["not consistent: KeyError: 'models'"]


def test_what_there_is_no_time_for_is_left_out_and_named(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "LATEST_S", -1)
    record = measure.measure_machine("pocket", print)
    assert record["left_out"] == [f"{part}: -1 seconds had passed" for part in PARTS]
    assert measure.figures(record) == []


def test_a_folder_is_named_without_its_place(
    small: None, monkeypatch: pytest.MonkeyPatch, pocket_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "LATEST_S", -1)
    (tmp_path / "mine").symlink_to(pocket_folder)
    record = measure.measure_machine(str(tmp_path / "mine"), print)
    assert record["parts"][1:3] == ["a token of mine", "the quality of mine"]
    assert str(tmp_path) not in json.dumps(record)


def test_what_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text("mine")
    assert f"--output: {file} exists" in refusal(2, "evidence", "--output", str(file))
    assert "--output: the folder of" in refusal(
        2, "evidence", "--output", str(tmp_path / "no" / "machine.json")
    )
    assert "expected one of --output and --check" in refusal(2, "evidence")
    assert "expected one of" in refusal(2, "evidence", "--output", str(file), "--check", str(file))
    assert "--check reads a file; expected no model" in refusal(2, "evidence", "pocket", "--check", str(file))
    assert f"{file}: Expecting value" in refusal(1, "evidence", "--check", str(file))
    assert "no-such" in refusal(1, "evidence", "no-such", "--output", str(tmp_path / "new.json"))
    file.write_text('{"format": "kvant evidence 2"}')
    assert "expected the format 'kvant evidence 1'" in refusal(1, "evidence", "--check", str(file))
    assert not (tmp_path / "new.json").exists()


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    first = sorted((evidence_page.RESULTS / "evidence").glob("*.json"))[0]
    record: dict[str, Any] = json.loads(first.read_text("utf-8"))
    del record["sha256"]
    return record


def _checked(file: Path, record: dict[str, Any]) -> list[str]:
    """The lines that a check says of a record with a digest that fits: its output, or one line of error."""
    file.write_text(json.dumps(check.sealed(record)), "utf-8")
    done = call("evidence", "--check", str(file))
    lines = (done.stdout or done.stderr).splitlines()
    assert done.returncode in (0, 1), done.stderr
    assert all(line.isprintable() and len(line) <= 1000 for line in lines), lines
    assert done.stdout or (len(lines) == 1 and lines[0].startswith("kvant: error: ")), done.stderr
    passed = lines[-1].startswith("the file is unaltered")
    assert passed is (done.returncode == 0), lines
    return lines


FORGED = "x\nthe file is unaltered\x1b[2J"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"left_out": 3}, "left_out is 3; expected a list of texts"),
        ({"left_out": [FORGED]}, r"left out: x\nthe file is unaltered\x1b[2J"),
        ({"parts": [FORGED, "the whole command"]}, r"wrong: not consistent: x\nthe file is"),
        ({"command_ms": []}, "the whole command is neither there nor left out"),
        ({"command_ms": [], "parts": []}, "no measurement is 'the whole command'"),
        ({"command_ms": [5.0]}, "the whole command, one token of pocket: 5 ms"),
        ({"command_ms": [10**400, 1]}, "not consistent: OverflowError"),
        ({"models": [{"model": "pocket", "runs": [0] * 101}]}, "101 runs; expected at most 100"),
        ({"report": {"model": "pocket", "formats": [3]}}, "not consistent: TypeError"),
    ],
)
def test_a_file_of_a_stranger(
    tmp_path: Path, recorded: dict[str, Any], change: dict[str, Any], line: str
) -> None:
    lines = _checked(tmp_path / "file.json", recorded | change)
    assert any(line in each for each in lines), lines


def test_any_value_may_be_any_other(tmp_path: Path, recorded: dict[str, Any]) -> None:
    others = [None, True, -3, 0, 1e308, 10**400, "", FORGED, [], [None], [["a"]], {}, {"a": 1}]
    for seed in range(count(80, 4000)):
        rng = random.Random(seed)
        changed = copy.deepcopy(recorded)
        at: Any = changed
        while True:
            key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not at[key] or not isinstance(at[key], dict | list) or rng.random() < 0.3:
                break
            at = at[key]
        at[key] = rng.choice(others)
        _checked(tmp_path / "file.json", changed)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": 1, "a": 2}', '{"a": ' + "9" * 5000 + "}", "\ud800", "\0"]
)
def test_what_is_no_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert "file.json: " in refusal(1, "evidence", "--check", str(tmp_path / "file.json"))


def test_drift_is_the_exact_share_of_orders() -> None:
    """Mann's test: of all orders of so many values, those with as many pairs that fall or fewer, on both
    sides.
    """
    values = [3.0, 1.0, 2.0, 5.0, 4.0]

    def falling(order: Any) -> int:
        return sum(order[i] > order[j] for j in range(len(order)) for i in range(j))

    counts = [falling(order) for order in permutations(range(5))]
    own = falling(values)
    share = 2 * sum(count <= min(own, 10 - own) for count in counts) / len(counts)
    assert drift(values) == (4.5 / 2.0, pytest.approx(share))
    rising = drift([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert rising is not None
    assert rising[0] == 6 / 2
    assert rising[1] == pytest.approx(2 / 5040)
    assert drift([1.0, 2.0, 3.0]) is None


def test_the_page_is_made_of_the_recorded_files() -> None:
    page = evidence_page.page()
    assert evidence_page.PAGE.read_text("utf-8") == page
    recorded = sorted((evidence_page.RESULTS / "evidence").glob("*.json"))
    assert recorded
    for path in recorded:
        record = check.read(path)
        assert check.problems(record) == []
        assert all(f"| {what} | {figure} |" in page for what, figure in measure.figures(record))
