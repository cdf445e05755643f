"""OpenAI's /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvant.server.answering import answer
from kvant.server.body import decode
from kvant.server.generation import Begun, Call, End, Event, Generation, Text
from kvant.server.openai_body import ChatBody
from kvant.server.openai_messages import chat_generation
from kvant.server.openai_results import Usage, logprobs_content
from kvant.server.service import Service
from kvant.server.streaming import EventStream, begin, json_response, sse, unless_gone


async def endpoint(request: Request) -> Response:
    """Answer a conversation.

    Raises:
        ApiError: see :func:`kvant.server.answering.answer`; 499: the client went away.
    """
    service: Service = request.app.state.service
    body = decode(await request.body(), ChatBody)
    name = service.check_model(body.model)
    generation = chat_generation(body, service, request.state.salt)
    events = answer(service, generation)
    if not body.stream:
        return json_response(await unless_gone(request, _whole(events, generation, name)))
    begun = await begin(request, events)
    return EventStream(begun, _chunks(begun, generation, name, body.wants_usage), lambda error: sse(error.openai()))


def head(name: str, kind: str, prefix: str = "chatcmpl-") -> dict[str, Any]:
    """The fields that every object of one answer begins with."""
    return {
        "id": prefix + uuid.uuid4().hex,
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": "kvant",
    }


async def _whole(events: AsyncGenerator[Event, None], generation: Generation, name: str) -> dict[str, Any]:
    """The answer in one object."""
    usage = Usage()
    choices = [_Choice() for _ in range(generation.answers)]
    async with aclosing(events):
        async for event in events:
            usage.take(event)
            if not isinstance(event, Begun):
                choices[event.answer].take(event)
    return {
        **head(name, "chat.completion"),
        "choices": [choice.shaped(number, generation.logprobs) for number, choice in enumerate(choices)],
        "usage": usage.shaped(),
    }


class _Choice:
    """One answer, gathered."""

    def __init__(self) -> None:
        self._texts: dict[bool, list[str]] = {False: [], True: []}  # thinking or not
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._reason: str | None = None

    def take(self, event: Text | Call | End) -> None:
        if isinstance(event, Text):
            self._texts[event.thinking].append(event.text)
            if not event.thinking:
                self._logprobs += logprobs_content(event.logprobs)
        elif isinstance(event, Call):
            self._calls.append(tool_call(event))
        else:
            self._reason = event.reason

    def shaped(self, number: int, with_logprobs: bool) -> dict[str, Any]:
        text = "".join(self._texts[False])
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._texts[True]:
            message["reasoning_content"] = "".join(self._texts[True])
        if self._calls:
            message |= {"content": text or None, "tool_calls": self._calls}
        logprobs = {"content": self._logprobs, "refusal": None} if with_logprobs else None
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": self._reason}


def tool_call(call: Call) -> dict[str, Any]:
    """A call in OpenAI's form, with an id of its own."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


async def _chunks(
    events: AsyncIterator[Event], generation: Generation, name: str, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events."""
    beginning = head(name, "chat.completion.chunk")
    usage = Usage()
    no_usage = {"usage": None} if include_usage else {}

    def chunk(answer: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": answer, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse({**beginning, "choices": [choice], **no_usage})

    async for event in events:
        usage.take(event)
        if isinstance(event, Begun):
            for number in range(generation.answers):
                yield chunk(number, {"role": "assistant", "content": ""})
        elif isinstance(event, Text):
            if event.thinking:
                yield chunk(event.answer, {"reasoning_content": event.text})
            else:
                logprobs = {"content": logprobs_content(event.logprobs), "refusal": None}
                yield chunk(event.answer, {"content": event.text}, None, logprobs if generation.logprobs else None)
        elif isinstance(event, Call):
            yield chunk(event.answer, {"tool_calls": [{"index": event.index, **tool_call(event)}]})
        else:
            yield chunk(event.answer, {}, event.reason)
    if include_usage:
        yield sse({**beginning, "choices": [], "usage": usage.shaped()})
    yield b"data: [DONE]\n\n"
