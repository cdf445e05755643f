"""The page: a chat in the browser and, beside it, what the pool and the engine are doing."""

from starlette.routing import Route

from kvant.server.page.files import ROUTES as FILE_ROUTES
from kvant.server.page.live import Live, live

ROUTES = [*FILE_ROUTES, Route("/live", live)]

__all__ = ["ROUTES", "Live"]
