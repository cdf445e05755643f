"""The guard of a run on several ranks: a TCP connection from each to rank 0, beside MLX's own.

It carries rank 0's messages to the others, which wait for them, and beats that show that a process lives. MLX's
collectives block in C++ and some never notice that another rank is gone. So a thread of the guard ends this process.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import FrameType
from typing import Any

from kvant.errors import RanksError, printable
from kvant.ranks.environment import Place
from kvant.ranks.joining import Arrival, gather_ranks, reach_first
from kvant.ranks.messages import Connection, frame
from kvant.ranks.stand_in import StandIn

BEAT_S = 0.25
# Without a byte from a rank: it is lost. A rank that imports or loads can be silent for a second or two.
SILENCE_S = 3.5
TELL_S = 0.2  # for the last message to a rank, which may not read
ENDED_S = 1.0  # after rank 0's end for a rank to notice by itself
LAST_S = 3.0  # then for its process to end by itself
WORDS_S = 1.0  # for the last line and for the terminal
LINE_COLUMNS = 1000  # another rank's error, which is cut already
FAILED, INTERRUPTED = 1, 130
CLOSED = "is gone: its connection was closed"
SILENT = f"has said nothing for {SILENCE_S:g} s: it is stopped or asleep, or the network is gone"
SHOW_CURSOR = "\x1b[?25h"


class Ended(Exception):  # noqa: N818  it is no error
    """Rank 0 has ended the run, and this rank is to end silently.

    Attributes:
        code: the exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True, eq=False)
class Peer:
    """Another rank that this one is connected to.

    Attributes:
        arrival: it.
        heard: when it was last heard, in the guard's time.
        inbox: its messages, (kind, body) each.
    """

    arrival: Arrival
    heard: float
    inbox: "SimpleQueue[tuple[str, Any]]" = field(default_factory=SimpleQueue)

    @property
    def rank(self) -> int:
        return self.arrival.rank

    @property
    def connection(self) -> Connection:
        return self.arrival.connection


class Guard:
    """One rank's guard. Rank 0 is connected to all others, each of them to rank 0.

    All ranks call ``agree``, ``gather``, and ``tell`` or ``receive`` in one order.

    A rank that is killed, stopped or asleep, interrupted or failed ends the processes of all. One line on standard
    error says which: rank 0's, or rank 1's where rank 0 is the lost one.

    Attributes:
        rank: of this process.
        size: ranks in all.
        restore: done before this guard ends its process, in another thread: what puts the terminal back.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.restore: list[Callable[[], None]] = []
        self._peers: dict[int, Peer] = {}
        self._outgoing: SimpleQueue[tuple[bytes, list[Peer], threading.Event]] = SimpleQueue()
        self._deadlines: list[tuple[float, str]] = []
        self._time = 0.0  # seconds in which this process was awake
        self._parent = os.getppid()
        # Rank 1 notices rank 0's silence first, and says so: the others may kill that process.
        self._silence_s = SILENCE_S + (2 * BEAT_S if rank > 1 else 0)
        self._deciding = threading.Lock()
        self._over = self._leaving = False  # the one by whatever end, the other by this guard's
        self._ended: int | None = None  # rank 0's exit code, where it has ended the run
        self._standing = threading.Lock()  # while sending is handed over, or taken back
        self._stand_in: StandIn | None = None
        self._on_interrupt: Callable[[int, FrameType | None], Any] | None = None  # while Ctrl-C does without Python
        self._noticed = threading.Event()  # rank 0's end, by whoever waits for its messages
        for work in (self._watch, self._send):
            threading.Thread(target=work, daemon=True).start()

    @classmethod
    def join(cls, place: Place, facts: Mapping[str, Any], *, deadline_s: float = 30.0) -> "Guard":
        """Wait until all ranks are here and :meth:`agree` on ``facts``, such as versions.

        Raises:
            RanksError: a rank did not come, or differs.
            Ended: rank 0 has ended the run and says why.
        """
        guard = cls(place.rank, place.size)
        until = time.monotonic() + deadline_s
        try:
            if place.rank == 0:
                for arrival in gather_ranks(place, until):
                    guard._add(arrival)
            else:
                guard._add(reach_first(place, until))
            guard.agree(facts)
        except KeyboardInterrupt:
            guard.end(INTERRUPTED, "was interrupted")
            raise
        except Exception as error:
            guard.end(FAILED, str(error) if place.rank else "")  # rank 0's caller says it
            raise
        return guard

    def tell(self, message: Mapping[str, Any]) -> None:
        """From rank 0 to all others, which ``receive`` it. Any thread may call it. Sent whole, even if interrupted."""
        self._post("tell", dict(message))

    def receive(self) -> Mapping[str, Any]:
        """On the others: rank 0's next message; waits for it.

        Raises:
            Ended: rank 0 has ended the run.
        """
        found: Mapping[str, Any] = self._next(self._peers[0], "tell")
        return found

    def gather(self, value: Any) -> list[Any]:
        """On all ranks: rank 0 gets every rank's value, in the order of ranks; the others an empty list."""
        return self._collect("value", value)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """On all ranks: compare facts, values of JSON, with rank 0's.

        Raises:
            RanksError: on rank 0: a rank differs. The run is over.
            Ended: on the others then.
        """
        everybody = self._collect("facts", dict(facts))
        if self.rank:
            self._next(self._peers[0], "agreed")
            return
        for rank, theirs in enumerate(everybody):
            if difference := first_difference(facts, theirs):
                self.end(FAILED)
                raise RanksError(f"rank {rank}: {difference}")
        self._post("agreed", None)

    @contextmanager
    def within(self, seconds: float, doing: str) -> Iterator[None]:
        """What is inside may block, and may hold the interpreter's lock: MLX does while it joins its group.

        If it is not done in time, the run ends with a line that names ``doing``. Until a message is sent, another
        process watches too, and in the main thread Ctrl-C ends this one at once.
        """
        late = f"{doing} took longer than {seconds:g} s"
        deadline = (self._time + seconds, late)
        self._deadlines.append(deadline)
        try:
            self._start_stand_in(seconds, late)
            yield
        finally:
            self._stop_stand_in()
            self._deadlines.remove(deadline)

    def end(self, code: int, why: str = "") -> None:
        """This rank's run is over; its process is to end now, by itself.

        Rank 0: the others end with ``code``, silently; it prints ``why`` itself, if anything. Another: rank 0 prints
        ``why``, and all end.
        """
        with self._deciding:
            first, self._over = not self._over, True
        self._wait_if_leaving()
        if not first:
            return
        self._say_last("end", code if self.rank == 0 else [code, why])
        if self.rank == 0:
            if why:
                self._last_words(f"rank 0 {why}", acts=False)
        elif self._peers:
            threading.Thread(target=self._end_later, args=(code,), daemon=True).start()

    # What follows is the guard's own.

    def _add(self, arrival: Arrival) -> None:
        peer = Peer(arrival, self._time)
        self._peers = {**self._peers, arrival.rank: peer}  # other threads go through the old one
        threading.Thread(target=self._listen, args=(peer,), daemon=True).start()

    def _start_stand_in(self, seconds: float, late: str) -> None:
        self._stop_stand_in()  # of a deadline around this one
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._on_interrupt = handler
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        with self._standing:
            peers = list(self._peers.values())
            lost, end = (frame(each).decode("latin-1") for each in (["lost", None], ["end", [FAILED, late]]))
            descriptors = [peer.connection.hold() for peer in peers]
            pids = [peer.arrival.pid if peer.arrival.local else None for peer in peers]
            try:
                self._stand_in = StandIn(
                    descriptors,
                    rank=self.rank,
                    peers=list(zip(self._peers, descriptors, pids, strict=True)),
                    seconds=seconds,
                    late=late,
                    beat_s=BEAT_S,
                    silence_s=self._silence_s,
                    words={"closed": CLOSED, "silent": SILENT, "lost": lost, "late": end},
                )
            except OSError as error:
                for peer in peers:
                    peer.connection.release()
                raise RanksError(
                    f"the process that stands in for the guard does not start: {error.strerror}"
                ) from error

    def _stop_stand_in(self) -> None:
        if self._on_interrupt is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._on_interrupt)
            self._on_interrupt = None
        with self._standing:
            stand_in, self._stand_in = self._stand_in, None
            if stand_in is not None:
                stand_in.stop()
                for peer in self._peers.values():
                    peer.connection.release()

    def _post(self, kind: str, body: Any) -> None:
        """Send to all peers. A thread of its own sends: Ctrl-C in this one cannot cut a message in two."""
        if self._ended is not None:
            raise self._notice(self._ended)
        self._wait_if_leaving()
        if self._over:
            raise RanksError("this run on several ranks is over")
        self._stop_stand_in()
        sent = threading.Event()
        self._outgoing.put((frame([kind, body]), list(self._peers.values()), sent))
        sent.wait()

    def _wait_if_leaving(self) -> None:
        """Nothing more is to be done or said by a thread while another one ends this process."""
        if self._leaving:
            time.sleep(LAST_S)

    def _send(self) -> None:
        while True:
            data, peers, sent = self._outgoing.get()
            for peer in peers:
                with suppress(OSError):  # who reads from it notices too, and may find its last words
                    peer.connection.send(data)
            sent.set()

    def _next(self, peer: Peer, expected: str) -> Any:
        kind, body = peer.inbox.get()
        if kind == "end":
            raise self._notice(body)
        if kind != expected:
            raise RanksError(f"rank {peer.rank} sent {kind!r} where rank {self.rank} expects {expected!r}")
        return body

    def _notice(self, code: int) -> Ended:
        self._noticed.set()
        return Ended(code)

    def _collect(self, kind: str, value: Any) -> list[Any]:
        if self.rank:
            self._post(kind, value)
            return []
        return [value, *(self._next(self._peers[rank], kind) for rank in range(1, self.size))]

    def _listen(self, peer: Peer) -> None:
        """A peer's messages, in a thread of its own."""

        def heard() -> None:
            peer.heard = self._time

        try:
            for kind, body in peer.connection.messages(heard):
                if kind == "lost":
                    self._leave(FAILED)
                elif kind != "end":
                    peer.inbox.put((kind, body))
                elif self.rank == 0:
                    self._hear_end(peer, *body)
                else:
                    self._follow_end(peer, int(body))
        except (EOFError, ConnectionError):
            self._lose(peer, f" {CLOSED}")
        except OSError as error:
            self._lose(peer, f" is gone: its connection failed: {error.strerror}")
        except (ValueError, TypeError):
            self._lose(peer, " sent no message of kvant's")

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over:
            time.sleep(BEAT_S)
            now = time.monotonic()
            self._time += min(now - before, 2 * BEAT_S)  # not while this process was stopped: it could hear nobody
            before = now
            for peer in self._peers.values():
                peer.connection.beat()
            if (stand_in := self._stand_in) is not None:
                stand_in.sign()
            if os.getppid() != self._parent:
                self._fail("its launcher is gone")
            for until, late in self._deadlines.copy():
                if self._time > until:
                    self._fail(late)
            for peer in self._peers.values():
                if self._time - peer.heard > self._silence_s:
                    self._lose_silent(peer)

    def _hear_end(self, peer: Peer, code: int, why: str) -> None:
        """On rank 0: another has ended its part of the run."""
        if code == INTERRUPTED:
            self._lose(peer, " was interrupted", code)
        else:
            self._lose(peer, f": {why}" if why else f" ended with exit code {code}", int(code))

    def _lose_silent(self, peer: Peer) -> None:
        kill = peer.arrival.pid if peer.arrival.local else None  # stopped, it would stay as it is
        self._lose(peer, f" {SILENT}", kill=kill)

    def _lose(self, peer: Peer, how: str, code: int = FAILED, kill: int | None = None) -> None:
        """Another rank's run is over, so this one's is."""
        line = f"rank {peer.rank}{how}"
        self._leave(code or FAILED, line if self.rank in (0, 1) else "", kill=kill)

    def _fail(self, why: str) -> None:
        """This rank's run is over, and its main thread does not know."""
        if self.rank == 0:
            self._leave(FAILED, f"rank 0: {why}")
        else:
            self._leave(FAILED, why=why)

    def _leave(self, code: int, line: str = "", *, why: str = "", kill: int | None = None) -> None:
        """End this process from a thread of the guard; returns where it is ending already.

        Args:
            code: its exit code.
            line: on standard error.
            why: for rank 0 to say.
            kill: another process, which ends with this one.
        """
        with self._deciding:
            if self._over:
                return
            self._over = self._leaving = True
        if kill is not None:
            with suppress(OSError):  # gone meanwhile
                os.kill(kill, signal.SIGKILL)
        if self.rank == 0:
            self._say_last("lost", None)
        elif why:
            self._say_last("end", [code, why])
        self._exit(code, line)

    def _say_last(self, kind: str, body: Any) -> None:
        self._stop_stand_in()
        data = frame([kind, body])
        for peer in self._peers.values():
            with suppress(OSError):  # it does not read, or is gone
                peer.connection.send_within(data, TELL_S)
            peer.connection.finish()

    def _follow_end(self, peer: Peer, code: int) -> None:
        """Rank 0 has ended the run: so does this process, if need be from here."""
        with self._deciding:
            if self._over:
                return
            self._over, self._ended = True, code
        peer.inbox.put(("end", code))
        if self._noticed.wait(ENDED_S):
            time.sleep(LAST_S)
        self._exit(code)

    def _end_later(self, code: int) -> None:
        time.sleep(LAST_S)
        self._exit(code)

    def _exit(self, code: int, line: str = "") -> None:
        """End this process, whatever its main thread does and whether or not the terminal takes the last line."""
        last = threading.Thread(target=self._last_words, args=(line,), daemon=True)
        last.start()
        last.join(WORDS_S)
        os._exit(code)

    def _last_words(self, line: str, *, acts: bool = True) -> None:
        for act in self.restore if acts else ():
            with suppress(Exception):  # the line is said all the same
                act()
        text = f"kvant: error: {printable(line, LINE_COLUMNS)}; this run is over\n" if line else ""
        if os.isatty(2):  # not sys.stderr: it is empty on other ranks than 0, and the main thread may hold its lock
            text = SHOW_CURSOR + (f"\n{text}" if line else "")
        with suppress(OSError):  # nobody reads it
            os.write(2, text.encode())


def first_difference(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first fact in which another rank differs from rank 0, and both values; empty where none does."""
    for name in {**own, **theirs}:
        ours, other = _shown(own, name), _shown(theirs, name)
        if ours != other:
            return f"{name} is {other}; rank 0 has {ours}"
    return ""


def _shown(facts: Mapping[str, Any], name: str) -> str:
    """A fact as it is compared and shown."""
    if name not in facts:
        return "missing"
    value = facts[name]
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
