"""What a model folder can do on purpose: nothing of it runs, and time and memory stay within bounds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile_kinds
import pytest
from support.counts import count

import kvant

# A process of its own: the fuzzer forks, which a process with MLX's threads should not.
PROGRAM = """
import json, random, shutil, sys
from pathlib import Path
import fuzz, hostile_kinds
from kvant.text import process
process.TIME_LIMIT_S = 1.0  # each kind that takes longer takes all of it
place = Path(sys.argv[1])
base = place / "base"
base.mkdir()
fuzz.base_folder(base, "llama")  # for which transformers takes a class by any name
for kind, count in json.loads(sys.argv[2]).items():
    done, seed = set(), 0
    while len(done) < count:
        folder, seed = place / f"model{seed}", seed + 1
        shutil.copytree(base, folder)
        how = hostile_kinds.KINDS[kind](folder, random.Random(seed))
        if how not in done:
            done.add(how)
            print(json.dumps([kind, how, fuzz.run(folder, fuzz.use)]), flush=True)
        shutil.rmtree(folder)
"""
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(kvant.__file__).parents[1]), str(Path(__file__).parents[2] / "scripts")]
    )
}


def _run(program: str, *arguments: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


CHEAP = ("foreign_class", "init_inputs", "hostile_config")
COUNTS = {kind: count(2, 8) if kind in CHEAP else count(1, 2) for kind in sorted(hostile_kinds.KINDS)}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """(kind, how, outcome) of every folder, from one process of the fuzzer; and the mark of code that ran."""
    place = tmp_path_factory.mktemp("fuzzed")
    return _run(PROGRAM, str(place), json.dumps(COUNTS)), place / "executed"


@pytest.mark.parametrize("kind", COUNTS)
def test_kinds(fuzzed: tuple[list[Any], Path], kind: str) -> None:
    outcomes, mark = fuzzed
    found = [(how, outcome) for made, how, outcome in outcomes if made == kind]
    assert len(found) == COUNTS[kind]
    for how, outcome in found:
        assert outcome.startswith(("ok", "refused: ")), (how, outcome)
    assert not mark.exists()
