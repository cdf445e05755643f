"""What goes wrong while a snapshot is written: the old one is there whole, or the new one is, and nothing
else.
"""

import errno
import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kvant  # isort: skip  # noqa: F401  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support import snapshot_writer
from support.counts import count
from support.interruption import Interruption

from kvant import atomic
from kvant.cache import ModelCache
from kvant.errors import SnapshotError

KILLS = count(12, 200)
SIZES = snapshot_writer.SIZES


def test_killed_while_it_writes(tmp_path: Path) -> None:
    """By SIGKILL, at any moment: one of the two loads, with its own metadata. What is left over goes with
    the next.
    """
    path, rng = tmp_path / "saved", random.Random(0)
    first, loaded = snapshot_writer.caches()[0], snapshot_writer.make()
    first.save(path, {"size": str(first.offset)})
    seen, left_over = set(), 0
    command = [sys.executable, snapshot_writer.__file__, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for number in range(10 * KILLS):
            if number >= KILLS and left_over and seen == set(SIZES):  # a busy machine takes more
                break
            print(rng.random() * 0.2, file=writer.stdin, flush=True)
            assert writer.stdout.readline() == "killed\n"
            metadata = loaded.load(path)
            assert loaded.ids == [loaded.offset] * loaded.offset
            assert metadata == {"size": str(loaded.offset)}
            seen.add(loaded.offset)
            left = set(os.listdir(tmp_path)) - {"saved"}
            assert len(left) <= 1  # each process has removed what the one before it left
            left_over += len(left)
        writer.stdin.close()
    assert seen == set(SIZES)
    assert left_over  # some were killed in the middle
    loaded.save(path)
    assert os.listdir(tmp_path) == ["saved"]


@pytest.fixture
def cache() -> ModelCache:
    return snapshot_writer.caches()[0]


@pytest.fixture
def old(tmp_path: Path, cache: ModelCache) -> Path:
    """A snapshot that is there already, of 299 tokens."""
    cache.trim(1)
    cache.save(tmp_path / "saved", {"old": "yes"})
    cache.load(tmp_path / "saved")
    return tmp_path / "saved"


def test_what_is_no_file_is_not_replaced(tmp_path: Path, cache: ModelCache) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    before = sorted(os.listdir(tmp_path))
    for name in before:
        with pytest.raises(SnapshotError, match="neither a regular file nor a link"):
            cache.save(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "loop").is_symlink()


@contextmanager
def _small_files(limit: int) -> Iterator[None]:
    """No file of this process may have more bytes: a write past them fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("fault", [0, 0.3, 0.9, 0.999, "fsync", "replace"])
def test_a_full_disk(
    old: Path, cache: ModelCache, fault: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    data = old.read_bytes()
    limit = 2**30 if isinstance(fault, str) else int(len(data) * fault)
    with monkeypatch.context() as patch:
        if isinstance(fault, str):
            patch.setattr(atomic.os, fault, no_room)
        with (
            _small_files(limit),
            pytest.raises(
                SnapshotError, match=r"cannot be written: .*(File too large|No space left)"
            ) as error,
        ):
            cache.save(old)
    assert str(error.value).startswith(f"{old}: ")
    assert old.read_bytes() == data
    assert os.listdir(old.parent) == [old.name]
    assert cache.offset == 299
    x = mx.ones((1, 2, 1, 64))
    cache.batch.begin(mx.zeros((1, 1), mx.int32))
    mx.eval([layer.multi_head_cache_attention(x, x, x) for layer in cache])
    cache.commit()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/saved", "No such file or directory"),
        ("file/saved", "Not a directory"),
        ("n" * 300, "File name too long"),
        ("a\0b", "null (byte|character)"),
    ],
)
def test_folders_that_take_no_file(tmp_path: Path, cache: ModelCache, path: str, message: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SnapshotError, match=f"cannot be written: .*{message}") as error:
        cache.save(tmp_path / path)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["file"]


# Interrupted between a file's opening and its `with` statement, Python closes it when it is dropped, and says
# so.
dropped_files = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def _interrupted(work: Callable[[], object], before: Callable[[], object]) -> Iterator[bool]:
    """Work that is broken off at one line after the other; whether it was, after each."""
    counted = Interruption(0)
    assert not counted.of(work)
    interrupted = 0
    for at in random.Random(0).sample(range(1, counted.lines), count(40, counted.lines - 1)):
        before()
        yield (was := Interruption(at).of(work))
        interrupted += was
    assert interrupted > 30


@dropped_files
def test_ctrl_c_at_any_line_of_a_save(old: Path, cache: ModelCache) -> None:
    data = old.read_bytes()
    cache.save(old)
    new = old.read_bytes()
    for _ in _interrupted(lambda: cache.save(old), lambda: old.write_bytes(data)):
        assert old.read_bytes() in (data, new)
        assert os.listdir(old.parent) == ["saved"]
        assert cache.offset == 299


@dropped_files
def test_ctrl_c_at_any_line_of_a_load(old: Path, cache: ModelCache) -> None:
    """The cache is empty then, or it has all of the snapshot."""
    for was in _interrupted(lambda: cache.load(old), lambda: cache.load(old)):
        if was:
            assert cache.offset in (0, 299)  # before its first line did anything, it is as it was
            assert cache.ids in ([], [300] * 299)
    cache.load(old)
    assert cache.offset == 299


def test_what_another_process_writes_is_left_alone(tmp_path: Path, cache: ModelCache) -> None:
    """Only files that nobody holds are removed, and only those of the same name."""
    digits = "0" * 15
    held, abandoned, other = (
        tmp_path / f".{name}.partial" for name in (f"s*d.{digits}1", f"s*d.{digits}2", f"sad.{digits}3")
    )
    for path in (held, abandoned, other):
        path.write_text("x")
    with held.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache.save(tmp_path / "s*d")
    assert sorted(os.listdir(tmp_path)) == sorted([held.name, other.name, "s*d"])
