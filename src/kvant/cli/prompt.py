"""Read the prompt of ``kvant generate``: an argument, --prompt, piped text, or piped text and one of them."""

import shlex
import sys
import threading
from collections.abc import Sequence

from kvant.cli import options, ranks
from kvant.cli.options import BadValueError
from kvant.cli.terminal import say
from kvant.engine.load import POCKET, find_model
from kvant.errors import ModelError, PromptError, did_you_mean

MAX_BYTES = 256 * 1024 * 1024  # limit of prompts, piped or in a file
MAX_QUOTED = 60  # characters of a prompt that an error repeats
PATH_BEGINNINGS = ("/", ".", "~")  # of an argument that can only be a path
PATIENCE_S = 1.0  # time to wait for piped text before saying so


def split_arguments(
    words: Sequence[str], option: str | None, flag: str = "--prompt"
) -> tuple[str | None, str | None]:
    """Split arguments into (model, prompt). With ``flag``, whose value is ``option``, one is the model."""
    if len(words) > 2:
        raise BadValueError(f"{len(words)} arguments are given; {_in_quotes(words)}")
    if option is not None:
        if len(words) == 2:
            raise BadValueError(f"the prompt is given twice, as an argument and with {flag}")
        return (words[0] if words else None), None
    if len(words) == 1 and is_a_models_name(words[0]):
        raise BadValueError(
            f"{words[0]!r} is a model's name, and there is no prompt; add one, or mark it with --prompt"
        )
    return (words[0] if len(words) == 2 else None), (words[-1] if words else None)


def check_first_word(words: Sequence[str], flag: str | None = None) -> None:
    """Refuse the first of two arguments, or the only one with a flag, if it is not a model."""
    try:
        find_model(words[0])
    except ModelError as error:
        if flag is not None:
            advice = f"with {flag}, an argument is the model"
        elif is_a_models_name(words[0]) or _is_like_a_model(words[0]):
            raise  # a model that is not pulled yet, or a slip of the pen; its own message is enough
        else:
            advice = _in_quotes(words)
        raise type(error)(str(error), advice) from error


def _in_quotes(words: Sequence[str]) -> str:
    """Advise to quote a prompt that the shell has split into several arguments."""
    if words[0].startswith(PATH_BEGINNINGS):
        return "put a path with spaces, and a prompt of several words, in quotes"
    has_model = is_a_models_name(words[0])
    text = " ".join(words[has_model:])
    if len(text) > MAX_QUOTED or not text.isprintable():
        text = "PROMPT"
    quoted = shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'
    model = f"{words[0]} " if has_model else ""
    return f"put a prompt of several words in quotes: kvant generate {model}{quoted}"


def is_a_models_name(text: str) -> bool:
    """Whether a text is a name that `kvant models` lists; folders and repositories are not."""
    if text.split() != [text]:
        return False
    from kvant.weights.imported import model_names  # imports everything that pulling needs

    return text in (POCKET, *model_names())


def _is_like_a_model(text: str) -> bool:
    """Whether a text is written as a path is, or resembles a known model's name."""
    from kvant.weights.imported import model_names

    return text.startswith(PATH_BEGINNINGS) or bool(did_you_mean(text, [POCKET, *model_names()]))


def read_prompt(argument: str | None, option: str | None) -> str:
    """Return the prompt: ``-`` means standard input; other piped text is put before the argument."""
    written = option if argument is None else argument
    options.check_text(the_prompt=written)
    if written == "-":
        prompt = _piped_text()
    else:
        has_input = not sys.stdin.isatty() and (written is None or ranks.reads_input())
        piped = _piped_text().rstrip("\r\n") if has_input else ""
        parts = [text for text in (piped, written) if text is not None and (text is written or text.strip())]
        if not parts:
            raise BadValueError(
                "no prompt; pass it as an argument, with --prompt, or pipe it into standard input"
            )
        prompt = "\n\n".join(parts)
    if not prompt.strip():
        raise BadValueError("the prompt is empty; expected text")
    return prompt


def standard_input() -> bytes:
    """Read all of standard input; say so if it takes long, since an inherited pipe may never be closed."""
    if not ranks.reads_input():
        raise BadValueError(
            "the ranks cannot read standard input; expected the prompt as an argument or with --prompt"
        )
    line = "waiting for the end of standard input; Ctrl-D ends it, `< /dev/null` skips it"
    timer = threading.Timer(PATIENCE_S, say, [line])
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
