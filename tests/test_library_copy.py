"""The copy of OpenBLAS in a cache folder that others can write to, or that a power cut left: never loaded as it is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.counts import count
from support.openblas import PACKAGE, environment, files, needs_openblas, only_copy, report

pytestmark = needs_openblas


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library that ends the process with 66 when it is loaded. Without a C library of its own, which takes long."""
    folder = tmp_path_factory.mktemp("evil")
    code = folder / "evil.c"
    code.write_text("void _exit(int);\n__attribute__((constructor)) static void evil(void) { _exit(66); }\n")
    command = [sys.executable, "-m", "ziglang", "cc", "-O2", "-shared", "-nostdlib", "-o", folder / "evil.so", code]
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


def _plant(copy: Path, evil: bytes) -> None:
    """Somebody else's file in the copy's place, of the same size."""
    copy.write_bytes(evil.ljust(copy.stat().st_size, b"\0"))


def test_the_test_s_planted_file_does_end_a_process_that_loads_it(cache: Path, evil: bytes) -> None:
    """Otherwise the tests below could pass for another reason. It is the user's own file here."""
    _plant(only_copy(cache), evil)
    only_copy(cache).chmod(0o600)
    done = subprocess.run([sys.executable, "-c", "import kvant"], env=environment(cache), check=False)
    assert done.returncode == 66


OTHERS = {  # mode of the copy and of its folder, the copy's owner
    "a copy that the group can write to": (0o620, 0o700, 0),
    "a copy that anybody can write to": (0o602, 0o700, 0),
    "a folder that the group can write to": (0o600, 0o775, 0),
    "a folder that anybody can write to": (0o600, 0o703, 0),
    "a folder as /tmp": (0o600, 0o1777, 0),
    "a copy of another user": (0o600, 0o700, 12345),
}


@pytest.mark.parametrize(("copy_mode", "folder_mode", "owner"), OTHERS.values(), ids=OTHERS.keys())
def test_what_others_can_write_is_made_again(
    cache: Path, copy_mode: int, folder_mode: int, owner: int, evil: bytes
) -> None:
    if owner and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    _plant(only_copy(cache), evil)
    only_copy(cache).chmod(copy_mode)
    (cache / "kvant").chmod(folder_mode)
    if owner:
        os.chown(only_copy(cache), owner, owner)
    _loads_another(cache, only_copy(cache).stat())


def _loads_another(cache: Path, planted: os.stat_result) -> None:
    blas, errors = report(cache)
    assert (blas.split(",")[0], errors) == ("OpenBLAS", "")
    state = only_copy(cache).stat()
    assert state.st_ino != planted.st_ino
    assert (state.st_uid, state.st_mode & 0o777) == (os.geteuid(), 0o600)
    assert (cache / "kvant").stat().st_mode & 0o022 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_left_alone(cache: Path, evil: bytes) -> None:
    """In a cache folder of mode 1777 anybody can be the first to make it."""
    _plant(only_copy(cache), evil)
    os.chown(cache / "kvant", 12345, 12345)
    cache.chmod(0o1777)
    blas, errors = report(cache)
    reason = f"{cache / 'kvant'} belongs to user 12345; expected 0"
    assert (blas, errors) == (f"mlx: {PACKAGE} could not be loaded: {reason}", "")


def test_a_link_in_the_copy_s_place_is_replaced(cache: Path, tmp_path: Path, evil: bytes) -> None:
    copy = only_copy(cache)
    copy.rename(tmp_path / "elsewhere")
    copy.symlink_to(tmp_path / "elsewhere")
    _plant(tmp_path / "elsewhere", evil)
    _loads_another(cache, copy.lstat())


def test_a_link_in_the_folder_s_place_is_left_alone(tmp_path: Path) -> None:
    for name in ("elsewhere", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "cache" / "kvant").symlink_to(tmp_path / "elsewhere")
    blas, errors = report(tmp_path / "cache")
    assert blas.startswith(f"mlx: {PACKAGE} could not be loaded: ")
    assert (errors, files(tmp_path / "elsewhere")) == ("", [])


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


def test_copies_that_were_not_used_for_a_month_are_removed(cache: Path) -> None:
    copy = only_copy(cache)
    month, week = (copy.stat().st_mtime - days * 86400 for days in (31, 7))
    ages = {"openblas-1-1.so": month, "openblas-x.part": month, "openblas-2-2.so": week, "mine.so": month}
    for name, age in ages.items():
        path = copy.with_name(name)
        path.mkdir() if name.endswith("part") else path.touch()
        os.utime(path, (age, age))
    os.utime(copy, (month, month))
    report(cache)
    assert copy.stat().st_mtime > week  # in use
    copy.unlink()
    report(cache)
    names = {copy.name, "openblas-2-2.so", "mine.so"}
    assert {path.name for path in copy.parent.iterdir()} == names
