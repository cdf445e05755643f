"""weights.toml, references to models, and the lock; and `kvant rm` in the cache shared with
huggingface_hub.
"""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.command import call
from support.hub import Hub, git_id
from support.pinned_configs import pinned_facts, written_config
from support.pull_machine import REPOSITORY, WEIGHTS, Machine
from support.terminal import Terminal

import kvant
from kvant import weights
from kvant.cli import models
from kvant.cli.models import cache_bytes
from kvant.engine.load import find_model
from kvant.errors import ModelError, WeightsError
from kvant.machine import Machine as ThisMachine
from kvant.models import Decoder
from kvant.models.architectures import ARCHITECTURES
from kvant.models.config import ModelConfig
from kvant.plan import Checkpoint
from kvant.sizes import format_bytes
from kvant.weights.lock import Lock, read_lock, write_lock
from kvant.weights.reference import COMMIT
from kvant.weights.reference import REPOSITORY as FORM
from kvant.weights.snapshot import Verified, git_blob_id, is_pulled, measure

NAMES = [
    "qwen2.5-0.5b", "qwen2.5-0.5b-4bit", "qwen2.5-1.5b", "qwen2.5-1.5b-4bit", "qwen2.5-7b",
    "qwen3-0.6b", "qwen3-0.6b-4bit", "smollm2-135m", "llama3.2-1b-4bit",
    "llama3.2-3b-4bit", "llama3.1-8b-4bit", "mistral-7b", "mistral-7b-4bit",
    "qwen3-4b-4bit", "qwen3-8b-4bit",
]  # fmt: skip
PINNED = "7ae557604adf67be50417f59c2c2f167def9a775"


def test_every_entry_can_be_used() -> None:
    models = weights.known_models()
    assert list(models) == NAMES
    for name, model in models.items():
        assert model.name == name
        assert FORM.fullmatch(model.repository)
        assert COMMIT.fullmatch(model.revision)
        assert all(is_pulled(file.name) for file in model.files)
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {
            file.name for file in model.files
        }
        for file in model.files:
            assert file.bytes is None or file.bytes > 0
            assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
        if model.config["model_type"] in ARCHITECTURES:
            facts = pinned_facts(name)
            assert ModelConfig.from_dict(facts).rope.theta == facts["rope_theta"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "smollm2-135m"])
def test_the_shape_is_that_of_the_pinned_config(name: str) -> None:
    """Written again from the facts, config.json has the size and the digest it is pinned to."""
    written = written_config(name)
    files = weights.known_models()[name].files
    pinned = next(file for file in files if file.name == "config.json")
    assert (len(written), hashlib.sha256(written.encode()).hexdigest()) == (pinned.bytes, pinned.sha256)


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_have_the_size_of_the_shape(name: str) -> None:
    """Bytes of the tensors, as planned, and a header of a few hundred bytes a tensor."""
    model = weights.known_models()[name]
    config = model.config
    if config["model_type"] not in ARCHITECTURES:
        config = config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    tied = config["tie_word_embeddings"] and name != "qwen3-0.6b"  # that one is tied and has both
    checkpoint = Checkpoint(ModelConfig.from_dict(config), 2, tied)
    stated = sum(file.bytes or 0 for file in model.files if file.name.endswith(".safetensors"))
    assert 0 < stated - checkpoint.stored_bytes < checkpoint.num_layers * 40 * 100


@pytest.mark.parametrize(
    ("text", "revision", "expected"),
    [
        ("qwen2.5-0.5b", None, ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", PINNED)),
        ("Qwen/Qwen2.5-0.5B-Instruct", None, ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", PINNED)),
        ("Qwen/Qwen2.5-0.5B-Instruct", PINNED, ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", PINNED)),
        ("qwen2.5-0.5b", "main", (None, "Qwen/Qwen2.5-0.5B-Instruct", "main")),
        ("qwen2.5-0.5b@main", "main", (None, "Qwen/Qwen2.5-0.5B-Instruct", "main")),
        ("a/b", None, (None, "a/b", None)),
        ("a/b.c_d-e@refs/pr/4", None, (None, "a/b.c_d-e", "refs/pr/4")),
    ],
)
def test_references(text: str, revision: str | None, expected: tuple[str | None, ...]) -> None:
    reference = weights.parse_reference(text, revision)
    assert (reference.name, reference.repository, reference.revision) == expected
    assert weights.parse_reference(str(reference)) == reference


BAD = [
    "",
    "x",
    "a/b/c",
    "/a/b",
    "../a",
    "a/..",
    "a/b..c",
    "a/.b",
    "a/b--c",
    "a/b.git",
    "a/b-",
    "a b/c",
    "a/b\0",
    "ä/b",
]
BAD += [
    "~/a",
    "a\\b/c",
    *(f"a/b@{revision}" for revision in ("", "../x", "/x", "x//y", "x y", "-x", "c" * 129)),
]
BAD += ["a/" + "b" * 97]


@pytest.mark.parametrize("text", BAD)
def test_bad_references(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected") as refused:
        weights.parse_reference(text)
    assert len(str(refused.value)) < 400
    with pytest.raises(ModelError):
        find_model(text)


def test_a_folder_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("qwen3-0.6b", "a/b"):
        with pytest.raises(WeightsError, match=f"^{name} is not here; `kvant pull {name}` fetches it$"):
            find_model(name)
        with pytest.raises(ModelError, match=r"is not a folder$"):
            find_model(Path(name))
        with pytest.raises(ModelError, match=r"is not a folder$"):
            find_model(f"./{name}")
        Path(name).mkdir(parents=True)
        assert find_model(name) == find_model(Path(name)) == Path(name)
        with pytest.raises(ValueError, match="a folder and the embedded model have none"):
            kvant.load(name, revision="main")
    with pytest.raises(ValueError, match="a folder and the embedded model have none"):
        kvant.load("pocket", revision="main")
    with pytest.raises(WeightsError, match=r"^a/c@later is not here"):
        kvant.load("a/c", revision="later")
    with pytest.raises(ValueError, match="contains a revision, but revision is 'x'"):
        weights.parse_reference("a/b@y", "x")


def test_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.chdir(tmp_path)
    commit = "0123456789" * 4
    lock = Lock("a/b", {"": commit}, {commit: {"config.json": Verified(2, 3, "4")}})
    write_lock(lock)
    path = tmp_path / ".cache" / "kvant" / "weights" / "a--b.json"
    assert [found.name for found in path.parent.iterdir()] == ["a--b.json"]
    assert not (tmp_path / "relative").exists()
    assert read_lock("a/b") == lock
    assert read_lock("a/c") == Lock("a/c")
    good = path.read_text()
    changes = [
        (good, "["),
        (good, "[]"),
        ('"format": 1', '"format": 2'),
        ('"config.json"', '"../config.json"'),
    ]
    for old, new in [*changes, (commit, "../.."), ('"bytes": 2', '"bytes": null'), ('"": ', '"../x": ')]:
        path.write_text(good.replace(old, new))
        with pytest.raises(WeightsError, match="not a lock that kvant wrote; remove it and pull a/b again"):
            read_lock("a/b")
    path.unlink()
    path.mkdir()
    with pytest.raises(WeightsError, match=r"a--b\.json: the record of pulled files cannot be read"):
        find_model("a/b")
    path.rmdir()
    path.write_text(good.replace("a/b", "a/B"))
    with pytest.raises(WeightsError, match="the lock of 'a/B'; expected 'a/b'"):
        read_lock("a/b")


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    """A file of huggingface_hub's cache; x.json of a snapshot beside it leads there."""
    made = tmp_path / "models--a--b" / "blobs" / "0"
    made.parent.mkdir(parents=True)
    made.write_bytes(b"one")
    folder = snapshot_of(made)
    folder.mkdir(parents=True)
    (folder / "x.json").symlink_to("../../blobs/0")
    return made


def snapshot_of(blob: Path) -> Path:
    return blob.parents[1] / "snapshots" / PINNED


@pytest.mark.parametrize("data", [b"", b"hello\n", bytes(3_000_000)])
def test_digests_are_those_of_git_and_sha256sum(blob: Path, data: bytes) -> None:
    blob.write_bytes(data)
    given = subprocess.run(["sha256sum", blob], capture_output=True, text=True, check=True).stdout
    assert measure(snapshot_of(blob), "x.json").sha256 == given.split()[0]
    known = {0: "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391", 6: "ce013625030ba8dba906f756967f9e9ca394464a"}
    expected = known.get(len(data)) or git_id(data)
    assert git_blob_id(snapshot_of(blob), "x.json") == expected == git_id(data)


@pytest.mark.parametrize("what", ["the blob", "the link", "a pipe", "in place"])
def test_a_file_that_is_swapped_while_it_is_measured(
    blob: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Of the same size and time: only which file it is tells."""
    state, link = blob.stat(), snapshot_of(blob) / "x.json"
    other = blob.with_name("1")
    other.write_bytes(b"two")
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    digest = hashlib.file_digest

    def swap(file: Any, name: str) -> Any:
        found = digest(file, name)
        if what == "the blob":
            other.replace(blob)
        elif what == "a pipe":
            blob.unlink()
            os.mkfifo(blob)
        elif what == "the link":
            link.unlink()
            link.symlink_to("../../blobs/1")
        else:
            blob.write_bytes(b"two")
            os.utime(blob, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
        return found

    monkeypatch.setattr(hashlib, "file_digest", swap)
    with pytest.raises(
        WeightsError, match=r"x\.json: (written to or replaced while it was read|not a regular file)"
    ):
        measure(snapshot_of(blob), "x.json")


def test_cache_bytes_are_those_of_the_cache(pocket: tuple[Decoder, Any], pocket_folder: Path) -> None:
    model, _ = pocket
    stated = cache_bytes(json.loads((pocket_folder / "config.json").read_text()))
    for bits in (8, 4):
        caches = [
            model.make_cache(size, kv_bits=bits, kv_group_size=32, bias_split=False) for size in (256, 512)
        ]
        short, long = (sum(layer.nbytes for layer in cache) for cache in caches)
        assert (long - short) / 256 == stated[bits]
    assert stated[16] == 2 * stated[8] / (1 + 2 / 32)
    assert cache_bytes({}) is None


def test_the_table_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache for 4,096 tokens, of a model with a shorter context for that."""
    machine = ThisMachine("cpu", 3 * 10**9, 3 * 10**9, "a small memory")
    monkeypatch.setattr(models, "this_machine", lambda: machine)
    rows = {row["name"]: row for row in json.loads(call("models", "--json").stdout)}
    fits = {name for name in NAMES if rows[name]["fits_here"]}
    assert {"qwen2.5-0.5b-4bit", "smollm2-135m"} <= fits
    assert not {"qwen2.5-1.5b", "qwen2.5-7b", "mistral-7b-4bit"} & fits
    table = call("models").stdout
    assert "all of a run in 3.00 GB (a small memory)" in table
    found = re.search(r"pocket +embedded +yes +7\.13 MB +(\S+ MB) ", table)
    assert found is not None
    assert found[1] == format_bytes(2048 * 1088)
    found = re.search(r"qwen2\.5-7b +\w+ +no +15\.24 GB +(\S+ MB) ", table)
    assert found is not None
    assert found[1] == format_bytes(4096 * 30464)


def test_a_family_suggests_its_models() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'qwen3-0\.6b', .* or 'qwen3-8b-4bit'"):
        weights.parse_reference("qwen3")
    with pytest.raises(ValueError, match="mean 'smollm2-135m'"):
        weights.parse_reference("smol")


OTHER = "somebody/other-model"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _removed(machine: Machine, model: str) -> int:
    """Remove a model; the bytes that it says are free, which are those that its files had."""
    before = _bytes(machine.home / "hf")
    done = machine.run("rm", model, "--yes")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    said = int(done.stderr.partition(": removed, ")[2].partition(" bytes are free")[0])
    assert 0 <= before - _bytes(machine.home / "hf") - said < 1000  # notes of huggingface_hub's own
    return said


def test_a_model_goes_with_its_record(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    folder = machine.pull(REPOSITORY)
    assert "cannot ask without a terminal; --yes removes it" in machine.refuses("rm", REPOSITORY, code=2)
    assert machine.resolves() is None
    size = sum(len(files[path.name]) for path in folder.iterdir())
    assert _removed(machine, REPOSITORY) == size
    assert not folder.exists()
    assert not machine.lock.exists()
    assert f"`kvant pull {REPOSITORY}` fetches it" in (machine.resolves() or "")
    rows = json.loads(machine.run("models", "--json").stdout)
    assert REPOSITORY not in [row["name"] for row in rows]
    assert "was not pulled by kvant; there is nothing to remove" in machine.refuses("rm", REPOSITORY, "--yes")
    assert machine.pull(REPOSITORY) == folder
    assert machine.resolves() is None


def test_what_another_commit_needs_stays(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    first = machine.pull(REPOSITORY).name
    config = files["config.json"] + b"\n"
    hub.add(REPOSITORY, files | {"config.json": config})
    machine.pull(REPOSITORY, "--update")
    assert _removed(machine, REPOSITORY) == len(config)
    assert machine.resolves(f"{REPOSITORY}@{first}") is None
    assert "is not here" in (machine.resolves() or "")
    assert _removed(machine, f"{REPOSITORY}@{first}") > 12_000_000
    assert not machine.lock.exists()


def test_a_link_out_of_the_cache_is_not_followed_to_remove(
    machine: Machine, hub: Hub, files: dict[str, bytes]
) -> None:
    """Another program made it, of an ETag that names a file of the user's."""
    first = machine.pull(REPOSITORY)
    hub.add(REPOSITORY, files | {"config.json": files["config.json"] + b"\n"})
    machine.pull(REPOSITORY, "--update")
    precious = machine.home / "precious"
    precious.write_bytes(b"the user's own")
    (first / "README.md").symlink_to(os.path.relpath(precious, first))
    line = machine.refuses("rm", f"{REPOSITORY}@{first.name}", "--yes")
    assert f"{precious}: outside the cache" in line
    assert precious.read_bytes() == b"the user's own"
    assert machine.resolves(f"{REPOSITORY}@{first.name}") is None
    (first / "README.md").unlink()
    assert _removed(machine, f"{REPOSITORY}@{first.name}") == len(files["config.json"])


def test_what_another_repository_shares_stays(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """In huggingface_hub's store of files that repositories share, each blob a link into it."""
    store = machine.home / "hf" / "hub" / "blobs"
    shared = store / "ab" / ("ab" * 32)
    links = []
    for repository in (REPOSITORY, OTHER):
        hub.add(repository, files)
        blob = (machine.pull(repository) / WEIGHTS).resolve()
        if not shared.exists():
            shared.parent.mkdir(parents=True)
            (store / ".huggingface-shared-blobs").write_text("1\n")
            shared.write_bytes(blob.read_bytes())
        blob.unlink()
        blob.symlink_to(Path("../..") / shared.relative_to(store.parent))
        links.append(str(blob.relative_to(store.parent)))
    shared.with_name(f"{shared.name}.refs").write_text("\n".join([*links, ""]))
    assert machine.resolves(OTHER) is None
    assert _removed(machine, REPOSITORY) < 1_000_000
    assert shared.exists()
    assert machine.resolves(OTHER) is None
    assert "5 files are unchanged since they were verified" in machine.run("pull", "--verify", OTHER).stderr
    assert _removed(machine, OTHER) > 12_000_000


def test_a_terminal_is_asked(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    folder = machine.pull(REPOSITORY)
    for answer, code in (("\r", 1), ("y\r", 0)):
        assert folder.exists()
        with Terminal("rm", REPOSITORY, **machine.environment) as terminal:
            terminal.wait_for(f"remove {REPOSITORY}, 12.")
            terminal.wait_for("[y/N]")
            terminal.press(answer)
            while terminal.read(1):
                pass
            terminal.child.close()
            assert terminal.child.exitstatus == code
    assert not folder.exists()


def test_what_cannot_be_removed(machine: Machine) -> None:
    for arguments, code, line in (
        (["pocket"], 1, "'pocket' is built into kvant; it cannot be removed"),
        (["hf"], 1, "'hf' is a folder; kvant removes only what it pulled"),
        (["qwen2.5-0.5"], 1, "did you mean 'qwen2.5-0.5b'"),
        (["qwen2.5-0.5b"], 1, "qwen2.5-0.5b was not pulled by kvant"),
        ([], 2, "no model"),
    ):
        assert line in machine.refuses("rm", *arguments, code=code)
