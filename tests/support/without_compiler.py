"""Processes in which MLX compiles its graphs and nothing is made by a C++ compiler.

On a CPU, MLX compiles only where a C++ compiler is installed, and then fuses what it can into kernels that this
compiler makes. Tests shall need none: the first ``g++`` on PATH is one that does nothing, and MLX is set not to fuse, a
setting of its C++ interface. Tracing, replaying and donating are the same.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

NO_FUSE = 2


def never_fuse() -> None:
    """For the rest of this process MLX traces, and makes no kernels."""
    library = ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / "libmlx.so"))
    library._ZN3mlx4core16set_compile_modeENS0_11CompileModeE(NO_FUSE)


def run_module(module: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python module in ``tests``. ``folder`` gets a g++ that is there, and makes nothing."""
    compiler = folder / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
    compiler.chmod(0o755)
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def printed_by(module: str, folder: Path) -> dict[str, Any]:
    """The JSON that a module of tests prints last."""
    done = run_module(module, folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
