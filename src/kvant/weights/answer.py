"""One answer of the hub, read within limits of time.

A thread reads the answer and hands it over in pieces. So a limit holds wherever the thread blocks: in the
look-up of a name, a handshake, the head of the answer, its body. It also holds where every single byte comes in time.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING

from kvant.weights.settings import login, timeout_s

if TYPE_CHECKING:
    from httpx2 import Response

HEAD_S = 30.0  # for the head of an answer, redirects included
WINDOW_S = 60.0  # over which a body's mean rate is taken
MIN_BYTES_PER_S = 10_000
MAX_REDIRECTS = 5
PIECES_AHEAD = 16  # of at most 64 KiB each
POLL_S = 0.2


class AnswerError(Exception):
    """A wrong answer; its text is for a person."""


class StatusError(Exception):
    """The hub refuses.

    Attributes:
        status: of HTTP.
        code: the hub's X-Error-Code, or nothing.
    """

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Answer:
    """A status of 200 or 206, its headers, and the body in pieces as they come."""

    status: int
    headers: Mapping[str, str]
    body: Iterator[bytes]


@contextmanager
def ask(url: str, *, start: int = 0) -> Iterator[Answer]:
    """GET an address of the hub, logged in where the user is; another host is never sent the login.

    Args:
        start: the first byte that is wanted; the server may send all of them.

    Raises:
        StatusError: the hub refuses.
        AnswerError: an answer that is too slow, compressed, or redirected without end.
        Exception: of httpx2, where the hub cannot be reached or the connection breaks.
    """
    pieces = _Pieces()
    threading.Thread(target=_read, args=(url, start, pieces), daemon=True).start()
    try:
        head_s = max(HEAD_S, timeout_s())
        response = pieces.take(time.monotonic() + head_s)
        if response is None:
            raise AnswerError(f"no answer within {head_s:g} s")
        assert not isinstance(response, bytes)
        if response.status_code not in (200, 206):
            code, said = (response.headers.get(name, "") for name in ("X-Error-Code", "X-Error-Message"))
            raise StatusError(response.status_code, code, said or response.reason_phrase)
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise AnswerError(f"the hub sends it in the encoding {encoding[:80]!r}; asked for none")
        yield Answer(response.status_code, response.headers, _body(pieces))
    finally:
        pieces.abandoned.set()


def _body(pieces: "_Pieces") -> Iterator[bytes]:
    while True:
        received, end = 0, time.monotonic() + WINDOW_S
        while (piece := pieces.take(end)) is not None:
            assert isinstance(piece, bytes)
            if not piece:
                return
            received += len(piece)
            yield piece
        if received < MIN_BYTES_PER_S * WINDOW_S:
            expected = f"expected at least {MIN_BYTES_PER_S} a second"
            raise AnswerError(f"too slow: {received} bytes came in {WINDOW_S:g} s; {expected}")


class _Pieces:
    """The thread's results in order: the answer's head, pieces of bytes, an empty piece at the end; or an error."""

    def __init__(self) -> None:
        self._queue: Queue[Response | bytes | Exception] = Queue(PIECES_AHEAD)
        self.abandoned = threading.Event()

    def put(self, piece: "Response | bytes | Exception") -> bool:
        """Hand a piece over; False: the reader has gone."""
        while not self.abandoned.is_set():
            try:
                self._queue.put(piece, timeout=POLL_S)
                return True
            except Full:
                pass
        return False

    def take(self, end: float) -> "Response | bytes | None":
        """The next piece; None: there was none until ``end``, on the monotonic clock."""
        try:
            piece = self._queue.get(timeout=max(0.0, end - time.monotonic()))
        except Empty:
            return None
        if isinstance(piece, Exception):
            raise piece
        return piece


def _read(url: str, start: int, pieces: _Pieces) -> None:
    try:
        response = _open(url, start)
        try:
            wanted = pieces.put(response)
            if response.status_code in (200, 206):  # the body of a refusal is not read
                wanted = wanted and all(pieces.put(piece) for piece in response.iter_raw() if piece)
            if wanted:
                pieces.put(b"")
        finally:
            response.close()
    except Exception as error:  # it belongs to whoever asked
        pieces.put(error)


def _open(url: str, start: int) -> "Response":
    """The answer at the end of the redirects; httpx2 takes the login out where one leads to another host."""
    from huggingface_hub import get_session

    headers = {"User-Agent": "kvant", "Accept-Encoding": "identity"}
    if (token := login()) is not None:
        headers["Authorization"] = f"Bearer {token}"
    if start:
        headers["Range"] = f"bytes={start}-"
    client = get_session()
    request = client.build_request("GET", url, headers=headers, timeout=timeout_s())
    for _ in range(MAX_REDIRECTS + 1):
        response = client.send(request, stream=True, follow_redirects=False)
        if response.next_request is None:
            return response
        response.close()  # its body is a stranger's, of any length
        if request.url.scheme == "https" and response.next_request.url.scheme != "https":
            raise AnswerError("the hub redirects from https to http; refused")
        request = response.next_request
    raise AnswerError(f"the hub redirects more than {MAX_REDIRECTS} times")
