"""The prompt of ``kvant generate``: an argument, --prompt, piped text, or piped text before one of them."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvant.cli import options
from kvant.cli.options import BadValueError
from kvant.errors import PromptError

WAIT_S = 1.0  # for piped text, until it is said that something waits


def read_prompt(argument: str | None, option: str | None) -> str:
    """The prompt, whole.

    ``-`` stands for standard input as it is. Other piped text goes before the argument, with a blank line between
    them; ends of lines at its end do not count. A terminal is read for ``-`` alone.

    Raises:
        BadValueError: no prompt, two of them, or one that is no Unicode.
        PromptError: an empty prompt, or piped text that is not UTF-8.
    """
    if argument is not None and option is not None:
        raise BadValueError("the prompt is given twice, as an argument and with --prompt")
    written = option if argument is None else argument
    options.check_text(the_prompt=written)
    if written == "-":
        prompt = _standard_input()
    else:
        piped = "" if sys.stdin.isatty() else _standard_input().rstrip("\r\n")
        parts = [part for part in (piped, written) if part is not None and (part is written or part.strip())]
        if not parts:
            raise BadValueError("no prompt; give it as an argument, with --prompt, or pipe it into standard input")
        prompt = "\n\n".join(parts)
    if not prompt.strip():
        raise PromptError("the prompt is empty")
    return prompt


def _standard_input() -> str:
    """All of it. Whoever inherits a pipe that nobody closes waits for ever, and is told so."""
    with _said_if_it_lasts("waiting for the end of standard input; Ctrl-D ends it, `< /dev/null` leaves it out"):
        data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8: {error}") from error


@contextmanager
def _said_if_it_lasts(line: str) -> Iterator[None]:
    timer = threading.Timer(WAIT_S, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
