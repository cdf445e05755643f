"""The digests that tell models and tokenizers apart, and the record of those that were computed before."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import pytest
from support.adapters import adapter_config, save_adapter
from support.bridged import copy_folder
from support.checkpoints import load_reference
from support.turns import ask

from kvant import digests
from kvant.cache.disk import DiskCache
from kvant.digests import SETTLED_NS, SMALL, file_sha256, state_of
from kvant.engine.load import load_folder, load_model
from kvant.errors import CheckpointError, SnapshotError
from kvant.models.identity import identify
from kvant.tools.evidence.measure import file_digests
from kvant.weights.snapshot import measure

Make = Callable[..., tuple[Path, Any]]


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of its own; files count as settled at once."""
    monkeypatch.setattr(digests, "user_cache", lambda: tmp_path / "cache" / "kvant")
    now = digests.time.time_ns
    monkeypatch.setattr(digests.time, "time_ns", lambda: now() + 100 * SETTLED_NS)
    return tmp_path / "cache" / "kvant" / digests.FILE


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files that are read whole from here on."""
    sizes: list[int] = []
    whole = hashlib.file_digest

    def hashed(file: Any, kind: str) -> Any:
        sizes.append(os.fstat(file.fileno()).st_size)
        return whole(file, kind)

    monkeypatch.setattr(digests.hashlib, "file_digest", hashed)
    return sizes


@pytest.fixture
def folder(make_checkpoint: Make) -> Path:
    """A model whose weights' digest is remembered, with a tokenizer."""
    made, _ = make_checkpoint(vocab_size=3000, intermediate_size=512)
    assert (made / "model.safetensors").stat().st_size > 2 * SMALL
    (made / "tokenizer.json").write_text("{}")
    return made


def _flip(path: Path, at: int) -> None:
    """Change a bit where it is: the file keeps its inode, its size and its time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _digest(*files: Path) -> str:
    """What an identity's digest is said to be, of the whole files."""
    listed = [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def test_it_is_by_the_files_and_not_by_the_folder(folder: Path, tmp_path: Path) -> None:
    before = identify(folder)
    assert before.tokenizer == hashlib.sha256(b"{}").hexdigest()
    assert before.model == _digest(folder / "config.json", folder / "model.safetensors")
    folder.rename(tmp_path / "moved")
    assert identify(tmp_path / "moved") == before


def test_every_byte_counts(folder: Path) -> None:
    """Also where size and time stay, and where the folder's digest was computed before."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    size = weights.stat().st_size
    seen = {identify(folder).model}
    for at in (0, 5000, 9000, size // 2, size // 2 + 1, size - 5000, size - 1):
        _flip(weights, at)
        found = identify(folder)
        assert found.model == _digest(config, weights)
        seen.add(found.model)
    config.write_bytes(config.read_bytes() + b" ")
    seen.add(identify(folder).model)
    assert len(seen) == 9
    (folder / "tokenizer.json").write_text("{ }")
    other = identify(folder)
    assert other != found
    assert (other.model in seen, other.tokenizer) == (True, hashlib.sha256(b"{ }").hexdigest())


def test_a_model_that_differs_in_one_number_reads_nothing_of_the_other(
    pocket_folder: Path, tmp_path: Path
) -> None:
    """Neither from a disk cache nor from a file of a cache."""
    for name in ("one", "other"):
        shutil.copytree(pocket_folder, tmp_path / name)
    weights = tmp_path / "other" / "model.safetensors"
    _flip(weights, weights.stat().st_size // 2 + 777)
    text, saved, known = [*range(5, 205)], tmp_path / "saved", []
    for name in ("one", "one", "other"):
        model, _ = kvant.load(tmp_path / name)
        disk, cache = DiskCache(tmp_path / "disk"), model.make_cache(256)
        cache.use_disk(disk)
        known.append(ask(model, cache, text)[0])
        disk.close()
        if name == "one":
            cache.save(saved)
    assert known == [0, 128, 0]
    with pytest.raises(SnapshotError, match="of another model: the model's digest is"):
        model.make_cache(256).load(saved)


def test_nothing_is_hashed_that_nobody_asks_for(folder: Path, reads: list[int], pocket_folder: Path) -> None:
    model, _ = kvant.load(pocket_folder)
    assert model.check_cache(model.make_cache(8)).pool.identity is model.identity
    identify(folder)
    assert not reads
    for _ in range(2):
        identify(folder).model  # noqa: B018
    weights, config = ((folder / name).stat().st_size for name in ("model.safetensors", "config.json"))
    assert sorted(reads) == [config, config, weights]  # what is small is not remembered


def test_a_file_that_changed_since_it_was_loaded_is_refused(folder: Path) -> None:
    """Its digest would be that of other weights than those in memory."""
    weights = folder / "model.safetensors"
    for change in (lambda: _flip(weights, 9000), lambda: weights.write_bytes(b"other"), weights.unlink):
        found = identify(folder)
        change()
        with pytest.raises(CheckpointError, match=r"changed since it was read|no such file"):
            found.model  # noqa: B018


def test_weights_that_change_while_they_are_loaded_are_refused(pocket_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pocket_folder, tmp_path / "model"))

    def load(*arguments: Any) -> Any:
        model = load_model(*arguments)
        _flip(folder / "model.safetensors", 9000)
        return model

    model, _ = load_folder(folder, load_weights=load)
    with pytest.raises(CheckpointError, match="changed since it was read"):
        model.make_cache(8).save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, whole = folder / "model.safetensors", hashlib.file_digest

    def hashed(file: Any, kind: str) -> Any:
        found = whole(file, kind)
        _flip(weights, 9000)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(digests.hashlib, "file_digest", hashed)
        with pytest.raises(CheckpointError, match="changed since it was read"):
            file_sha256(weights)
    assert file_sha256(weights) == hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "harm", ["others can write", "cut", "a list", "numbers", "a folder", "a link", "a pipe"]
)
def test_a_record_that_does_not_count(harm: str, folder: Path, record: Path, reads: list[int]) -> None:
    weights = folder / "model.safetensors"
    right = file_sha256(weights)
    forged = record.read_text().replace(right, "0" * 64)
    record.write_text(forged)
    assert file_sha256(weights) == "0" * 64  # it is read
    record.unlink()
    if harm == "a folder":
        record.mkdir()
    elif harm == "a pipe":
        os.mkfifo(record)
    elif harm == "a link":
        (record.parent / "elsewhere").write_text(forged)
        record.symlink_to(record.parent / "elsewhere")
    else:
        numbers = json.dumps(dict.fromkeys(json.loads(forged), 5))
        kinds = {"others can write": forged, "cut": forged[:-9], "a list": "[]", "numbers": numbers}
        record.write_text(kinds[harm])
        record.chmod(0o666 if harm == "others can write" else 0o600)
    assert file_sha256(weights) == right
    assert len(reads) == 2


def test_the_record_is_the_users_and_bounded(
    folder: Path, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MOST_FILES", 3)
    before = {*folder.iterdir()}
    for number in range(5):
        (folder / f"{number}.safetensors").write_bytes(bytes([number]) * (SMALL + 1))
        file_sha256(folder / f"{number}.safetensors")
    assert [*json.loads(record.read_text()).values()] == [
        hashlib.sha256(bytes([number]) * (SMALL + 1)).hexdigest() for number in (2, 3, 4)
    ]
    assert record.stat().st_mode & 0o777 == 0o600
    # nothing beside the weights
    assert {path.suffix for path in {*folder.iterdir()} - before} == {".safetensors"}


def test_a_pull_and_the_evidence_use_the_same_record(folder: Path, reads: list[int]) -> None:
    name = "model.safetensors"
    assert measure(folder, name).sha256 == file_digests(folder)[name] == file_sha256(folder / name)
    assert len(reads) == 1
    measure(folder, name)  # `kvant pull --verify` reads it, whatever is remembered
    assert len(reads) == 2


def test_a_file_that_was_just_written_is_not_remembered(
    folder: Path, record: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change within the same tick of the file system's clock would leave its times as they are."""
    weights = folder / "model.safetensors"
    monkeypatch.setattr(digests.time, "time_ns", lambda: state_of(weights)[-1])
    file_sha256(weights)
    file_sha256(weights)
    assert len(reads) == 2
    assert not record.exists()


def test_a_cache_that_cannot_be_written(folder: Path, tmp_path: Path, reads: list[int]) -> None:
    (tmp_path / "cache").write_text("")
    weights = folder / "model.safetensors"
    for _ in range(2):
        assert file_sha256(weights) == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert len(reads) == 2


def test_an_adapter_counts(pocket_folder: Path, tmp_path: Path) -> None:
    model, _ = kvant.load("pocket")
    adapter = save_adapter(tmp_path / "adapter", adapter_config(), load_reference(pocket_folder))
    adapted, _ = kvant.load("pocket", adapter_path=adapter)
    assert adapted.identity is not None
    assert model.identity is not None
    assert adapted.identity != model.identity
    assert adapted.identity.tokenizer == model.identity.tokenizer
    assert adapted.make_cache(8).pool.identity == adapted.identity
    own = [pocket_folder / "config.json", pocket_folder / "model.safetensors"]
    assert model.identity.model == _digest(*own)
    assert adapted.identity.model == _digest(
        *own, adapter / "adapter_config.json", adapter / "adapters.safetensors"
    )


def test_a_bridged_model_has_one(tmp_path: Path) -> None:
    folder = copy_folder("gemma3", tmp_path, tokenizer=True)
    model, _ = kvant.load(folder)
    assert model.identity == identify(folder) == model.make_cache(8).pool.identity
