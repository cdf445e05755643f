"""What several files of this folder share."""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from support.kinds import Loaded, load_kind


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
