"""Runs Metal kernels on a Linux machine, for tests: see docs/operators.md."""

import sys

import pytest

from support.metal_host.run import FORWARD, REVERSE, HostError, on_host, summary, worker

# On a Mac Metal itself compiles and runs the kernels; everywhere else a host run that cannot happen is a
# failure.
host_pytest_skip = pytest.mark.skipif(sys.platform == "darwin", reason="Metal runs kernels here")

__all__ = ["FORWARD", "REVERSE", "HostError", "host_pytest_skip", "on_host", "summary", "worker"]
