"""``kvant pull`` as its user meets it: a process, against a hub on loopback (hub.py)."""

import json
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from support.hub import Hub, git_id, serve, sha256
from support.pull_machine import REPOSITORY, WEIGHTS, Machine
from support.terminal import Terminal


def test_pulled_verified_and_used_offline(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    folder = machine.pull(REPOSITORY)
    commit = folder.name
    assert folder == machine.blobs.parent / "snapshots" / hub.branches[REPOSITORY]["main"]
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
        name: sha256(files[name]) for name in wanted
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
    assert "HF_HUB_OFFLINE forbids" in machine.refuses("pull", "somebody/other", **offline)
    assert "`kvant pull somebody/other` fetches it" in machine.refuses(
        *prompt, "--model", "somebody/other", **offline
    )
    assert len(hub.requests) == count


def test_a_progress_bar_on_a_terminal(machine: Machine) -> None:
    with Terminal(
        "pull", REPOSITORY, columns=160, **machine.environment | {"HF_HUB_OFFLINE": "0"}
    ) as terminal:
        terminal.wait_for("model.safetensors: 100%|")
        terminal.wait_for(f"snapshots/{machine.hub.branches[REPOSITORY]['main']}")


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_half_way_then_pulled_again(
    machine: Machine, hub: Hub, files: dict[str, bytes], stop: signal.Signals
) -> None:
    hub.hold[WEIGHTS] = 6_000_000
    process = machine.start("pull", REPOSITORY)
    assert hub.held.wait(60)
    process.send_signal(stop)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130 if stop == signal.SIGINT else -stop, "")
    assert "Traceback" not in errors
    assert not machine.lock.exists()
    assert "is not here; `kvant pull" in (machine.resolves() or "")
    for path in machine.blobs.glob("*.incomplete"):
        assert stop == signal.SIGKILL
        os.utime(path, (time.time() - 100_000,) * 2)
    hub.release.set()
    assert (machine.pull(REPOSITORY) / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert machine.resolves() is None
    assert not list(machine.blobs.glob("*.incomplete"))
    assert len(hub.fetched("config.json")) == 1


def test_two_pulls_at_once(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.hold[WEIGHTS] = 11_000_000
    processes = [machine.start("pull", REPOSITORY)]
    assert hub.held.wait(60)
    processes.append(machine.start("pull", REPOSITORY))
    assert any(f"fetching {REPOSITORY}, {WEIGHTS}" in line for line in iter(processes[1].stderr.readline, ""))
    hub.release.set()  # the first's connection breaks, and it asks for the rest
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == {f"{machine.pull(REPOSITORY)}\n"}
    assert [request.range is None for request in hub.fetched(WEIGHTS)] == [True, False]
    assert machine.resolves() is None


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_content_that_is_not_what_was_stated(
    machine: Machine, hub: Hub, files: dict[str, bytes], name: str
) -> None:
    data = files[name]
    hub.sent[name] = data[:-1] + bytes([data[-1] ^ 1])
    kind, digest = ("sha256", sha256) if name == WEIGHTS else ("git blob id", git_id)
    given, expected = digest(hub.sent[name]), digest(data)
    line = machine.refuses("pull", REPOSITORY)
    assert f"{name}: {kind} {given}; expected {expected}, as the hub states; nothing was deleted" in line
    assert line.endswith(f"remove {machine.blobs / expected} and pull again to fetch it anew")
    assert not machine.lock.exists()
    assert "is not here" in (machine.resolves() or "")
    assert f"{kind} {given}" in machine.refuses("pull", REPOSITORY)
    hub.sent.clear()
    (machine.blobs / expected).unlink()
    machine.pull(REPOSITORY)
    assert machine.resolves() is None


def test_content_of_another_size(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.sent[WEIGHTS] = files[WEIGHTS] * 2
    assert f"{WEIGHTS}: cannot be pulled: " in machine.refuses("pull", REPOSITORY)
    hub.sent.clear()
    hub.entries["config.json"] = {"size": len(files["config.json"]) + 1}
    assert "bytes; expected 575, as the hub states" in machine.refuses("pull", REPOSITORY)
    assert not machine.lock.exists()


def test_a_listed_model(machine: Machine, hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    """What weights.toml knows is held against the hub's listing before a byte, and against every file
    after.
    """
    commit = hub.branches[REPOSITORY]["main"]
    moved = hub.add(REPOSITORY, files | {"generation_config.json": b"{}"})
    wrong, right = sha256(b""), sha256(files[WEIGHTS])

    def listed(of: str = "", **changes: object) -> dict[str, Any]:
        lines = [
            f'[models.small]\nrepository = "{REPOSITORY}"\nrevision = "{commit}"\nlicense = "mit"\nfiles = ['
        ]
        for each in ("config.json", WEIGHTS):
            facts = {"name": each, "bytes": len(files[each]), "sha256": sha256(files[each])}
            facts |= changes if each == of else {}
            lines.append(
                "  { " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in facts.items()) + " },"
            )
        path = tmp_path / "weights.toml"
        path.write_text("\n".join([*lines, "]", "[models.small.config]", "num_hidden_layers = 4"]))
        return {"patches": {"kvant.weights.known.PLACES": f"(Path({str(path)!r}),)"}}

    for change, line in (
        ({"sha256": wrong}, f"the hub lists {WEIGHTS} with sha256 {right}; expected {wrong}"),
        ({"bytes": 7}, f"the hub lists {WEIGHTS} with {len(files[WEIGHTS])} bytes; expected 7"),
        ({"name": "other.safetensors"}, "the hub lists no other.safetensors"),
    ):
        assert line in machine.refuses("pull", "small", **listed(WEIGHTS, **change))
    assert not hub.fetched("config.json")
    assert not hub.fetched(WEIGHTS)
    line = machine.refuses("pull", "small", **listed("config.json", sha256=wrong))
    assert f"expected {wrong}, as weights.toml says" in line
    hub.entries[WEIGHTS] = {"lfs": None, "blobId": None}
    assert f"the hub states no digest of {WEIGHTS}" in machine.refuses("pull", f"{REPOSITORY}@{moved}")
    folder = machine.pull("small", **listed())  # its own digests do
    assert folder.name == commit != moved
    assert machine.pull(REPOSITORY, **listed()) == folder
    rows = json.loads(machine.run("models", "--json", **listed()).stdout)
    found = [(row["name"], row["here"], row["license"]) for row in rows]
    assert found == [("pocket", "embedded", "MIT"), ("small", "yes", "mit")]


def test_a_branch_that_moved(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    folder = machine.pull(REPOSITORY)
    old = folder.name
    new = hub.add(REPOSITORY, files | {"generation_config.json": b"{}"})
    done = machine.run("pull", REPOSITORY)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n")
    assert (
        f"upstream moved from {old} to {new}; the old commit stays until `kvant pull {REPOSITORY} --update`"
        in done.stderr
    )
    assert json.loads(machine.lock.read_text())["pins"] == {"": old}
    assert machine.pull(REPOSITORY, "--update").name == new
    assert json.loads(machine.lock.read_text())["pins"] == {"": new}
    assert machine.resolves(f"{REPOSITORY}@{old}") is None
    assert "only a branch or a tag" in machine.refuses("pull", f"{REPOSITORY}@{old}", "--update", code=2)


def test_a_file_that_changed_on_disk(machine: Machine, files: dict[str, bytes]) -> None:
    folder = machine.pull(REPOSITORY)
    path = folder / WEIGHTS
    blob = path.resolve()
    os.utime(blob, ns=(1, 1))  # touched, and hashed again
    assert machine.resolves() is None
    assert json.loads(machine.lock.read_text())["snapshots"][folder.name][WEIGHTS]["mtime_ns"] == 1
    blob.write_bytes(b"x" * len(files[WEIGHTS]))
    given = sha256(b"x" * len(files[WEIGHTS]))
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
    assert (
        "5 files are unchanged since they were verified" in machine.run("pull", "--verify", REPOSITORY).stderr
    )
    # where huggingface_hub keeps what repositories share
    shared = machine.home / "hf" / "hub" / "blobs" / "ab" / "abc"
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


def test_a_full_disk(machine: Machine) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))"
    full = {"shutil.disk_usage": "lambda place: shutil._ntuple_diskusage(9, 9, 9)"}
    assert "File too large" in machine.refuses("pull", REPOSITORY, PRELUDE=limit)
    assert "; 9 bytes are free" in machine.refuses("pull", REPOSITORY, patches=full)
    assert not machine.lock.exists()
    assert "is not here" in (machine.resolves() or "")


def test_a_cache_that_cannot_be_written_is_told_before_the_download(machine: Machine, hub: Hub) -> None:
    (machine.home / "cache").write_text("no folder")
    line = machine.refuses("pull", REPOSITORY)
    assert "the record of pulled files cannot be read: Not a directory" in line
    (machine.home / "cache").unlink()
    read_only = {"os.access": "lambda *a, **k: False"}  # whoever runs tests may be root
    line = machine.refuses("pull", REPOSITORY, patches=read_only)
    assert line.endswith("kvant/weights: pulled files cannot be recorded there: Permission denied")
    assert not hub.fetched("config.json")
    assert machine.resolves() is not None


REFUSALS = [
    ((401, "RepoNotFound"), None, "no such repository, or a private one (401); `hf auth login`"),
    ((403, "GatedRepo"), None, "gated (403): accept its terms on its page; then `hf auth login`"),
    ((403, ""), None, "the hub forbids it (403); `hf auth login`"),
    ((429, ""), None, "too many requests (429)"),
    ((500, ""), None, "the hub answered 500"),
    (None, (401, "GatedRepo"), "config.json: gated (401): accept its terms"),
    (None, (404, "EntryNotFound"), "config.json: no such file at"),
]


def test_the_hub_refuses(machine: Machine, hub: Hub) -> None:
    for hub.refusal, hub.file_refusal, line in REFUSALS:
        assert line in machine.refuses("pull", REPOSITORY)
    assert not machine.lock.exists()


def test_what_cannot_be_had(machine: Machine, hub: Hub) -> None:
    commit, missing = hub.branches[REPOSITORY]["main"], "0" * 40
    hub.add("somebody/pickles", {"config.json": b"{}", "pytorch_model.bin": b""})
    for model, line in (
        ("nobody/nothing", "no such repository"),
        (f"{REPOSITORY}@later", "no revision 'later' (404)"),
        (f"{REPOSITORY}@{missing}", f"no revision '{missing}' (404)"),
        ("somebody/pickles", "no config.json and safetensors"),
    ):
        assert line in machine.refuses("pull", model)
    with serve(Hub()) as gone:
        pass
    elsewhere = {"huggingface_hub.constants.ENDPOINT": repr(gone.endpoint)}
    line = machine.refuses("pull", f"{REPOSITORY}@{commit}", patches=elsewhere)
    assert f"{REPOSITORY} is not here, and {gone.endpoint} cannot be reached: " in line
    folder = machine.pull(REPOSITORY)
    done = machine.run("pull", REPOSITORY, patches=elsewhere)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n")
    assert "whether it moved could not be checked" in done.stderr


def test_usage(machine: Machine) -> None:
    for arguments, line in (
        ([], "no model"),
        (["pocket"], "'pocket' is built in"),
        (["../x"], "'../x' is not a known model"),
        (["small", "--verify", "--update"], "--verify downloads nothing"),
    ):
        code = 1 if "is " in line else 2  # a model that cannot be had, or flags
        assert line in machine.refuses("pull", *arguments, code=code)
    assert "somebody/x is not here" in machine.refuses("pull", "--verify", "somebody/x")
    assert machine.run("pull", "--verify").stderr == "nothing was pulled yet\n"


def test_remote_facts(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    code = "import json, sys; from kvant import weights; print(json.dumps(weights.remote_facts(sys.argv[1])))"
    config, sizes = json.loads(machine.start(REPOSITORY, code=code).communicate(timeout=60)[0])
    assert config == json.loads(files["config.json"])
    names = ("config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json")
    assert sizes == {name: len(files[name]) for name in names}
    assert not hub.fetched(WEIGHTS)
    assert "is not here" in (machine.resolves() or "")


def test_huggingface_hub_finds_what_was_pulled(machine: Machine, hub: Hub) -> None:
    """By commit and branch: so mlx-lm loads it, offline, too; and kvant takes what huggingface_hub
    fetched.
    """
    folder = machine.pull(REPOSITORY)
    code = """if True:
        import json, sys
        from huggingface_hub import hf_hub_download, snapshot_download
        repository, name, commit = sys.argv[1:]
        files = [hf_hub_download(repository, name, revision=r, local_files_only=True) for r in (None, "main", commit)]
        print(json.dumps([*files, snapshot_download(repository)]))
    """
    process = machine.start(REPOSITORY, WEIGHTS, folder.name, code=code, HF_HUB_OFFLINE="1")
    assert json.loads(process.communicate(timeout=60)[0]) == [*[str(folder / WEIGHTS)] * 3, str(folder)]
    count = len(hub.requests)
    machine.lock.unlink()
    assert machine.pull(REPOSITORY) == folder
    assert len(hub.requests) == count + 1


def test_a_download_of_another_program_moves_no_pin(
    machine: Machine, hub: Hub, files: dict[str, bytes]
) -> None:
    """It writes where a branch is now into refs/, of files that kvant has not verified."""
    folder = machine.pull(REPOSITORY)
    new = hub.add(REPOSITORY, files | {"generation_config.json": b"{}"})
    code = "import sys; from huggingface_hub import hf_hub_download; hf_hub_download(*sys.argv[1:])"
    _, errors = machine.start(REPOSITORY, WEIGHTS, code=code).communicate(timeout=60)
    assert errors == ""
    assert (machine.blobs.parent / "refs" / "main").read_text() == new
    assert (machine.blobs.parent / "snapshots" / new / WEIGHTS).exists()
    assert machine.resolves() is None
    done = machine.run("pull", REPOSITORY)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n")


def test_a_cache_without_links(machine: Machine) -> None:
    folder = machine.pull(REPOSITORY, patches={"huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS": "True"})
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert machine.resolves() is None


def test_the_login_stays_with_the_hub(machine: Machine, hub: Hub) -> None:
    machine.pull(REPOSITORY, patches={"os.environ": "os.environ | {'HF_TOKEN': 'hf_secret'}"})
    logins = {(request.host.partition(":")[0], request.login) for request in hub.requests}
    assert logins == {("127.0.0.1", "Bearer hf_secret"), ("localhost", None)}


SHA = "0123456789" * 4
LISTINGS = [
    (b"<html>", "cannot be pulled: "),
    (b"[" * 100_000, "cannot be pulled: "),
    (b"[]", "cannot be pulled: "),
    (b"{}", "cannot be pulled: "),
    (b'{"id": "a/b"}', "the hub answers for commit None; asked for main"),
    (b'{"id": "a/b", "sha": "../../x"}', "the hub answers for commit '../../x'"),
    *(
        (json.dumps({"id": "a/b", "sha": SHA, "siblings": siblings}).encode(), line)
        for siblings, line in [
            ([], "no config.json and safetensors"),
            ("config.json", "cannot be pulled: "),
            ([{"rfilename": 7}], "the hub lists a file named 7; refused"),
            ([{"rfilename": "a\x1b]52;c;x\x07.json"}], "the hub lists a file named"),
            ([{"rfilename": "a\\b.json"}], "the hub lists a file named"),
            ([{"rfilename": "x" * 300 + ".json"}], "the hub lists a file named"),
        ]
    ),
]
ENTRIES: list[tuple[dict[str, object], str]] = [
    *(({"size": size}, "with the size ") for size in (None, -1, True, 574.0, "574", 10**400, 2**40 + 1, {})),
    *(
        ({"blobId": value}, "expected 40 hexadecimal digits")
        for value in ("../../x", "0" * 41, "A" * 40, 10**39)
    ),
    ({"blobId": None}, "the hub states no digest of config.json"),
    ({"lfs": {"sha256": "../../x", "size": 1, "pointerSize": 1}}, "expected 64 hexadecimal digits"),
    ({"lfs": {"size": 1}}, "cannot be pulled: "),
    ({"rfilename": "Tokenizer.json"}, "the hub lists tokenizer.json twice"),
]


def test_odd_listings(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    # never asked for
    hub.add(REPOSITORY, files | {"../../../escaped.safetensors": b"", "/etc/escaped.json": b""})

    def refused(line: str) -> None:
        said = machine.refuses("pull", REPOSITORY)
        assert line in said
        assert len(said) < 600

    for hub.listing, line in LISTINGS:
        refused(line)
    hub.listing = None
    for hub.entries["config.json"], line in ENTRIES:
        refused(line)
    assert not machine.lock.exists()
    assert not hub.fetched(WEIGHTS)
    hub.entries = {"README.md": {"size": None, "blobId": None}, "config.json": {"lfs": None, "xetHash": 7}}
    machine.pull(REPOSITORY)
    assert not [path for path in machine.home.rglob("*") if "escaped" in path.name]


def _paths(machine: Machine) -> set[Path]:
    """Everything on the user's machine but huggingface_hub's and kvant's caches."""
    ours = (machine.home / "hf", machine.home / "cache" / "kvant")
    paths = machine.home.parent.rglob("*")
    return {path for path in paths if not any(path.is_relative_to(each) for each in ours)}


OUTSIDE = "../../../../../escaped/zz.pth"  # from blobs/, snapshots/ and .no_exist/


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_no_header_chooses_a_path(machine: Machine, hub: Hub, files: dict[str, bytes], name: str) -> None:
    """huggingface_hub itself joins an ETag to blobs/ and a commit to snapshots/ and .no_exist/."""
    (machine.home / "cache").mkdir()
    commit, before = hub.branches[REPOSITORY]["main"], _paths(machine)
    right = sha256(files[name]) if name == WEIGHTS else git_id(files[name])
    other = git_id(files[name]) if name == WEIGHTS else sha256(files[name])
    tags = [
        OUTSIDE,
        str(machine.home / "escaped"),
        "escaped",
        "..",
        other,
        right.upper(),
        right[:-1],
        "0" * 64,
    ]
    answers = [{"X-Linked-Etag": f'"{tag}"'} for tag in tags]
    answers += [{"X-Linked-Etag": "", "ETag": f'"{tag}"'} for tag in tags]
    answers += [{"X-Repo-Commit": value} for value in (OUTSIDE, "0" * 40, commit.upper(), "main")]
    answers += [{"ETag": '""', "X-Linked-Etag": ""}, {"X-Linked-Etag": 'W/""'}]
    for hub.headers[name] in answers:
        for hub.moved in (set(), {name}):
            assert f"{name}: cannot be pulled: the hub answers " in machine.refuses("pull", REPOSITORY)
    hub.headers[name] = {"X-Linked-Size": str(len(files[name]) - 1)}
    assert f"{len(files[name]) - 1} bytes; expected {len(files[name])}" in machine.refuses("pull", REPOSITORY)
    hub.headers[name], hub.file_refusal = {"X-Repo-Commit": OUTSIDE}, (404, "EntryNotFound")
    assert "no such file at" in machine.refuses("pull", REPOSITORY)
    assert not hub.fetched(name)
    assert _paths(machine) == before
    snapshots = machine.blobs.parent / "snapshots"
    assert (snapshots / commit).is_dir() == (name == WEIGHTS)  # config.json was fetched before
    assert not snapshots.exists() or len(list(snapshots.iterdir())) == 1
    assert not (machine.blobs.parent / ".no_exist").exists()
    assert not machine.lock.exists()
    hub.headers[name], hub.file_refusal = {"X-Linked-Etag": f'W/"{right}"'}, None
    hub.moved = {name, "tokenizer.json"}
    machine.pull(REPOSITORY)
    assert machine.resolves() is None


def test_xet_is_for_hugging_face_alone(
    machine: Machine, hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    """Its client writes whatever comes, so that a hub's headers do not lead to it."""
    hub.headers[WEIGHTS] = {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": f"{hub.endpoint}/xet"}
    machine.pull(REPOSITORY)
    assert len(hub.fetched(WEIGHTS)) == 1
    assert not [request for request in hub.requests if "xet" in request.path]
    machine.empty()
    (tmp_path / "content").write_bytes(files[WEIGHTS])
    copy = f"lambda **given: shutil.copy({str(tmp_path / 'content')!r}, given['incomplete_path'])"
    imports = (
        "__import__('unittest.mock').mock.create_autospec(__import__('huggingface_hub').file_download.xet_get"
    )
    xet = {"huggingface_hub.file_download.xet_get": f"{imports}, side_effect={copy})"}
    folder = machine.pull(REPOSITORY, patches=xet | {"kvant.weights.hub.HUGGING_FACE": repr(hub.endpoint)})
    assert len(hub.fetched(WEIGHTS)) == 1
    assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert machine.resolves() is None


def test_what_does_not_end_is_left(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """However much a hub would send: a listing's limit or a file's size ends it, and nothing of it stays."""
    for what, line, most in (
        ("listing", "more than 8388608 bytes", 2**25),
        ("config.json", "config.json: cannot be pulled: the hub sends more than the 574 bytes", 2**24),
        ("307", "config.json: cannot be pulled: the hub sends more than the 574 bytes", 2**24),
        (WEIGHTS, f"{WEIGHTS}: cannot be pulled: the hub sends more than the ", 2**24 + len(files[WEIGHTS])),
        ("500", "the hub answered 500", 2**24),
    ):
        hub.endless, hub.streamed = {what}, 0
        hub.moved, hub.refusal = {"config.json"}, (500, "") if what == "500" else None
        if what == "307":
            hub.endless |= {"config.json"}
        assert line in machine.refuses("pull", REPOSITORY)
        assert 0 < hub.streamed < most
        left = {path.resolve().name for path in (machine.home / "hf").rglob("*") if path.is_file()}
        assert {name for name in left if not name.endswith(".lock")} <= set(map(git_id, files.values()))
    assert not machine.lock.exists()
    hub.endless, hub.refusal = set(), None
    machine.pull(REPOSITORY)


def test_a_connection_that_always_breaks(machine: Machine, hub: Hub) -> None:
    """Each second answer, from the beginning, brought more than the one before: it was asked for without
    end.
    """
    hub.cuts[WEIGHTS] = [300, 200]
    assert WEIGHTS in machine.refuses("pull", REPOSITORY)
    assert len(hub.fetched(WEIGHTS)) < 10


def test_a_listing_of_many_names(machine: Machine, hub: Hub) -> None:
    """Checked in time that grows with their number: 30 s of processor time are many times what is needed."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (30, 30))"
    commit = hub.branches[REPOSITORY]["main"]
    for count, letters, line in (
        (60_000, 20, "lists more than 10000 files to pull"),
        (10_000, 200, "lists X.json twice"),  # long ones; the last is there twice
        (100_000, 20, "more than 8388608 bytes"),
    ):
        names = [f"{number:0{letters - 5}}.json" for number in range(count - 1)] + ["x.json", "X.json"]
        siblings = [{"rfilename": name, "size": 1, "blobId": "0" * 40} for name in names]
        hub.listing = json.dumps({"id": REPOSITORY, "sha": commit, "siblings": siblings}).encode()
        assert line in machine.refuses("pull", REPOSITORY, PRELUDE=limit)
    # not pulled, so they do not count
    never = [{"rfilename": f"onnx/{number}.json"} for number in range(20_000)]
    hub.listing = json.dumps({"id": REPOSITORY, "sha": commit, "siblings": never}).encode()
    assert "no config.json and safetensors" in machine.refuses("pull", REPOSITORY, PRELUDE=limit)


def test_settings_that_cannot_be(machine: Machine) -> None:
    """huggingface_hub itself ends in a traceback."""
    for variable, line in (
        ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_ETAG_TIMEOUT is '10 s'"),
        ("HF_ENDPOINT", REPOSITORY),
    ):
        assert line in machine.refuses("pull", REPOSITORY, **{variable: "10 s"})


def test_models_shows_whatever_was_pulled(machine: Machine, hub: Hub) -> None:
    shape = b'{"num_hidden_layers": %s, "num_attention_heads": 9, "hidden_size": 576}'
    configs = [
        shape % value for value in (b'"9"', b"1e999", b"NaN", b"true", b"[9]", b"1" + b"0" * 400, b"null")
    ]
    configs += [
        b'{"num_hidden_layers": 9, "num_attention_heads": 1, "head_dim": 3000000000, "max_position_embeddings": 1e999}',
        b'{"num_hidden_layers": 9, "num_attention_heads": 9, "hidden_size": 576, "num_key_value_heads": "x"}',
        *(b"[]", b"{", b"\xff", b'{"a": 1, "a": 2}'),
    ]
    sizes = {}
    for number, config in enumerate(configs):
        sizes[f"a/b{number}"] = len(config) + 7
        hub.add(f"a/b{number}", {"config.json": config, WEIGHTS: b"weights"})
        machine.pull(f"a/b{number}")
    done = machine.run("models", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    for name, size in sizes.items():
        row = rows[name]
        assert (row["cache_bytes_per_token"], row["context"], row["here"], row["bytes"]) == (
            None,
            None,
            "yes",
            size,
        )
    assert machine.run("models").returncode == 0


def test_a_file_in_a_subfolder(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """A tokenizer's loader reads more templates from one; they were not verified."""
    hub.add(REPOSITORY, files | {"additional_chat_templates/x.jinja": b"{{ 1 }}"})
    folder = machine.pull(REPOSITORY)
    assert not (folder / "additional_chat_templates").exists()
    assert machine.resolves() is None
    # on a disk where capital letters do not count
    for name in ("Additional_Chat_Templates", "ADDED_TOKENS.JSON"):
        (folder / name).mkdir()
        assert f"{name}: not among the files that were pulled and verified; remove it" in (
            machine.resolves() or ""
        )
        assert "1 of 6 files are wrong" in machine.refuses("pull", "--verify")
        (folder / name).rmdir()


def test_how_an_embedding_model_pools(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """The one file of a subfolder that is pulled; one that was put there is refused."""
    hub.add(
        REPOSITORY,
        files | {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "2_Dense/config.json": b"{}"},
    )
    folder = machine.pull(REPOSITORY)
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"{}"
    assert not (folder / "2_Dense").exists()
    assert machine.resolves() is None
    (folder / "3_pooling").mkdir()
    (folder / "3_pooling" / "config.json").write_text("{}")
    assert "not among the files that were pulled and verified" in (machine.resolves() or "")
