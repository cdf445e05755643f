"""What the tests of the server share: one that runs."""

from support.server import server  # noqa: F401, a fixture
