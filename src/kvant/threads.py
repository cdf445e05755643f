"""The right to compute: one thread at a time through a cache, and no process forked after MLX had work."""

import os
import threading

import mlx.core as mx

_started = False  # whether this process has given MLX work
_forked = False


class ComputeLock:
    """A cache's lock, held by the thread that computes through it. Another thread is refused and does not
    wait.

    MLX's arrays are not made for two threads: it ends the process. One thread after the other is fine.
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
        return ComputeLock, ()  # a copy of a cache has a lock of its own


class _Cleared:
    """Clears what MLX keeps for a thread, at the end of the thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __del__(self) -> None:
        if threading.get_ident() == self._thread:  # else the interpreter ends, and the thread has not
            mx.clear_streams()


_of_thread = threading.local()


def clear_at_end() -> None:
    """Have this thread clear what MLX keeps for it (streams, compiled functions, random state) before it
    ends.

    Called by a thread that computes. The main thread, and one that threading did not start, keep theirs.
    """
    # MLX's random state of a thread is a Python list, which C++ frees behind the thread's last Python code,
    # so behind a join too (Python 3.11, 3.12). It waits for the interpreter's lock there, and where the
    # interpreter is ending by then, Python ends the thread inside the destructor: std::terminate. Here the
    # lock is held.
    if hasattr(_of_thread, "cleared"):
        return
    thread = threading.current_thread()
    lasts = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
    _of_thread.cleared = None if lasts else _Cleared()


def check_process() -> None:
    """Called before MLX is given work; refuse a process that was forked from one in which MLX has had some.

    MLX computes in threads of its own. A fork has none of them and would wait for ever.
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
