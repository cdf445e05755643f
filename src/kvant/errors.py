"""The errors that kvant raises on purpose::

    KvantError
     +-- ModelError
     |    +-- CheckpointError, WeightsError
     +-- ContextError, PromptError, GrammarError   each also a ValueError
     +-- KernelError                               also a RuntimeError
     +-- SnapshotError, LogitsError, BenchError, ConvertError, QueueFullError, EngineError, RanksError

Wrong arguments of a function raise ValueError or TypeError. ArgumentError is a ValueError that has the
argument's name.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import ClassVar
from unicodedata import east_asian_width

EXIT_INTERRUPTED = 130
MAX_COLUMNS = 3 * 79 - len("kvant: error: ")  # an error takes at most three lines of a terminal
MIN_BEGINNING = 4  # characters that are enough to complete a name
MAX_CHARACTERS = 2000  # characters of a text that are processed


class KvantError(Exception):
    """Base of the errors kvant raises on purpose. The text is one line for a person.

    It may quote a stranger's text, so it goes through :func:`printable`.
    """

    columns: ClassVar[int] = MAX_COLUMNS

    def __init__(self, message: str = "", advice: str = "") -> None:
        """``advice`` is appended to the message. It is kvant's text and is never shortened."""
        text = printable(message, self.columns)
        super().__init__(f"{text}; {advice}" if advice else text)


class ModelError(KvantError):
    """A model folder that cannot be loaded."""


class CheckpointError(ModelError):
    """Tensors that are truncated, missing, or of the wrong shape or dtype."""


class WeightsError(ModelError):
    """A model of the hub is not here, cannot be fetched, or has wrong files."""

    columns = 1000  # room for two digests and a path to copy; quoted names are cut elsewhere


class SnapshotError(KvantError):
    """A cache's snapshot cannot be written or read, or belongs to another model or format."""

    columns = 1000  # room for a path to copy and two digests


class ContextError(KvantError, ValueError):
    """A prompt or a conversation that does not fit the reserved context."""

    columns = 1000  # a memory plan, and the flags that would fit; quotes no foreign text


class PromptError(KvantError, ValueError):
    """A prompt that cannot be used."""


class GrammarError(KvantError, ValueError):
    """A grammar that cannot be used, or an answer that cannot follow it."""

    columns = 1000  # quotes the wrong part of a schema or grammar


class LogitsError(KvantError):
    """Logits from which no token can be drawn."""


class KernelError(KvantError, RuntimeError):
    """A step through the fused kernel that failed."""


class BenchError(KvantError):
    """A measurement that could not be made."""


class ConvertError(KvantError):
    """A model that could not be converted."""


class QueueFullError(KvantError):
    """A request that an engine cannot take now. Later it may."""


class EngineError(KvantError):
    """An engine that was closed, or whose thread failed."""


class RanksError(KvantError):
    """A run on several machines that cannot begin or continue."""


class ArgumentError(ValueError):
    """A wrong argument. Callers insert their own names: a command its flags, an API its parameters.

    Attributes:
        argument: the argument's name.
        problem: the rest of the sentence, such as "is 3; expected 4 or 8".
        needs: the name of an argument that ends the sentence, or "".
    """

    def __init__(self, argument: str, problem: str, needs: str = "") -> None:
        super().__init__(argument, problem, needs)
        self.argument = argument
        self.problem = problem
        self.needs = needs

    def worded(self, name: Callable[[str], str]) -> str:
        """Return the sentence with arguments named by ``name``."""
        return f"{name(self.argument)} {self.problem} {name(self.needs) if self.needs else ''}".rstrip()

    def __str__(self) -> str:
        return self.worded(str)


def one_line(error: BaseException) -> str:
    """Return the first line of another library's error, made printable, or its type if it has no text."""
    lines = str(error).strip().splitlines()
    return printable(lines[0]) if lines else type(error).__name__


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Suggest up to 5 names that are similar to ``text`` or begin with it, ignoring case.

    Returns the end of a sentence that refuses a name; empty without suggestions.
    """
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in names}
    lower = text[:100].lower()
    near = [lower] if lower in by_lower else get_close_matches(lower, by_lower, cutoff=0.7)
    if len(lower) >= MIN_BEGINNING and lower not in by_lower:
        near += [name for name in by_lower if name.startswith(lower) and name not in near]
    if not near:
        return ""
    *names, last = (repr(by_lower[name]) for name in near[:5])
    return f"; did you mean {', '.join(names)}{' or ' * bool(names)}{last}?"


def printable(text: str, columns: int = MAX_COLUMNS) -> str:
    """Make a text from any source safe to show: one line of at most ``columns`` columns.

    Characters that ``str.isprintable`` refuses become Python escapes: control characters, direction marks,
    zero-width characters. If the text is too wide, its long words lose their middles first, then the text.
    """
    text = _cut(text, MAX_CHARACTERS)
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if _width(text) > columns:
        text = " ".join(_cut(word, columns // 4, end=columns // 8) for word in text.split(" "))
    return _cut(text, columns, end=columns // 5)


def _cut(text: str, columns: int, end: int = 100) -> str:
    """Cut a text wider than ``columns`` to its start and, in ``end`` columns, its end."""
    if _width(text) <= columns:
        return text
    start = columns - end - len("...")
    return f"{_start(text, start)}...{_start(text[::-1], end)[::-1]}"


def _start(text: str, columns: int) -> str:
    ends = accumulate(map(_width, text))
    return text[: sum(end <= columns for end in ends)]


def _width(text: str) -> int:
    """Return the width in a terminal's columns; combining characters count too."""
    return len(text) if text.isascii() else sum(2 if east_asian_width(c) in "WF" else 1 for c in text)


@contextmanager
def library_errors(kind: type[KvantError], failure: str) -> Iterator[None]:
    """Raise another library's error as ``kind``, with its text after ``failure``; let kvant's errors pass.

    Ctrl-C and the like pass too, but a panic in Rust is converted although it is not an Exception.
    """
    try:
        yield
    except KvantError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kind(f"{failure}: {one_line(error)}") from error
        raise
