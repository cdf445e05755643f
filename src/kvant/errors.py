"""Every error that kvant raises on purpose::

    KvantError
     +-- ModelError
     |    +-- CheckpointError, WeightsError
     +-- ContextError, PromptError, GrammarError   each also a ValueError
     +-- KernelError                               also a RuntimeError
     +-- SnapshotError, LogitsError, BenchError, ConvertError, QueueFullError, EngineError, RanksError

Wrong arguments of a function are ValueError and TypeError. ArgumentError is the ValueError that knows the
argument.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import ClassVar
from unicodedata import east_asian_width

EXIT_INTERRUPTED = 130
MAX_COLUMNS = 3 * 79 - len("kvant: error: ")  # so that an error takes three lines of a terminal
MIN_BEGINNING = 4  # characters of a name that say which one is meant
MAX_CHARACTERS = 2000  # of a text that are looked at


class KvantError(Exception):
    """Base of every error kvant raises on purpose; its text is one line made for a person.

    It may quote text of a stranger, so it goes through :func:`printable`.
    """

    columns: ClassVar[int] = MAX_COLUMNS

    def __init__(self, message: str = "", advice: str = "") -> None:
        """``advice`` follows the message. It is kvant's text and is never shortened."""
        text = printable(message, self.columns)
        super().__init__(f"{text}; {advice}" if advice else text)


class ModelError(KvantError):
    """A model folder that cannot be loaded."""


class CheckpointError(ModelError):
    """Tensors that are truncated, missing, or of the wrong shape or dtype."""


class WeightsError(ModelError):
    """A model of the hub that is not here or cannot be had, or that has wrong files."""

    columns = 1000  # two digests whole, and a path to copy; a name that was refused is cut where it is quoted


class SnapshotError(KvantError):
    """A cache's snapshot that cannot be written or read, or is of another model or format."""

    columns = 1000  # a path to copy, and two digests whole


class ContextError(KvantError, ValueError):
    """A prompt or a conversation that does not fit the reserved context."""

    columns = 1000  # a plan's sum, and the flags that would fit; it quotes nothing


class PromptError(KvantError, ValueError):
    """A prompt that cannot be used."""


class GrammarError(KvantError, ValueError):
    """A grammar that cannot be used, or an answer that cannot follow it."""

    columns = 1000  # it quotes the part of a schema or a grammar that is wrong


class LogitsError(KvantError):
    """Logits that no token can be drawn from."""


class KernelError(KvantError, RuntimeError):
    """A step through the fused kernel that failed."""


class BenchError(KvantError):
    """A measurement that could not be made."""


class ConvertError(KvantError):
    """A model that could not be converted."""


class QueueFullError(KvantError):
    """A request that an engine has no place for now. Later it may have."""


class EngineError(KvantError):
    """An engine that was closed, or whose thread failed."""


class RanksError(KvantError):
    """A run on several machines that cannot begin or go on."""


class ArgumentError(ValueError):
    """A wrong argument. Each caller words it in its own names: a command in flags, an API in parameters.

    Attributes:
        argument: its name.
        problem: the rest of the sentence, such as "is 3; expected 4 or 8".
        needs: the name of the argument that the sentence ends with, if any.
    """

    def __init__(self, argument: str, problem: str, needs: str = "") -> None:
        super().__init__(argument, problem, needs)
        self.argument, self.problem, self.needs = argument, problem, needs

    def worded(self, name: Callable[[str], str]) -> str:
        """The sentence, with ``name`` of each argument."""
        return f"{name(self.argument)} {self.problem} {name(self.needs) if self.needs else ''}".rstrip()

    def __str__(self) -> str:
        return self.worded(str)


def one_line(error: BaseException) -> str:
    """The first line of another library's error, :func:`printable`, or its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return printable(lines[0]) if lines else type(error).__name__


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Return the end of a sentence that refuses a name: up to 5 that look like it, or begin with it.

    Capital letters do not count. It is empty if there is none.
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
    """The text as it can be shown to a person, whoever wrote it: on one line, in at most so many columns.

    Characters that ``str.isprintable`` refuses become Python escapes: control characters, marks of direction
    or of no width. A text that is too wide loses the middle of its long words first, then its own middle.
    """
    text = _cut(text, MAX_CHARACTERS)
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if _width(text) > columns:
        text = " ".join(_cut(word, columns // 4, end=columns // 8) for word in text.split(" "))
    return _cut(text, columns, end=columns // 5)


def _cut(text: str, columns: int, end: int = 100) -> str:
    """The text's start and, in ``end`` columns, its end, where it is wider than ``columns``."""
    if _width(text) <= columns:
        return text
    start = columns - end - len("...")
    return f"{_start(text, start)}...{_start(text[::-1], end)[::-1]}"


def _start(text: str, columns: int) -> str:
    ends = accumulate(map(_width, text))
    return text[: sum(end <= columns for end in ends)]


def _width(text: str) -> int:
    """Columns of a terminal; those of a mark that joins the character before it count too."""
    return len(text) if text.isascii() else sum(2 if east_asian_width(c) in "WF" else 1 for c in text)


@contextmanager
def library_errors(kind: type[KvantError], failure: str) -> Iterator[None]:
    """Raise another library's error as ``kind``, its text after ``failure``. kvant's own errors pass as they
    are.

    Ctrl-C and the like pass too. A panic in Rust does not: it is no Exception, but it is an error.
    """
    try:
        yield
    except KvantError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kind(f"{failure}: {one_line(error)}") from error
        raise
