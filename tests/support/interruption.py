"""Ctrl-C at a chosen line of kvant's code."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvant

SOURCE = str(Path(kvant.__file__).parent)


class Interruption:
    """Counts the lines of kvant's code that run, and raises a KeyboardInterrupt at one of them."""

    def __init__(self, at: int) -> None:
        self.lines, self._at = 0, at

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                raise KeyboardInterrupt
        return self._trace

    def of(self, work: Callable[[], object]) -> bool:
        """Do the work; whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False
