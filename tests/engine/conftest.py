"""What several files of this folder share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.drafts import save_draft_model
from support.kinds import Loaded, load_kind

from kvant.models import LanguageModel


@pytest.fixture(scope="module")
def without_compilation() -> Iterator[None]:
    """It would call a C++ compiler, the first time."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model of a kind, and its tokenizer."""
    return load_kind(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="session")
def small(pocket: Any, pocket_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A random draft model with pocket's tokenizer, a padded vocabulary and a shorter context."""
    sizes = {"vocab_size": pocket[0].config.vocab_size + 64, "max_position_embeddings": 146}
    return kvant.load(save_draft_model(tmp_path_factory.mktemp("small") / "model", pocket_folder, **sizes))[0]
