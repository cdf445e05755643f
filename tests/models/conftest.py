"""A good model folder, and copies of it to spoil."""

import shutil
from pathlib import Path

import pytest
from support.hostile import good_model


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with every file kvant opens."""
    return good_model(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(good, tmp_path / "model"))
