"""Handle Ctrl-C during a command: raise KeyboardInterrupt, and end the process if nothing reacts for 0.2 s.

Python handles signals between its own operations, but one operation of MLX can take seconds. So a second
thread waits for the signal.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from kvant.errors import EXIT_INTERRUPTED

DEADLINE_S = 0.2
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it

Handler = Callable[[int, FrameType | None], None]

_early: Handler | None = None
_reacted = threading.Event()
_patience = 0  # above 0: the deadline is suspended
_deferring = 0  # above 0: KeyboardInterrupt is postponed
_is_pending = False  # whether one was postponed
_at_deadline: list[Callable[[], None]] = []  # called before the process ends at the deadline


def begin(early: Handler | None) -> None:
    """Raise KeyboardInterrupt from now on, with the deadline; ``early`` is the handler used until now."""
    global _early
    if early is None or signal.getsignal(signal.SIGINT) is not early:
        return
    _early = early
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _interrupt)
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()


def finish() -> None:
    """End at once on Ctrl-C from now on, since nothing is left to do."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, _early)


@contextmanager
def patient() -> Iterator[None]:
    """Suspend the deadline: something must be cleaned up, or the program continues after Ctrl-C."""
    global _patience
    _patience += 1
    try:
        yield
    finally:
        _patience -= 1


@contextmanager
def deferred() -> Iterator[None]:
    """Postpone KeyboardInterrupt to the end of the block, so that it runs completely. Main thread only."""
    global _deferring, _is_pending
    _deferring += 1
    try:
        yield
    finally:
        _deferring -= 1
        if _is_pending and not _deferring:
            _is_pending = False
            raise KeyboardInterrupt


def at_deadline(act: Callable[[], None]) -> None:
    """Call ``act``, maybe in another thread, before the process ends at the deadline."""
    _at_deadline.append(act)


@contextmanager
def restoring(act: Callable[[], None]) -> Iterator[None]:
    """Inside the block, restore the terminal with ``act`` before the process ends at the deadline."""
    _at_deadline.append(act)
    try:
        yield
    finally:
        _at_deadline.remove(act)


def leave(number: int, frame: object) -> NoReturn:
    """Handle a signal by exiting like a command, so that what was begun is undone or saved."""
    sys.exit(128 + number)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _is_pending
    _reacted.set()
    if _deferring:
        _is_pending = True
    else:
        raise KeyboardInterrupt


def _watch(reading: int) -> None:
    while received := os.read(reading, 1):
        if received[0] != signal.SIGINT:
            continue
        if not _reacted.wait(DEADLINE_S) and not _patience:
            if sys.stderr is not None and sys.stderr.isatty():
                os.write(2, SHOW_CURSOR.encode())
            for act in [*_at_deadline]:
                act()
            os._exit(EXIT_INTERRUPTED)
        _reacted.clear()
