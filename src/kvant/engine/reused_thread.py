"""Threads that compute for one model after another."""

import atexit
import threading
from collections.abc import Callable
from queue import SimpleQueue


class ReusedThread:
    """Calls a function in a daemon thread, which is then reused for another function.

    MLX starts a system thread for each stream and keeps it after the stream's thread has ended. A new thread
    for each loaded model would therefore be a leak.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        """``name``: the thread's name while it calls the function."""
        self.name = name
        self._function: Callable[[], object] | None = function
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
        """Call the function in the thread, then release it."""
        assert self._function is not None
        self._ident = threading.get_ident()
        try:
            self._function()
        finally:
            self._function = None

    def end(self) -> None:
        """Mark the call as ended, when the thread is idle again."""
        self._ended.set()

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs in the called function."""
        return self.is_alive() and threading.get_ident() == self._ident

    def is_alive(self) -> bool:
        """Return whether the call has not ended."""
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the call has ended."""
        self._ended.wait(timeout)


class _Thread(threading.Thread):
    """Runs one job after another."""

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
            del job  # release everything it refers to


IDLE = "kvant-idle"  # the name of an idle thread
_idle: list[_Thread] = []


@atexit.register
def _end_idle() -> None:
    """End the idle threads: none that MLX knows may exist when the interpreter ends."""
    for thread in _idle:
        thread.jobs.put(None)
    for thread in _idle:
        thread.join(1)
