"""OpenAI's conversations: a body of /v1/chat/completions as a generation."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvant.server.answering import Service
from kvant.server.body import Fields
from kvant.server.errors import ApiError
from kvant.server.generation import Generation
from kvant.server.sampling import SamplingFields, check_range, sampling_options

MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # texts of stop, and characters of one
MAX_TOP_LOGPROBS = 20


class StreamOptions(Fields, frozen=True):
    """Of a streamed answer."""

    include_usage: bool | None = None


class Part(Fields, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(Fields, frozen=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None


class ChatBody(SamplingFields, frozen=True, kw_only=True):
    """The body."""

    model: str
    messages: list[Message]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    ignore_eos: bool | None = None


def chat_generation(body: ChatBody, service: Service, salt: bytes) -> Generation:
    """What a body asks for.

    Raises:
        ApiError: 400: a field that cannot be applied.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options is given without stream: true", param="stream_options")
    if body.top_logprobs is not None:
        check_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs is given without logprobs: true", param="top_logprobs")
    return Generation(
        messages=[_message(place, message) for place, message in enumerate(body.messages)],
        sampling=sampling_options(body),
        max_tokens=max_tokens(body.max_tokens, body.max_completion_tokens),
        stop=stops(body.stop),
        answers=answers(body.n, service),
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        ignore_eos=bool(body.ignore_eos),
        variables=service.settings.template_variables,
        salt=salt,
    )


def _message(place: int, message: Message) -> Mapping[str, Any]:
    """A message as the chat template takes it."""
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": text_of(message.content, f"messages[{place}].content")}


def text_of(content: str | Sequence[Part] | None, name: str) -> str:
    """A message's text; several parts on lines of their own.

    Raises:
        ApiError: a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for place, part in enumerate(content):
        if part.type != "text" or part.text is None:
            given = f"{name}[{place}]"
            raise ApiError(f"{given} is of the type {part.type[:40]!r}; the model reads text only", param=given)
    return "\n".join(part.text or "" for part in content)


def max_tokens(*given: int | None) -> int | None:
    """The number that either field gives; None: neither does.

    Raises:
        ApiError: less than one token, or two numbers.
    """
    numbers = {number for number in given if number is not None}
    if len(numbers) > 1:
        raise ApiError("max_tokens and max_completion_tokens differ; expected one of them", param="max_tokens")
    for number in numbers:
        if number < 1:
            raise ApiError(f"max_tokens is {number}; expected at least 1", param="max_tokens")
    return numbers.pop() if numbers else None


def stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The texts that end an answer.

    Raises:
        ApiError: too many, or one that is empty or too long.
    """
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if len(found) > MAX_STOPS:
        raise ApiError(f"stop has {len(found)} texts; expected at most {MAX_STOPS}", param="stop")
    for text in found:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise ApiError(f"stop has a text of {len(text)} characters; expected 1 to {MAX_STOP_LENGTH}", param="stop")
    return found


def answers(n: int | None, service: Service) -> int:
    """How many answers.

    Raises:
        ApiError: more than run at once.
    """
    if n is None:
        return 1
    most = service.settings.sequences
    if not 1 <= n <= most:
        raise ApiError(f"n is {n}; expected 1 to {most}, the sequences of this server", param="n")
    return n
