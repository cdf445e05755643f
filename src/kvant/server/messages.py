"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from kvant.server.answering import answer, read_prompt
from kvant.server.anthropic_body import Conversation, MessagesBody
from kvant.server.anthropic_messages import conversation, messages_generation, shows_thinking
from kvant.server.body import decode
from kvant.server.message_stream import MessageStream
from kvant.server.service import Service
from kvant.server.streaming import EventStream, begin, json_response, named_events, sse, take_all, unless_gone


async def endpoint(request: Request) -> Response:
    """Answer a conversation.

    Raises:
        ApiError: see :func:`kvant.server.answering.answer`; 499: the client went away.
    """
    service: Service = request.app.state.service
    body = decode(await request.body(), MessagesBody)
    message = MessageStream(service.check_model(body.model), shows_thinking=shows_thinking(body))
    events = answer(service, messages_generation(body, service, request.state.salt))
    if not body.stream:
        await unless_gone(request, take_all(events, message.add))
        return json_response(message.message)
    begun = await begin(request, events)
    request_id = request.state.request_id
    return EventStream(begun, named_events(begun, message.add), lambda error: sse(error.anthropic(request_id), "error"))


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation as it would be fed: system prompt, tools and the template's own text.

    Raises:
        ApiError: 400: a conversation that could not be answered.
    """
    service: Service = request.app.state.service
    body = decode(await request.body(), Conversation)
    service.check_model(body.model)
    generation = conversation(body, service)
    prompt = await unless_gone(request, asyncio.to_thread(read_prompt, service, generation))
    return json_response({"input_tokens": len(prompt.ids)})
