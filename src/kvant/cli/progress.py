"""Progress on standard error: after a second of work, and only on a terminal."""

import sys
import threading

from kvant.cli.terminal import behind

DELAY_S = 1.0


class LateProgress:
    """A bar that appears when the work inside the ``with`` has lasted a second."""

    def __init__(self, description: str, *, quiet: bool = False) -> None:
        self._timer: threading.Timer | None = None
        if quiet or not sys.stderr.isatty():
            return  # importing rich takes longer than the rest of the command's own start
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
        """Say how much is done; done by the engine's callbacks."""
        if self._timer:
            counts = 0 < done < total  # before the first part and after the last one work goes on, too
            self._task.total = total if counts else None
            self._bar.update(self._task.id, completed=done, count=f"{done}/{total}" if counts else "")

    def stop(self) -> None:
        """Take the bar away, or see to it that none appears."""
        if self._timer:
            self._timer.cancel()
            self._timer.join()
            self._bar.stop()
            self._timer = None

    def __exit__(self, *error: object) -> None:
        self.stop()
