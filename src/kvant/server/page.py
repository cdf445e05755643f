"""The page: a chat in the browser and a view of the pool and the engine. Its files are in page/."""

import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvant.server.errors import ApiError
from kvant.server.registry import Registry

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_DIGITS = 16
FOLDER = Path(__file__).parent / "page"
# Only this server's files may load, and text never becomes script or markup.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri "
    "'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidate each time; an unchanged file is a 304
}


async def live(request: Request) -> Response:
    """GET /live: the state of a model's pool and engine.

    ?model=NAME: default: the first model. ?known=N: include the times of the tokens after the Nth.
    """
    registry: Registry = request.app.state.registry
    model = registry.find(request.query_params.get("model"))
    service = model.service
    if service is None:
        return JSONResponse({"model": model.name, "loaded": False}, headers={"Cache-Control": "no-store"})
    if not service.alive:
        raise ApiError(
            "the engine has failed", status=503, code="engine_failed", headers={"Retry-After": "10"}
        )
    known = request.query_params.get("known", "")
    state = service.live.read(
        int(known) if known.isascii() and known.isdecimal() and len(known) < MAX_DIGITS else None
    )
    state |= {"model": model.name, "loaded": True}
    return JSONResponse(state, headers={"Cache-Control": "no-store"})


async def file(request: Request) -> Response:
    """GET / and /page/NAME: return a file of the page."""
    name = request.path_params.get("name", "index.html")
    if name not in _files():
        raise ApiError(f"the page has no file {name!r:.80}", status=404)
    content, tag = _files()[name]
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=TYPES[Path(name).suffix])


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Return each file's content and ETag by name."""
    contents = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}
    return {
        name: (content, f'"{hashlib.sha256(content).hexdigest()[:16]}"') for name, content in contents.items()
    }


routes: list[BaseRoute] = [Route("/", file), Route("/page/{name}", file), Route("/live", live)]
