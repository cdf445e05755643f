"""A bound on time that does not depend on how busy the machine is."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager


def _seconds() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What is inside takes no more of processors, with the processes that end meanwhile from their start
    on.
    """
    before = _seconds()
    yield
    assert _seconds() - before < seconds
