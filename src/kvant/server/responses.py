"""OpenAI's /v1/responses. Nothing is stored: each request has the whole conversation."""

from starlette.requests import Request
from starlette.responses import Response

from kvant.errors import ArgumentError
from kvant.server.answering import answer
from kvant.server.body import decode
from kvant.server.errors import ApiError
from kvant.server.response_stream import ResponseStream
from kvant.server.responses_body import ResponsesBody
from kvant.server.responses_input import responses_generation
from kvant.server.sampling import refused
from kvant.server.service import Service
from kvant.server.streaming import EventStream, begin, json_response, named_events, sse, take_all, unless_gone


async def endpoint(request: Request) -> Response:
    """Answer a conversation.

    Raises:
        ApiError: see :func:`kvant.server.answering.answer`; 499: the client went away.
    """
    service: Service = request.app.state.service
    body = decode(await request.body(), ResponsesBody)
    name = service.check_model(body.model)
    generation = responses_generation(body, service, request.state.salt)
    try:
        sampling = generation.sampling.filled(service.sampling)
    except ArgumentError as error:
        raise refused(error) from error
    response = ResponseStream(name, body, generation, sampling)
    events = answer(service, generation)
    try:
        if not body.stream:
            await unless_gone(request, take_all(events, response.add))
            return json_response(response.response)
        begun = await begin(request, events)
    except ApiError as error:
        if error.param == "messages":  # what this interface calls otherwise
            error.param = "input"
        raise

    def failed(error: ApiError) -> bytes:
        return b"".join(sse(told, told["type"]) for told in response.failed(error))

    return EventStream(begun, named_events(begun, response.add), failed)
