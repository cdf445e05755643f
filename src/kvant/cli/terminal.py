"""Text for a terminal, with escapes for control characters. A model, a folder's name or a hub can write
anything.
"""

import json
import re
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# Control characters of ASCII and Latin-1, but for the ends of lines and tabs.
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def escaped(text: str) -> str:
    """The text with a Python escape for every character that a terminal would obey."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, quiet: bool = False) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def write_generated(text: str, *, raw: bool) -> None:
    """Generated text to standard output at once: escaped on a terminal unless ``raw``, elsewhere as it is."""
    sys.stdout.write(text if raw or not sys.stdout.isatty() else escaped(text))
    sys.stdout.flush()


def show(record: Any, parts: "Iterable[RenderableType]", *, as_json: bool) -> None:
    """What a command found: the record as JSON, or lines and tables, in which every string is escaped."""
    if as_json:
        print(json.dumps(record, indent=2, allow_nan=False))
        return
    from rich.console import Console
    from rich.text import Text

    class EscapingConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(escaped(text), **options)

    screen = EscapingConsole(highlight=False, markup=False, soft_wrap=True)
    for part in parts:
        screen.print(part, soft_wrap=isinstance(part, str))


def table(
    columns: Iterable[str], rows: Iterable[Sequence[str]], right: Container[str] = (), **settings: Any
) -> "Table":
    """A table of texts; columns named in ``right`` end at the same place."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, **settings)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in right else "left")
    for row in rows:
        made.add_row(*row)
    return made


class _Escaping:
    """A stream that escapes all text written to it. Otherwise it is the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(escaped(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def escaping_standard_error() -> Iterator[None]:
    """Escape all that is written to standard error; progress bars and the chat's prompt write to
    :func:`behind`.
    """
    stream = sys.stderr
    sys.stderr = _Escaping(stream)
    try:
        yield
    finally:
        sys.stderr = stream


def behind(stream: TextIO) -> TextIO:
    return stream._stream if isinstance(stream, _Escaping) else stream
