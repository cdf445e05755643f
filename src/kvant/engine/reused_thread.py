"""Threads that compute for one model after another."""

import atexit
import threading
from collections.abc import Callable
from queue import SimpleQueue


class ReusedThread:
    """Calls a function in a daemon thread, which calls another one's when this one has returned.

    MLX computes in threads of the system, one for each stream. It keeps them when the thread that a stream
    belongs to has ended, so a new thread for each loaded model would be a leak.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        """``name``: of the thread, as long as the work goes on."""
        self.name = name
        self._work: Callable[[], object] | None = work
        self._ident: int | None = None  # of the thread
        self._ended = threading.Event()

    def start(self) -> None:
        try:
            thread = _idle.pop()
        except IndexError:
            thread = _Thread()
            thread.start()
        thread.jobs.put(self)

    def run(self) -> None:
        """Do the work, and forget it; called in the thread."""
        assert self._work is not None
        self._ident = threading.get_ident()
        try:
            self._work()
        finally:
            self._work = None

    def end(self) -> None:
        """Called in the thread when it is idle."""
        self._ended.set()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the work itself."""
        return self.is_alive() and threading.get_ident() == self._ident

    def is_alive(self) -> bool:
        """Return whether the work has not ended."""
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the work has ended."""
        self._ended.wait(timeout)


class _Thread(threading.Thread):
    """Does one work after another."""

    def __init__(self) -> None:
        super().__init__(name=IDLE, daemon=True)
        self.jobs: SimpleQueue[ReusedThread | None] = SimpleQueue()  # None: end

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            self.name = job.name
            try:
                job.run()
            except BaseException:
                job.end()
                raise
            self.name = IDLE
            _idle.append(self)
            job.end()
            del job  # and all that it refers to


IDLE = "kvant-idle"  # the name of a thread without work
_idle: list[_Thread] = []


@atexit.register
def _end_idle() -> None:
    """End the threads: one that MLX knows must not be there when the interpreter ends."""
    for thread in _idle:
        thread.jobs.put(None)
    for thread in _idle:
        thread.join(1)
