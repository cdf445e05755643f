"""``kvant pull`` as its user meets it: a process, against a hub on loopback (hub.py) that does what it should.

What a hub or a network does that they should not: test_pull_resumed.py and test_pull_hostile.py.
"""

import contextlib
import hashlib
import json
import os
import pty
import signal
import stat
import subprocess
import sys
import termios
from typing import Any

import pytest
from support.hub import Hub, serve
from support.pull_machine import LOOPBACK_ONLY, REPOSITORY, WEIGHTS, Listing, Machine


def test_pulled_verified_and_used_offline(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    commit = hub.add(REPOSITORY, files)
    folder = machine.pull(REPOSITORY)
    assert folder == machine.home / "hf" / "hub" / "models--somebody--small-model" / "snapshots" / commit
    wanted = {"config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == wanted
    assert all((folder / name).read_bytes() == files[name] for name in wanted)
    assert {request.host for request in hub.requests} == {f"127.0.0.1:{hub.port}", f"localhost:{hub.port}"}
    asked = {request.path.rpartition("/")[2] for request in hub.requests}
    assert not asked & {"pytorch_model.bin", "modeling.py", "consolidated.safetensors", "README.md", "x.pkl"}

    lock = json.loads(machine.lock.read_text())
    assert stat.S_IMODE(machine.lock.stat().st_mode) == 0o600
    assert lock["pins"] == {"": commit}
    assert {name: file["sha256"] for name, file in lock["snapshots"][commit].items()} == {
        name: hashlib.sha256(files[name]).hexdigest() for name in wanted
    }

    count = len(hub.requests)
    prompt = ["generate", "Tell me a story about a fox named Pip.", "-q", "-m", "8", "--temp", "0"]
    offline = {"HF_HUB_OFFLINE": "1"}
    said = machine.run(*prompt, "--model", REPOSITORY, **offline)
    assert (said.returncode, said.stdout) == (0, machine.run(*prompt).stdout)
    table = machine.run("models", "--json", **offline)
    rows = {row["name"]: row for row in json.loads(table.stdout)}
    assert (rows[REPOSITORY]["here"], rows["qwen2.5-0.5b"]["here"]) == ("yes", "no")
    assert rows[REPOSITORY]["cache_bytes_per_token"] == rows["pocket"]["cache_bytes_per_token"]
    assert machine.pull(REPOSITORY, **offline) == machine.pull(f"{REPOSITORY}@{commit}", **offline) == folder
    assert machine.run("find", REPOSITORY, commit, **offline).stdout == ""
    why = machine.run("find", REPOSITORY, "main", **offline).stdout  # pinned under the name it was pulled by
    assert why == f"{REPOSITORY}@main is not here; `kvant pull {REPOSITORY}@main` fetches it\n"
    assert "HF_HUB_OFFLINE keeps it" in machine.refuses("pull", "somebody/other", **offline)
    assert "`kvant pull somebody/other` fetches it" in machine.refuses(*prompt, "--model", "somebody/other", **offline)
    assert len(hub.requests) == count


def test_a_cut_connection_is_resumed(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    hub.cut[WEIGHTS] = 11_000_000
    folder = machine.pull(REPOSITORY)
    assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert [request.range for request in hub.fetched(WEIGHTS)] == [None, "bytes=11000000-"]


def test_a_progress_bar_on_a_terminal(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    command = [sys.executable, "-c", f"{LOOPBACK_ONLY}main()", "pull", REPOSITORY]
    process = subprocess.Popen(command, env=machine.environment, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, f"{machine.pull(REPOSITORY)}\n")
    assert b"model.safetensors:   0%|" in shown
    assert b"model.safetensors: 100%|" in shown


def test_interrupted_half_way_then_pulled_again(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """Whole files stay, and the half of the one it was at, which the next pull completes."""
    hub.add(REPOSITORY, files)
    hub.hold[WEIGHTS] = 6_000_000
    process = machine.start("pull", REPOSITORY)
    assert hub.held.wait(60)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors
    assert not machine.lock.exists()
    assert "is not here; `kvant pull" in (machine.resolves() or "")
    data = machine.partial().read_bytes()
    assert files[WEIGHTS].startswith(data)
    assert 0 < len(data) <= 6_000_000
    hub.release.set()
    machine.pull(REPOSITORY)
    assert machine.resolves() is None
    assert not list((machine.home / "hf").rglob("*.incomplete"))
    assert len(hub.fetched("config.json")) == 1
    assert [request.range for request in hub.fetched(WEIGHTS)] == [None, f"bytes={len(data)}-"]


def test_content_that_is_not_what_was_stated(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """What came is removed, what was there is not; nothing can be loaded, and what the line says to do helps."""
    hub.add(REPOSITORY, files)
    data = files[WEIGHTS]
    hub.sent[WEIGHTS] = data[:-1] + bytes([data[-1] ^ 1])
    line = machine.refuses("pull", REPOSITORY)
    given, expected = (hashlib.sha256(content).hexdigest() for content in (hub.sent[WEIGHTS], data))
    assert line.endswith(f"{WEIGHTS}: sha256 {given}; expected {expected}; what came is removed")
    blob = machine.blobs / expected
    assert not list(machine.blobs.glob(f"{expected}*"))
    blob.write_bytes(hub.sent[WEIGHTS])  # as another program may leave it
    line = machine.refuses("pull", REPOSITORY)
    assert f"{WEIGHTS}: sha256 {given}; expected {expected}, as the hub states; nothing was deleted" in line
    assert line.endswith(f"remove {blob} and pull again to fetch it anew")
    assert blob.read_bytes() == hub.sent[WEIGHTS]
    assert not machine.lock.exists()
    assert "is not here" in (machine.resolves() or "")
    assert f"sha256 {given}" in machine.refuses("pull", REPOSITORY)
    hub.sent.clear()
    blob.unlink()
    machine.pull(REPOSITORY)
    assert machine.resolves() is None

    hub.add(REPOSITORY, files | {"config.json": files["config.json"] + b"\n"}, branch="short")
    hub.sent["config.json"] = files["config.json"]
    line = machine.refuses("pull", f"{REPOSITORY}@short")
    size = len(files["config.json"])
    assert f"config.json: {size} bytes; expected {size + 1}, as the hub states" in line
    assert "is not here" in (machine.resolves(f"{REPOSITORY}@short") or "")


def test_a_listed_model(machine: Machine, hub: Hub, files: dict[str, bytes], listed: Listing) -> None:
    """What weights.toml knows is held against the hub's listing before a byte, and against every file after."""
    commit = hub.add(REPOSITORY, files)
    moved = hub.add(REPOSITORY, files | {"generation_config.json": b"{}"})
    wrong = hashlib.sha256(b"").hexdigest()
    right = hashlib.sha256(files[WEIGHTS]).hexdigest()
    line = machine.refuses("pull", "small", listed=listed.write(commit, model={"sha256": wrong}))
    assert f"the hub lists {WEIGHTS} with sha256 {right}; expected {wrong}" in line
    size = len(files[WEIGHTS])
    line = machine.refuses("pull", "small", listed=listed.write(commit, model={"bytes": 7}))
    assert f"the hub lists {WEIGHTS} with {size} bytes; expected 7" in line
    line = machine.refuses("pull", "small", listed=listed.write(commit, model={"name": "other.safetensors"}))
    assert "the hub lists no other.safetensors" in line
    assert not hub.fetched("config.json")
    assert not hub.fetched(WEIGHTS)
    place = listed.write(commit, config={"sha256": wrong})
    assert f"expected {wrong}, as weights.toml says" in machine.refuses("pull", "small", listed=place)
    place = listed.write(commit)
    folder = machine.pull("small", listed=place)
    assert folder.name == commit != moved
    assert machine.pull(REPOSITORY, listed=place) == folder
    rows = json.loads(machine.run("models", "--json", listed=place).stdout)
    assert [(row["name"], row["here"], row["license"]) for row in rows] == [
        ("pocket", "embedded", "MIT"),
        ("small", "yes", "mit"),
    ]


def test_a_branch_that_moved(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    old = hub.add(REPOSITORY, files)
    folder = machine.pull(REPOSITORY)
    new = hub.add(REPOSITORY, files | {"generation_config.json": b"{}"})
    done = machine.run("pull", REPOSITORY)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n")
    assert (
        f"upstream moved from {old} to {new}; the former stays until `kvant pull {REPOSITORY} --update`" in done.stderr
    )
    assert json.loads(machine.lock.read_text())["pins"] == {"": old}
    assert machine.pull(REPOSITORY, "--update").name == new
    assert json.loads(machine.lock.read_text())["pins"] == {"": new}
    assert machine.resolves(f"{REPOSITORY}@{old}") is None
    assert "only a branch or a tag" in machine.refuses("pull", f"{REPOSITORY}@{old}", "--update", code=2)


def test_a_file_that_changed_on_disk(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    folder = machine.pull(REPOSITORY)
    path = folder / WEIGHTS
    blob = path.resolve()
    os.utime(blob, ns=(1, 1))  # touched, and hashed again
    assert machine.resolves() is None
    assert json.loads(machine.lock.read_text())["snapshots"][folder.name][WEIGHTS]["mtime_ns"] == 1
    blob.write_bytes(b"x" * len(files[WEIGHTS]))
    given = hashlib.sha256(b"x" * len(files[WEIGHTS])).hexdigest()
    why = machine.resolves() or ""
    assert f"{path}: sha256 {given}; expected" in why
    assert f"remove {blob} and pull again" in why
    os.utime(blob, ns=(1, 1))  # its old time: only the digest tells
    assert machine.resolves() is None, "size and time are what a load compares"
    line = machine.refuses("pull", "--verify")
    assert line.startswith("kvant: error: 1 of 5 files are wrong: ")
    assert f"{WEIGHTS}: sha256 {given}" in line
    os.utime(blob)
    rows = json.loads(machine.run("models", "--json").stdout)
    assert [row["here"] for row in rows if row["name"] == REPOSITORY] == ["changed"]
    blob.unlink()
    assert f"{path}: no such file" in (machine.resolves() or "")
    machine.pull(REPOSITORY)
    assert "5 files are as they were verified" in machine.run("pull", "--verify", REPOSITORY).stderr
    shared = machine.home / "hf" / "hub" / "blobs" / "ab" / "abc"  # where huggingface_hub keeps what repositories share
    shared.parent.mkdir(parents=True)
    path.resolve().rename(shared)
    blob.symlink_to(shared)
    assert machine.resolves() is None
    (folder / "model-extra.safetensors").write_bytes(b"")
    assert "not among the files that were pulled" in (machine.resolves() or "")
    (folder / "model-extra.safetensors").unlink()
    path.unlink()
    path.symlink_to(machine.home / "elsewhere")
    (machine.home / "elsewhere").write_bytes(files[WEIGHTS])
    assert "a link out of the model folder" in (machine.resolves() or "")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"PRELUDE": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))"},
            "File too large",
        ),
        (
            {"patches": {"os.fsync": "Mock(side_effect=OSError(errno.ENOSPC, 'No space left on device'))"}},
            "No space left on device",
        ),
        (
            {"patches": {"shutil.disk_usage": "lambda place: shutil._ntuple_diskusage(9, 9, 9)"}},
            "; 9 bytes are free",
        ),
    ],
)
def test_a_full_disk(machine: Machine, hub: Hub, files: dict[str, bytes], options: dict[str, Any], line: str) -> None:
    hub.add(REPOSITORY, files)
    assert line in machine.refuses("pull", REPOSITORY, **options)
    assert not machine.lock.exists()
    assert "is not here" in (machine.resolves() or "")


def test_a_cache_that_cannot_be_written_is_told_before_the_download(
    machine: Machine, hub: Hub, files: dict[str, bytes]
) -> None:
    hub.add(REPOSITORY, files)
    (machine.home / "cache").write_text("no folder")
    line = machine.refuses("pull", REPOSITORY)
    assert "the record of what was pulled cannot be read: Not a directory" in line
    (machine.home / "cache").unlink()
    read_only = {"os.access": "lambda *a, **k: False"}  # whoever runs tests may be root
    line = machine.refuses("pull", REPOSITORY, patches=read_only)
    assert line.endswith("kvant/weights: what is pulled cannot be recorded there: Permission denied")
    assert not hub.fetched("config.json")
    assert machine.resolves() is not None


REFUSALS = [
    ((401, "RepoNotFound"), None, "no such repository, or a private one (401); `hf auth login`"),
    ((404, "RepoNotFound"), None, "no such repository, or a private one (404)"),
    ((403, "GatedRepo"), None, "gated (403): accept its terms on its page; then `hf auth login`"),
    ((403, ""), None, "the hub forbids it (403); `hf auth login`"),
    ((429, ""), None, "too many requests (429)"),
    ((404, "RevisionNotFound"), None, "no revision 'main' (404)"),
    ((500, ""), None, "the hub answered 500"),
    (None, (401, "GatedRepo"), "config.json: gated (401): accept its terms"),
    (None, (404, "EntryNotFound"), "config.json: no such file at"),
]


def test_the_hub_refuses(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    for refusal, file_refusal, line in REFUSALS:
        hub.refusal, hub.file_refusal = refusal, file_refusal
        assert line in machine.refuses("pull", REPOSITORY)
    assert not machine.lock.exists()


def test_what_cannot_be_had(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    commit = hub.add(REPOSITORY, files)
    assert "no such repository" in machine.refuses("pull", "nobody/nothing")
    assert "no revision 'later' (404)" in machine.refuses("pull", f"{REPOSITORY}@later")
    missing = "0" * 40
    assert f"no revision '{missing}' (404)" in machine.refuses("pull", f"{REPOSITORY}@{missing}")
    hub.add("somebody/pickles", {"config.json": b"{}", "pytorch_model.bin": b""})
    assert "no config.json and safetensors" in machine.refuses("pull", "somebody/pickles")
    for name in ("../../../escaped.safetensors", "/etc/escaped.json", "a\\b.json", "..", "model copy.safetensors"):
        hub.add("somebody/hostile", files | {name: b"{}"})
        assert f"the hub lists a file named {name!r}; refused" in machine.refuses("pull", "somebody/hostile")
    assert not [path for path in machine.home.rglob("*") if "escaped" in path.name]
    with serve(Hub()) as gone:
        pass
    elsewhere = {"huggingface_hub.constants.ENDPOINT": repr(gone.endpoint)}
    line = machine.refuses("pull", f"{REPOSITORY}@{commit}", patches=elsewhere)
    assert f"{REPOSITORY} is not here, and {gone.endpoint} cannot be reached: " in line
    folder = machine.pull(REPOSITORY)
    done = machine.run("pull", REPOSITORY, patches=elsewhere)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n")
    assert "whether it moved cannot be asked" in done.stderr


def test_usage(machine: Machine) -> None:
    for arguments, line in (
        ([], "no model"),
        (["pocket"], "'pocket' is embedded"),
        (["../x"], "'../x' is no known model"),
        (["small", "--verify", "--update"], "--verify downloads nothing"),
    ):
        code = 1 if "is " in line else 2  # a model that cannot be had, or flags
        assert line in machine.refuses("pull", *arguments, code=code)
    assert "somebody/x is not here" in machine.refuses("pull", "--verify", "somebody/x")
    assert machine.run("pull", "--verify").stderr == "nothing was pulled yet\n"


def test_remote_facts(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """The config and the sizes of what a pull would bring, and no weights."""
    hub.add(REPOSITORY, files)
    code = "import json, sys; from kvant import weights; print(json.dumps(weights.remote_facts(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, REPOSITORY], env=machine.environment, capture_output=True, text=True, check=True
    )
    config, sizes = json.loads(done.stdout)
    assert config == json.loads(files["config.json"])
    names = ("config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json")
    assert sizes == {name: len(files[name]) for name in names}
    assert not hub.fetched(WEIGHTS)
    assert "is not here" in (machine.resolves() or "")
