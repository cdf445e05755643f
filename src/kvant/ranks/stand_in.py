"""Stands in for a rank's guard while the rank's process can run no Python at all.

MLX joins its group with the interpreter's lock held, so no thread of the guard runs until every rank has joined: it
could neither beat nor end its process. This script is started beside it for that time, and imports nothing of kvant.
It beats on the guard's connections. It ends the rank only where the guard cannot.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

BEAT = b"\0"  # as in kvant.ranks.messages
PROCESSES = Path("/proc")  # on Linux
STUCK_S = 1.0  # without a sign from the guard: it cannot act


class Peer:
    """A connection of the guard's; its bytes are left for the guard to read."""

    def __init__(self, rank: int, descriptor: int, pid: int | None) -> None:
        self.rank, self.pid = rank, pid
        self.heard = 0.0
        self.closed = False
        self._pending = 0
        self._socket = socket.socket(fileno=descriptor)

    def send(self, data: bytes) -> None:
        try:
            self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # full
        except OSError:
            self.closed = True

    def look(self, now: float) -> bytes:
        """What has come and was not read."""
        try:
            data = self._socket.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return b""
        if len(data) != self._pending:
            self._pending, self.heard = len(data), now
        return data


def stand_in(
    *, rank: int, process: int, signs: int, peers: list[tuple[int, int, int | None]], seconds: float, late: str,
    beat_s: float, silence_s: float, words: dict[str, str],
) -> None:  # fmt: skip
    """Until the pipe ``signs`` is closed.

    Args:
        rank: of the process that is stood in for.
        process: its pid.
        signs: a pipe that the guard writes to while it can act.
        peers: rank, descriptor of the connection and, on this machine, pid of each.
        seconds: until the time is over.
        late: then the line.
        beat_s, silence_s: as in the guard.
        words: the guard's last messages, and its line about each loss.
    """
    connected = [Peer(*each) for each in peers]
    now = last_sign = 0.0
    before = time.monotonic()

    def leave(line: str, to_rank_0: bool = False) -> None:
        for peer in connected:
            if rank == 0 or to_rank_0:
                peer.send(words["lost" if rank == 0 else "late"].encode("latin-1"))
        if line and not to_rank_0:
            os.write(2, f"kvant: error: {line}; this run is over\n".encode())
        os.kill(process, signal.SIGKILL)
        os._exit(0)

    while True:
        if select.select([signs], [], [], beat_s)[0]:
            if not os.read(signs, 4096):
                return
            last_sign = now
            time.sleep(beat_s)
        clock = time.monotonic()
        now += min(clock - before, 2 * beat_s)
        before = clock
        if is_stopped(process):  # then it does not beat either
            continue
        for peer in connected:
            peer.send(BEAT)
            data = peer.look(now)
            if now - last_sign < STUCK_S:
                peer.heard = now  # the guard reads
                continue
            told = last_message(data)
            who = f"rank {peer.rank}" if rank in (0, 1) else ""
            if told is not None and rank:
                leave("")
            elif told is not None:
                leave(f"{who}: {told[1][1]}" if told[0] == "end" else who)
            elif peer.closed:
                leave(who and f"{who} {words['closed']}")
            elif now - peer.heard > silence_s:
                if peer.pid is not None:
                    os.kill(peer.pid, signal.SIGKILL)
                leave(who and f"{who} {words['silent']}")
        if now > seconds and now - last_sign >= STUCK_S:
            leave(f"rank {rank}: {late}", to_rank_0=rank > 0)


def last_message(data: bytes) -> Any:
    """The end of a run, where another rank has sent it."""
    for kind in (b'["end",', b'["lost",'):
        if (start := data.find(kind)) >= 0:
            try:
                return json.loads(data[start:])
            except ValueError:
                return json.loads(data[start : data.rfind(b"]") + 1])
    return None


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped it."""
    if PROCESSES.is_dir():
        try:
            state = (PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].strip()
        except OSError:
            return False  # gone
    else:
        state = subprocess.run(["ps", "-o", "state=", "-p", str(process)], capture_output=True, text=True).stdout
    return state.startswith("T")


class StandIn:
    """The script beside this process, from the guard's side.

    Args:
        descriptors: of the connections; nobody else may send on them until :meth:`stop`.
        what: the other arguments of :func:`stand_in`.
    """

    def __init__(self, descriptors: list[int], **what: Any) -> None:
        reading, self._signs = os.pipe()
        os.set_blocking(self._signs, False)
        arguments = json.dumps({**what, "process": os.getpid(), "signs": reading})
        command = [sys.executable, "-I", "-S", __file__, arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[reading, *descriptors])
        os.close(reading)

    def sign(self) -> None:
        """The guard can act."""
        with suppress(OSError):  # full
            os.write(self._signs, b".")

    def stop(self) -> None:
        """The guard acts and sends again."""
        self._process.kill()
        self._process.wait()
        os.close(self._signs)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stand_in(**json.loads(sys.argv[1]))
