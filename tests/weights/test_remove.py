"""``kvant rm`` as its user meets it, in the cache that huggingface_hub and kvant share."""

import json
from pathlib import Path

from support.hub import Hub
from support.pull_machine import REPOSITORY, WEIGHTS, Machine
from support.terminal import Terminal

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
    assert "nobody can be asked here; --yes removes it" in machine.refuses("rm", REPOSITORY, code=2)
    assert machine.resolves() is None
    size = sum(len(files[path.name]) for path in folder.iterdir())
    assert _removed(machine, REPOSITORY) == size
    assert not folder.exists()
    assert not machine.lock.exists()
    assert f"`kvant pull {REPOSITORY}` fetches it" in (machine.resolves() or "")
    rows = json.loads(machine.run("models", "--json").stdout)
    assert REPOSITORY not in [row["name"] for row in rows]
    assert "was not pulled by kvant; nothing to remove" in machine.refuses("rm", REPOSITORY, "--yes")
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
    assert "5 files are as they were verified" in machine.run("pull", "--verify", OTHER).stderr
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
        (["pocket"], 1, "'pocket' is embedded in kvant; it cannot be removed"),
        (["hf"], 1, "'hf' is a folder; kvant removes only what it pulled"),
        (["qwen2.5-0.5"], 1, "did you mean 'qwen2.5-0.5b'"),
        (["qwen2.5-0.5b"], 1, "qwen2.5-0.5b was not pulled by kvant"),
        ([], 2, "no model"),
    ):
        assert line in machine.refuses("rm", *arguments, code=code)
