"""The default run and the markers: together they are every test, and every name in the selection names
one.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.selection import DEFAULT, KEPT, MARKED, MARKS, covers, is_left_out, markers

REPOSITORY = Path(__file__).parents[1]
OPTIONS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"][
    "ini_options"
]


def collected(*arguments: str) -> list[str]:
    """Return the tests that pytest collects, named relative to ``tests``."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "--collect-only",
        "-q",
        *arguments,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return [line.removeprefix("tests/") for line in lines if line.startswith("tests/")]


def test_the_default_run_leaves_out_every_marker_and_no_other() -> None:
    names = [marker.partition(":")[0] for marker in OPTIONS["markers"]]
    assert names == list(MARKS)
    assert f'-m "{DEFAULT}"' in OPTIONS["addopts"]


def test_a_name_covers_what_is_in_it() -> None:
    test = "a/test_b.py::Test::test_c[1-x]"
    for name in ("a", "a/test_b.py", "a/test_b.py::Test", "a/test_b.py::Test::test_c", test):
        assert covers(name, test)
    for name in ("a/test", "a/test_b.py::Te", "a/test_b.py::Test::test_c[1", "test_b.py"):
        assert not covers(name, test)


@pytest.fixture(scope="module")
def every() -> list[str]:
    return collected("-m", "")


def test_all_markers_and_the_default_run_are_every_test(every: list[str]) -> None:
    default = collected()
    marked = collected("-m", " or ".join(MARKS))
    assert len(every) == len({*every}) > 5000
    assert sorted([*default, *marked]) == sorted(every)
    assert {*default} == {test for test in every if not markers(test)}
    files = {test.partition("::")[0] for test in every}
    assert {file for file in files if is_left_out(file)} == files - {
        test.partition("::")[0] for test in default
    }


def test_every_name_of_the_selection_is_a_tests(every: list[str]) -> None:
    for name in [*MARKED, *KEPT]:
        assert any(covers(name, test) for test in every), f"{name} names no test"


def test_every_sample_is_taken_from_a_marker() -> None:
    for sample in KEPT:
        assert any(covers(name, sample) for name in MARKED), f"{sample} is in the default run anyway"
