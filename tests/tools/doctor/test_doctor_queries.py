"""`kvant doctor` measures how many queries a simdgroup should hold: by a clock that only the kernel moves."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvant.operators.kernels import queries as records
from kvant.operators.kernels.queries import queries_here
from kvant.tools.doctor import queries
from kvant.tools.doctor.queries import QueriesMeasured, measure_queries


class Device:
    """Attention on it takes ``seconds[queries]``, the same or not with each call; its outputs are the query."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.queued = 0.0
        self.calls: list[int] = []
        self.checked: list[int] = []
        self.seconds: Callable[[int, int], float] = lambda number, D: 1.0
        self.output: Callable[[mx.array, int], mx.array] = lambda query, number: query
        self.problem: str | None = None
        monkeypatch.setattr(queries, "attend", self.attend)
        monkeypatch.setattr(queries, "_run", self.run)
        monkeypatch.setattr(queries, "self_check", self.self_check)

    def attend(self, query: mx.array, *arrays: mx.array, queries: int, **options: Any) -> mx.array:
        self.calls.append(queries)
        self.queued += self.seconds(queries, query.shape[3])
        return self.output(query, queries)

    def run(self, outputs: list[mx.array]) -> None:
        """What was queued since the last time takes its time now."""
        assert len(outputs) == queries.CALLS
        self.now, self.queued = self.now + self.queued, 0.0

    def self_check(self, backend: str, queries: int) -> str | None:
        self.checked.append(queries)
        return self.problem

    def measure(self, backend: Any = "metal") -> QueriesMeasured:
        self.calls.clear()
        self.queued = 0.0
        self.checked.clear()
        return measure_queries(backend, lambda done, total: None, lambda: self.now)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """kvant's cache folder, which is not there yet; a call reads little."""
    monkeypatch.setattr(records, "user_cache", lambda: tmp_path / "kvant")
    monkeypatch.setattr(queries, "ROWS", 64)
    monkeypatch.setattr(queries, "CASE_BYTES", 1)
    queries_here.cache_clear()
    yield tmp_path / "kvant"
    queries_here.cache_clear()


@pytest.fixture
def device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def _recorded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "fused-kernel.json").read_text())
    return found


@pytest.mark.parametrize(("backend", "first", "second"), [("metal", 4, 2), ("cuda", 8, 4)])
def test_the_faster_one_is_recorded_and_used(
    device: Device, folder: Path, backend: Any, first: int, second: int
) -> None:
    device.seconds = lambda number, D: D / 64 * (1.0 if number == first else 0.5)
    found = device.measure(backend)
    assert (found.numbers, found.used, found.problem) == ((first, second), second, None)
    assert [case.case for case in found.cases] == [
        f"{heads} heads of {D}, {bits} bits, 1 x 64 rows"
        for heads, D in (("14/2", 64), ("28/4", 128), ("32/8", 128))
        for bits in (8, 4)
    ]
    assert [case.first_ms for case in found.cases] == pytest.approx([1000.0] * 2 + [2000.0] * 4)
    assert found.ratio == pytest.approx(0.5)
    assert device.checked == [second]
    there, back = ([number] * queries.CALLS for number in (first, second))
    rounds = (there + back + back + there) * 4 + there + back
    assert device.calls == [first, second, *rounds] * 6  # once unmeasured, then in turns: 9 rounds
    assert queries_here(backend).number == second
    assert _recorded(folder) == {records.device_key(backend): records.new_record(backend, second)}
    queries_here.cache_clear()  # another process
    assert (queries_here(backend).number, queries_here(backend).recorded) == (second, True)


def test_the_median_counts(device: Device) -> None:
    """A hiccup in some of the rounds changes nothing."""

    def seconds(number: int, D: int) -> float:
        return 50.0 if len(device.calls) % 29 == 0 else 1.0

    device.seconds = seconds
    found = device.measure()
    assert found.ratio == pytest.approx(1.0)
    assert found.used == 4


@pytest.mark.parametrize(
    ("before", "second_by_first", "after"),
    [(4, 0.98, 4), (4, 0.96, 2), (4, 1.5, 4), (2, 1.02, 2), (2, 0.5, 2), (2, 1.04, 4)],
)
def test_what_is_used_stays_where_the_other_is_not_clearly_faster(
    device: Device, folder: Path, before: int, second_by_first: float, after: int
) -> None:
    folder.mkdir()
    key = records.device_key("metal")
    others = {"another (metal)": {"kernel": "x", "queries": 1}}
    (folder / "fused-kernel.json").write_text(json.dumps({**others, key: records.new_record("metal", before)}))
    device.seconds = lambda number, D: 1.0 if number == 4 else second_by_first
    found = device.measure()
    assert found.used == queries_here("metal").number == after
    assert found.reason.startswith("measured on this device: ")
    assert device.checked == ([after] if after != before else [])
    assert _recorded(folder) == {**others, key: records.new_record("metal", after)}


def test_one_that_fails_its_self_check_is_not_recorded(device: Device, folder: Path) -> None:
    device.seconds = lambda number, D: 1.0 if number == 4 else 0.5
    device.problem = "a case: the output is off by 1"
    found = device.measure()
    assert (found.used, found.problem) == (4, "2 queries a simdgroup: a case: the output is off by 1")
    assert not folder.exists()
    assert queries_here("metal").number == 4


@pytest.mark.parametrize("wrong", [lambda x: x * 1.05, lambda x: x * float("nan"), lambda x: x * 0])
def test_outputs_that_differ_are_a_problem(device: Device, folder: Path, wrong: Callable[[mx.array], mx.array]) -> None:
    device.output = lambda query, number: wrong(query) if number == 2 else query
    found = device.measure()
    assert found.problem is not None
    assert found.problem.startswith("outputs with 4 and 2 queries a simdgroup differ by ")
    assert (found.cases, found.ratio, found.used) == ([], None, 4)
    assert not folder.exists()


def test_one_that_does_not_compile_is_a_problem(device: Device, folder: Path) -> None:
    def broken(query: mx.array, number: int) -> mx.array:
        if number == 2:
            raise RuntimeError("Unable to build metal library from source\nprogram_source:1:1: error: no")
        return query

    device.output = broken
    found = device.measure()
    assert (found.problem, found.used) == ("Unable to build metal library from source", 4)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_said(device: Device, folder: Path) -> None:
    folder.write_text("a file")
    device.seconds = lambda number, D: 1.0 if number == 4 else 0.5
    found = device.measure()
    assert (found.used, found.problem) == (4, None)
    assert "2 could not be recorded: " in found.reason
    assert queries_here("metal").number == 4


def test_a_broken_record_is_replaced(device: Device, folder: Path) -> None:
    folder.mkdir()
    (folder / "fused-kernel.json").write_text("{")
    assert "not JSON" in queries_here("metal").reason
    found = device.measure()
    assert found.reason.startswith("measured on this device: ")
    assert _recorded(folder) == {records.device_key("metal"): records.new_record("metal", 4)}
