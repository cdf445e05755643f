"""How many queries a simdgroup holds: the default, or what was recorded for this device and this kernel."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.metal_host import host_pytest_skip

from kvant.operators.kernels import launch, queries
from kvant.operators.kernels.attend import attend
from kvant.operators.kernels.queries import CHOICES, queries_here
from kvant.operators.self_check import SELF_CHECK, Trial

DEVICE = mx.device_info()["device_name"]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of the records, which is not there, in a process that has not looked for it."""
    monkeypatch.setattr(queries, "user_cache", lambda: tmp_path)
    queries_here.cache_clear()
    yield tmp_path / "fused-kernel.json"
    queries_here.cache_clear()


@pytest.mark.parametrize("backend", CHOICES)
def test_without_a_record_it_is_the_default(record: Path, backend: launch.Backend) -> None:
    found = queries_here(backend)
    assert (found.number, found.recorded) == (CHOICES[backend][0], False)
    assert found.reason == "the default: not measured on this device"


@pytest.mark.parametrize("backend", CHOICES)
@pytest.mark.parametrize("index", [0, 1])
def test_a_record_of_this_device_is_used(record: Path, backend: launch.Backend, index: int) -> None:
    number = CHOICES[backend][index]
    others = {"another (metal)": {"kernel": "x", "queries": 1}}
    record.write_text(json.dumps(others | {queries.device_key(backend): queries.new_record(backend, number)}))
    found = queries_here(backend)
    assert (found.number, found.recorded, found.reason) == (number, True, f"measured on this device: {record}")
    other = next(b for b in CHOICES if b != backend)
    assert not queries_here(other).recorded


def test_the_file_is_read_once(record: Path) -> None:
    assert queries_here("metal").number == 4
    record.write_text(json.dumps({f"{DEVICE} (metal)": queries.new_record("metal", 2)}))
    assert queries_here("metal").number == 4


def _digest(**changes: Any) -> dict[str, Any]:
    return {f"{DEVICE} (metal)": queries.new_record("metal", 2) | changes}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps({"Apple M9 (metal)": queries.new_record("metal", 2)}), "not measured on this device"),
        (json.dumps({f"{DEVICE} (cuda)": queries.new_record("metal", 2)}), "not measured on this device"),
        (json.dumps(_digest(kernel="0" * 64)), "is of another kernel's text"),
        (json.dumps({f"{DEVICE} (metal)": queries.new_record("cuda", 4)}), "is of another kernel's text"),
        (json.dumps({f"{DEVICE} (metal)": 2}), "is of another kernel's text"),
        (json.dumps(_digest(queries=3)), "queries is '3'; expected 4 or 2"),
        (json.dumps(_digest(queries=8)), "queries is '8'; expected 4 or 2"),
        (json.dumps(_digest(queries=2.0)), "queries is '2.0'; expected 4 or 2"),
        (json.dumps(_digest(queries=None)), "queries is 'None'; expected 4 or 2"),
        ("[2]", "a JSON list; expected an object"),
        ("{", "not JSON: "),
        ("\0", "not JSON: "),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ("[" * 50_000, "not JSON: "),
        (" " * 70_000, "70000 bytes; expected at most"),
    ],
)
def test_another_record_is_ignored_and_named(record: Path, text: str, reason: str) -> None:
    record.write_text(text)
    found = queries_here("metal")
    assert (found.number, found.recorded) == (4, False)
    assert found.reason.startswith("the default: ")
    assert reason in found.reason
    assert "\n" not in found.reason


def test_what_is_no_file_is_ignored(record: Path) -> None:
    os.mkfifo(record)
    assert "not a regular file" in queries_here("metal").reason
    queries_here.cache_clear()
    record.unlink()
    record.symlink_to("/etc/passwd")
    assert "a link out of" in queries_here("metal").reason


def test_the_digest_is_of_all_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    text = launch._text
    seen = {launch.text_digest("metal"), launch.text_digest("cuda")}
    assert len(seen) == 2
    for changed in ("metal.h", "load.h", "rows.h", "attend.h", "attend.py"):
        monkeypatch.setattr(launch, "_text", lambda file, changed=changed: text(file) + " " * (file == changed))
        seen.add(launch.text_digest.__wrapped__("metal"))
    assert len(seen) == 7


@host_pytest_skip
def test_the_kernel_goes_by_the_record(record: Path, launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded number is what is compiled, and the numbers are right with it; an argument wins."""
    seen: list[int] = []
    kernel = launch._kernel

    def noted(name: str, backend: launch.Backend) -> Any:
        def run(*, template: list[tuple[str, Any]], **rest: Any) -> list[mx.array]:
            seen.extend(value for key, value in template if key == "QUERIES")
            return kernel(name, backend)(template=template, **rest)

        return run

    monkeypatch.setattr(launch, "_kernel", noted)
    trial = Trial(SELF_CHECK[0])
    assert trial.agreement("metal").problem is None
    record.write_text(json.dumps({f"{DEVICE} (metal)": queries.new_record("metal", 2)}))
    queries_here.cache_clear()
    assert trial.agreement("metal").problem is None
    assert trial.agreement("metal", queries=4).problem is None
    assert seen == [4, 2, 4]
    assert attend.__kwdefaults__["queries"] is None
