"""The prompt of ``kvant generate``: an argument, --prompt, piped text, or piped text before one of them."""

import shlex
import sys
import threading
from collections.abc import Sequence

from kvant.cli import options, ranks
from kvant.cli.options import BadValueError
from kvant.cli.terminal import say
from kvant.engine.load import POCKET, find_model
from kvant.errors import ModelError, PromptError

MAX_BYTES = 256 * 1024 * 1024  # of prompts, piped or in a file
MAX_QUOTED = 60  # characters of a prompt that an error repeats
WAIT_S = 1.0  # for piped text, until it is said that something waits


def split_arguments(
    words: Sequence[str], option: str | None, flag: str = "--prompt"
) -> tuple[str | None, str | None]:
    """The arguments as (model, prompt): one is the prompt, or the model beside ``flag``, whose value is
    ``option``.
    """
    if len(words) > 2:
        raise BadValueError(f"{len(words)} arguments are given; {_in_quotes(words)}")
    if option is not None:
        if len(words) == 2:
            raise BadValueError(f"the prompt is given twice, as an argument and with {flag}")
        return (words[0] if words else None), None
    if len(words) == 1 and is_a_models_name(words[0]):
        raise BadValueError(
            f"{words[0]!r} is a model's name, and there is no prompt; one can be that with --prompt"
        )
    return (words[0] if len(words) == 2 else None), (words[-1] if words else None)


def check_first_word(words: Sequence[str], flag: str | None = None) -> None:
    """Refuse the first of two arguments, or the only one beside a flag, if it is no model."""
    try:
        find_model(words[0])
    except ModelError as error:
        if flag is not None:
            advice = f"an argument beside {flag} is the model"
        elif is_a_models_name(words[0]):
            raise  # a model that was not pulled yet
        else:
            advice = _in_quotes(words)
        raise type(error)(str(error), advice) from error


def _in_quotes(words: Sequence[str]) -> str:
    """Advice for a prompt that the shell split into several arguments: the command with quotes."""
    has_model = is_a_models_name(words[0])
    text = " ".join(words[has_model:])
    if len(text) > MAX_QUOTED or not text.isprintable():
        text = "PROMPT"
    quoted = shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'
    model = f"{words[0]} " if has_model else ""
    return f"put a prompt of several words in quotes: kvant generate {model}{quoted}"


def is_a_models_name(text: str) -> bool:
    """Whether it is a name of `kvant models`; a folder or a repository has no such name."""
    if text.split() != [text]:
        return False
    from kvant.weights.imported import model_names  # imports what pulling takes

    return text in (POCKET, *model_names())


def read_prompt(argument: str | None, option: str | None) -> str:
    """The prompt, whole: ``-`` is standard input as it is; other piped text goes before the argument."""
    written = option if argument is None else argument
    options.check_text(the_prompt=written)
    if written == "-":
        prompt = _piped_text()
    else:
        whose = not sys.stdin.isatty() and (written is None or ranks.reads_input())
        piped = _piped_text().rstrip("\r\n") if whose else ""
        parts = [part for part in (piped, written) if part is not None and (part is written or part.strip())]
        if not parts:
            raise BadValueError(
                "no prompt; give it as an argument, with --prompt, or pipe it into standard input"
            )
        prompt = "\n\n".join(parts)
    if not prompt.strip():
        raise BadValueError("the prompt is empty; expected text")
    return prompt


def standard_input() -> bytes:
    """All of it. Whoever inherits a pipe that nobody closes waits for ever, and is told so."""
    if not ranks.reads_input():
        raise BadValueError(
            "standard input reaches no rank; expected the prompt as an argument or with --prompt"
        )
    line = "waiting for the end of standard input; Ctrl-D ends it, `< /dev/null` leaves it out"
    timer = threading.Timer(WAIT_S, say, [line])
    timer.daemon = True
    timer.start()
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
    finally:
        timer.cancel()
    if len(data) > MAX_BYTES:
        raise PromptError(f"standard input is longer than {MAX_BYTES} bytes")
    return data


def _piped_text() -> str:
    try:
        return standard_input().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8: {error}") from error
