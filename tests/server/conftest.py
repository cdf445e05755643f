"""Servers that run as long as the tests: pocket, 4 sequences of 512 tokens, no key."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.server import Running, served

from kvant.cache import CacheOptions


@pytest.fixture(scope="session")
def server(pocket: Any) -> Iterator[Running]:
    with served(*pocket, sequences=4, max_kv_size=512, max_queue=16) as found:
        yield found


@pytest.fixture(scope="session")
def strict(pocket: Any) -> Iterator[Running]:
    """One that refuses what others leave out."""
    with served(*pocket, sequences=4, max_kv_size=512, strict=True) as found:
        yield found


@pytest.fixture(scope="session")
def exact(pocket: Any) -> Iterator[Running]:
    """One whose cache is not quantized: mlx-lm's numbers are its own."""
    with served(*pocket, sequences=4, max_kv_size=512, cache=CacheOptions(kv_bits=0)) as found:
        yield found
