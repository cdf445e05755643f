"""How ranks find rank 0, and strangers at its port do not. In threads of this process."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from kvant.errors import RanksError
from kvant.ranks.environment import Place
from kvant.ranks.guard import Guard
from kvant.ranks.hosts import free_ports
from kvant.ranks.joining import HELLO_S, MAGIC, STRANGERS, Arrival, gather_ranks, reach_first

LATE_S = 30.0


def place(rank: int, size: int, port: int, host: str = "127.0.0.1") -> Place:
    return Place(rank, size, "ring", host, port)


def arrive(rank: int, size: int, port: int, host: str = "127.0.0.1") -> Arrival:
    return reach_first(place(rank, size, port, host), time.monotonic() + LATE_S)


def connected(port: int) -> socket.socket:
    """A stranger's connection, once somebody listens."""
    until = time.monotonic() + LATE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)


@contextmanager
def gathering(size: int, port: int, host: str = "127.0.0.1") -> Iterator[list[Arrival]]:
    """Rank 0's side in a thread; done when every rank has come."""
    found: list[Arrival] = []
    until = time.monotonic() + LATE_S
    thread = threading.Thread(target=lambda: found.extend(gather_ranks(place(0, size, port, host), until)))
    thread.start()
    try:
        yield found
    finally:
        thread.join()
        for each in found:
            each.connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_all_ranks_find_rank_0(host: str) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6 on its loopback")
    (port,) = free_ports(1)
    with ThreadPoolExecutor(2) as pool, gathering(3, port, host) as found:
        reached = [each.result() for each in [pool.submit(arrive, rank, 3, port, host) for rank in (2, 1)]]
    assert sorted(each.rank for each in found) == [1, 2]
    assert [each.rank for each in reached] == [0, 0]
    assert all(each.local for each in found + reached)  # so that a stopped one is killed
    assert len({each.pid for each in found + reached}) == 1
    for each in reached:
        each.connection.close()


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def hello(rank: int, size: int) -> bytes:
    body = json.dumps({"rank": rank, "size": size, "pid": 4, "machine": ["elsewhere"]}).encode()
    return b"\1" + struct.pack(">I", len(body)) + body


STRANGERS_SAY = {
    "an HTTP client": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "garbage": bytes(range(256)) * 64,
    "nothing": b"",
    "half a hello": MAGIC + hello(1, 3)[:20],
    "a hello of 4 GiB": MAGIC + b"\1\xff\xff\xff\xff",
    "no JSON": MAGIC + b"\1\0\0\0\1{",
    "deep JSON": MAGIC + b"\1" + struct.pack(">I", 4000) + b"[" * 4000,
    "a list": MAGIC + b"\1\0\0\0\2[]",
    "a rank of another size": MAGIC + hello(1, 4),
    "a rank out of range": MAGIC + hello(3, 3),
    "rank 0": MAGIC + hello(0, 3),
    "a negative rank": MAGIC + hello(-1, 3),
}


def test_strangers_do_not_join() -> None:
    (port,) = free_ports(1)
    with ExitStack() as strangers, gathering(3, port) as found:
        began = time.monotonic()
        said = {name: strangers.enter_context(connected(port)) for name in STRANGERS_SAY}
        for name, sock in said.items():
            sock.sendall(STRANGERS_SAY[name])
        with said.pop("nothing"), said.pop("half a hello"):  # those that may go on are left alone
            for name, sock in said.items():
                answer = _rest(sock)
                assert b"pid" not in answer, name
                if "rank" in name:
                    assert answer.startswith(MAGIC), name
                    assert b"refused" in answer, name
            first = arrive(1, 3, port)
            with pytest.raises(RanksError, match="refuses this process: rank 1, which is here already"):
                arrive(1, 3, port)
            second = arrive(2, 3, port)
            assert time.monotonic() - began < HELLO_S, "the silent ones were waited for"
    assert [each.rank for each in found] == [1, 2]
    for each in (first, second):
        each.connection.close()


def _rest(sock: socket.socket) -> bytes:
    found = b""
    try:
        while data := sock.recv(4096):
            found += data
    except ConnectionResetError:
        pass  # it had sent more than was read
    return found


def test_many_silent_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take all places for hellos; ranks come in when those places are free again."""
    monkeypatch.setattr("kvant.ranks.joining.HELLO_S", 0.5)
    (port,) = free_ports(1)
    with ExitStack() as strangers, gathering(2, port) as found:
        for _ in range(STRANGERS + 8):
            strangers.enter_context(connected(port))
        arrive(1, 2, port).connection.close()
    assert [each.rank for each in found] == [1]


def test_the_port_is_free_again() -> None:
    """Another run can begin at once, and nobody is let in after the last rank."""
    (port,) = free_ports(1)
    for _ in range(2):
        with gathering(2, port) as found:
            arrive(1, 2, port).connection.close()
        assert len(found) == 1
        for _ in range(100):  # the thread that listens looks up five times a second
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                break
            time.sleep(0.02)
        else:
            pytest.fail("somebody still listens")


def test_ranks_that_do_not_come() -> None:
    (port,) = free_ports(1)
    with pytest.raises(RanksError, match=rf"^rank 1 of 2 did not come within 0.2 s; expected at 127.0.0.1:{port}$"):
        Guard.join(place(0, 2, port), {}, deadline_s=0.2)
    with pytest.raises(RanksError, match=r"^ranks 1, 2 of 3 did not come within 0.2 s; expected at \[::1\]:"):
        Guard.join(place(0, 3, port, "::1" if _has_ipv6() else pytest.skip("no IPv6")), {}, deadline_s=0.2)


def test_a_refused_process_is_named_at_the_deadline() -> None:
    (port,) = free_ports(1)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(arrive, 1, 3, port)
        with pytest.raises(RanksError, match=r"rank 1 of 2 did .*; refused: rank 1 of 3; this run has 2 ranks$"):
            Guard.join(place(0, 2, port), {}, deadline_s=1.0)
        with pytest.raises(RanksError, match="refuses this process: rank 1 of 3; this run has 2 ranks"):
            other.result()


def test_rank_0_does_not_come() -> None:
    (port,) = free_ports(1)
    expected = rf"^rank 0 of 2 did not come within 0.3 s; expected it at 127.0.0.1:{port} \(Connection refused\)$"
    with pytest.raises(RanksError, match=expected):
        Guard.join(place(1, 2, port), {}, deadline_s=0.3)


def test_something_else_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        joining = pool.submit(Guard.join, place(1, 2, port), {}, deadline_s=LATE_S)
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(RanksError, match=f"something else than kvant listens at 127.0.0.1:{port}; expected"):
                joining.result()
        with pytest.raises(RanksError, match=f"rank 0 cannot listen at 127.0.0.1:{port}: Address already in use"):
            Guard.join(place(0, 2, port), {})
    with pytest.raises(RanksError, match=r"rank 0 cannot listen at 192.0.2.1:5000: "):  # RFC 5737: no machine's
        Guard.join(place(0, 2, 5000, "192.0.2.1"), {})
