"""The application: its routes, its error responses, and ``/tokenize``."""

import asyncio
from http import HTTPStatus
from typing import Literal

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvant.server import control, page, status
from kvant.server.answering import read_prompt
from kvant.server.anthropic import MESSAGES, count_tokens
from kvant.server.body import Fields
from kvant.server.embeddings import embeddings
from kvant.server.endpoint import BodyReader
from kvant.server.errors import ApiError, log_cause
from kvant.server.generation import Generation
from kvant.server.openai import CHAT, COMPLETIONS
from kvant.server.registry import Registry
from kvant.server.responses import RESPONSES
from kvant.server.security import Bodies, Guard, Keys, error_response

ENDPOINTS = {
    "/v1/chat/completions": CHAT.endpoint,
    "/v1/completions": COMPLETIONS.endpoint,
    "/v1/responses": RESPONSES.endpoint,
    "/v1/messages": MESSAGES.endpoint,
    "/v1/messages/count_tokens": count_tokens,
    "/v1/embeddings": embeddings,
}


def make_app(registry: Registry) -> Starlette:
    """Return the application that answers for the models of a registry."""
    routes: list[BaseRoute] = [
        Route("/health", status.health),
        Route("/metrics", status.metrics),
        Route("/props", status.props),
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
    ]
    for path, endpoint in {**ENDPOINTS, "/tokenize": tokenize}.items():
        routes.append(Route(path, endpoint, methods=["POST"]))
    routes += [*page.routes, *control.routes]
    pages = []
    if origins := registry.settings.allow_origins:  # a browser's preflight request has no key
        exposed = ("request-id", "retry-after", "x-kvant-ignored")
        pages = [Middleware(CORSMiddleware, origins, ("GET", "POST"), ("*",), expose_headers=exposed)]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Guard, registry),
            *pages,
            Middleware(Keys, registry),
            Middleware(Bodies, registry),
        ],
        exception_handlers={ApiError: _answer_error, HTTPException: _answer_error},
    )
    app.state.registry = registry
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return an error in the shape of the path's interface."""
    if isinstance(error, HTTPException):  # an unknown route or method
        said = _expected(request.url.path) if error.status_code == HTTPStatus.NOT_FOUND else error.detail
        error = ApiError(said, status=error.status_code, headers=error.headers)
    assert isinstance(error, ApiError)
    log_cause(request.state.request_id, error)
    return error_response(request.scope, error)


def _expected(path: str) -> str:
    """Return the message for a path that does not exist, with the ones that do."""
    if f"/v1{path}" in ENDPOINTS:
        return f"there is no {path[:200]}; expected /v1{path}"
    ollama = "; Ollama's interface is not supported" if path.startswith("/api/") else ""
    return f"there is no {path[:200]}{ollama}; expected one of {', '.join(ENDPOINTS)}"


class TokenizeMessage(Fields, frozen=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class TokenizeBody(Fields, frozen=True):
    """The body, in vLLM's names."""

    model: str | None = None
    prompt: str | None = None  # text, as /v1/completions reads it
    messages: list[TokenizeMessage] | None = None  # a conversation instead, rendered by the chat template
    return_token_strs: bool = False  # also return each token's string in the vocabulary


async def tokenize(request: Request) -> Response:
    """Return the token ids, their number, and the context's size."""
    registry: Registry = request.app.state.registry

    async with await BodyReader.of(request) as reader:
        body = await reader.decode(TokenizeBody, tokens=registry.context)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("expected either prompt or messages", param="prompt")
        field = "prompt" if body.messages is None else "messages"
        messages = await reader.call(lambda: msgspec.to_builtins(body.messages))
        service, _ = await reader.use_model(body.model)
    asked = Generation(messages=messages, prompt=body.prompt, field=field)
    ids = (await asyncio.to_thread(read_prompt, service, asked)).ids
    record: dict[str, object] = {"count": len(ids), "max_model_len": service.max_seq_len, "tokens": ids}
    if body.return_token_strs:
        record["token_strs"] = await asyncio.to_thread(service.tokenizer.convert_ids_to_tokens, ids)
    return JSONResponse(record)
