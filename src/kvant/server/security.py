"""Who may ask, and how much: Host, Origin and key of every request, and the size and time of its body.

A web page of a stranger can have its name resolve to 127.0.0.1, and then asks a server there as if it were
its own (DNS rebinding). Its requests still name its host. So only requests to the server's own names pass.
"""

import asyncio
import hashlib
import hmac
import re
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvant.server.errors import ApiError, described, logger
from kvant.server.left_out import LeftOut
from kvant.server.registry import ENDING, Registry
from kvant.server.request_log import Usage, log_request
from kvant.server.settings import LOOPBACK_NAMES, address_of

ANTHROPIC_PATH = "/v1/messages"
CONTROL_PREFIX = "/control/"  # of routes that need the server's own token, whatever the clients' keys
WHILE_ENDING = ("/health", "/metrics")  # answered until the end
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]\s]+)(?::[0-9]{1,5})?", re.IGNORECASE)
MORE_BYTES = 64 << 20  # that are read of a body that is too long, and forgotten

CLOSE = {"connection": "close"}
HALF_CLOSED = "half_closed"  # in a request's state: its client sends no more
FORGET = "forget_body"  # in a request's state: called when nothing needs its body any more
MAX_VALUES = 200_000  # of a body's JSON: decoded in a tenth of a second
NO_MARKS = bytes(byte for byte in range(256) if byte not in b'",[{')
PIECE_BYTES = 1 << 16


def error_response(scope: Scope, error: ApiError) -> Response:
    """An error as the interface of the path has it."""
    if scope["path"].startswith(ANTHROPIC_PATH):
        return JSONResponse(error.anthropic(scope["state"]["request_id"]), error.status, error.headers)
    return JSONResponse(error.openai(), error.status, error.headers)


class Guard:
    """The outermost layer: requests to other hosts or from other origins are refused, and no error passes
    it.
    """

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        self._app = app
        self._registry = registry
        host = registry.settings.host.lower().strip("[]")
        address = address_of(host)
        # it listens on all addresses of its machine
        self._on_all = address is not None and address.is_unspecified
        own = [f"[{host}]" if ":" in host else host]
        if self._on_all:
            machine = socket.gethostname().lower()
            own = [machine, f"{machine.partition('.')[0]}.local"]
        self._hosts = {*LOOPBACK_NAMES, *own}  # names, in lower case, that a Host header may have

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope.setdefault("state", {})["request_id"] = f"req_{uuid.uuid4().hex}"
        left_out = scope["state"]["left_out"] = LeftOut(strict=self._registry.settings.strict)
        usage = scope["state"]["usage"] = Usage()
        began = time.monotonic()
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
                if left_out.names:
                    headers["x-kvant-ignored"] = left_out.header()
            await send(message)

        try:
            if (refused := self._refusal(scope)) is not None:
                await error_response(scope, refused)(scope, receive, send_marked)
            else:
                await self._app(scope, receive, send_marked)
        except asyncio.CancelledError:
            if not self._registry.draining:
                raise
        except Exception as error:
            logger.error("%s: %s", request_id, described(error))
            if status == 0:
                failed = ApiError("the server failed; its log has the kind of the error", status=500)
                await error_response(scope, failed)(scope, receive, send_marked)
        finally:
            route = scope.get("route")
            self._registry.metrics.answered(getattr(route, "path", "other"), status, left_out)
            log_request(scope, status, time.monotonic() - began, usage)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        # RFC 9112, 6.1: two ends of one body
        if "content-length" in headers and "transfer-encoding" in headers:
            said = "the request has a Content-Length and a Transfer-Encoding; expected one of them"
            return ApiError(said, headers=CLOSE)
        hosts = headers.getlist("host")
        origins = headers.getlist("origin")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            names = ", ".join(sorted(self._hosts))
            return ApiError(
                f"the Host header is {', '.join(hosts)[:200]!r}; expected one of {names}", status=403
            )
        allowed = (f"http://{hosts[0]}", f"https://{hosts[0]}", *self._registry.settings.allow_origins)
        if len(origins) > 1 or (origins and origins[0].lower() not in {each.lower() for each in allowed}):
            said = ", ".join(origins)[:200]
            return ApiError(f"the Origin header is {said!r}, which --allow-origin does not name", status=403)
        if self._registry.draining and scope["path"] not in WHILE_ENDING:
            return _ending()
        return None

    def _is_own(self, host: str) -> bool:
        if not (found := HOST.fullmatch(host)):
            return False
        name = found[1].lower()
        if name in self._hosts:
            return True
        return self._on_all and address_of(name) is not None  # a name can be rebound, an address cannot


class Keys:
    """The layer that compares a client's key with those of the server, on every route, in constant time."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in registry.settings.api_keys]
        self._control = hashlib.sha256(registry.settings.control_token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else ""
        key = (given or headers.get("x-api-key", "").strip()).encode("latin-1")  # empty where there is none
        digest = hashlib.sha256(key).digest()
        # each of them, whichever matches
        same = [hmac.compare_digest(digest, each) for each in self._digests]
        if scope["path"].startswith(CONTROL_PREFIX):
            if not hmac.compare_digest(digest, self._control):
                message = "only `kvant ps` and `kvant stop` of the server's user may ask this"
                refused = ApiError(message, status=403)
                await error_response(scope, refused)(scope, receive, send)
                return
            same = [True]
        # The page's own files are the same for everybody; the page asks for the key, and all that it does
        # needs one.
        page = scope["path"] == "/" or scope["path"].startswith("/page/")
        if self._digests and not any(same) and not page:
            said = "the key is wrong" if key else "there is no key"
            message = f"{said}; expected Authorization: Bearer KEY, or x-api-key: KEY"
            refused = ApiError(
                message, status=401, code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
            await error_response(scope, refused)(scope, receive, send)
            return
        scope["state"]["salt"] = digest if self._digests else b""  # where any key will do, it says nothing
        await self._app(scope, receive, send)


class Body:
    """What was received of a request's body, as long as there is room for it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.parts: list[bytes] = []
        self.num_bytes = 0  # bytes of the parts
        self.count = 0  # bytes received, with those that were dropped
        self.fits = True  # nothing was dropped

    def drop(self) -> int:
        """Drop what was received, and all that follows. Return how many bytes were freed."""
        freed = self.num_bytes
        self.num_bytes = 0
        self.fits = False
        self.parts.clear()
        return freed


class Bodies:
    """The layer that reads a body to its end, within bounds, before anything looks at it."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        self._app = app
        self._registry = registry
        self._limits = registry.settings.limits
        self._num_bytes = 0  # bytes of the bodies that requests still need
        self._coming: set[Body] = set()  # those that have no end yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body()
        self._coming.add(body)
        try:
            await self._read(Headers(scope=scope), receive, body)
        except ApiError as refused:
            await error_response(scope, refused)(scope, receive, send)
        except ClientDisconnect:
            return
        else:
            works = scope["method"] == "POST"
            if works and self._registry.draining:  # since its headers came
                await error_response(scope, _ending())(scope, receive, send)
                return
            self._registry.active += works
            scope["state"][FORGET] = partial(self._forget, body)
            try:
                with ExitStack() as leases:  # of models: they stay loaded until the answer has been sent
                    scope["state"]["leases"] = leases
                    await self._app(scope, _replaying(body.parts, receive, scope["state"]), send)
            finally:
                self._registry.active -= works
        finally:
            self._coming.discard(body)
            self._forget(body)

    def _forget(self, body: Body) -> None:
        """Make room for others."""
        self._num_bytes -= body.drop()

    async def _read(self, headers: Headers, receive: Receive, body: Body) -> None:
        """Read a body whole. It is then the only one of its parts."""
        limits = self._limits
        message = f"the body is longer than {limits.body_bytes} bytes"
        too_long = ApiError(message, status=413, code="request_too_large", headers=CLOSE)
        if "expect" in headers and int(headers.get("content-length", "0")) > limits.body_bytes:
            raise too_long  # its sender waits for leave to send it
        try:
            await asyncio.wait_for(self._receive(receive, body), limits.body_s)
        except TimeoutError:
            message = f"the body did not come within {limits.body_s:g} seconds"
            raise ApiError(message, status=408, headers=CLOSE) from None
        self._coming.discard(body)
        if body.count > limits.body_bytes:
            raise too_long
        if not body.fits:
            message = "the server holds as many bytes of requests as it may; try again later"
            raise ApiError(message, status=503, headers={"retry-after": "1"})
        whole = b"".join(body.parts)
        body.parts[:] = [whole]
        if (count := count_marks(whole)) > MAX_VALUES:
            count = await asyncio.to_thread(count_values, whole)  # commas of texts do not count
        if count > MAX_VALUES:
            raise ApiError(f"the body has {count} values of JSON; expected {MAX_VALUES} at most")

    async def _receive(self, receive: Receive, body: Body) -> None:
        """Receive a body to its end, or until it is too long to be a mistake.

        A body that is too long, or that there is no room for, is received too and dropped: its sender does
        not read the answer before it has sent everything.
        """
        more = True
        while more and body.count <= self._limits.body_bytes + MORE_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            more = message.get("more_body", False)
            body.count += len(part)
            if not body.fits:
                continue
            if body.count <= self._limits.body_bytes and self._has_room(len(part), body):
                body.parts.append(part)
                body.num_bytes += len(part)
                self._num_bytes += len(part)
            else:
                self._forget(body)

    def _has_room(self, count: int, body: Body) -> bool:
        """Return whether ``count`` more bytes of a body can be held.

        If there is no room, the largest of the slow bodies are dropped, unless this body is slow itself.
        """
        late = time.monotonic() - self._limits.slow_s
        while self._num_bytes + count > self._limits.all_bodies_bytes:
            slow = [each for each in self._coming if each.began < late and each.num_bytes]
            if body.began < late or not slow:
                return False
            self._num_bytes -= max(slow, key=lambda each: each.num_bytes).drop()
        return True


def _ending() -> ApiError:
    headers = {"retry-after": "5", **CLOSE}
    return ApiError(ENDING, status=503, headers=headers)


def _replaying(parts: list[bytes], receive: Receive, state: Mapping[str, Any]) -> Receive:
    """The body that was read, which is then forgotten here, and what else comes: that the client may have
    gone.
    """

    async def replay() -> Message:
        message: Message | None = None
        if parts:
            message = {"type": "http.request", "body": parts.pop(), "more_body": False}
        elif not state.get(HALF_CLOSED):
            message = await receive()
            if state.get(HALF_CLOSED):
                message = None
        return {"type": "http.disconnect"} if message is None else message

    return replay


def count_values(body: bytes) -> int:
    """At least as many values as a body of JSON has in its arrays and objects.

    It is the commas and opening brackets outside of strings. Eight million bytes of ``[],[],`` would hold up
    every thread for seconds while they are decoded, and take 180 MB. This is done piece by piece, so that
    others come between.
    """
    # Two backslashes are one, and end before the next character. What then follows one is no end of a string.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, NO_MARKS)
    found = 0
    inside = 0  # 1: the next part is in a string
    for start in range(0, len(bare), PIECE_BYTES):
        parts = bare[start : start + PIECE_BYTES].split(b'"')
        found += sum(map(len, parts[inside::2]))
        inside = (inside + len(parts) - 1) % 2
    return found


def count_marks(body: bytes) -> int:
    """No fewer than :func:`count_values`, at once: with those in strings."""
    return sum(map(body.count, (b",", b"[", b"{")))
