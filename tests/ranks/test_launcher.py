"""Ranks that fail, hang and are interrupted; small scripts are the ranks."""

import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pexpect
import pytest
from support.ranks import SRC

from kvant.errors import RanksError
from kvant.ranks import launcher
from kvant.ranks.launcher import Outcome, RankCommand, run_ranks

SLEEP = "time.sleep(60)"
DIE = "os.kill(os.getpid(), signal.SIGKILL)"
FAIL_LATER = "time.sleep(0.1); sys.exit(1)"  # as a guard does that has noticed a lost rank


def _script(source: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{source}"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRACE_S", "LOST_S", "SHORT_S", "STOPPED_S"):
        monkeypatch.setattr(launcher, name, 0.2)
    monkeypatch.setattr(launcher, "ENDING", tuple((number, 0.2) for number, _ in launcher.ENDING))


STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
STUBBORN = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


@pytest.mark.parametrize(
    ("sources", "code", "problem"),
    [
        (["pass"], 0, ""),
        (["pass", "pass", "pass"], 0, ""),
        (["sys.exit(2)", "pass"], 2, ""),
        (["sys.exit(130)", "sys.exit(130)"], 130, ""),
        (["pass", "sys.exit(3)"], 1, "rank 1 ended with exit code 3"),
        (["pass", "pass", DIE], 1, "rank 2 was killed by signal 9"),
        ([FAIL_LATER, DIE], 1, ""),
        ([DIE, FAIL_LATER], 137, ""),
        ([DIE, "pass"], 137, "rank 0 was killed by signal 9"),
        ([DIE], 137, "rank 0 was killed by signal 9"),
    ],
)
def test_how_a_run_ends(sources: list[str], code: int, problem: str) -> None:
    assert run_ranks([RankCommand(_script(source)) for source in sources]) == Outcome(code, problem)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("sources", "code", "problem"),
    [
        ([SLEEP, "sys.exit(3)"], 1, "rank 1 ended with exit code 3"),
        ([STUBBORN, DIE], 1, "rank 1 was killed by signal 9"),
        (["pass", SLEEP], 1, "rank 1 did not end after the others; this run is over"),
        ([SLEEP, STOP], 1, "rank 1 was stopped; this run is over"),
        ([STOP, SLEEP, SLEEP], 1, "rank 0 was stopped; this run is over"),
        (["sys.exit(130)", STUBBORN], 130, ""),
        (["sys.exit(2)", SLEEP], 2, ""),
    ],
)
def test_what_does_not_end_is_ended(sources: list[str], code: int, problem: str) -> None:
    assert run_ranks([RankCommand(_script(source)) for source in sources]) == Outcome(code, problem)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (255, "rank 1 on mac1: ssh failed (exit code 255)"),
        (127, "rank 1 on mac1: it could not be started there (exit code 127)"),
    ],
)
def test_a_rank_that_ssh_cannot_start(code: int, problem: str) -> None:
    ranks = [RankCommand(_script(SLEEP)), RankCommand(_script(f"sys.exit({code})"), host="mac1")]
    assert run_ranks(ranks) == Outcome(1, problem)
    assert run_ranks([RankCommand(ranks[1].words, host="mac0"), ranks[0]]) == Outcome(
        1, problem.replace("rank 1 on mac1", "rank 0 on mac0")
    )


def test_a_rank_that_was_stopped_for_a_moment_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "STOPPED_S", 0.8)
    goes_on = f"""
parent = os.getpid()
if os.fork() == 0:
    time.sleep(0.2)
    os.kill(parent, signal.SIGCONT)
    os._exit(0)
{STOP}
os.wait()
"""
    assert run_ranks([RankCommand(_script("time.sleep(1.1)")), RankCommand(_script(goes_on))]) == Outcome(0)


def test_a_program_that_is_not_there() -> None:
    begun = time.monotonic()
    with pytest.raises(RanksError, match=r"rank 1 cannot be started: .*/no/such/program"):
        run_ranks([RankCommand(_script(SLEEP)), RankCommand(["/no/such/program"])])
    assert time.monotonic() - begun < 10  # rank 0 was ended


DRIVER = """
import signal, sys
from kvant.ranks import launcher
from kvant.ranks.launcher import RankCommand, run_ranks
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # whatever this test was started by
launcher.GRACE_S = 0.2
launcher.ENDING = tuple((number, 0.2) for number, _ in launcher.ENDING)
ranks = [[sys.executable, "-S", "-c", "import os, signal, sys, time" + chr(10) + source] for source in sys.argv[1:]]
outcome = run_ranks([RankCommand(words) for words in ranks])
print(outcome.problem, end="", file=sys.stderr)
sys.exit(outcome.code)
"""
READY = "print('ready', flush=True)"


def _command(*sources: str) -> list[str]:
    """A launcher of its own, with scripts for ranks."""
    return [sys.executable, "-c", DRIVER, *sources]


@pytest.fixture(autouse=True)
def _source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SRC))


def test_only_rank_0_has_the_streams() -> None:
    source = "sys.stdout.write(f'read {sys.stdin.read()!r}\\n')"
    done = subprocess.run(_command(source, source), input="for rank 0", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read 'for rank 0'\n", "read ''\n")


def _interrupted(*numbers: signal.Signals, ranks: tuple[str, ...]) -> tuple[int, str, float]:
    """Send signals to a launcher that has no terminal: its exit code, all that was written, and how long it took."""
    with subprocess.Popen(
        _command(*ranks), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        begun = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.2)
        written = process.stdout.read()  # to the end: no rank holds it any more
        return process.wait(), written, time.monotonic() - begun


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_passed_on_to_rank_0(number: signal.Signals) -> None:
    first = f"signal.signal(signal.SIGINT, signal.SIG_DFL); {READY}; {SLEEP}"
    code, written, _ = _interrupted(number, ranks=(first, FAIL_LATER))
    assert (code, written) == (128 + number, "")


def test_rank_0_may_take_its_time_to_end_until_a_second_signal() -> None:
    drains = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print('drained', flush=True), sys.exit(0)))"
    code, written, _ = _interrupted(signal.SIGTERM, ranks=(f"{drains}; {READY}; {SLEEP}", "pass"))
    assert (code, written) == (0, "drained\n")
    ignores = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}; {SLEEP}"
    code, written, seconds = _interrupted(signal.SIGTERM, signal.SIGTERM, ranks=(ignores, SLEEP))
    assert (code, written) == (128 + signal.SIGKILL, "")
    assert seconds < 10


@pytest.fixture
def terminal() -> Iterator[Callable[..., pexpect.spawn]]:
    """Launchers on a terminal of their own."""
    started: list[pexpect.spawn] = []

    def start(*sources: str) -> pexpect.spawn:
        command = _command(*sources)
        started.append(pexpect.spawn(command[0], command[1:], timeout=20))
        started[-1].delaybeforesend = None
        return started[-1]

    yield start
    for each in started:
        each.close(force=True)


def test_keys_go_to_rank_0_alone(terminal: Callable[..., pexpect.spawn]) -> None:
    first = f"""
seen = []
signal.signal(signal.SIGINT, lambda *_: (seen.append(1), print("interrupted", len(seen), flush=True)))
{READY}
while len(seen) < 2:
    time.sleep(0.02)
print(input(), sys.stdin.isatty(), sys.stdout.isatty())
sys.exit(7)
"""
    child = terminal(first, f"signal.signal(signal.SIGINT, lambda *_: os._exit(9)); {SLEEP}")
    child.expect("ready")
    child.send("\x03")
    child.expect("interrupted 1")
    child.send("\x1a")  # Ctrl-Z stops neither
    time.sleep(0.2)
    child.send("\x03")
    child.expect("interrupted 2")
    child.send("a line\r")
    child.expect("a line True True")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_a_terminal_after_a_rank_was_killed(terminal: Callable[..., pexpect.spawn], rank: int) -> None:
    """Rank 0 leaves it without echo and lines, and its input without waiting."""
    take = "import tty; tty.setraw(0); os.set_blocking(0, False)"
    noticed = "time.sleep(0.3); print('rank 1 is gone', file=sys.stderr); os._exit(1)"
    waiting = SLEEP if rank == 0 else noticed
    first = f"{take}; print('ready', os.getpid(), flush=True); {waiting}"
    child = terminal(first, FAIL_LATER.replace("0.1", "0.6") if rank == 0 else f"time.sleep(0.5); {DIE}")
    before = termios.tcgetattr(child.child_fd)
    child.expect(r"ready (\d+)\s")
    assert termios.tcgetattr(child.child_fd) != before
    if rank == 0:
        os.kill(int(child.match[1]), signal.SIGKILL)
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == (128 + signal.SIGKILL if rank == 0 else 1)
    assert termios.tcgetattr(child.child_fd) == before
    assert ("\x1b[?25h" in child.before.decode()) == (rank == 0)
