"""The routes for ``kvant ps`` and ``kvant stop``, which send a token that only the server's user knows."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvant.server.body import Fields
from kvant.server.endpoint import BodyReader
from kvant.server.registry import Registry
from kvant.server.security import CONTROL_PREFIX


class UnloadBody(Fields, frozen=True):
    """The body of POST /control/unload."""

    model: str | None = None  # None: every model


async def list_models(request: Request) -> Response:
    """Handle GET /control/models: return the state of every model."""
    registry: Registry = request.app.state.registry
    return JSONResponse({"models": [registry.describe(model) for model in registry.models]})


async def unload(request: Request) -> Response:
    """Handle POST /control/unload: unload one model or all as soon as their requests have ended.

    Return the models that were loaded or loading, each with whether it is unloaded now.
    """
    registry: Registry = request.app.state.registry
    async with await BodyReader.of(request) as reader:
        body = await reader.decode(UnloadBody)
    chosen = registry.models if body.model is None else [registry.find(body.model)]
    chosen = [model for model in chosen if model.service is not None or model.loading is not None]
    ended = await asyncio.gather(*(registry.unload(model) for model in chosen))
    records = [
        {"name": model.name, "unloaded": is_unloaded, "requests": model.users}
        for model, is_unloaded in zip(chosen, ended, strict=True)
    ]
    return JSONResponse({"models": records})


routes: list[BaseRoute] = [
    Route(f"{CONTROL_PREFIX}models", list_models),
    Route(f"{CONTROL_PREFIX}unload", unload, methods=["POST"]),
]
