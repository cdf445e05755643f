"""A process of the tokenizer for the tests of a module."""

from collections.abc import Iterator

import pytest

from kvant.text.process import TextProcess


@pytest.fixture(scope="module")
def process() -> Iterator[TextProcess]:
    made = TextProcess()
    yield made
    made._end()
