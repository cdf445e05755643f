"""Files that change under the reader: what was checked is what is read."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvant.errors import ModelError
from kvant.files import check_file, read_bytes, read_text

INSIDE, OUTSIDE = b"inside" * 100, b"outside" * 100
TRIES = 2000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "outside").write_bytes(OUTSIDE)
    path = tmp_path / "model" / "config.json"
    path.write_bytes(INSIDE)
    return path


@pytest.mark.parametrize("evil", [lambda path: path.symlink_to(path.parents[1] / "outside"), os.mkfifo])
def test_what_is_put_there_during_the_check_is_not_opened(path: Path, evil: Callable[[Path], object]) -> None:
    """A link is not followed, a pipe does not block."""
    read, refused, done = 0, 0, threading.Event()

    def swap() -> None:
        scratch = path.with_name("scratch")
        while not done.is_set():
            for make in (lambda path: path.write_bytes(INSIDE), evil):
                make(scratch)
                os.replace(scratch, path)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for tried in range(50 * TRIES):  # on a busy machine the other thread may get its turn late
            if tried >= TRIES and min(read, refused) > 10:
                break
            try:
                assert read_bytes(path, 10_000) == INSIDE
                read += 1
            except ModelError:
                refused += 1
    finally:
        done.set()
        thread.join()
    assert min(read, refused) > 10


def test_bytes_are_bounded_and_nothing_stays_open(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)  # the lowest that is free
    os.close(descriptor)
    size = len(INSIDE)
    check_file(path)
    assert read_bytes(path, size) == INSIDE
    with pytest.raises(ModelError, match=f"config.json: {size} bytes; expected at most {size - 1}"):
        read_bytes(path, size - 1)
    again = os.open(path, os.O_RDONLY)
    os.close(again)
    assert again == descriptor


@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="needs a file that does not tell its size"
)
def test_a_file_that_does_not_tell_its_size_is_bounded() -> None:
    status = Path("/proc/self/status")
    assert status.stat().st_size == 0
    folder = status.resolve().parent
    assert b"Name:" in read_bytes(status, 100_000, folder)
    with pytest.raises(ModelError, match="101 bytes; expected at most 100"):
        read_bytes(status, 100, folder)


def test_lines_of_a_text_end_in_a_newline(path: Path) -> None:
    path.write_bytes(b"a\r\nb\rc\n")
    assert read_text(path, 100) == path.read_text()
    assert read_bytes(path, 100) == b"a\r\nb\rc\n"
