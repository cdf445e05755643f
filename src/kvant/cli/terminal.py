"""Print text to a terminal with control characters escaped, since models, folders and hubs can write any."""

import json
import re
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# Control characters of ASCII and Latin-1 except line ends and tabs.
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def escaped(text: str) -> str:
    """Replace every character that would control a terminal with a Python escape."""
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(text: str, quiet: bool = False) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def write_generated(text: str, *, raw: bool) -> None:
    """Write generated text to standard output; escape it on a terminal unless ``raw``."""
    sys.stdout.write(text if raw or not sys.stdout.isatty() else escaped(text))
    sys.stdout.flush()


def show(record: Any, parts: "Iterable[RenderableType]", *, as_json: bool) -> None:
    """Print a command's result: the record as JSON, or lines and tables with all strings escaped."""
    if as_json:
        print(json.dumps(record, indent=2, allow_nan=False))
        return
    from rich.console import Console
    from rich.text import Text

    class EscapingConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(escaped(text), **options)

    screen = EscapingConsole(highlight=False, markup=False, soft_wrap=True)
    for renderable in parts:
        screen.print(renderable, soft_wrap=isinstance(renderable, str))


def table(
    columns: Iterable[str], rows: Iterable[Sequence[str]], right: Container[str] = (), **settings: Any
) -> "Table":
    """Make a table of texts; columns in ``right`` are aligned to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, **settings)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in right else "left")
    for row in rows:
        made.add_row(*row)
    return made


class _Escaping:
    """A stream that escapes all text written to it; other attributes are those of the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(escaped(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def escaping_standard_error() -> Iterator[None]:
    """Escape everything written to standard error, except by those who write to :func:`behind` it."""
    stream = sys.stderr
    sys.stderr = _Escaping(stream)
    try:
        yield
    finally:
        sys.stderr = stream


def behind(stream: TextIO) -> TextIO:
    return stream._stream if isinstance(stream, _Escaping) else stream
