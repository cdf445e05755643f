"""What a model folder can do on purpose: nothing of it runs, and time and memory stay within bounds."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hostile_kinds
import pytest

import kvant

# A process of its own: the fuzzer forks, which a process with MLX's threads should not.
PROGRAM = """
import json, random, shutil, sys
from pathlib import Path
import fuzz, hostile_kinds
place = Path(sys.argv[1])
base = place / "base"
base.mkdir()
fuzz.base_folder(base, "llama")  # for which transformers takes a class by any name
done, seed = set(), 0
while len(done) < int(sys.argv[3]):
    folder, seed = place / f"model{seed}", seed + 1
    shutil.copytree(base, folder)
    how = hostile_kinds.KINDS[sys.argv[2]](folder, random.Random(seed))
    if how not in done:
        done.add(how)
        print(json.dumps([how, fuzz.run(folder, fuzz.use)]), flush=True)
    shutil.rmtree(folder)
"""
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(Path(kvant.__file__).parents[1]), str(Path(__file__).parents[2] / "scripts")])
}


def _run(program: str, *arguments: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


CHEAP = ("foreign_class", "init_inputs", "hostile_config")


@pytest.mark.parametrize("kind", sorted(hostile_kinds.KINDS))
def test_kinds(tmp_path: Path, kind: str) -> None:
    start, count = time.monotonic(), 8 if kind in CHEAP else 2
    outcomes = _run(PROGRAM, str(tmp_path), kind, str(count))
    assert len(outcomes) == count
    for how, outcome in outcomes:
        assert outcome.startswith(("ok", "refused: ")), (how, outcome)
    assert time.monotonic() - start < 150
    assert not (tmp_path / "executed").exists()


def test_the_fuzzer_sees_what_it_looks_for(tmp_path: Path) -> None:
    """Code that ran, a question that was answered, memory of a process that was started."""
    program = """
import json, subprocess, sys
from pathlib import Path
import fuzz, hostile_kinds
folder = Path(sys.argv[1]) / "model"
folder.mkdir()
hostile_kinds.plant(folder)
def execute(folder):
    subprocess.run([sys.executable, "-c", "import evil"])
def ask(folder):
    if input() == "y": raise ValueError("agreed")
def start(folder):
    hold = "import time; data = b'x' * 700_000_000; time.sleep(2)"
    subprocess.run([sys.executable, "-c", hold])
fuzz.LIMIT_BYTES = 700_000_000
for work in (execute, ask, start):
    print(json.dumps(fuzz.run(folder, work)))
"""
    executed, asked, started = _run(program, str(tmp_path))
    assert executed.startswith("executed code of the folder")
    assert asked == "raised: ValueError: agreed"
    if sys.platform == "linux":
        assert started.startswith("took ")
