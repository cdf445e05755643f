"""The application: its routes, and what becomes of an error."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvant.errors import ArgumentError, ContextError, EngineError, PromptError, QueueFullError
from kvant.server import chat_completions, completions, messages, page, responses, status, tokenize
from kvant.server.errors import ApiError
from kvant.server.security import Bodies, Guard, Keys, error_response
from kvant.server.service import Service

ENDPOINTS = {
    "/v1/chat/completions": chat_completions.endpoint,
    "/v1/completions": completions.endpoint,
    "/v1/responses": responses.endpoint,
    "/v1/messages": messages.endpoint,
    "/v1/messages/count_tokens": messages.count_tokens,
    "/tokenize": tokenize.endpoint,
}
RETRY_AFTER_S = 1


def make_app(service: Service) -> Starlette:
    """An application that answers for a service."""
    routes: list[BaseRoute] = [
        Route("/health", status.health),
        Route("/metrics", status.metrics),
        Route("/props", status.props),
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
    ]
    routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in ENDPOINTS.items()]
    routes += page.routes
    pages = []
    if origins := service.settings.allow_origins:  # a browser asks without a key whether it may ask with one
        told = ("request-id", "retry-after")
        pages = [Middleware(CORSMiddleware, origins, ("GET", "POST"), ("*",), expose_headers=told)]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, service), *pages, Middleware(Keys, service), Middleware(Bodies, service)],
        exception_handlers=dict.fromkeys(
            (ApiError, HTTPException, ContextError, PromptError, ArgumentError, QueueFullError, EngineError),
            _answer_error,
        ),
    )
    app.state.service = service
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """An error in the shape of the interface that was asked."""
    return error_response(request.scope, as_api_error(error))


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.detail, status=error.status_code, headers=error.headers)
    if isinstance(error, ContextError):
        return ApiError(str(error), code="context_length_exceeded")
    if isinstance(error, QueueFullError):
        headers = {"retry-after": str(RETRY_AFTER_S)}
        return ApiError(str(error), status=429, code="rate_limit_exceeded", headers=headers)
    if isinstance(error, EngineError):
        return ApiError(str(error), status=503, code="engine_failed")
    return ApiError(str(error), param=error.argument if isinstance(error, ArgumentError) else None)
