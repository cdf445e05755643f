"""Check every request's Host, Origin and key, and bound the size and time of its body.

A malicious web page can make its own name resolve to 127.0.0.1 and then call a server there as if it were its
own (DNS rebinding). Such requests still name the page's host, so only the server's own names are accepted.
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
from kvant.server.registry import Registry, ending
from kvant.server.request_log import Usage, log_request
from kvant.server.settings import LOOPBACK_NAMES, address_of

ANTHROPIC_PATH = "/v1/messages"
CONTROL_PREFIX = "/control/"  # these routes need the server's control token instead of a client's key
WHILE_ENDING = ("/health", "/metrics")  # answered until the end
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]\s]+)(?::[0-9]{1,5})?", re.IGNORECASE)
MORE_BYTES = 64 << 20  # read beyond the limit of a body and discarded

CLOSE = {"connection": "close"}
HALF_CLOSED = "half_closed"  # in a request's state: its client has closed its sending side
FORGET = "forget_body"  # in a request's state: the function to call when its body is no longer needed
MAX_VALUES = 200_000  # JSON values in a body: they decode in a tenth of a second
NO_MARKS = bytes(byte for byte in range(256) if byte not in b'",[{')
PIECE_BYTES = 1 << 16


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return an error response in the shape of the path's interface."""
    if scope["path"].startswith(ANTHROPIC_PATH):
        return JSONResponse(error.anthropic(scope["state"]["request_id"]), error.status, error.headers)
    return JSONResponse(error.openai(), error.status, error.headers)


class Guard:
    """The outermost layer: refuses requests to other hosts or from other origins, and stops all errors."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        self._app = app
        self._registry = registry
        host = registry.settings.host.lower().strip("[]")
        address = address_of(host)
        # the server listens on all addresses of the machine
        self._on_all = address is not None and address.is_unspecified
        names = [f"[{host}]" if ":" in host else host]
        if self._on_all:
            machine = socket.gethostname().lower()
            names = [machine, f"{machine.partition('.')[0]}.local"]
        self._hosts = {*LOOPBACK_NAMES, *names}  # accepted names in a Host header, in lower case

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
        # RFC 9112, 6.1: two definitions of the body's end
        if "content-length" in headers and "transfer-encoding" in headers:
            message = "the request has both Content-Length and Transfer-Encoding; expected one of them"
            return ApiError(message, headers=CLOSE)
        hosts = headers.getlist("host")
        origins = headers.getlist("origin")
        if len(hosts) != 1 or not self._is_allowed(hosts[0]):
            names = ", ".join(sorted(self._hosts))
            return ApiError(
                f"the Host header is {', '.join(hosts)[:200]!r}; expected one of {names}", status=403
            )
        allowed = (f"http://{hosts[0]}", f"https://{hosts[0]}", *self._registry.settings.allow_origins)
        if len(origins) > 1 or (origins and origins[0].lower() not in {each.lower() for each in allowed}):
            sent = ", ".join(origins)[:200]
            return ApiError(f"the Origin header is {sent!r}, which --allow-origin does not name", status=403)
        if self._registry.draining and scope["path"] not in WHILE_ENDING:
            return ending()
        return None

    def _is_allowed(self, host: str) -> bool:
        if not (match := HOST.fullmatch(host)):
            return False
        name = match[1].lower()
        if name in self._hosts:
            return True
        return self._on_all and address_of(name) is not None  # a name can be rebound; an address cannot


class Keys:
    """The layer that checks a client's key on every route, in constant time."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in registry.settings.api_keys]
        self._control = hashlib.sha256(registry.settings.control_token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        token = bearer.strip() if scheme.lower() == "bearer" else ""
        key = (token or headers.get("x-api-key", "").strip()).encode("latin-1")  # empty if there is none
        digest = hashlib.sha256(key).digest()
        # compare with all of them, for constant time
        same = [hmac.compare_digest(digest, each) for each in self._digests]
        if scope["path"].startswith(CONTROL_PREFIX):
            if not hmac.compare_digest(digest, self._control):
                message = "only `kvant ps` and `kvant stop` may use this path, run by the server's user"
                refused = ApiError(message, status=403)
                await error_response(scope, refused)(scope, receive, send)
                return
            same = [True]
        # The page's files are public. The page asks its user for the key and sends it with every request.
        page = scope["path"] == "/" or scope["path"].startswith("/page/")
        if self._digests and not any(same) and not page:
            reason = "the key is wrong" if key else "there is no key"
            message = f"{reason}; expected Authorization: Bearer KEY, or x-api-key: KEY"
            refused = ApiError(
                message, status=401, code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
            await error_response(scope, refused)(scope, receive, send)
            return
        scope["state"]["salt"] = digest if self._digests else b""  # without keys, a client's key is ignored
        await self._app(scope, receive, send)


class Body:
    """The received bytes of a request's body, unless they were dropped for lack of room."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.chunks: list[bytes] = []
        self.num_bytes = 0  # bytes of the chunks
        self.count = 0  # bytes received, including dropped ones
        self.fits = True  # False: bytes were dropped

    def drop(self) -> int:
        """Drop the received bytes and all later ones. Return how many bytes were freed."""
        freed = self.num_bytes
        self.num_bytes = 0
        self.fits = False
        self.chunks.clear()
        return freed


class Bodies:
    """The layer that reads a complete body, within bounds, before it is processed."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        self._app = app
        self._registry = registry
        self._limits = registry.settings.limits
        self._num_bytes = 0  # bytes of the bodies that requests still need
        self._coming: set[Body] = set()  # incomplete bodies

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
            if works and self._registry.draining:  # the server began to end after the headers arrived
                await error_response(scope, ending())(scope, receive, send)
                return
            self._registry.active += works
            scope["state"][FORGET] = partial(self._forget, body)
            try:
                with ExitStack() as leases:  # keep models loaded until the answer has been sent
                    scope["state"]["leases"] = leases
                    await self._app(scope, _replaying(body.chunks, receive, scope["state"]), send)
            finally:
                self._registry.active -= works
        finally:
            self._coming.discard(body)
            self._forget(body)

    def _forget(self, body: Body) -> None:
        """Free the room of a body."""
        self._num_bytes -= body.drop()

    async def _read(self, headers: Headers, receive: Receive, body: Body) -> None:
        """Read a complete body, which is then a single chunk."""
        limits = self._limits
        message = f"the body is longer than {limits.body_bytes} bytes"
        too_long = ApiError(message, status=413, code="request_too_large", headers=CLOSE)
        if "expect" in headers and int(headers.get("content-length", "0")) > limits.body_bytes:
            raise too_long  # the client waits for permission to send it
        try:
            await asyncio.wait_for(self._receive(receive, body), limits.body_s)
        except TimeoutError:
            message = f"the body did not come within {limits.body_s:g} seconds"
            raise ApiError(message, status=408, headers=CLOSE) from None
        self._coming.discard(body)
        if body.count > limits.body_bytes:
            raise too_long
        if not body.fits:
            message = "the server has no room for the request's body now; try again later"
            raise ApiError(message, status=503, headers={"retry-after": "1"})
        whole = b"".join(body.chunks)
        body.chunks[:] = [whole]
        if (count := count_marks(whole)) > MAX_VALUES:
            count = await asyncio.to_thread(count_values, whole)  # exact: without the commas in strings
        if count > MAX_VALUES:
            raise ApiError(f"the body has {count} values of JSON; expected {MAX_VALUES} at most")

    async def _receive(self, receive: Receive, body: Body) -> None:
        """Receive a body to its end, or until it is too long to be a mistake.

        A body that is too long or has no room is received and dropped, because clients send everything before
        they read the answer.
        """
        more = True
        while more and body.count <= self._limits.body_bytes + MORE_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            body.count += len(chunk)
            if not body.fits:
                continue
            if body.count <= self._limits.body_bytes and self._has_room(len(chunk), body):
                body.chunks.append(chunk)
                body.num_bytes += len(chunk)
                self._num_bytes += len(chunk)
            else:
                self._forget(body)

    def _has_room(self, count: int, body: Body) -> bool:
        """Return whether there is room for ``count`` more bytes of a body.

        If there is no room, the largest of the slow bodies are dropped, unless this body is slow itself.
        """
        late = time.monotonic() - self._limits.slow_s
        while self._num_bytes + count > self._limits.all_bodies_bytes:
            slow = [each for each in self._coming if each.began < late and each.num_bytes]
            if body.began < late or not slow:
                return False
            self._num_bytes -= max(slow, key=lambda each: each.num_bytes).drop()
        return True


def _replaying(chunks: list[bytes], receive: Receive, state: Mapping[str, Any]) -> Receive:
    """Return a ``receive`` that yields the body once, without keeping it, and then reports a disconnect."""

    async def replay() -> Message:
        message: Message | None = None
        if chunks:
            message = {"type": "http.request", "body": chunks.pop(), "more_body": False}
        elif not state.get(HALF_CLOSED):
            message = await receive()
            if state.get(HALF_CLOSED):
                message = None
        return {"type": "http.disconnect"} if message is None else message

    return replay


def count_values(body: bytes) -> int:
    """Return an upper bound of the number of values in a JSON body's arrays and objects.

    It counts commas and opening brackets outside of strings. Decoding eight million bytes of ``[],[],`` would
    take 180 MB and block every thread for seconds. This works in pieces, so that other threads can run.
    """
    # Remove escaped backslashes first; then a quote after a backslash does not end a string.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, NO_MARKS)
    count = 0
    inside = 0  # 1: the next piece begins inside a string
    for start in range(0, len(bare), PIECE_BYTES):
        parts = bare[start : start + PIECE_BYTES].split(b'"')
        count += sum(map(len, parts[inside::2]))
        inside = (inside + len(parts) - 1) % 2
    return count


def count_marks(body: bytes) -> int:
    """Return a quick upper bound of :func:`count_values` that includes commas and brackets in strings."""
    return sum(map(body.count, (b",", b"[", b"{")))
