"""A faster BLAS for MLX's CPU back end on Linux. MLX's own there is the unoptimized reference.

MLX calls ``cblas_sgemm`` through the dynamic linker. That takes the first globally loaded library that has the name.
So OpenBLAS (scipy-openblas32, a part of the extra ``cpu``) is loaded before MLX. The package prefixes its names;
kvant.library_copy makes a copy with the names MLX looks for, once, in the user's cache folder.

Measured on 2 cores: matrices times one row 3 to 6 times as fast, times 512 rows 30 to 40 times (scripts/results).
"""

import ctypes
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

from kvant.files import user_cache
from kvant.library_copy import open_copy

VARIABLE = "KVANT_BLAS"  # an environment variable; OWN is its only value
OWN = "mlx"
PACKAGE = "scipy_openblas32"
EXTRAS = "On Linux kvant needs one of its extras cpu, cuda12 and cuda13, such as: pip install '.[cpu]'"

_loaded = OWN


def loaded() -> str:
    """The library that multiplies matrices on the CPU, for people: name and version, or why it is MLX's own."""
    from importlib.metadata import version

    return f"OpenBLAS, {PACKAGE} {version(PACKAGE)}" if _loaded == PACKAGE else _loaded


def load_blas() -> None:
    """Load a faster BLAS where there is one; afterwards :func:`loaded` says which. To be called before MLX's import."""
    global _loaded
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", OWN):
        warnings.warn(f"{VARIABLE} is {wanted!r}; expected {OWN!r}, or nothing for the fastest", stacklevel=3)
    source = _source()
    if wanted == OWN:
        _loaded = f"{OWN}: {VARIABLE} asks for it"
    elif "mlx.core" in sys.modules:
        _loaded = f"{OWN}: mlx was imported before kvant"
        if source is not None:
            warnings.warn(
                "mlx was imported before kvant, so it multiplies with its own BLAS: a prefill 8 to 11 times slower was "
                f"measured. Import kvant first; {VARIABLE}={OWN} accepts it without this warning",
                stacklevel=3,
            )
    elif source is None:
        _loaded = f"{OWN}: {PACKAGE} is not installed"
    else:
        try:
            _load(source)
            _loaded = PACKAGE
        except (OSError, AttributeError) as error:
            _loaded = f"{OWN}: {PACKAGE} could not be loaded: {' '.join(str(error).split())}"


def import_mlx() -> None:
    """Import MLX. Its wheel for Linux comes without a back end: then the error says how to install one.

    Raises:
        ImportError: a message of one line.
    """
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        reason = " ".join(str(error).split())[:90]
        raise ImportError(f"MLX cannot be imported ({reason}). {EXTRAS}") from None


def _source() -> Path | None:
    """OpenBLAS as its package has it; None: not installed, or of no use here."""
    package = find_spec(PACKAGE) if sys.platform == "linux" else None
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "lib" / "libscipy_openblas.so"


def _load(source: Path) -> None:
    descriptor = open_copy(source, user_cache())  # stays open: the linker remembers the library by this name
    library = ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        # Its threads spin while they wait for each other, and for 0.1 s for more work. On 2 cores with a third
        # busy thread a prefill took 10 to 30 times as long. Work for two threads gets two of MLX's streams.
        library.scipy_openblas_set_num_threads(1)
