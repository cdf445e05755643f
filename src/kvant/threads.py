"""Let one thread at a time compute with a cache, and refuse processes forked after MLX started."""

import atexit
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import mlx.core as mx

_started = False  # whether this process has used MLX
_forked = False


class ComputeLock:
    """A cache's lock for the thread that computes with it. Another thread is refused instead of waiting.

    MLX's arrays do not support concurrent use, which crashes the process. Threads may take turns.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "the cache is in use by another thread; expected one thread at a time, or a cache each"
            )
        clear_at_end()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["ComputeLock"], tuple[()]]:
        return ComputeLock, ()  # a copy of a cache has its own lock


class _Cleared:
    """Clears MLX's per-thread data when the thread ends."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __del__(self) -> None:
        if threading.get_ident() == self._thread:  # otherwise the interpreter is ending
            mx.clear_streams()


_of_thread = threading.local()


def clear_at_end() -> None:
    """Clear MLX's data of this thread (streams, compiled functions, random state) when the thread ends.

    Threads that compute call this. The main thread, and threads not started by threading, keep their data.
    """
    # MLX's random state of a thread is a Python list, which C++ frees after the thread's last Python code,
    # even after a join (Python 3.11, 3.12). It then waits for the interpreter's lock; if the interpreter is
    # ending, Python ends the thread inside the destructor: std::terminate. Here we hold the lock.
    if hasattr(_of_thread, "cleared"):
        return
    thread = threading.current_thread()
    lasts = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
    _of_thread.cleared = None if lasts else _Cleared()


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


def check_process() -> None:
    """Refuse to use MLX in a process forked from one that had used it. Call this before using MLX.

    MLX computes in threads. A forked process has none of them and would wait forever.
    """
    global _started
    if _forked:
        raise RuntimeError(
            "this process was forked from one that had loaded a model; MLX's threads are not in it. "
            "Start it with multiprocessing's 'spawn', or load the model only after the fork"
        )
    _started = True


def _after_fork() -> None:
    global _forked
    _forked = _started


os.register_at_fork(after_in_child=_after_fork)
