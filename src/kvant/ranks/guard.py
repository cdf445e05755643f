"""The guard of a run on several ranks: a TCP connection from each to rank 0, in addition to MLX's own.

It carries rank 0's messages and heartbeats. MLX's collectives block in C++, and some never notice that
another rank is gone; then a thread of the guard ends this process.

A message is a line of JSON; an empty line is a heartbeat. Nothing received is executed.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NoReturn

from kvant.errors import RanksError, printable
from kvant.ranks.environment import Place
from kvant.ranks.joining import gather_ranks, reach_first

BEAT_S = 0.25
SILENCE_S = 3.5  # a rank that has begun is lost after this time without a byte
# for all ranks to come; also the allowed silence while a rank imports, joins MLX's group and loads
JOIN_S = 30.0
ENDED_S = 3.0  # for a rank's process to exit by itself after rank 0's end
WORDS_S = 1.0  # for the last line and for the last message
MAX_BYTES = 64 * 2**20  # of a message
LINE_COLUMNS = 1000  # limit of another rank's error, which is shortened already
LOST = "lost"  # rank 0's reason if it ends because another rank did
# MLX joins its group while it holds the interpreter's lock, so no Python thread runs; another process has to
# keep the time.
TIMER = """
import os, sys, time
rank, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == rank:
    time.sleep(0.1)
    if time.monotonic() > until:
        os.write(2, sys.argv[3].encode())
        os.kill(rank, 9)
        break
"""


class Ended(SystemExit):
    """Rank 0 has ended the run with this exit code, and this rank must exit silently."""


@dataclass(slots=True, eq=False)
class Peer:
    """Another rank that this one is connected to."""

    rank: int
    socket: socket.socket
    heard: float  # time of the last byte, on the guard's clock
    silence_s: float  # allowed silence, after which it is lost
    sending: threading.Lock = field(default_factory=threading.Lock)  # locked while a message is sent
    # kind and body of each message
    inbox: "SimpleQueue[tuple[str, Any]]" = field(default_factory=SimpleQueue)


class Guard:
    """One rank's guard. Rank 0 is connected to all other ranks, and they to rank 0.

    All ranks call ``agree``, ``gather``, and ``tell`` or ``receive`` in the same order. Once rank 0 has ended
    the run, these raise Ended on the other ranks.

    A rank that is killed, stopped or asleep, or has failed ends the processes of all. Rank 0, or rank 1 if
    rank 0 is lost, prints a line that names it to standard error. Ranks also end with their launcher.
    """

    def __init__(self, place: Place, launcher: int | None, silence_s: float) -> None:
        self.rank = place.rank
        self.size = place.size
        self.backend = place.backend
        self._parent = os.getppid()
        self._launcher = launcher
        self._silence_s = silence_s
        self._peers: dict[int, Peer] = {}
        self._time = 0.0  # seconds for which this process was awake
        self._over = threading.Lock()  # acquired by the thread that ends this process, and never released
        self._ended = False  # by rank 0
        threading.Thread(target=self._watch, daemon=True).start()

    @classmethod
    def join(
        cls,
        place: Place,
        facts: Mapping[str, Any],
        *,
        launcher: int | None = None,
        deadline_s: float = JOIN_S,
        silence_s: float = SILENCE_S,
    ) -> "Guard":
        """Wait until all ranks have come and :meth:`agree` on ``facts``, such as versions.

        Args:
            launcher: the id of a process on this machine; the run ends with it.
            deadline_s: how long to wait for all ranks, and the allowed silence before a rank has begun.
            silence_s: the allowed silence after a rank has begun.
        """
        guard = cls(place, launcher, silence_s)
        try:
            for rank, connection in (gather_ranks if place.rank == 0 else reach_first)(place, deadline_s):
                peer = Peer(rank, connection, guard._time, deadline_s)
                guard._peers = {
                    **guard._peers,
                    rank: peer,
                }  # a new dict: other threads iterate over the old one
                threading.Thread(target=guard._listen, args=(peer,), daemon=True).start()
            guard.agree(facts)
        except RanksError as error:
            guard.end(1, str(error))
            raise
        return guard

    def begin(self) -> None:
        """Announce that this rank has loaded, and no longer holds the interpreter's lock for long."""
        self._post("begun", None)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message from rank 0 to all others, which ``receive`` it. Any thread may call this."""
        self._post("tell", dict(message))

    def receive(self) -> Mapping[str, Any]:
        """Wait for rank 0's next message, on another rank."""
        message: Mapping[str, Any] = self._next(self._peers[0], "tell")
        return message

    def wait_for_first(self) -> None:
        """Return at once on rank 0; on other ranks wait for its end and exit like it."""
        if self.rank:
            self.receive()
            raise AssertionError("rank 0 has a message for a rank that waits for its end")

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' values, by rank, on rank 0, and an empty list elsewhere. All ranks call it."""
        if self.rank:
            self._post("value", value)
            return []
        return [value, *(self._next(self._peers[rank], "value") for rank in range(1, self.size))]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compare facts, JSON values, with rank 0's; raise a RanksError if they differ. All ranks call it."""
        for rank, theirs in enumerate(self.gather(dict(facts))):
            if difference := first_difference(facts, theirs):
                raise RanksError(f"rank {rank}: {difference}")
        if self.rank:
            self.receive()
        else:
            self.tell({})

    @contextmanager
    def within(self, seconds: float, doing: str) -> Iterator[None]:
        """End this process with a line that names ``doing`` on timeout, even while Python's lock is held."""
        line = (
            "" if self.rank else f"kvant: error: {doing} took longer than {seconds:g} s; this run is over\n"
        )
        command = [sys.executable, "-I", "-S", "-c", TIMER, str(os.getpid()), str(seconds), line]
        # a session of its own, so that Ctrl-C does not reach it
        timer = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            yield
        finally:
            timer.kill()
            timer.wait()

    def end(self, code: int, why: str = "") -> None:
        """Tell the other ranks that this rank's run is over; the caller must then exit.

        From rank 0, the others exit silently with ``code``, and the caller explains why. From another rank,
        rank 0 prints ``why``, and all end.
        """
        if not self._ended:
            self._over.acquire()
            self._say_last([code, why])

    # Private methods.

    def _post(self, kind: str, body: Any) -> None:
        line = json.dumps([kind, body], allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_BYTES:
            raise RanksError(f"a message between ranks has {len(line)} bytes; expected at most {MAX_BYTES}")
        for peer in self._peers.values():
            # the listening thread notices a closed connection too, and may find a last message
            with peer.sending, suppress(OSError):
                peer.socket.sendall(line)

    def _next(self, peer: Peer, expected: str) -> Any:
        kind, body = peer.inbox.get()
        if kind == "end":
            raise Ended(body)
        if kind != expected:
            raise RanksError(f"rank {peer.rank} sent {kind!r} where rank {self.rank} expects {expected!r}")
        return body

    def _watch(self) -> None:
        """Send heartbeats, and check those of other ranks and the launcher."""
        before = time.monotonic()
        while True:
            if self._is_orphan():
                self._leave("" if self.rank else "rank 0: its launcher is gone")
            for peer in self._peers.values():
                if peer.sending.acquire(blocking=False):  # a message being sent is as good as a heartbeat
                    with suppress(OSError):  # full, or closed, which the listening thread notices
                        peer.socket.send(b"\n", socket.MSG_DONTWAIT)
                    peer.sending.release()
                if self._time - peer.heard > peer.silence_s:
                    why = "it is stopped or asleep, or the network is gone"
                    self._lose(peer, f"has been silent for {peer.silence_s:g} s: {why}")
            time.sleep(BEAT_S)
            now = time.monotonic()
            # limited, because a process that was stopped could not receive anything
            self._time += min(now - before, 2 * BEAT_S)
            before = now

    def _is_orphan(self) -> bool:
        try:
            if self._launcher is not None:
                os.kill(self._launcher, 0)  # sends nothing
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return os.getppid() != self._parent

    def _listen(self, peer: Peer) -> None:
        """Receive a peer's messages, in a thread of its own."""
        data = bytearray()
        try:
            while received := peer.socket.recv(1 << 16):
                peer.heard = self._time
                data += received
                if len(data) > MAX_BYTES:
                    raise ValueError("a message without an end")
                if b"\n" not in received:
                    continue
                *lines, data = data.split(b"\n")
                for line in filter(None, lines):
                    kind, body = json.loads(line)
                    if kind == "end":
                        code, why = body
                        self._hear_end(peer, int(code), str(why))
                    if kind == "begun":
                        peer.silence_s = self._silence_s
                    else:
                        peer.inbox.put((kind, body))
        except OSError:
            pass
        except (ValueError, TypeError, RecursionError):
            self._lose(peer, "sent no message of kvant's")
        self._lose(peer, "is gone: its connection was closed")

    def _hear_end(self, peer: Peer, code: int, why: str) -> NoReturn:
        if self.rank == 0:
            self._leave(
                f"rank {peer.rank}: {why}" if why else f"rank {peer.rank} ended with exit code {code}", code
            )
        self._over.acquire()
        self._ended = True
        peer.inbox.put(("end", code))
        if why != LOST:
            time.sleep(ENDED_S)
        os._exit(code)

    def _lose(self, peer: Peer, how: str) -> NoReturn:
        self._leave(f"rank {peer.rank} {how}" if self.rank in (0, 1) else "")

    def _leave(self, line: str, code: int = 1) -> NoReturn:
        """End this process from a thread of the guard, whatever the main thread does."""
        self._over.acquire()
        if line and select.select([], [2], [], WORDS_S)[1]:
            # Not sys.stderr, which is disabled on ranks other than 0, and may be locked by the main thread.
            with suppress(OSError):  # a closed pipe
                os.write(2, f"kvant: error: {printable(line, LINE_COLUMNS)}; this run is over\n".encode())
        if self.rank == 0:
            self._say_last([code or 1, LOST])
        os._exit(code or 1)

    def _say_last(self, body: Any) -> None:
        line = json.dumps(["end", body]).encode() + b"\n"
        for peer in self._peers.values():
            if peer.sending.acquire(timeout=WORDS_S / self.size):  # never released: nothing more is sent
                with suppress(OSError):  # it does not read, or is gone
                    peer.socket.send(line, socket.MSG_DONTWAIT)
                    peer.socket.shutdown(socket.SHUT_WR)


def first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Describe the first fact that differs from rank 0's (``mine``), or return ""."""
    for name in {**mine, **theirs}:
        both = [facts.get(name, "missing") for facts in (mine, theirs)]
        ours, other = (
            value if isinstance(value, str) else json.dumps(value, sort_keys=True) for value in both
        )
        if ours != other:
            return f"{name} is {other}; rank 0 has {ours}"
    return ""
