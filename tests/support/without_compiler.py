"""Processes in which MLX compiles its graphs and nothing is made by a C++ compiler: see support/compiled_runs.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def printed_by(module: str, folder: Path) -> dict[str, Any]:
    """The JSON that a module of tests prints last. ``folder`` gets a g++ that is there, and makes nothing."""
    compiler = folder / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
