"""The application: its routes, and what becomes of an error."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvant.server import chat_completions, completions, messages, page, responses, status, tokenize
from kvant.server.errors import ApiError, log_cause
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
        exception_handlers={ApiError: _answer_error, HTTPException: _answer_error},
    )
    app.state.service = service
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """An error in the shape of the interface that was asked."""
    if isinstance(error, HTTPException):  # of a route that there is not
        error = ApiError(error.detail, status=error.status_code, headers=error.headers)
    assert isinstance(error, ApiError)
    log_cause(request.state.request_id, error)
    return error_response(request.scope, error)
