"""Downloads that break: cut connections, killed and interrupted processes, two at once, servers without ranges."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.hub import Hub, git_id
from support.pull_machine import REPOSITORY, WEIGHTS, Listing, Machine

QUICK = {"kvant.weights.download.WAIT_S": "0.01"}  # between attempts


def _ranges(hub: Hub, name: str = WEIGHTS) -> list[str | None]:
    return [request.range for request in hub.fetched(name)]


def _digest(files: dict[str, bytes]) -> str:
    return hashlib.sha256(files[WEIGHTS]).hexdigest()


def _leave_partial(machine: Machine, hub: Hub, stop: signal.Signals) -> int:
    """A pull that is ended half-way; the bytes that are left of the file it was at."""
    hub.hold[WEIGHTS] = 6_000_000
    process = machine.start("pull", REPOSITORY)
    assert hub.held.wait(60)
    deadline = time.monotonic() + 30
    while not list(machine.blobs.glob("*.incomplete")) or machine.partial().stat().st_size < 5_000_000:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    begun = time.monotonic()
    process.send_signal(stop)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - begun < 5, "it waits for the server"  # 0.1 s on a quiet machine
    assert "Traceback" not in errors
    hub.release.set()
    return machine.partial().stat().st_size


def _found(machine: Machine, files: dict[str, bytes]) -> Path:
    """The folder of a pull that must succeed: every file as it should be, nothing unfinished."""
    folder = machine.pull(REPOSITORY, patches=QUICK)
    assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert machine.resolves() is None
    assert not list(machine.home.rglob("*.incomplete"))
    return folder


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_process_that_ends_leaves_its_part(
    machine: Machine, hub: Hub, files: dict[str, bytes], stop: signal.Signals
) -> None:
    """The next pull asks only for the rest."""
    hub.add(REPOSITORY, files)
    size = _leave_partial(machine, hub, stop)
    assert size >= 5_000_000
    assert files[WEIGHTS].startswith(machine.partial().read_bytes())
    assert not machine.lock.exists()
    assert "is not here" in (machine.resolves() or "")
    _found(machine, files)
    assert _ranges(hub) == [None, f"bytes={size}-"]
    assert len(hub.fetched("config.json")) == 1


def test_a_part_that_is_not_the_file(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """It is continued, found wrong, removed; the pull after begins anew."""
    hub.add(REPOSITORY, files)
    partial = machine.blobs / f"{_digest(files)}.kvant.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(4_000_000))
    line = machine.refuses("pull", REPOSITORY)
    given = hashlib.sha256(bytes(4_000_000) + files[WEIGHTS][4_000_000:]).hexdigest()
    assert line.endswith(f"sha256 {given}; expected {_digest(files)}; what came is removed")
    assert not partial.exists()
    _found(machine, files)
    assert _ranges(hub) == ["bytes=4000000-", None]

    for made in (files[WEIGHTS] + b"more", files[WEIGHTS]):  # more than all of it, and all of it
        hub.requests.clear()
        machine.lock.unlink()
        (machine.blobs / _digest(files)).unlink()
        partial.write_bytes(made)
        _found(machine, files)
        assert _ranges(hub) == ([None] if made != files[WEIGHTS] else [])


def test_a_part_that_is_more_than_the_server_has(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    hub.sent[WEIGHTS] = files[WEIGHTS][:3_000_000]
    line = machine.refuses("pull", REPOSITORY, patches=QUICK)
    assert f"{WEIGHTS}: 3000000 bytes; expected {len(files[WEIGHTS])}, as the hub states; what came is removed" in line
    (machine.blobs / f"{_digest(files)}.kvant.incomplete").write_bytes(files[WEIGHTS][:4_000_000])
    line = machine.refuses("pull", REPOSITORY, patches=QUICK)
    assert line.endswith(f"{WEIGHTS}: the hub has no more than what is here of it, which is removed")
    hub.sent.clear()
    _found(machine, files)


def test_a_part_counts_where_there_is_little_space(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    machine.blobs.mkdir(parents=True)
    (machine.blobs / f"{_digest(files)}.kvant.incomplete").write_bytes(files[WEIGHTS][:12_000_000])
    small = sum(len(data) for name, data in files.items() if name.endswith(".json") and "/" not in name)
    needed = small + len(files[WEIGHTS]) - 12_000_000

    def free(number: int) -> dict[str, str]:
        return {"shutil.disk_usage": f"lambda place: shutil._ntuple_diskusage({number}, {number}, {number})"}

    line = machine.refuses("pull", REPOSITORY, patches=free(needed - 1))
    assert f"{REPOSITORY} needs {needed / 1e3:.2f} kB in " in line
    machine.pull(REPOSITORY, patches=free(needed))
    assert _ranges(hub) == ["bytes=12000000-"]


def test_a_server_without_ranges(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    hub.whole = True
    hub.cut[WEIGHTS] = 3_000_000
    _found(machine, files)
    assert _ranges(hub) == [None, "bytes=3000000-"]


RANGES = [
    "bytes 0-{end}/{size}",
    "bytes {start}-{end}/*",
    "bytes {start}-{end}/12",
    "bytes {start}-7/{size}",
    "bytes -{start}-{end}/{size}",
    "bytes {start}-{end}/1e9999",
    "bytes " + "9" * 5000 + "-{end}/{size}",
    "",
]


def test_a_range_that_was_not_asked_for(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    size = len(files[WEIGHTS])
    machine.blobs.mkdir(parents=True)
    for hub.ranges in RANGES:
        (machine.blobs / f"{_digest(files)}.kvant.incomplete").write_bytes(files[WEIGHTS][:3_000_000])
        line = machine.refuses("pull", REPOSITORY, patches=QUICK)
        assert f"expected 'bytes 3000000-{size - 1}/{size}'; what came is removed" in line
        assert len(line) < 400
        assert not list(machine.blobs.glob("*.incomplete"))
    hub.ranges = Hub.ranges
    _found(machine, files)


def test_a_connection_that_is_always_cut(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """Attempts that bring next to nothing are counted; those that bring much are not."""
    hub.add(REPOSITORY, files)
    hub.always_cut = True
    hub.cut[WEIGHTS] = 10
    line = machine.refuses("pull", REPOSITORY, patches=QUICK)
    assert "cannot be reached: " in line
    assert _ranges(hub) == [None, *(f"bytes={10 * n}-" for n in range(1, 5))]
    assert machine.partial().stat().st_size == 50
    hub.cut[WEIGHTS] = 1_500_000
    _found(machine, files)
    assert len(_ranges(hub)) == 5 + -(-(len(files[WEIGHTS]) - 50) // 1_500_000)


def test_two_pulls_at_once(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """The second waits for what the first fetches, says so, and takes it."""
    hub.add(REPOSITORY, files)
    hub.hold[WEIGHTS] = 1_000_000
    first = machine.start("pull", REPOSITORY)
    assert hub.held.wait(60)
    second = machine.start("pull", REPOSITORY)
    assert second.stderr is not None
    lines = iter(second.stderr.readline, "")
    assert any(line == f"waiting for another download of {WEIGHTS}\n" for line in lines)
    hub.release.set()  # the first's connection breaks, and it asks for the rest
    outputs = {process.communicate(timeout=60)[0] for process in (first, second)}
    assert (first.returncode, second.returncode) == (0, 0)
    assert outputs == {f"{_found(machine, files)}\n"}
    assert len(_ranges(hub)) == 2
    assert len(hub.fetched("config.json")) == 1


def test_what_others_left_unfinished(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """A pull that completes removes it, but not what somebody may be writing."""
    hub.add(REPOSITORY, files)
    machine.blobs.mkdir(parents=True)
    old, new, ours = (
        machine.blobs / name for name in ("0.1.incomplete", "0.2.incomplete", f"{'0' * 64}.kvant.incomplete")
    )
    for path in (old, new, ours):
        path.write_bytes(b"part")
    os.utime(old, (time.time() - 100_000,) * 2)
    machine.pull(REPOSITORY)
    assert [path.name for path in machine.blobs.glob("*.incomplete")] == [new.name]


def test_huggingface_hub_finds_what_was_pulled(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """Its own names for blobs, relative links, and the branch: so mlx-lm loads it, offline, too."""
    commit = hub.add(REPOSITORY, files)
    folder = machine.pull(REPOSITORY)
    for name in ("config.json", WEIGHTS):
        digest = _digest(files) if name == WEIGHTS else git_id(files[name])
        assert os.readlink(folder / name) == f"../../blobs/{digest}"
    code = """if True:
        import json, sys
        from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download
        repository, name, commit = sys.argv[1:]
        files = [hf_hub_download(repository, name, revision=r, local_files_only=True) for r in (None, "main", commit)]
        cache = scan_cache_dir()
        count = next(iter(cache.repos)).nb_files
        print(json.dumps([*files, snapshot_download(repository), len(cache.warnings), count]))
    """
    environment = machine.environment | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, REPOSITORY, WEIGHTS, commit]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    path = str(folder / WEIGHTS)
    assert json.loads(done.stdout) == [path, path, path, str(folder), 0, 5]

    count = len(hub.requests)  # and kvant takes what huggingface_hub fetched
    machine.lock.unlink()
    assert machine.pull(REPOSITORY) == folder
    assert len(hub.requests) == count + 1


def test_a_cache_without_links(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    first = hub.add(REPOSITORY, files)
    folder = machine.pull(REPOSITORY, HF_HUB_DISABLE_SYMLINKS="1")
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert machine.resolves() is None
    machine.pull(f"{REPOSITORY}@{first}")
    no_links = {"os.symlink": "Mock(side_effect=PermissionError(1, 'Operation not permitted'))"}
    for path in folder.iterdir():  # what a snapshot with links would have left
        path.rename(machine.blobs / (_digest(files) if path.name == WEIGHTS else git_id(files[path.name])))
    machine.lock.unlink()
    assert machine.pull(REPOSITORY, patches=no_links) == folder
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert machine.resolves() is None
    assert (machine.blobs / _digest(files)).read_bytes() == files[WEIGHTS], "others may use it"
    assert not list(machine.home.rglob("*.incomplete"))


def test_a_digest_of_weights_toml_where_the_hub_states_none(
    machine: Machine, hub: Hub, files: dict[str, bytes], listed: Listing
) -> None:
    """Without either nothing is fetched: a large file's blob id is its pointer's."""
    commit = hub.add(REPOSITORY, files)
    hub.entries[WEIGHTS] = {"lfs": {"size": len(files[WEIGHTS])}}
    line = machine.refuses("pull", REPOSITORY)
    assert line.endswith(f"{REPOSITORY}: the hub states no digest of {WEIGHTS}; nothing else could tell what came")
    assert not hub.fetched(WEIGHTS)
    hub.sent[WEIGHTS] = bytes(len(files[WEIGHTS]))
    place = listed.write(commit)
    assert f"expected {_digest(files)}; what came is removed" in machine.refuses("pull", "small", listed=place)
    hub.sent.clear()
    machine.pull("small", listed=place)
    assert len(_ranges(hub)) == 2


def test_weights_that_are_a_plain_git_blob(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    hub.entries[WEIGHTS] = {"lfs": None}
    hub.sent[WEIGHTS] = bytes(len(files[WEIGHTS]))
    given, expected = (git_id(data) for data in (hub.sent[WEIGHTS], files[WEIGHTS]))
    line = machine.refuses("pull", REPOSITORY)
    assert line.endswith(f"git blob id {given}; expected {expected}; what came is removed")
    hub.sent.clear()
    _found(machine, files)
