"""A lost rank ends the run: one line that names it, an exit code from every survivor, and no process
stays.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.ranks import SRC, rank_environments, start_ranks

from kvant.ranks.guard import BEAT_S, ENDED_S, SILENCE_S, first_difference

SILENT_S = 1.5  # here, for a rank to be lost
SHORT = f"silence_s = {SILENT_S}"
LATE_S = 60.0  # a run that does not end
BUSY_S = 6.0  # more, if other tests run beside it
GONE, SILENT = (
    "is gone: its connection was closed",
    f"has been silent for {SILENT_S:g} s: it is stopped or asleep",
)

# The package's first lines load MLX, which a guard does not need: without them a process starts in half the
# time. All processes have started when they join: a busy start is no silence.
BEGIN = f"""
import ctypes, os, sys, threading, time, types
sys.modules["kvant"] = kvant = types.ModuleType("kvant")
kvant.__path__ = ["{SRC / "kvant"}"]
from kvant.errors import RanksError
from kvant.ranks.environment import find_place
from kvant.ranks.guard import Ended, Guard

def blocked():
    "As in a collective: the main thread waits in C for what never comes."
    os.read(os.pipe()[0], 1)

def hold(seconds):
    "As MLX while it joins its group: no thread of Python runs."
    ctypes.PyDLL(None).sleep(seconds)

place = find_place(os.environ)
os.write(1, b"here\\n")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
facts, launcher, deadline_s, silence_s = {{"version": 1}}, None, 30, 20
guard = None
PREPARE
try:
    guard = Guard.join(place, facts, deadline_s=deadline_s, silence_s=silence_s, launcher=launcher)
    rank = guard.rank
"""
END = """
except Ended as ended:
    print("told", ended.code, flush=True)
    if guard is not None:
        guard.end(ended.code)
    sys.exit(ended.code)
except RanksError as error:
    print(f"kvant: error: {error}", file=sys.stderr)
    sys.exit(1)
"""
READY = "guard.agree({})\nguard.begin()\nos.write(1, b'ready\\n')\n"


def script(begin: Path, body: str, prepare: str = "") -> list[str]:
    """The command of a rank that joins when a file is there, and then does this."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return [sys.executable, "-W", "error", "-c", BEGIN.replace("PREPARE", prepare) + lines + END, str(begin)]


TALK = """
assert guard.gather({"rank": rank, "text": "ä"}) == [{"rank": r, "text": "ä"} for r in range(3) if not rank]
guard.agree({"digest": "abc", "shape": (1, 2), "none": None})
big = "x" * 3_000_000
if rank == 0:
    guard.tell({"big": big})
    assert guard.gather(None) == [None, big, big]
    def many(thread):
        for i in range(200):
            guard.tell({"thread": thread, "i": i})
    threads = [threading.Thread(target=many, args=(each,)) for each in range(3)]
    for each in threads: each.start()
    for each in threads: each.join()
    guard.end(3)
    sys.exit(3)
assert guard.receive() == {"big": big}
assert guard.gather(big) == []
order = [guard.receive() for _ in range(600)]
assert all([m["i"] for m in order if m["thread"] == thread] == list(range(200)) for thread in range(3))
print(sum(place * m["thread"] for place, m in enumerate(order)), flush=True)
blocked() if rank == 2 else guard.receive()
"""
LOST = f"{READY}\nblocked() if rank == BLOCKED else guard.gather(None) if rank == 0 else guard.receive()"
DOES_NOT_READ = f"""
{READY}
while True:
    guard.tell({{"big": "x" * 1_000_000}}) if rank == 0 else guard.receive()
    time.sleep(0.1)
"""
GOES_ON = f"""
{READY}
if rank:
    print(guard.receive(), flush=True)
    guard.receive()
before = time.monotonic()
while time.monotonic() - before < 1.0:
    before = time.monotonic()
    time.sleep(0.05)
guard.tell({{"still": "here"}})
guard.end(0)
"""
FAILS = f"""
{READY}
guard.agree({{}})  # all have said it
if rank == 1:
    guard.end(1, "no memory")
    sys.exit(1)
blocked()
"""
HELD = f"""
{READY}
with guard.within(3, "joining the ring"):
    hold(30)
"""
JOINS = """
guard.agree({})
with guard.within(30, "joining the ring"):
    hold(3 * rank)
    guard.agree({})
guard.begin()
guard.agree({})
guard.end(0) if rank == 0 else guard.receive()
"""


@dataclass
class Case:
    """A run of as many ranks as there are codes."""

    body: str
    codes: list[int]
    line: str = ""  # how the only one on standard error begins, by the first rank that is not lost
    sent: tuple[signal.Signals, int] | None = None  # and the rank that gets it
    prepare: str = ""  # what is done before it joins
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    said: str = ""  # on standard error

    def start(self, stack: ExitStack, folder: Path) -> None:
        self.processes = start_ranks(
            [script(folder / "begin", self.body, self.prepare)] * len(self.codes), folder
        )
        for process in self.processes:
            stack.callback(process.communicate)
            stack.callback(process.kill)

    def wait_for(self, word: str) -> None:
        for process in self.processes:
            assert process.stdout.readline() == f"{word}\n", process.communicate()[1]

    def finish(self) -> None:
        """Read what they say until they have ended; a rank that is stopped stays so."""
        stopped = self.sent[1] if self.sent is not None and self.sent[0] == signal.SIGSTOP else None
        for rank in sorted(range(len(self.codes)), key=lambda rank: rank == stopped):
            if rank == stopped:
                assert self.processes[rank].poll() is None
                self.processes[rank].kill()
            self.said += self.processes[rank].communicate(timeout=LATE_S)[1]


ABSENT = "if place.rank == 2: sys.exit()\ndeadline_s = 5"


def lost(sign: signal.Signals, rank: int) -> Case:
    codes = [-signal.SIGKILL if rank == each else 1 for each in range(3)]
    how = SILENT if sign == signal.SIGSTOP else GONE
    return Case(
        LOST.replace("BLOCKED", str((rank + 1) % 3)), codes, f"rank {rank} {how}", (sign, rank), SHORT
    )


CASES = {
    "talks": Case(TALK, [3, 3, 3]),
    "first is killed": lost(signal.SIGKILL, 0),
    "another is killed": lost(signal.SIGKILL, 2),
    "first is stopped": lost(signal.SIGSTOP, 0),
    "another is stopped": lost(signal.SIGSTOP, 1),
    "does not read": Case(DOES_NOT_READ, [1, -9, 1], f"rank 1 {SILENT}", (signal.SIGSTOP, 1), SHORT),
    "all are stopped": Case(GOES_ON, [0, 0], prepare=SHORT),
    "fails": Case(FAILS, [1, 1], "rank 1: no memory"),
    "python's lock is held": Case(HELD, [-9, -9], "joining the ring took longer than 3 s"),
    "the lock is given back": Case(JOINS, [0, 0], prepare=SHORT),
    "differs": Case(
        "", [1, 1], "rank 1: version is 2; rank 0 has 1", prepare="facts['version'] += place.rank"
    ),
    "does not come": Case("", [1, 1, 0], "rank 2 of 3 did not come within 5 s", prepare=ABSENT),
    "no launcher": Case("blocked()", [1, 1], "rank 0: its launcher is gone", prepare="launcher = 2**22 + 1"),
}


@pytest.fixture(scope="module")
def took(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, float]]:
    """How long each case took from its event; most of their time they wait, so they run side by side."""
    found: dict[str, float] = {}
    folder = tmp_path_factory.mktemp("ranks")
    with ExitStack() as stack:
        for each in CASES.values():
            each.start(stack, folder)
        for each in CASES.values():
            each.wait_for("here")
        (folder / "begin").touch()
        for each in CASES.values():
            if READY in each.body:
                each.wait_for("ready")
        began, asleep = time.monotonic(), CASES["all are stopped"]
        for process in asleep.processes:
            process.send_signal(signal.SIGSTOP)
        for each in CASES.values():
            if each.sent is not None:
                each.processes[each.sent[1]].send_signal(each.sent[0])
        for name, each in sorted(CASES.items(), key=lambda item: (item[1] is asleep, item[1].sent is None)):
            if each is asleep:  # for longer than any silence
                time.sleep(max(0.0, began + 2 * SILENT_S - time.monotonic()))
                for process in each.processes:
                    process.send_signal(signal.SIGCONT)
            each.finish()
            found[name] = time.monotonic() - began
        yield found


@pytest.mark.parametrize("name", CASES)
def test_how_a_run_ends(took: dict[str, float], name: str) -> None:
    case = CASES[name]
    assert [process.returncode for process in case.processes] == case.codes, case.said
    assert case.said.startswith(f"kvant: error: {case.line}" if case.line else "")
    assert case.said.count("\n") == bool(case.line)
    if case.sent is not None:
        assert took[name] < SILENT_S + 2 * BEAT_S + BUSY_S


def test_what_is_promised() -> None:
    assert SILENCE_S + 4 * BEAT_S < 5.0
    assert ENDED_S < 5.0


@pytest.mark.parametrize("said", [b"\xff", b"[" * 100_000, b"{}", b'["end", 3]', b'["end", ["x", 0]]'])
def test_a_rank_that_is_none(said: bytes, tmp_path: Path) -> None:
    """Strangers do not join. Who says hello as a rank and then something else ends the run."""
    own = rank_environments(2, tmp_path)[0]
    port = int(json.loads(Path(own["MLX_HOSTFILE"]).read_text())[0][0].partition(":")[2]) - 1
    strangers = [b"GET / HTTP/1.1\r\n\r\n", b'["kvant", 1, 3]\n', b'["kvant", 0, 2]\n']
    pipe = subprocess.PIPE
    (tmp_path / "begin").touch()
    command = script(tmp_path / "begin", "blocked()")
    with (
        subprocess.Popen(command, env=os.environ | own, stdout=pipe, stderr=pipe, text=True) as first,
        ExitStack() as held,
    ):
        for text in [*strangers, b'["kvant", 1, 2]\n' + said + b"\n"]:
            while True:
                try:
                    connection = socket.create_connection(("127.0.0.1", port))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            held.enter_context(connection).sendall(text)
        assert first.stderr.read() == "kvant: error: rank 1 sent no message of kvant's; this run is over\n"
        assert first.wait() == 1


def test_the_first_difference_is_named() -> None:
    assert first_difference({"a": [1, 2], "b": None}, {"b": None, "a": (1, 2)}) == ""
    assert first_difference({"a": 1}, {"b": "x", "a": 2}) == "a is 2; rank 0 has 1"
    assert first_difference({"a": 1}, {"a": 1, "b": "x"}) == "b is x; rank 0 has missing"
