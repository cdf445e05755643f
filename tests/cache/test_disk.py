"""The folder of a disk cache: bounded at every instant, right or nothing after any death, and nobody waits
for it.
"""

import errno
import fcntl
import hashlib
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.counts import count

from kvant.cache import disk as disk_module
from kvant.cache.disk import BLOCK, LOCK, QUEUE_BYTES, DiskCache
from kvant.errors import SnapshotError


def name_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def contents(number: int, size: int = 3000) -> bytes:
    return random.Random(number).randbytes(size)


def put(cache: DiskCache, number: int, size: int = 3000) -> None:
    cache.put(name_of(number), size, lambda: contents(number, size))


def sizes_in(folder: Path) -> dict[tuple[str, int], int]:
    """Of all that is there, as the file system gives it away, half-written files too."""
    found = {entry.name: os.lstat(entry) for entry in folder.iterdir() if entry.name != LOCK}
    return {(name, each.st_ino): -(-each.st_size // BLOCK) * BLOCK for name, each in found.items()}


def bytes_in(folder: Path) -> int:
    return sum(sizes_in(folder).values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(folder: Path) -> Iterator[DiskCache]:
    made = DiskCache(folder, 10 * BLOCK)
    yield made
    made.close()


def test_what_was_put_is_there_for_its_owner_alone(cache: DiskCache, folder: Path) -> None:
    put(cache, 1)
    assert cache.get(name_of(1)) == contents(1)  # written or not
    assert cache.flush(10)
    assert cache.get(name_of(1)) == contents(1)
    assert cache.get(name_of(2)) is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(entry.stat().st_mode) == 0o600 for entry in folder.iterdir())
    cache.close()
    again = DiskCache(folder)
    assert name_of(1) in again
    assert again.get(name_of(1)) == contents(1)
    again.close()


def test_nothing_is_written_twice(cache: DiskCache) -> None:
    put(cache, 1)
    cache.flush(10)
    cache.put(name_of(1), 3000, lambda: pytest.fail("its contents were asked for"))
    assert (cache.counts.written, cache.counts.files, cache.counts.bytes) == (1, 1, BLOCK)


def test_the_least_recently_used_go_first(cache: DiskCache, folder: Path) -> None:
    for number in range(10):
        put(cache, number)
    cache.used([name_of(3), name_of(0)])
    cache.flush(10)
    cache.close()
    again = DiskCache(folder, 10 * BLOCK)  # the order is in the folder
    for number in range(10, 18):
        put(again, number)
    assert again.flush(10)
    assert [number for number in range(10) if name_of(number) in again] == [0, 3]
    assert again.counts.bytes == bytes_in(folder) == 10 * BLOCK
    put(again, 18)
    again.flush(10)
    assert name_of(3) in again  # named first, it stays longest
    assert name_of(0) not in again
    again.close()


def test_a_smaller_bound_holds_from_the_start(cache: DiskCache, folder: Path) -> None:
    for number in range(10):
        put(cache, number)
    cache.flush(10)
    cache.close()
    again = DiskCache(folder, 3 * BLOCK)
    assert again.flush(10)
    assert bytes_in(folder) == 3 * BLOCK
    again.close()


@pytest.mark.parametrize(
    "harm",
    ["altered", "cut", "empty", "another's", "long", "writable by others", "a folder", "a link", "a pipe"],
)
def test_a_wrong_file_is_none_and_goes(harm: str, cache: DiskCache, folder: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        put(cache, number)
    cache.flush(10)
    path, other = (folder / f"{name_of(number)}.kv" for number in (1, 2))
    data = path.read_bytes()
    path.unlink()
    if harm == "a folder":
        path.mkdir()
    elif harm == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif harm == "a pipe":
        os.mkfifo(path)
    else:
        changed = bytes([*data[:40], data[40] ^ 1, *data[41:]])
        kinds = {
            "altered": changed,
            "cut": data[:-1],
            "empty": b"",
            "another's": other.read_bytes(),
            "long": data * 2,
            "writable by others": data,
        }
        path.write_bytes(kinds[harm])
        path.chmod(0o620 if harm == "writable by others" else 0o600)
    assert cache.get(name_of(1)) is None
    assert name_of(1) not in cache
    assert harm in ("a folder", "a link") or not path.exists()
    assert cache.get(name_of(2)) == contents(2)
    assert (tmp_path / "elsewhere").exists() == (harm == "a link")


def test_what_is_no_file_of_it_stays(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").write_text("mine")
    cache = DiskCache(folder, BLOCK)
    for number in range(3):
        put(cache, number)
    cache.flush(10)
    cache.close()
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_bytes_of_an_hour(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e6]
    # The module's own name: servers of other tests in this process go by the real clock.
    clock = SimpleNamespace(**{name: getattr(time, name) for name in dir(time) if name != "monotonic"})
    clock.monotonic = lambda: now[0]
    monkeypatch.setattr(disk_module, "time", clock)
    for number in range(12):
        put(cache, number)
        cache.flush(10)
    assert (cache.counts.written, cache.counts.dropped) == (10, 2)
    now[0] += 360
    for number in range(20, 23):
        put(cache, number)
        cache.flush(10)
    assert (cache.counts.written, cache.counts.dropped) == (11, 4)


def test_nobody_waits_and_what_is_too_much_is_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk does not answer, as many bytes wait as may."""
    cache, size, goes_on = DiskCache(folder, QUEUE_BYTES * 2), QUEUE_BYTES // 4, threading.Event()
    write = cache._write
    monkeypatch.setattr(cache, "_write", lambda *parts: (goes_on.wait(20), write(*parts)))
    started = time.monotonic()
    for number in range(6):
        cache.put(name_of(number), size, lambda: bytes(size))
    assert (cache.counts.dropped, goes_on.is_set()) == (2, False)
    assert time.monotonic() - started < 15
    goes_on.set()
    cache.close()
    assert cache.counts.written == 4


@pytest.mark.parametrize("failed", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_let_be_for_a_while(
    failed: int,
    cache: DiskCache,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of a file was written by then; what is there is still read."""
    put(cache, 0)
    cache.flush(10)
    fails = [True]

    def replace(*paths: Any) -> None:
        if fails:
            raise OSError(failed, os.strerror(failed))
        os.rename(*paths)

    monkeypatch.setattr(disk_module.os, "replace", replace)
    for number in (1, 2):
        put(cache, number)
        cache.flush(10)
    assert sorted(entry.name for entry in folder.iterdir()) == sorted([f"{name_of(0)}.kv", LOCK])
    assert (cache.counts.written, cache.counts.dropped, cache.counts.bytes) == (1, 2, BLOCK)
    assert cache.get(name_of(0)) == contents(0)
    assert [record.message for record in caplog.records] == [
        f"disk cache: [Errno {failed}] {os.strerror(failed)}; answers go on without it"
    ]
    fails.clear()
    cache._paused_until = 0.0
    put(cache, 1)
    cache.flush(10)
    assert cache.get(name_of(1)) == contents(1)


def test_a_folder_that_became_read_only() -> None:
    """For nobody, where root runs the tests: root writes everywhere."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    if (pid := os.fork()) == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.chown(folder, 65534, 65534)
                os.setuid(65534)
            cache = DiskCache(folder, 10 * BLOCK)
            put(cache, 0)
            cache.flush(10)
            folder.chmod(0o500)
            put(cache, 1)
            cache.flush(10)
            right = (cache.counts.written, cache.counts.dropped) == (1, 1) and cache.get(
                name_of(0)
            ) == contents(0)
            code = 0 if right else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_a_folder_that_went(cache: DiskCache, folder: Path) -> None:
    put(cache, 0)
    cache.flush(10)
    for entry in [*folder.iterdir()]:
        entry.unlink()
    folder.rmdir()
    put(cache, 1)
    cache.flush(10)
    assert cache.get(name_of(0)) is None
    assert cache.counts.dropped == 1


def test_folders_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").write_text("")
    for name, said in (
        ("open", "with mode 755; expected"),
        ("file", "no folder"),
        ("file/below", "no folder"),
    ):
        with pytest.raises(SnapshotError, match=said):
            DiskCache(tmp_path / name)
    with pytest.raises(ValueError, match="max_bytes is 5"):
        DiskCache(tmp_path / "new", 5)


@pytest.mark.parametrize("kind", ["text", "long", "as long", "a link", "a folder", "a pipe"])
def test_a_file_of_the_users_under_the_locks_name_stays(kind: str, folder: Path, tmp_path: Path) -> None:
    """Nothing is written to it, and the folder is refused. Under another name it does not matter."""
    folder.mkdir(mode=0o700)
    DiskCache(tmp_path / "another", BLOCK).close()
    size = (tmp_path / "another" / LOCK).stat().st_size
    mine = tmp_path / "mine"
    mine.write_text({"text": "mine", "as long": "m" * size}.get(kind, "mine" * 100))
    if kind == "a folder":
        (folder / LOCK).mkdir()
    elif kind == "a pipe":
        os.mkfifo(folder / LOCK)
    elif kind == "a link":
        (folder / LOCK).symlink_to(mine)
    else:
        shutil.copy(mine, folder / LOCK)
    before = mine.read_bytes()
    with pytest.raises(SnapshotError, match=LOCK):
        DiskCache(folder, BLOCK)
    if (folder / LOCK).is_file():
        assert (folder / LOCK).read_bytes() == before
        shutil.copy(mine, folder / "lock")
        (folder / LOCK).unlink()
        cache = DiskCache(folder, BLOCK)
        put(cache, 1)
        cache.close()
        assert (folder / "lock").read_bytes() == before
        assert cache.counts.written == 1


def open_in(folder: Path) -> int:
    """Return how many descriptors of this process are a folder's, or of what is in it; a Mac does not say
    which.
    """
    links = (Path("/proc/self/fd", name) for name in os.listdir("/dev/fd"))
    return sum(str(folder) in os.readlink(link) for link in links if os.path.lexists(link))


def test_folders_under_the_names_of_files(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each stands in the way of its own file only, and is named."""
    folder.mkdir(mode=0o700)
    (folder / f"{name_of(1)}.kv" / "below").mkdir(parents=True)
    (folder / f"{name_of(2)}.kv.part").mkdir()
    os.mkfifo(folder / f"{name_of(3)}.kv.part")
    (folder / f"{name_of(4)}.kv.part").symlink_to(folder / "elsewhere")
    cache = DiskCache(folder, 4 * BLOCK)
    assert cache.flush(30)  # its thread has opened what it holds
    descriptors = open_in(folder)
    for number in (1, 2, 3, 4, 5):
        assert cache.get(name_of(number)) is None
        put(cache, number)
    assert cache.flush(30)
    assert [cache.get(name_of(number)) for number in (1, 2)] == [None, None]
    assert [cache.get(name_of(number)) for number in (3, 4, 5)] == [contents(number) for number in (3, 4, 5)]
    assert (cache.counts.written, cache.counts.dropped, cache.counts.bytes) == (3, 2, 3 * BLOCK)
    assert open_in(folder) == descriptors
    assert (folder / f"{name_of(1)}.kv" / "below").is_dir()
    named = [name_of(number) in record.message for number, record in zip((1, 2), caplog.records, strict=True)]
    assert all(named)
    cache.close()


def test_a_folder_that_takes_the_place_of_a_file(cache: DiskCache, folder: Path) -> None:
    """It does not keep others from being given up, for new ones."""
    for number in range(10):
        put(cache, number)
    cache.flush(10)
    cache.close()
    again = DiskCache(folder, 10 * BLOCK)
    assert again.flush(10)
    path = folder / f"{name_of(0)}.kv"
    path.unlink()
    path.mkdir()
    os.utime(path, ns=(0, 0))  # it is the first to go
    for number in range(10, 15):
        put(again, number)
    assert again.flush(10)
    assert (again.counts.written, again.counts.dropped) == (5, 0)
    assert path.is_dir()
    again.close()


def test_closing_does_not_wait_for_another_process(cache: DiskCache, folder: Path) -> None:
    """Which holds the folder, perhaps for ever. What comes while it does is written once it lets go."""
    other = os.open(folder / LOCK, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    put(cache, 1)
    assert not cache.flush(0.2)
    fcntl.flock(other, fcntl.LOCK_UN)
    assert cache.flush(30)
    fcntl.flock(other, fcntl.LOCK_EX)
    put(cache, 2)
    closing = threading.Thread(target=cache.close, args=(600,), daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert (cache.counts.written, cache.counts.dropped) == (1, 1)
    os.close(other)


def test_kill_9_at_any_moment(folder: Path) -> None:
    """Two processes write in one folder. One is killed, again and again: what is read is right, and the
    bound holds.
    """
    bound, stopped, most, looks = 40 * BLOCK, threading.Event(), [0], [0]

    def watch() -> None:
        """A sum over files counts where nothing changed while they were looked at."""
        while not stopped.is_set():
            with suppress(FileNotFoundError):
                if (found := sizes_in(folder)) == sizes_in(folder):
                    most[0], looks[0] = max(most[0], sum(found.values())), looks[0] + 1

    def writes(seed: int) -> int:
        """A process of its own, forked: nothing is loaded for it."""
        if pid := os.fork():
            return pid
        try:
            cache, rng = DiskCache(folder, bound), random.Random(seed)
            cache.max_bytes = bound
            while True:
                cache._allowed = float(bound)
                put(cache, rng.randrange(200), rng.choice([100, 3000, 50_000]))
                cache.flush(0.05)
        finally:
            os._exit(1)

    DiskCache(folder, bound).close()
    watcher = threading.Thread(target=watch, daemon=True)
    other = writes(0)
    watcher.start()
    rng = random.Random(1)
    try:
        for seed in range(count(12, 200)):
            pid = writes(seed + 1)
            time.sleep(rng.uniform(0.002, 0.1))
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL
            assert not os.waitpid(other, os.WNOHANG)[0]
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        stopped.set()
        watcher.join()
    last = DiskCache(folder, bound)
    put(last, 1000)
    assert last.flush(30)
    assert 0 < bytes_in(folder) == last.counts.bytes <= bound
    assert looks[0] > 20
    assert 0 < most[0] <= bound
    assert not [entry for entry in folder.iterdir() if entry.suffix == ".part"]
    found = 0
    for number in range(200):
        for size in (100, 3000, 50_000):
            data = last.get(name_of(number))
            found += data == contents(number, size)
        assert data is None or data in [contents(number, size) for size in (100, 3000, 50_000)]
    assert found > 1
    last.close()


def test_many_files(folder: Path) -> None:
    """They are found at the start, and given up one by one."""
    number = count(2_000, 100_000)
    folder.mkdir(mode=0o700)
    for place in range(number):
        path = folder / f"{name_of(place)}.kv"
        path.touch(0o600)
        os.truncate(path, 100)
        os.utime(path, ns=(place * 10**9, place * 10**9))
    cache = DiskCache(folder, number * BLOCK)
    assert cache.counts.files == number
    for place in range(5):
        put(cache, number + place)
    assert cache.flush(60)
    assert cache.counts.files == number
    assert [name_of(place) in cache for place in range(6)] == [False] * 5 + [True]
    cache.close()
    assert sys.getsizeof(cache._files) < 200 * number
