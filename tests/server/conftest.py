"""Servers that run as long as the tests: pocket, 4 sequences of 512 tokens, no key."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.server import Running, running, start

from kvant.cache import CacheOptions
from kvant.server.settings import Settings


@pytest.fixture(scope="session")
def server(pocket: Any) -> Iterator[Running]:
    with running(start(Settings(port=0, sequences=4, max_kv_size=512, max_queue=16), *pocket)) as found:
        yield found


@pytest.fixture(scope="session")
def exact(pocket: Any) -> Iterator[Running]:
    """One whose cache is not quantized: mlx-lm's numbers are its own."""
    settings = Settings(port=0, sequences=4, max_kv_size=512, cache=CacheOptions(kv_bits=0))
    with running(start(settings, *pocket)) as found:
        yield found
