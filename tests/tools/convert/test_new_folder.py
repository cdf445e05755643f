"""A folder that is made: whole or not at all, and nothing removed that is not kvant's own."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import call

from kvant.errors import ConvertError
from kvant.tools.convert.new_folder import MARKER, appearing, remove_leftovers

HOLD = """
import sys
from pathlib import Path
from kvant.tools.convert.new_folder import appearing
with appearing(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print("ready", flush=True)
    sys.stdin.readline()
"""


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _writing(dest: Path) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(dest)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_folder_has_the_usual_mode(tmp_path: Path) -> None:
    with appearing(tmp_path / "dest") as folder:
        (folder / "file").write_text("text")
        (part,) = tmp_path.iterdir()
        assert stat.S_IMODE(part.stat().st_mode) == 0o700
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "dest").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert _names(tmp_path) == ["dest", "plain"]
    assert _names(tmp_path / "dest") == ["file"]


def test_a_folder_it_did_not_make_stays(tmp_path: Path) -> None:
    """The name a process of the same number once took, and names that are like kvant's."""
    others = [f".dest.{os.getpid()}.part", ".dest.abcdefgh.part", ".dest.1.part", ".other.abcdefgh.part"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    (tmp_path / others[-1] / MARKER).touch()  # of another destination
    os.mkfifo(tmp_path / others[1] / MARKER)
    (tmp_path / ".dest.aaaaaaaa.part").symlink_to(others[-1])
    assert remove_leftovers(tmp_path / "dest") == []
    with appearing(tmp_path / "dest"):
        pass
    with pytest.raises(KeyboardInterrupt), appearing(tmp_path / "dest2"):
        raise KeyboardInterrupt
    for name in others:
        assert (tmp_path / name / "mine").read_text() == "mine"
    assert _names(tmp_path) == sorted([*others, ".dest.aaaaaaaa.part", "dest"])


@pytest.mark.parametrize(
    "make",
    [Path.touch, lambda dest: (dest / "mine").mkdir(parents=True), lambda dest: dest.symlink_to("nothing")],
)
def test_what_appears_meanwhile_stays(tmp_path: Path, make: Callable[[Path], None]) -> None:
    dest = tmp_path / "dest"
    with pytest.raises(ConvertError, match="exists already; it appeared"), appearing(dest):
        make(dest)
    assert _names(tmp_path) == ["dest"]
    assert dest.is_symlink() or dest.is_file() or _names(dest) == ["mine"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    killed = _writing(dest)
    killed.kill()
    killed.communicate()
    (part,) = tmp_path.iterdir()
    living = _writing(dest)
    try:
        done = call("convert", "pocket", str(dest))
        assert done.returncode == 0
        assert done.stderr.splitlines()[0] == f"{part}: removed; an interrupted convert had left it"
        (left,) = (path for path in tmp_path.iterdir() if path != dest)
        assert _names(left / "folder") == ["half"]
    finally:
        living.kill()
        living.communicate()
