"""Let one thread at a time compute with a cache, and refuse processes forked after MLX started."""

import os
import threading

import mlx.core as mx

_started = False  # whether this process has used MLX
_forked = False


class ComputeLock:
    """A cache's lock for the thread that computes with it. Another thread is refused instead of waiting.

    MLX's arrays do not support concurrent use, which crashes the process.
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
