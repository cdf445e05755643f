"""``--prompts-file``: read prompts as JSON objects, one per line, and check all before loading a model."""

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
# By key: a test of the value, and what is expected.
CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (lambda text: isinstance(text, str) and bool(text.strip()), "text that is not empty"),
    "messages": (
        lambda messages: isinstance(messages, list) and bool(messages),
        "a list of objects with role and content",
    ),
    "id": (lambda name: type(name) in (str, int), "text or a whole number"),
    "max_tokens": (lambda count: type(count) is int and count >= 1, "a whole number, at least 1"),
    "stop": (
        lambda stop: (
            stop != "" and isinstance(stop, str | list) and all(isinstance(s, str) and s for s in stop)
        ),
        "text or a list of texts, none empty",
    ),
}
# only one spelling per token id, so that two entries cannot mean the same token
_TOKEN = re.compile("0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt with its line's options."""

    where: str  # the file and the line number, for messages
    id: str | int  # the line's own id, or its number in the file, from 1
    prompt: str | list[Message]
    max_tokens: int | None  # None here and in stop: use the flags
    stop: list[str] | None
    sampling: SamplingOptions  # the flags' options, overridden by the line's
    has_seed: bool  # whether the line sets a seed


def read_lines(path: str, sampling: SamplingOptions) -> list[Line]:
    """Read all prompts of a file, or of standard input (``-``), in order; blank lines do not count."""
    if not path:
        raise BadValueError("--prompts-file is empty; expected a file, or - for standard input")
    name = "standard input" if path == "-" else path
    data = standard_input() if path == "-" else read_user_file(path, MAX_BYTES, PromptError)
    lines: list[Line] = []
    seen: dict[str | int, str] = {}
    # Not splitlines(): JSON strings may contain other line separators.
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
                f"{where}: id is {shown(line.id)}, as on {seen[line.id]}; expected unique ids"
            )
        seen[line.id] = f"line {number}"
        lines.append(line)
    if not lines:
        raise BadValueError(
            f'{name}: no prompt; expected JSON objects, one per line, such as {{"prompt": "Hi!"}}'
        )
    return lines


def _read_line(raw: bytes, where: str, number: int, flags: SamplingOptions) -> Line:
    try:
        record = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {one_line(error)}") from error
    except json.JSONDecodeError as error:  # str(error) would say line 1
        raise ValueError(f"it is not JSON: {error.msg}, at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {one_line(error)}") from error
    if not isinstance(record, dict):
        raise ValueError(f'it is {shown(record)}; expected an object, such as {{"prompt": "Hi!"}}')
    for key in record:
        if key not in KEYS:
            near = did_you_mean(key, KEYS) or f"; expected {', '.join(KEYS[:5])} and sampling options"
            raise ValueError(f"it has {shown(key)}{near}")
    values = {key: value for key, value in record.items() if value is not None}
    if ("prompt" in values) == ("messages" in values):
        count = "both" if "prompt" in values else "neither"
        raise ValueError(f"it has {count} of prompt and messages; expected one of them")
    for key, (is_right, expected) in CHECKS.items():
        if key in values:
            _check(is_right(values[key]), key, values[key], expected)
    _check_messages(values.get("messages", ()))
    sampling = {key: values[key] for key in ("logit_bias", *OPTIONS) if key in values}
    stop = values.get("stop")
    return Line(
        where,
        values.get("id", number),
        values["prompt"] if "prompt" in values else values["messages"],
        values.get("max_tokens"),
        [stop] if isinstance(stop, str) else stop,
        _sampling(flags, sampling),
        "seed" in sampling,
    )


def _check(is_right: bool, name: str, value: Any, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{name} is {shown(value)}; expected {expected}")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON can contain a lone surrogate
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


def _sampling(flags: SamplingOptions, changes: Mapping[str, Any]) -> SamplingOptions:
    """Override the flags' options with a line's, and drop flags that these make ineffective."""
    chosen = dict(changes)
    for key, value in changes.items():
        if key in OPTIONS and isinstance(value, int) and OPTIONS[key].type in (float, float | None):
            # SamplingOptions refuses bools
            chosen[key] = value if isinstance(value, bool) else _number(key, value)
    if "logit_bias" in changes:
        chosen["logit_bias"] = _biases(changes["logit_bias"])
    values = {option.name: getattr(flags, option.name) for option in fields(flags)} | chosen
    for name in values:
        if name not in changes and blocked_by(name, values) in changes:
            values[name] = OPTIONS[name].default
    return SamplingOptions(**values)


def _biases(value: Any) -> Mapping[int, float]:
    if not isinstance(value, dict):
        raise ValueError(f'logit_bias is {shown(value)}; expected an object, such as {{"42": -5.0}}')
    biases = {}
    for token, bias in value.items():
        if not _TOKEN.fullmatch(token) or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(
                f"logit_bias has {shown(bias)} for {shown(token)}; expected a number for a token's id"
            )
        biases[int(token)] = _number("logit_bias", bias)
    return biases


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} has a number of more than 308 digits; expected a smaller one") from None
