"""Connecting the ranks to rank 0 before a run begins."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from kvant.errors import RanksError
from kvant.ranks.environment import Place

MAX_HELLO_BYTES = 100
HELLO_S = 1.0  # for a hello, which limits the delay by a stranger at the port
RETRY_S = 0.1


def gather_ranks(place: Place, seconds: float) -> Iterator[tuple[int, socket.socket]]:
    """Yield every other rank and its connection as it comes, on rank 0."""
    until = time.monotonic() + seconds
    missing = set(range(1, place.size))
    try:
        family, *_, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address, family=family)
    except OSError as error:
        raise RanksError(f"rank 0 cannot listen at {_where(place)}: {error.strerror}") from error
    with listening:
        while missing:
            listening.settimeout(max(0.001, until - time.monotonic()))
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                raise RanksError(
                    f"rank {', '.join(map(str, sorted(missing)))} of {place.size} did not come within "
                    f"{seconds:g} s; expected at {_where(place)}"
                ) from None
            except OSError:  # a client that left at once, or too many open files
                time.sleep(RETRY_S)
                continue
            rank = _read_hello(connection, place.size)
            if rank in missing:
                missing.remove(rank)
                yield rank, connection
            else:
                connection.close()


def reach_first(place: Place, seconds: float) -> Iterator[tuple[int, socket.socket]]:
    """Connect to rank 0, retrying until it listens, and yield the connection."""
    until = time.monotonic() + seconds
    failure = ""
    while (left := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((place.host, place.port), timeout=left)
            # the port may be an ephemeral one, so that the socket connected to itself
            if connection.getsockname() == connection.getpeername():
                connection.close()
                raise ConnectionRefusedError(None, "nothing listens there")
            connection.sendall(json.dumps(["kvant", place.rank, place.size]).encode() + b"\n")
        except OSError as error:
            failure = error.strerror or str(error)
            time.sleep(RETRY_S)
            continue
        _settle(connection)
        yield 0, connection
        return
    raise RanksError(
        f"rank 0 of {place.size} did not come within {seconds:g} s; expected it at {_where(place)} "
        f"({failure})"
    )


def _read_hello(connection: socket.socket, size: int) -> int | None:
    """Read a hello; return its rank, or None if it is not a rank of this run."""
    data = b""
    until = time.monotonic() + HELLO_S
    with suppress(OSError, ValueError):
        while not data.endswith(b"\n") and len(data) < MAX_HELLO_BYTES:
            connection.settimeout(max(0.001, until - time.monotonic()))
            if not (byte := connection.recv(1)):  # byte by byte, as a message may follow
                return None
            data += byte
        match json.loads(data):
            case ["kvant", int(rank), int(of)] if of == size:
                _settle(connection)
                return rank
    return None


def _settle(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send small messages at once


def _where(place: Place) -> str:
    return f"[{place.host}]:{place.port}" if ":" in place.host else f"{place.host}:{place.port}"
