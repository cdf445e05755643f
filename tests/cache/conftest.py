"""Small models for the tests of pools."""

import pytest
from support.pools import tiny_model

from kvant.models import Decoder


@pytest.fixture(scope="session")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Layers that see everything, and two widths of windows."""
    return tiny_model(tmp_path_factory.mktemp("windows"), (None, 40, 200))


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_model(tmp_path_factory.mktemp("plain"), (None, None))
