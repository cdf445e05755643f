"""Messages between ranks over a socket of this process."""

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from kvant.errors import RanksError
from kvant.ranks import messages
from kvant.ranks.messages import Connection, frame


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as other:
        sock, _ = server.accept()
        with sock:
            yield Connection(sock), other


def test_round_trip(ends: tuple[Connection, socket.socket]) -> None:
    here, other = ends
    there = Connection(other)
    sent = [["tell", {"text": "ä\n\0", "ids": list(range(1000)), "none": None, "half": 0.5}], ["agreed", None], []]
    heard: list[int] = []
    for message in sent:
        here.beat()
        here.send(frame(message))
    found = there.messages(lambda: heard.append(1))
    assert [next(found) for _ in sent] == sent
    assert len(heard) >= 2 * len(sent), "beats are heard, and no message"
    with pytest.raises(ValueError, match="not JSON compliant"):
        frame([float("nan")])


def test_size(ends: tuple[Connection, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before it is sent, and before memory is taken for it."""
    here, other = ends
    monkeypatch.setattr(messages, "MAX_BYTES", 100)
    assert len(frame("x" * 98)) == 105
    with pytest.raises(RanksError, match="a message between ranks has 101 bytes; expected at most 100"):
        frame("x" * 99)
    other.sendall(b"\1" + struct.pack(">I", 101))
    with pytest.raises(ValueError, match="a message of 101 bytes"):
        here.read(100)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n", b"\1\0\0\0\1{", b"\1\0\0\0\1\xff", b"\0\0\2"])
def test_no_message(ends: tuple[Connection, socket.socket], sent: bytes) -> None:
    here, other = ends
    other.sendall(sent)
    with pytest.raises(ValueError, match=r"."):
        here.read()


def test_closed(ends: tuple[Connection, socket.socket]) -> None:
    here, other = ends
    other.sendall(frame("x" * 100)[:50])
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        here.read()


def test_the_other_side_does_not_read(ends: tuple[Connection, socket.socket]) -> None:
    """A beat never waits, and a last message not for long: neither with a full connection nor with one in use."""
    here, other = ends
    with pytest.raises(TimeoutError):
        here.send_within(b"x" * 100_000_000, 0.05)
    began = time.monotonic()
    here.beat()

    def send() -> None:
        with pytest.raises(OSError, match=r"."):
            here.send(b"x")

    sending = threading.Thread(target=send)
    sending.start()
    while not here._sending.locked():
        time.sleep(0.001)
    here.beat()
    with pytest.raises(TimeoutError):
        here.send_within(b"x", 0.05)
    assert time.monotonic() - began < 5
    other.close()  # with data unread: a reset
    sending.join()


def test_a_time_limit(ends: tuple[Connection, socket.socket]) -> None:
    """For all of a message, however its bytes drip."""
    here, other = ends
    here.limit(0.2)
    began = time.monotonic()
    timed_out = threading.Event()

    def drip() -> None:
        for byte in frame("x" * 1000):
            if timed_out.wait(0.02):
                return
            other.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        here.read()
    assert time.monotonic() - began < 10
    timed_out.set()
    thread.join()
