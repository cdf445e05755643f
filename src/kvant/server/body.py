"""Decode a request's body into a typed structure. A fault is a 400 that names the field."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import inspect

from kvant.engine.drafts import ServedSource
from kvant.engine.option_ranges import MIN_TEMP
from kvant.engine.sampling import NEEDS_TEMP, SamplingOptions
from kvant.errors import ArgumentError
from kvant.server.errors import ApiError
from kvant.server.left_out import LeftOut, kinds, known

T = TypeVar("T")
MAX_DEPTH = 64
FLAT = {int, float, bool, str, type(None)}
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_TOKENS = 1024  # in logit_bias, and in stop_token_ids
MAX_TOOLS = 1024  # agents with many servers of tools have more than OpenAI's 128
MAX_PROMPTS = 128  # OpenAI's
ALL_TOKENS = 2**30  # more than any context has
WITHOUT_EFFECT = (*NEEDS_TEMP, "xtc_threshold")  # options without effect at temperature 0


class Fields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Base of all bodies. An undeclared field is ignored, or refused by name."""


def decode(body: bytes, kind: type[T], left_out: LeftOut | None = None, tokens: float = math.inf) -> T:
    """Decode a JSON body as ``kind``.

    Args:
        body: JSON text.
        kind: a :class:`Fields`.
        left_out: collects the names of unknown fields. None: they are refused.
        tokens: the maximum number of tokens of a prompt.

    Raises:
        ApiError: the body is not JSON, is nested too deeply, has a list that is too long, or is no ``kind``.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(str(error)) from error
    check_depth(value)
    if isinstance(value, dict):
        _check_counts(value, tokens)
    return converted(value, kind, LeftOut(strict=True) if left_out is None else left_out)


def _check_counts(body: Mapping[str, Any], tokens: float) -> None:
    """Refuse lists that are too long before their entries are converted one by one.

    Every message, and every part of a message, takes at least one token.
    """
    lists = {name: value for name, value in body.items() if isinstance(value, list)}
    tools = lists.get("tools", [])
    if (count := max(len(tools), _inner(tools, "tools"))) > MAX_TOOLS:  # a namespace contains tools
        raise ApiError(f"tools has {count}; expected at most {MAX_TOOLS}", param="tools")
    if (count := sum(type(each) is not int for each in lists.get("prompt", ()))) > MAX_PROMPTS:
        raise ApiError(f"prompt has {count} prompts; expected 1 to {MAX_PROMPTS}", param="prompt")
    for field in ("messages", "input", "system"):
        entries = lists.get(field, [])
        parts = _inner(entries, "content", "output", "summary", "tool_calls")
        for count, what in ((len(entries), "entries"), (parts, "parts")):
            if count > tokens:
                message = f"{field} has {count} {what}; there is room for {tokens} tokens with the answer's"
                raise ApiError(message, param=field, code="context_length_exceeded")


def _inner(entries: Iterable[Any], *names: str) -> int:
    """Return the total length of the lists that the entries have under these names."""
    values = (entry.get(name) for entry in entries if isinstance(entry, dict) for name in names)
    return sum(len(value) for value in values if isinstance(value, list))


def typed(
    values: Iterable[Any], kinds: Mapping[str, type[T]], place: str, left_out: LeftOut, default: str = ""
) -> Iterator[tuple[str, T | str]]:
    """Yield each object's place and the object converted by its ``type``, or the type's name if unknown."""
    for number, value in enumerate(values):
        at = f"{place}[{number}]"
        kind = value.get("type") or default if isinstance(value, dict) else default
        is_known = isinstance(kind, str) and kind in kinds
        yield at, converted(value, kinds[kind], left_out, at) if is_known else str(kind)


def known_of(
    values: Iterable[Any] | None,
    kinds: Mapping[str, type[T]],
    place: str,
    left_out: LeftOut,
    default: str = "",
) -> list[tuple[str, T]]:
    """Return those of :func:`typed` with a known type; ignore others, and refuse those without a type."""
    items: list[tuple[str, T]] = []
    for at, value in typed(values or (), kinds, place, left_out, default):
        if value == "":
            raise ApiError(f"{at} has no type; expected {' or '.join(kinds)}", param=f"{at}.type")
        if isinstance(value, str):
            left_out.add(at, value)
        else:
            items.append((at, value))
    return items


def converted(value: Any, kind: type[T], left_out: LeftOut, at: str = "") -> T:
    """Convert decoded JSON to ``kind``. ``at`` is its place in the body, for errors."""
    try:
        return msgspec.convert(known(value, kind, at, left_out), kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        text = str(error)
        field = re.search(r"(?:unknown|required) field `([^`]*)`", text)
        place = re.search(r"(?:- at|in) `\$\.?([^`]*)`", text)
        names = [at, *(match[1] for match in (place, field) if match)]
        if place and text.startswith("Invalid") and (values := allowed(kind, place[1])):
            text += f"; expected {' or '.join(msgspec.json.encode(value).decode() for value in values)}"
        param = ".".join(filter(None, names)).replace(".[", "[")
        raise ApiError(f"{at}: {text}" if at else text, param=param or None) from error


def allowed(kind: type, place: str) -> list[Any]:
    """Return the values that a field may have, if its type lists them.

    Args:
        kind: the type of the body.
        place: the field's place in it as msgspec writes it: ``tools[0].type``.
    """
    values: list[Any] = []
    at = _kinds(inspect.type_info(kind))
    steps = re.findall(r"[^.\[\]]+|\[", place.replace("[...]", "[0]"))
    steps = [step for step in steps if not step.isdecimal()]  # all items of an array have one type
    for number, step in enumerate(steps, 1):
        if step == "[":
            at = [
                each for node in at if isinstance(node, inspect.ListType) for each in _kinds(node.item_type)
            ]
            continue
        structs = [node for node in at if isinstance(node, inspect.StructType)]
        if number == len(steps):
            values += [node.tag for node in structs if node.tag_field == step]
        at = [
            each
            for node in structs
            for field in node.fields
            if field.name == step
            for each in _kinds(field.type)
        ]
    return values + [value for node in at if isinstance(node, inspect.LiteralType) for value in node.values]


def _kinds(node: inspect.Type) -> list[inspect.Type]:
    """Return a type, or the types of a union, without their metadata."""
    return [each.type if isinstance(each, inspect.Metadata) else each for each in kinds(node)]


def check_depth(value: object) -> None:
    """Refuse JSON that is nested deeper than MAX_DEPTH, before any code recurses into it.

    The walk is level by level and skips scalars. :class:`kvant.server.security.Bodies` has bounded the number
    of objects and arrays.
    """
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        nodes = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for children in nodes for child in children if type(child) not in FLAT]
        if not level:
            return
    raise ApiError(f"the body's JSON is nested deeper than {MAX_DEPTH} levels")


# kvant's field: an unknown value is refused, as the command refuses one.
DraftField = Annotated[ServedSource, msgspec.Meta(title="draft")] | None


class SamplingFields(Fields, frozen=True, kw_only=True):
    """The sampling fields of a body. A null field counts as absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None


def sampling_options(fields: SamplingFields) -> SamplingOptions:
    """Return the options that a body requests.

    At temperature 0, options that only affect random choices are checked and dropped: they have no effect.
    """
    options: dict[str, Any] = {}
    if (temperature := fields.temperature) is not None:
        check_range("temperature", temperature, 0, 2)
        options["temp"] = temperature if temperature >= MIN_TEMP else 0.0
    if (top_p := fields.top_p) is not None:
        check_range("top_p", top_p, 0, 1)
        options |= {"top_p": top_p} if top_p else {"top_k": 1}  # 0 would disable the engine's top_p
    for name in ("presence", "frequency"):
        if penalty := getattr(fields, f"{name}_penalty"):
            check_range(f"{name}_penalty", penalty, -2, 2)
            options |= {f"{name}_penalty": penalty, f"{name}_context_size": ALL_TOKENS}
    bias = fields.logit_bias or {}
    if len(bias) > MAX_TOKENS:
        message = f"logit_bias has {len(bias)} tokens; expected at most {MAX_TOKENS}"
        raise ApiError(message, param="logit_bias")
    for token, value in bias.items():
        check_range(f"logit_bias.{token}", value, -100, 100)
    options["logit_bias"] = bias
    if (seed := fields.seed) is not None:
        check_range("seed", seed, -(2**63), 2**64 - 1)
        options["seed"] = seed % 2**64
    for name in (
        "min_p",
        "repetition_penalty",
        "repetition_context_size",
        "xtc_probability",
        "xtc_threshold",
    ):
        if (value := getattr(fields, name)) is not None:
            options[name] = value
    if fields.top_k is not None and "top_k" not in options:
        options["top_k"] = fields.top_k
    try:
        if options.get("temp") == 0:
            idle = {name: value for name, value in options.items() if name in WITHOUT_EFFECT}
            SamplingOptions(**idle)  # checks their ranges
            options = {name: value for name, value in options.items() if name not in idle}
        return SamplingOptions(**options)
    except ArgumentError as error:
        raise refused(error) from error


def refused(error: ArgumentError) -> ApiError:
    """Return the engine's error with OpenAI's names of the arguments."""
    names = {"temp": "temperature"}
    return ApiError(
        error.worded(lambda name: names.get(name, name)), param=names.get(error.argument, error.argument)
    )


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Refuse a number outside ``least`` to ``most``, both included."""
    if not least <= value <= most:
        raise ApiError(f"{name} is {value}; expected {least} to {most}", param=name)


def max_tokens(value: int | None, name: str = "max_tokens") -> int | None:
    """Return the maximum tokens of an answer, or None if only the context limits them."""
    if value is not None and value < 1 and value != -1:
        raise ApiError(f"{name} is {value}; expected at least 1", param=name)
    return None if value == -1 else value  # LM Studio and others send -1 for no limit


def stops(value: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Return the checked texts that end an answer."""
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    if len(texts) > MAX_STOPS:
        raise ApiError(f"{name} has {len(texts)} texts; expected at most {MAX_STOPS}", param=name)
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            expected = f"expected 1 to {MAX_STOP_LENGTH}"
            raise ApiError(f"{name} has a text of {len(text)} characters; {expected}", param=name)
    return texts
