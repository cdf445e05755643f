"""Processes that are the ranks of a run: started, waited for, and ended together.

Rank 0 has the terminal, or the pipes, that the launcher was given. The others have none: their standard input is empty
and all that they write goes to standard error. The ranks' own guards notice a lost rank; the launcher ends what is
still there afterwards, and puts the terminal back.
"""

import math
import os
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType

from kvant.errors import RanksError

GRACE_S = 6.0  # after rank 0 has ended by itself, for the others to do so
LOST_S = 3.0  # after a rank was lost: the guards of the others, where they have met, end them sooner
STOPPED_S = 4.5  # after a rank was stopped, unless it goes on: its guard's silence is noticed sooner
SHORT_S = 1.0  # where no guard has begun, or nobody waits for what is left
LOOK_S = 1.0  # at most until a signal is seen that came just before a wait
SSH_FAILED, NOT_STARTED = 255, (126, 127)  # of a command by ssh; the second: no such folder or program there
INTERRUPTED = (130, -signal.SIGINT)
ENDING = ((signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0))  # a signal, and how long it may take
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# After a chat or a progress bar that was killed: plain colours, the cursor shown, pasted text as it is, a new line.
PLAIN = b"\x1b[0m\x1b[?25h\x1b[?2004l\r\n"


@dataclass(frozen=True, slots=True)
class RankCommand:
    """How a rank is started.

    Attributes:
        words: the program and its arguments.
        environment: all of it; None: this process's.
        cwd: the folder it runs in; None: this one.
        host: what it runs on by ssh; empty: this machine.
    """

    words: Sequence[str]
    environment: Mapping[str, str] | None = None
    cwd: str | None = None
    host: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        code: the exit code: rank 0's, 128 and the signal's number where one ended it; not 0 where any rank failed.
        problem: what went wrong where no rank can have said it; else empty.
    """

    code: int
    problem: str = ""


def run_ranks(commands: Sequence[RankCommand]) -> Outcome:
    """Run the ranks until all have ended. Only in the main thread, which gets signals.

    Ctrl-C on a terminal reaches rank 0 by itself. Other signals are passed on to it. Ctrl-Z does nothing: a rank that
    is stopped would end the run.

    Raises:
        RanksError: a rank's program cannot be started; those that were are ended.
    """
    run = _Run(commands, _Terminal())
    with _handled(run):
        run.start()
        run.wait()
    return run.outcome()


class _Run:
    """The processes, and what has become of each."""

    def __init__(self, commands: Sequence[RankCommand], terminal: "_Terminal") -> None:
        self.commands, self.terminal = commands, terminal
        self.processes: list[subprocess.Popen[bytes]] = []
        self.codes: dict[int, int] = {}  # in the order in which ranks ended; below 0: a signal's number
        self.ended_here: dict[int, str] = {}  # ranks that did not end by themselves, and why they were to
        self.stopped: dict[int, float] = {}  # ranks, and when they are ended
        # What is to be done. Signal handlers may put something into this kind of queue.
        self.events: SimpleQueue[tuple[Callable[[int, int], None], int, int]] = SimpleQueue()
        self.until: float | None = None  # when what is left is ended
        self.steps = iter(ENDING)
        self.signals = 0

    def start(self) -> None:
        """Start every rank; rank 0 in this group of processes where there is a terminal, whose Ctrl-C reaches both."""
        for rank, command in enumerate(self.commands):
            first = rank == 0
            try:
                process = subprocess.Popen(
                    command.words,
                    env=command.environment,
                    cwd=command.cwd,
                    stdin=None if first else subprocess.DEVNULL,
                    stdout=None if first else 2,
                    start_new_session=not first,
                    process_group=0 if first and _foreground() is None else None,
                )
            except OSError as error:
                self.until = time.monotonic()
                self.wait()
                raise RanksError(f"rank {rank} cannot be started: {error}") from error
            self.processes.append(process)
            Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread, which waits
        while True:
            _, status = os.waitpid(process.pid, os.WUNTRACED | os.WCONTINUED)
            if os.WIFSTOPPED(status):
                self.events.put((self._stopped, rank, 0))
            elif os.WIFCONTINUED(status):
                self.events.put((self._continued, rank, 0))
            else:
                process.returncode = os.waitstatus_to_exitcode(status)
                self.events.put((self._ended, rank, process.returncode))
                return

    def wait(self) -> None:
        """Until all have ended, by themselves or because another did."""
        while len(self.codes) < len(self.processes):
            until = min(filter(None, (self.until, *self.stopped.values())), default=math.inf)
            try:
                react, rank, number = self.events.get(timeout=min(max(0.0, until - time.monotonic()), LOOK_S))
            except Empty:
                if time.monotonic() >= until and not self._end_the_rest():
                    return
            else:
                react(rank, number)

    def _stopped(self, rank: int, _: int) -> None:
        self.stopped[rank] = time.monotonic() + STOPPED_S

    def _continued(self, rank: int, _: int) -> None:
        self.stopped.pop(rank, None)

    def _ended(self, rank: int, code: int) -> None:
        self.codes[rank] = code
        self.stopped.pop(rank, None)
        if rank == 0:
            self.terminal.restore(killed=code < 0)
        if self.until is None and (rank == 0 or code):
            if self._never_began(rank) or (rank == 0 and code in INTERRUPTED):
                seconds = SHORT_S
            else:
                seconds = GRACE_S if rank == 0 and code >= 0 else LOST_S
            self.until = time.monotonic() + seconds

    def signalled(self, _: int, number: int) -> None:
        """This process got a signal."""
        if 0 in self.codes:  # nothing is left that the user waits for
            self.until = time.monotonic()
        elif number == signal.SIGINT:
            if not _foreground():
                self._send(0, number)
        else:
            self.signals += 1
            self._send(0, number)
            if self.signals > 1:  # the first may take as long as it needs: a server answers what was asked
                self.until = time.monotonic()

    def _end_the_rest(self) -> bool:
        """The next step of :data:`ENDING`; whether there was one."""
        number, seconds = next(self.steps, (None, 0.0))
        if number is None:
            return False
        for rank in range(len(self.processes)):
            if rank in self.codes:
                continue
            stopped = rank in self.stopped
            self.ended_here.setdefault(rank, "was stopped" if stopped else "did not end after the others")
            self._send(rank, signal.SIGKILL if stopped else number)
        self.until = time.monotonic() + seconds
        self.stopped.clear()
        return True

    def _send(self, rank: int, number: int) -> None:
        """A signal to rank 0 alone; to another with all that it has started, for its session is its own."""
        with suppress(ProcessLookupError, PermissionError):  # it has just ended; macOS has the second for it
            (os.killpg if rank else os.kill)(self.processes[rank].pid, number)

    def outcome(self) -> Outcome:
        """The exit code; and a line unless a rank that failed by itself has written its own."""
        first = self.codes.get(0, -signal.SIGKILL)
        failed = [rank for rank, code in self.codes.items() if code and rank not in self.ended_here]
        if first == 0:
            code = 1 if failed or self.ended_here else 0
        elif first > 0:
            code = 1 if self._never_began(0) else first
        else:
            code = 1 if 0 in self.ended_here and not self.signals else 128 - first
        asked = first in INTERRUPTED or self.signals > 0
        began = [rank for rank in failed if not self._never_began(rank)]
        said = (0 in began and first > 0) or (any(self.codes[rank] > 0 for rank in began) and not self.ended_here)
        if code == 0 or (first != 0 and (asked or said)):
            return Outcome(code)
        if failed:
            return Outcome(code, self._described(failed[0]))
        rank, why = max(self.ended_here.items(), key=lambda each: (each[1] == "was stopped", -each[0]))
        return Outcome(code, f"{self._named(rank)} {why}; this run is over")

    def _never_began(self, rank: int) -> bool:
        """Whether it ended before it was kvant's, or because its connection failed."""
        return bool(self.commands[rank].host) and self.codes[rank] in (SSH_FAILED, *NOT_STARTED)

    def _described(self, rank: int) -> str:
        code = self.codes[rank]
        if code < 0:
            return f"{self._named(rank)} was killed by signal {-code}"
        if self._never_began(rank):
            how = "ssh failed" if code == SSH_FAILED else "it could not be started there"
            return f"{self._named(rank)}: {how} (exit code {code})"
        return f"{self._named(rank)} ended with exit code {code}"

    def _named(self, rank: int) -> str:
        host = self.commands[rank].host
        return f"rank {rank} on {host}" if host else f"rank {rank}"


@contextmanager
def _handled(run: _Run) -> Iterator[None]:
    """Signals as events of the run; those that are ignored stay so."""

    def put(number: int, frame: FrameType | None) -> None:
        run.events.put((run.signalled, 0, number))

    before = {}
    wakeup = signal.set_wakeup_fd(-1)  # nobody else reacts to them
    try:
        for number in (signal.SIGINT, *FORWARDED):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, put)
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the ranks started now inherit it
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)


class _Terminal:
    """The terminal as the launcher found it: its settings, and reads and writes that wait."""

    def __init__(self) -> None:
        self._blocking = {}
        for stream in range(3):
            with suppress(OSError):
                self._blocking[stream] = os.get_blocking(stream)
        self._stream = next((stream for stream in range(3) if os.isatty(stream)), None)
        self._settings = termios.tcgetattr(self._stream) if self._stream is not None and _foreground() else None

    def restore(self, *, killed: bool) -> None:
        """Put it back after rank 0, which was killed perhaps."""
        for stream, value in self._blocking.items():
            with suppress(OSError):
                os.set_blocking(stream, value)
        if self._stream is None or self._settings is None or not _foreground():  # it is another program's now
            return
        with suppress(OSError, termios.error):
            if termios.tcgetattr(self._stream) != self._settings:
                termios.tcsetattr(self._stream, termios.TCSANOW, self._settings)
            if killed and os.isatty(2):
                os.write(2, PLAIN)


def _foreground() -> bool | None:
    """Whether the terminal's keys go to this process; None: it has no terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return None
    finally:
        os.close(terminal)
