"""How ranks find rank 0 before their run begins. Strangers at its port neither join, disturb nor delay it."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from kvant.errors import RanksError
from kvant.ranks.environment import Place
from kvant.ranks.messages import Connection, frame

MAGIC = b"kvant guard 1\n"  # what both sides say first
MAX_HELLO_BYTES = 4096
HELLO_S = 5.0  # for a hello and its answer
STRANGERS = 64  # connections at once whose hello has not come
RETRY_S = 0.1
ACCEPT_S = 0.2  # after which it is seen that nobody is waited for any more

Hellos: TypeAlias = "SimpleQueue[tuple[Connection, Any]]"  # who said hello, and what


@dataclass(frozen=True, slots=True)
class Arrival:
    """A process that said hello.

    Attributes:
        rank: its place.
        connection: to it.
        pid: of it on its machine.
        local: whether it is a process of this machine, so that the pid means something here.
    """

    rank: int
    connection: Connection
    pid: int
    local: bool


def gather_ranks(place: Place, until: float) -> Iterator[Arrival]:
    """On rank 0: every other rank as it comes, until ``until`` of time.monotonic.

    Raises:
        RanksError: the address cannot be listened at, or a rank did not come in time.
    """
    began = time.monotonic()
    missing, refused = set(range(1, place.size)), ""
    hellos: Hellos = SimpleQueue()
    done = threading.Event()
    threading.Thread(target=_accept, args=(_listen(place), hellos, done), daemon=True).start()
    try:
        while missing:
            try:
                connection, hello = hellos.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                raise RanksError(
                    f"{_named(sorted(missing))} of {place.size} did not come within {until - began:.3g} s; expected at "
                    f"{_where(place)}{refused and '; refused: '}{refused}"
                ) from None
            wrong = _wrong(hello, place, missing)
            try:
                connection.limit(HELLO_S)
                connection.send(MAGIC + frame({"refused": wrong} if wrong else _about_this_process()))
                connection.limit(None)
            except OSError:
                wrong = "it went away"
            if wrong:
                refused = wrong
                connection.close()
            else:
                missing.remove(hello["rank"])
                yield Arrival(hello["rank"], connection, hello["pid"], _is_local(connection, hello))
    finally:
        done.set()
        _close_all(hellos)


def reach_first(place: Place, until: float) -> Arrival:
    """On every other rank: connect to rank 0, again and again until ``until`` of time.monotonic.

    Raises:
        RanksError: rank 0 is not there in time or refuses this rank, or something else listens there.
    """
    began = time.monotonic()
    where = _where(place)
    failure = ""
    while (left := until - time.monotonic()) > 0:
        try:
            connection, answer = _say_hello(place, min(HELLO_S, left))
        except (OSError, EOFError) as error:  # rank 0 is not there yet, or busy
            failure = getattr(error, "strerror", None) or str(error) or "the connection was closed"
            time.sleep(RETRY_S)
            continue
        except ValueError as error:
            raise RanksError(f"something else than kvant listens at {where}; expected rank 0 of this run") from error
        match answer:
            case {"refused": str(why)}:
                connection.close()
                raise RanksError(f"rank 0 at {where} refuses this process: {why}")
            case {"pid": int(pid)}:
                connection.limit(None)
                return Arrival(0, connection, pid, _is_local(connection, answer))
        connection.close()
        raise RanksError(f"rank 0 at {where} answers {answer!r}; expected its pid")
    raise RanksError(
        f"rank 0 of {place.size} did not come within {until - began:.3g} s; expected it at {where} ({failure})"
    )


def _say_hello(place: Place, seconds: float) -> tuple[Connection, Any]:
    """A connection to rank 0, and its answer."""
    sock = socket.create_connection((place.host, place.port), timeout=seconds)
    try:
        if sock.getsockname() == sock.getpeername():  # a port from the range that connections get theirs from
            raise ConnectionRefusedError("nobody listens")
        connection = Connection(sock)
        connection.limit(seconds)
        connection.send(MAGIC + frame({"rank": place.rank, "size": place.size, **_about_this_process()}))
        connection.read_exactly(MAGIC)
        return connection, connection.read(MAX_HELLO_BYTES)
    except BaseException:
        sock.close()
        raise


def _listen(place: Place) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise RanksError(f"rank 0 cannot listen at {_where(place)}: {error.strerror}") from error


def _accept(listening: socket.socket, hellos: Hellos, done: threading.Event) -> None:
    """Each connection's hello is read in a thread of its own, so that nobody waits for a silent one."""
    free = threading.BoundedSemaphore(STRANGERS)

    def greet(sock: socket.socket) -> None:
        try:
            connection = Connection(sock)
            connection.limit(HELLO_S)
            connection.read_exactly(MAGIC)
            hellos.put((connection, connection.read(MAX_HELLO_BYTES)))
        except (OSError, EOFError, ValueError):
            sock.close()
        free.release()
        if done.is_set():
            _close_all(hellos)

    with listening:
        listening.settimeout(ACCEPT_S)
        while not done.is_set():
            try:
                sock, _ = listening.accept()
            except TimeoutError:
                continue
            except OSError:  # somebody who left at once, or no more files can be open
                done.wait(ACCEPT_S)
                continue
            if free.acquire(blocking=False):
                threading.Thread(target=greet, args=(sock,), daemon=True).start()
            else:
                sock.close()


def _close_all(hellos: Hellos) -> None:
    """Those who came when everybody was here."""
    with suppress(Empty):
        while True:
            hellos.get_nowait()[0].close()


def _wrong(hello: Any, place: Place, missing: set[int]) -> str:
    """Why this hello is refused; empty where it is not."""
    match hello:
        case {"rank": int(rank), "size": int(size), "pid": int(pid)}:
            pass
        case _:
            return "a hello that is no rank's"
    if size != place.size:
        return f"rank {rank} of {size}; this run has {place.size} ranks"
    if not 0 < rank < size or pid < 2:
        return f"rank {rank}; expected 1 to {size - 1}"
    return "" if rank in missing else f"rank {rank}, which is here already"


def _where(place: Place) -> str:
    return f"[{place.host}]:{place.port}" if ":" in place.host else f"{place.host}:{place.port}"


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _about_this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "machine": _machine()}


def _machine() -> list[str]:
    """The same in every process that sees this one under its pid: on Linux its boot and its space of pids."""
    found = [socket.gethostname()]
    try:
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # not on Linux
    return found


def _is_local(connection: Connection, about: dict[str, Any]) -> bool:
    """Both: a tunnel has the same address at both ends, and two machines can have one name."""
    return connection.same_address() and about.get("machine") == _machine()
