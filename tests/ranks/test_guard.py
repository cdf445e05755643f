"""A lost rank ends the run: one line that names it, an exit code from every survivor, and no process stays."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.ranks import SRC, rank_environments, start_ranks

from kvant.ranks.guard import BEAT_S, SILENCE_S, first_difference

LATE_S = 60.0  # a run that does not end
PROMISED_S = 5.0  # from the event to the last survivor's end
BUSY_S = 5.0  # more, where other tests run beside it
RESTORED = "the terminal is restored"

# The package's first lines load MLX, which a guard does not need: without them a process starts in half the time.
BEGIN = f"""
import os, signal, socket, sys, threading, time, types
sys.modules["kvant"] = kvant = types.ModuleType("kvant")
kvant.__path__ = ["{SRC / "kvant"}"]
from kvant.errors import RanksError
from kvant.ranks.environment import find_place
from kvant.ranks.guard import Ended, Guard

def blocked():
    "As in a collective: the main thread waits in C for what never comes."
    ours, theirs = socket.socketpair()
    ours.recv(1)

def ready():
    os.write(1, b"ready\\n")  # at once, so that two ranks' do not mix in one pipe

try:
    place = find_place(os.environ)
    guard = Guard.join(place, {{"version": 1}})
    guard.restore.append(lambda: os.write(1, b"{RESTORED}\\n"))
"""
END = """
except Ended as ended:
    print("told", ended.code, flush=True)
    sys.exit(ended.code)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    guard.end(130, "was interrupted")
    sys.exit(130)
except RanksError as error:
    print(f"kvant: error: {error}", file=sys.stderr)
    sys.exit(1)
"""


def script(body: str) -> list[str]:
    """The command of a rank that has joined and then does this."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return [sys.executable, "-W", "error", "-c", BEGIN + lines + END]


class Run:
    """Ranks that run one script; what each wrote and its exit code once they have ended."""

    def __init__(self, count: int, body: str, folder: Path, **environment: str) -> None:
        self.processes = start_ranks(count, script(body), folder, environment)
        self.out: list[str] = []
        self.err: list[str] = []
        self.codes: list[int] = []

    def wait_until_ready(self, ranks: Sequence[int] | None = None) -> None:
        """Each of the ranks has said so."""
        for rank, process in enumerate(self.processes):
            if ranks is None or rank in ranks:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n", process.communicate()[1]

    def finish(self) -> list[int]:
        """Exit codes."""
        self.out, self.err = [], []
        for process in self.processes:
            out, err = process.communicate(timeout=LATE_S)
            self.out.append(out)
            self.err.append(err)
        self.codes = [process.returncode for process in self.processes]
        return self.codes

    def line(self, teller: int) -> str:
        """The only line on standard error of all ranks, written by this one."""
        assert [rank for rank, text in enumerate(self.err) if text.strip()] == [teller], self.err
        (line,) = self.err[teller].splitlines()
        assert line.startswith("kvant: error: rank "), line
        return line.removeprefix("kvant: error: ")


@contextmanager
def runs(count: int, *bodies: str, **environment: str) -> Iterator[list[Run]]:
    """Side by side: most of their time they wait."""
    started: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            started.extend(Run(count, body, Path(folder), **environment) for body in bodies)
            yield started
        finally:
            for process in (each for run in started for each in run.processes):
                process.kill()
                process.communicate()


def run(count: int, body: str, **environment: str) -> tuple[Run, list[int]]:
    """To its end."""
    with runs(count, body, **environment) as (started,):
        return started, started.finish()


TALK = """
rank, size = guard.rank, guard.size
assert guard.gather({"rank": rank, "text": "ä"}) == [{"rank": r, "text": "ä"} for r in range(size) if not rank]
guard.agree({"digest": "abc", "shape": (1, 2), "none": None})
big = "x" * 10_000_000
if rank == 0:
    guard.tell({"big": big})
    assert guard.gather(None) == [None, big, big]
    def many(thread):
        for i in range(200):
            guard.tell({"thread": thread, "i": i})
    threads = [threading.Thread(target=many, args=(each,)) for each in range(3)]
    for each in threads: each.start()
    for each in threads: each.join()
    guard.end(CODE)
    try:
        guard.tell({})
    except RanksError as error:
        print(error, flush=True)
    sys.exit(CODE)
assert guard.receive() == {"big": big}
assert guard.gather(big) == []
order = [guard.receive() for _ in range(600)]
assert all([m["i"] for m in order if m["thread"] == thread] == list(range(200)) for thread in range(3))
print(sum(place * m["thread"] for place, m in enumerate(order)), flush=True)
if rank == 2:
    blocked()
guard.receive()
"""


def test_messages_and_the_end() -> None:
    """Rank 0's exit code is everybody's: of a rank that waits for messages, and of one that is blocked."""
    with runs(3, *(TALK.replace("CODE", str(code)) for code in (0, 3))) as both:
        for code, each in zip((0, 3), both, strict=True):
            assert each.finish() == [code] * 3, each.err
            assert each.err == [""] * 3
            assert each.out[0] == "this run on several ranks is over\n"
            order, told = each.out[1].splitlines()
            assert told == f"told {code}"
            assert each.out[2].splitlines() == [order, RESTORED], "one order for all; ended from outside"


LOST = """
ready()
if guard.rank == 0:
    blocked() if BLOCKED == 0 else guard.gather(None)
elif guard.rank == BLOCKED:
    blocked()
guard.receive()
"""
WAYS = {
    "kill": (signal.SIGKILL, "is gone: its connection was closed"),
    "stop": (
        signal.SIGSTOP,
        f"has said nothing for {SILENCE_S:g} s: it is stopped or asleep, or the network is gone",
    ),
    "interrupt": (signal.SIGINT, "was interrupted"),
}
CASES = [(way, lost) for way in WAYS for lost in range(3)]
DOES_NOT_READ = """
ready()
while True:
    guard.tell({"big": "x" * 1_000_000}) if guard.rank == 0 else guard.receive()
    time.sleep(0.1)
"""
SLEEPS = """
with guard.within(2, "nothing"): pass
ready()
if guard.rank:
    print(guard.receive(), flush=True)
    guard.receive()
before = time.monotonic()
while time.monotonic() - before < 1.0:
    before = time.monotonic()
    time.sleep(0.05)
time.sleep(1.0)
guard.tell({"still": "here"})
guard.end(0)
"""
HANGS = """
ready()
guard.agree({})  # all have said it
if guard.rank == 0:
    guard.end(3)
    sys.exit(3)
try:
    guard.receive()
except Ended:
    blocked()
"""
ENDS_AND_HANGS = """
ready()
guard.agree({})  # all have said it
if guard.rank == 1:
    guard.end(0)
blocked()
"""


@dataclass
class Slow:
    """Runs that have ended, and how long it took from the events to the end of those that lost a rank."""

    lost: list[Run]
    does_not_read: Run
    held: list[Run]
    hangs: Run
    ends_and_hangs: Run
    goes_on: Run
    sleeps: Run
    took_s: float = 0.0


# As MLX does while it joins its group: no thread of Python runs meanwhile.
HELD = """
import ctypes
ready()
with guard.within(LIMIT, "joining the ring"):
    ctypes.PyDLL(None).sleep(HELD)
print(guard.gather(None), flush=True)
guard.end(0) if guard.rank == 0 else guard.receive()
"""
HELD_CASES = [(signal.SIGKILL, 1), (signal.SIGSTOP, 0), (signal.SIGINT, 2), (None, None)]


@pytest.fixture(scope="module")
def slow() -> "Iterator[Slow]":
    """They wait for seconds, so they do it side by side."""
    lost = [LOST.replace("BLOCKED", str((lost + 1) % 3)) for _, lost in CASES]
    held = [HELD.replace("LIMIT", str(20 if sign else 1.5)).replace("HELD", "30") for sign, _ in HELD_CASES]
    goes_on = HELD.replace("LIMIT", "20").replace("HELD", f"int({SILENCE_S} + 1.5) + guard.rank")
    with runs(3, *lost, DOES_NOT_READ, *held, HANGS, ENDS_AND_HANGS, goes_on, SLEEPS) as all_runs:
        for each in all_runs:
            each.wait_until_ready()
        found = Slow(all_runs[:9], all_runs[9], all_runs[10:14], *all_runs[14:])
        time.sleep(0.5)  # the locks are held
        began = time.monotonic()
        for each, (way, rank) in zip(found.lost, CASES, strict=True):
            os.kill(each.processes[rank].pid, WAYS[way][0])
        for each, (sign, victim) in zip(found.held, HELD_CASES, strict=True):
            if sign is not None and victim is not None:
                os.kill(each.processes[victim].pid, sign)
        os.kill(found.does_not_read.processes[1].pid, signal.SIGSTOP)
        for process in found.sleeps.processes:
            os.kill(process.pid, signal.SIGSTOP)
        for each in [*found.lost, found.does_not_read, *found.held]:
            each.finish()
        found.took_s = time.monotonic() - began
        time.sleep(max(0.0, began + SILENCE_S + 1.0 - time.monotonic()))
        for process in found.sleeps.processes:
            os.kill(process.pid, signal.SIGCONT)
        for each in all_runs[14:]:
            each.finish()
        yield found


def test_a_lost_rank(slow: Slow) -> None:
    """Each rank of three is killed, stopped or interrupted. Of the others one is blocked and one waits for messages."""
    assert SILENCE_S + 4 * BEAT_S < PROMISED_S
    assert slow.took_s < PROMISED_S + BUSY_S
    for each, (way, lost) in zip(slow.lost, CASES, strict=True):
        codes = each.codes.copy()
        own_code = codes.pop(lost)
        if (way, lost) == ("interrupt", 0):  # it says so itself, and the others end with its code
            assert (own_code, codes) == (130, [130, 130])
            assert each.line(0) == "rank 0 was interrupted; this run is over"
            continue
        assert own_code == (130 if way == "interrupt" else -signal.SIGKILL), "a stopped one does not stay"
        assert codes == [130 if way == "interrupt" else 1, 1], (way, lost)
        assert each.line(0 if lost else 1) == f"rank {lost} {WAYS[way][1]}; this run is over"
        assert all(RESTORED in out for rank, out in enumerate(each.out) if rank != lost)


def test_a_rank_that_does_not_read(slow: Slow) -> None:
    """Its connection is full, and rank 0 waits to send more; its silence ends the run all the same."""
    each = slow.does_not_read
    assert each.codes == [1, -signal.SIGKILL, 1]
    assert each.line(0) == f"rank 1 {WAYS['stop'][1]}; this run is over"


def test_a_rank_that_does_not_end(slow: Slow) -> None:
    """Told that the run is over, or having said so, it waits for something else."""
    assert slow.hangs.codes == [3, 3, 3]
    assert slow.hangs.err == [""] * 3
    assert slow.ends_and_hangs.codes == [1, 0, 1]
    assert slow.ends_and_hangs.line(0) == "rank 1 ended with exit code 0; this run is over"


def test_all_are_stopped_and_go_on(slow: Slow) -> None:
    """A machine that slept: nobody could be heard in that time, so nobody is blamed."""
    each = slow.sleeps
    assert each.codes == [0, 0, 0]
    assert each.err == [""] * 3
    assert each.out[1] == "{'still': 'here'}\ntold 0\n"


def test_the_lock_of_python_is_held(slow: Slow) -> None:
    """No thread of the guard runs: the process beside it beats for it, and ends it where a rank is lost."""
    killed, stopped, interrupted, late = slow.held
    assert killed.codes == stopped.codes == [-signal.SIGKILL] * 3
    assert killed.line(0) == f"rank 1 {WAYS['kill'][1]}; this run is over"
    seen = (WAYS["stop"][1], WAYS["kill"][1])  # the latter where rank 2 was so much faster that it has killed it
    assert stopped.line(1) in [f"rank 0 {how}; this run is over" for how in seen]
    assert interrupted.codes == [-signal.SIGKILL, -signal.SIGKILL, -signal.SIGINT]
    assert interrupted.line(0) == f"rank 2 {WAYS['kill'][1]}; this run is over"
    assert late.codes == [-signal.SIGKILL] * 3
    assert re.fullmatch(r"rank [012]: joining the ring took longer than 1.5 s; this run is over", late.line(0))


def test_a_held_lock_alone_ends_nothing(slow: Slow) -> None:
    """For longer than a rank may be silent."""
    assert slow.goes_on.codes == [0, 0, 0]
    assert slow.goes_on.err == [""] * 3
    assert slow.goes_on.out[0] == "[None, None, None]\n"


TOO_LATE = "with guard.within(0.3, 'joining the ring'): blocked()"
ENDS = [
    ("if guard.rank == 2: guard.end(1, 'a.safetensors is cut'); sys.exit(1)", 0, "rank 2: a.safetensors is cut"),
    ("if guard.rank == 2: sys.exit(1)", 0, "rank 2 is gone: its connection was closed"),
    ("if guard.rank == 0: sys.exit(1)", 1, "rank 0 is gone: its connection was closed"),
    (f"if guard.rank == 2:\n {TOO_LATE}", 0, "rank 2: joining the ring took longer than 0.3 s"),
    (f"if guard.rank == 0:\n {TOO_LATE}", 0, "rank 0: joining the ring took longer than 0.3 s"),
    ("if guard.rank == 1: guard._peers[0].connection.send(b'GET')", 0, "rank 1 sent no message of kvant's"),
]  # fmt: skip


def test_a_rank_that_ends() -> None:
    """By its own words, without any, by a deadline, by nonsense."""
    waits = "\nwith guard.within(20, 'a message'): guard.gather(1)\nblocked() if guard.rank != 1 else guard.receive()"
    with runs(3, *(body + waits for body, _, _ in ENDS)) as all_runs:
        for each, (body, teller, line) in zip(all_runs, ENDS, strict=True):
            assert each.finish() == [1, 1, 1], body
            assert each.line(teller) == f"{line}; this run is over"


def test_differences() -> None:
    facts = {"digest": "ab", "shape": [1, 2], "on": True}
    assert first_difference(facts, {"on": True, "shape": [1, 2], "digest": "ab"}) == ""
    assert first_difference(facts, {**facts, "digest": "cd"}) == "digest is cd; rank 0 has ab"
    assert first_difference(facts, {**facts, "on": 1}) == "on is 1; rank 0 has true"
    assert first_difference(facts, {**facts, "more": None}) == "more is null; rank 0 has missing"
    assert first_difference({**facts, "more": "x"}, facts) == "more is missing; rank 0 has x"


def test_versions_differ() -> None:
    with tempfile.TemporaryDirectory() as folder:
        body = script("blocked()")
        body[-1] = body[-1].replace('{"version": 1}', '{"version": "0.%d" % (place.rank // 2), "other": [1]}')
        started = start_ranks(3, body, Path(folder))
        done = [(*process.communicate(timeout=LATE_S), process.returncode) for process in started]
    assert done[0] == ("", "kvant: error: rank 2: version is 0.1; rank 0 has 0.0\n", 1)
    assert done[1:] == [("told 1\n", "", 1)] * 2


def test_a_rank_that_does_not_come() -> None:
    """Rank 1 is here, rank 2 is not."""
    with tempfile.TemporaryDirectory() as folder:
        body = script("blocked()")
        body[-1] = body[-1].replace('{"version": 1}', '{"version": 1}, deadline_s=2.0')
        environments = rank_environments(3, Path(folder))[:2]
        base = {**os.environ, "PYTHONPATH": str(SRC)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [subprocess.Popen(body, env={**base, **own}, **pipes) for own in environments]
        done = [(*process.communicate(timeout=LATE_S), process.returncode) for process in started]
    where = environments[0]["KVANT_GUARD"]
    assert done[0] == ("", f"kvant: error: rank 2 of 3 did not come within 2 s; expected at {where}\n", 1)
    assert done[1] == ("told 1\n", "", 1)


LAUNCHER = """
import os, subprocess, sys, time
for environment in ENVIRONMENTS:
    subprocess.Popen(COMMAND, env={**os.environ, **environment})
time.sleep(60)
"""


def test_the_launcher_is_gone() -> None:
    """Its ranks do not stay: the pipe that they write to is closed."""
    with tempfile.TemporaryDirectory() as folder:
        source = LAUNCHER.replace("ENVIRONMENTS", repr(rank_environments(2, Path(folder))))
        source = source.replace("COMMAND", repr(script("ready()\nblocked()")))
        launcher = subprocess.Popen(
            [sys.executable, "-c", source],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert launcher.stdout is not None
            assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        finally:
            launcher.kill()
        _, err = launcher.communicate(timeout=PROMISED_S + BUSY_S)  # when the last that holds the pipes has ended
    assert re.fullmatch(r"kvant: error: rank [01]: its launcher is gone; this run is over\n", err), err


INTERRUPTED_TELLS = """
def alarm(*_):
    raise KeyboardInterrupt
if guard.rank == 0:
    signal.signal(signal.SIGALRM, alarm)
    cut = 0
    began = time.perf_counter()
    guard.tell({"i": 0, "text": "x" * 3_000_000})
    whole = time.perf_counter() - began
    for i in range(1, 60):
        try:
            signal.setitimer(signal.ITIMER_REAL, whole * 2 * i / 60)
            guard.tell({"i": i, "text": "x" * 3_000_000})
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            cut += 1
    print(cut, flush=True)
    guard.tell({"i": -1})
    guard.end(0)
    sys.exit(0)
seen = []
while (message := guard.receive())["i"] >= 0:
    assert len(message["text"]) == 3_000_000
    seen.append(message["i"])
assert seen == sorted(set(seen))
print(seen, flush=True)
guard.receive()
"""


def test_an_interrupted_message_arrives_whole() -> None:
    """Or not at all, and the same to every rank."""
    each, codes = run(3, INTERRUPTED_TELLS)
    assert codes == [0, 0, 0], each.err
    assert int(each.out[0]) >= 5, "hardly anything was interrupted"
    assert each.out[1] == each.out[2]
    assert len(each.out[1].splitlines()[0].split(",")) >= 5


def test_a_terminal() -> None:
    """Standard error is one: the cursor is shown again, the line has a line of its own."""
    ours, theirs = os.openpty()
    with tempfile.TemporaryDirectory() as folder:
        environments = rank_environments(2, Path(folder))
        base = {**os.environ, "PYTHONPATH": str(SRC)}
        first = subprocess.Popen(
            script("ready()\nblocked()"), env={**base, **environments[0]}, stdout=-1, stderr=theirs
        )
        other = subprocess.Popen(script("sys.exit(0)"), env={**base, **environments[1]}, stdout=-1, stderr=-1)
        os.close(theirs)
        assert first.wait(LATE_S) == 1
        assert other.communicate(timeout=LATE_S) == (b"", b"")
        first.communicate()
        said = os.read(ours, 10_000).decode()
        os.close(ours)
    assert said == "\x1b[?25h\r\nkvant: error: rank 1 is gone: its connection was closed; this run is over\r\n"
