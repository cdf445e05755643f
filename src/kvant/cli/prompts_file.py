"""``--prompts-file``: a prompt a line, each an object of JSON. Every line is checked before a model is
loaded.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvant.cli.defaults import blocked_by
from kvant.cli.options import BadValueError
from kvant.cli.prompt import MAX_BYTES, standard_input
from kvant.engine.sampling import OPTIONS, SamplingOptions
from kvant.errors import ArgumentError, PromptError, did_you_mean, one_line
from kvant.fields import shown
from kvant.files import read_user_file, unique_keys
from kvant.text.prompt import Message

KEYS = ("prompt", "messages", "id", "max_tokens", "stop", "logit_bias", *OPTIONS)
MESSAGE_KEYS = ("role", "content", "reasoning_content")
# By key: whether its value is right, and what is expected.
CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (lambda text: isinstance(text, str) and bool(text.strip()), "text that is not empty"),
    "messages": (
        lambda found: isinstance(found, list) and bool(found),
        "a list of objects with role and content",
    ),
    "id": (lambda name: type(name) in (str, int), "text or a whole number"),
    "max_tokens": (lambda count: type(count) is int and count >= 1, "a whole number, at least 1"),
    "stop": (
        lambda found: (
            found != "" and isinstance(found, str | list) and all(isinstance(s, str) and s for s in found)
        ),
        "text or a list of texts, none empty",
    ),
}
# one way to write each: two entries for a token are never taken for one
_TOKEN = re.compile("0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt and what its line asks for."""

    where: str  # the file and the number of the line, for messages
    id: str | int  # the line's own, else its number in the file, from 1
    prompt: str | list[Message]
    max_tokens: int | None  # None, of stop too: what the flags say
    stop: list[str] | None
    sampling: SamplingOptions  # the flags' options with the line's over them
    has_seed: bool  # of its own


def read_lines(path: str, sampling: SamplingOptions) -> list[Line]:
    """All prompts of a file, in order; ``-`` is standard input. Lines with nothing but white space do not
    count.
    """
    if not path:
        raise BadValueError("--prompts-file is empty; expected a file, or - for standard input")
    name = "standard input" if path == "-" else path
    data = standard_input() if path == "-" else read_user_file(path, MAX_BYTES, PromptError)
    found: list[Line] = []
    seen: dict[str | int, str] = {}
    # Not splitlines(): JSON's strings may hold other ends of lines than these.
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{name}: line {number}"
        try:
            line = _read_line(raw, where, number, sampling)
        except (ValueError, RecursionError) as error:
            raise BadValueError(
                f"{where}: {error if isinstance(error, ArgumentError) else one_line(error)}"
            ) from error
        if line.id in seen:
            raise BadValueError(
                f"{where}: id is {shown(line.id)}, as that of {seen[line.id]}; expected one a line"
            )
        seen[line.id] = f"line {number}"
        found.append(line)
    if not found:
        raise BadValueError(
            f'{name}: it has no prompt; expected an object of JSON a line, such as {{"prompt": "Hi!"}}'
        )
    return found


def _read_line(raw: bytes, where: str, number: int, flags: SamplingOptions) -> Line:
    try:
        record = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {one_line(error)}") from error
    except json.JSONDecodeError as error:  # its text says line 1, which is not the file's
        raise ValueError(f"it is not JSON: {error.msg}, at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {one_line(error)}") from error
    if not isinstance(record, dict):
        raise ValueError(f'it is {shown(record)}; expected an object, such as {{"prompt": "Hi!"}}')
    for key in record:
        if key not in KEYS:
            near = did_you_mean(key, KEYS) or f"; expected {', '.join(KEYS[:5])} and options of sampling"
            raise ValueError(f"it has {shown(key)}{near}")
    given = {key: value for key, value in record.items() if value is not None}
    if ("prompt" in given) == ("messages" in given):
        count = "both" if "prompt" in given else "neither"
        raise ValueError(f"it has {count} of prompt and messages; expected one of them")
    for key, (is_right, expected) in CHECKS.items():
        if key in given:
            _check(is_right(given[key]), key, given[key], expected)
    _check_messages(given.get("messages", ()))
    own = {key: given[key] for key in ("logit_bias", *OPTIONS) if key in given}
    stop = given.get("stop")
    return Line(
        where,
        given.get("id", number),
        given["prompt"] if "prompt" in given else given["messages"],
        given.get("max_tokens"),
        [stop] if isinstance(stop, str) else stop,
        _sampling(flags, own),
        "seed" in own,
    )


def _check(is_right: bool, name: str, value: Any, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{name} is {shown(value)}; expected {expected}")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON can name half of a surrogate pair
        raise ValueError(
            f"{name} is {shown(value)}; expected Unicode, without half of a surrogate pair"
        ) from None


def _check_messages(messages: Sequence[Any]) -> None:
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        has_both = isinstance(message, dict) and {"role", "content"} <= message.keys()
        _check(has_both, name, message, "an object with role and content")
        for key, text in message.items():
            if key not in MESSAGE_KEYS:
                raise ValueError(f"{name} has {shown(key)}; expected {', '.join(MESSAGE_KEYS)}")
            if not isinstance(text, str):
                raise ValueError(f"{name} has {shown(text)} as its {key}; expected text")


def _sampling(flags: SamplingOptions, own: Mapping[str, Any]) -> SamplingOptions:
    """The flags' options with a line's over them. A flag that these leave without effect is dropped."""
    chosen = dict(own)
    for key, value in own.items():
        if key in OPTIONS and isinstance(value, int) and OPTIONS[key].type in (float, float | None):
            # bools are refused by their option
            chosen[key] = value if isinstance(value, bool) else _number(key, value)
    if "logit_bias" in own:
        chosen["logit_bias"] = _biases(own["logit_bias"])
    values = {option.name: getattr(flags, option.name) for option in fields(flags)} | chosen
    for name in values:
        if name not in own and blocked_by(name, values) in own:
            values[name] = OPTIONS[name].default
    return SamplingOptions(**values)


def _biases(value: Any) -> Mapping[int, float]:
    if not isinstance(value, dict):
        raise ValueError(f'logit_bias is {shown(value)}; expected an object, such as {{"42": -5.0}}')
    found = {}
    for token, bias in value.items():
        if not _TOKEN.fullmatch(token) or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(
                f"logit_bias has {shown(bias)} for {shown(token)}; expected a number for a token's id"
            )
        found[int(token)] = _number("logit_bias", bias)
    return found


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} has a number of more than 308 digits; expected a smaller one") from None
