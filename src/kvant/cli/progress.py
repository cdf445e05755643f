"""Show progress on standard error after one second, if it is a terminal."""

import sys
import threading

from kvant.cli.terminal import behind

DELAY_S = 1.0


class LateProgress:
    """A bar that appears when the block has taken a second."""

    def __init__(self, description: str, *, quiet: bool = False) -> None:
        self._timer: threading.Timer | None = None
        if quiet or not sys.stderr.isatty():
            return  # importing rich takes longer than the rest of the start
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
        console = Console(file=behind(sys.stderr))
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._bar.add_task(description, total=None, count="")
        (self._task,) = self._bar.tasks
        self._timer = threading.Timer(DELAY_S, self._bar.start)

    def __enter__(self) -> "LateProgress":
        if self._timer:
            self._timer.daemon = True
            self._timer.start()
        return self

    def update(self, done: int, total: int) -> None:
        """Show how much is done; passed to the engine as a callback."""
        if self._timer:
            counts = 0 < done < total  # something happens before the first part and after the last one, too
            self._task.total = total if counts else None
            self._bar.update(self._task.id, completed=done, count=f"{done}/{total}" if counts else "")

    def stop(self) -> None:
        """Remove the bar, or prevent it from appearing."""
        if self._timer:
            self._timer.cancel()
            self._timer.join()
            self._bar.stop()
            self._timer = None

    def __exit__(self, *error: object) -> None:
        self.stop()
