"""What every test of a bridged model needs."""

from collections.abc import Iterator

import kvant  # noqa: F401  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest


@pytest.fixture(scope="module", autouse=True)
def _without_compilation() -> Iterator[None]:
    """It would call a C++ compiler, the first time."""
    mx.disable_compile()
    yield
    mx.enable_compile()
