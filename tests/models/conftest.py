"""Good model folders, and copies of them to spoil."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import hostile_kinds
import pytest
from support.bridged import copy_folder
from support.checkpoints import reference_model, save_checkpoint, write_reference
from support.hostile import good_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with every file kvant opens, and code beside them that must never run."""
    root = tmp_path_factory.mktemp("good")
    made = {name: good_model(root / name) for name in ("native", "shards", "mxfp4")}
    (made["shards"] / "model.safetensors").unlink()
    config = json.loads((made["shards"] / "config.json").read_text())
    save_checkpoint(made["shards"], config, reference_model(config), shards=2)
    write_reference(made["mxfp4"], config, 4, 32, "mxfp4")
    made["bridged"] = copy_folder("gpt-oss", root, tokenizer=True)
    for folder in made.values():
        hostile_kinds.plant(folder)
        for name in ("gpt_oss", "model", "sitecustomize"):
            shutil.copy(folder / "evil.py", folder / f"{name}.py")
    return made


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A copy to spoil, of the native model or the one that the test names. Nothing of it runs."""
    yield Path(shutil.copytree(folders[getattr(request, "param", "native")], tmp_path / "model"))
    assert not any((place / "executed").exists() for place in (tmp_path, folders["native"].parent))
