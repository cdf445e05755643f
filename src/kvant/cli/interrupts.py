"""Ctrl-C while a command runs: KeyboardInterrupt. Where nothing reacts to it, the process ends after 0.2 s.

Python handles a signal between two of its own operations, and one operation of MLX can take seconds. So a
second thread waits for the signal.
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
_patience = 0  # above 0: something may take as long as it needs
_deferring = 0  # above 0: KeyboardInterrupt waits
_waiting = False  # one does
_at_deadline: list[Callable[[], None]] = []  # what is done before the process ends by itself


def begin(early: Handler | None) -> None:
    """Raise KeyboardInterrupt from here on, with the deadline, in place of the handler that ends a
    starting command.
    """
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
    """End at once from here on: nothing is left to do."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, _early)


@contextmanager
def patient() -> Iterator[None]:
    """No deadline inside: a half-written folder is removed first, or the program goes on."""
    global _patience
    _patience += 1
    try:
        yield
    finally:
        _patience -= 1


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C inside is a KeyboardInterrupt at the end: something is done whole or not at all. For the main
    thread.
    """
    global _deferring, _waiting
    _deferring += 1
    try:
        yield
    finally:
        _deferring -= 1
        if _waiting and not _deferring:
            _waiting = False
            raise KeyboardInterrupt


def at_deadline(act: Callable[[], None]) -> None:
    """From here on ``act`` is done first if the process ends at the deadline. It may run in another
    thread.
    """
    _at_deadline.append(act)


@contextmanager
def restoring(act: Callable[[], None]) -> Iterator[None]:
    """Inside, ``act`` is done as by :func:`at_deadline`: it puts the terminal back."""
    _at_deadline.append(act)
    try:
        yield
    finally:
        _at_deadline.remove(act)


def leave(number: int, frame: object) -> NoReturn:
    """Handle a signal: end as a command does, so that what was begun is undone or saved."""
    sys.exit(128 + number)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _waiting
    _reacted.set()
    if _deferring:
        _waiting = True
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
