"""A rank that is killed, stopped or interrupted ends the command on all others, with one line that names it."""

import signal
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import pytest
from support.counts import count
from support.ranks import start_ranks

RANKS = 3
# The command, with a model that takes its time to load.
SLOWLY = """
import time
from kvant.models import checkpoint
read = checkpoint._Builder._block
def block(*arguments, **options):
    print("loading", flush=True)
    time.sleep(4)
    return read(*arguments, **options)
checkpoint._Builder._block = block
from kvant_command import main
main()
"""
KVANT = [sys.executable, "-c", "from kvant_command import main; main()"]
# A step for each of the prompt's tokens; and then an answer that goes on.
LONG = ["generate", "Once upon a time " * 150, "--ignore-eos", "--temp", "0", "--kv-bits", "0"]
PHASES = {
    "loading": [sys.executable, "-c", SLOWLY, "generate", "Hi"],
    "prefill": [*KVANT, *LONG, "--prefill-step-size", "1"],
    "decoding": [*KVANT, *LONG, "--max-tokens", "1000"],
}
SIGNALS = [signal.SIGKILL, signal.SIGSTOP, signal.SIGINT]
CASES = list(product(PHASES, SIGNALS, range(RANKS)))
# Every phase, every signal, every rank, and rank 0 with each signal.
FEW = [
    ("loading", signal.SIGKILL, 1),
    ("loading", signal.SIGINT, 0),
    ("prefill", signal.SIGSTOP, 2),
    ("decoding", signal.SIGKILL, 0),
]
WITHIN_S = 5.0


def _wait_for(phase: str, process: subprocess.Popen[str]) -> None:
    """Until rank 0 is in this phase."""
    if phase == "loading":
        # Rank 0 says so when it begins, and a follower prints nothing.
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
    elif phase == "prefill":
        assert process.stderr is not None
        line = ""
        while not line.startswith("sampling"):
            line = process.stderr.readline()
            assert line, "rank 0 ended before it read the prompt"
        time.sleep(0.5)
    else:
        assert process.stdout is not None
        assert process.stdout.read(20)


@pytest.mark.parametrize(
    ("phase", "number", "lost"), FEW + [case for case in CASES if case not in FEW][: count(0, len(CASES))]
)
def test_one_line_and_no_survivor(phase: str, number: signal.Signals, lost: int, tmp_path: Path) -> None:
    ranks = start_ranks(RANKS, PHASES[phase], tmp_path)
    ended: dict[int, tuple[float, str]] = {}
    try:
        _wait_for(phase, ranks[0])
        readers = []
        for rank, process in enumerate(ranks):
            process.send_signal(number) if rank == lost else None
        began = time.monotonic()

        def read(rank: int, process: subprocess.Popen[str]) -> None:
            _, said = process.communicate(timeout=30)
            ended[rank] = time.monotonic() - began, said

        for rank, process in enumerate(ranks):
            readers.append(threading.Thread(target=read, args=(rank, process)))
            readers[-1].start()
        for reader in readers:
            reader.join()
        lines = [line for _, said in ended.values() for line in said.splitlines() if "rank " in line]
        assert len(lines) == 1, ended
        assert f"rank {lost} " in lines[0]
        assert lines[0].startswith("kvant: error: ")
        survivors = [rank for rank in range(RANKS) if rank != lost]
        assert all(ranks[rank].returncode > 0 for rank in survivors)
        assert all(ended[rank][0] < WITHIN_S for rank in survivors), ended
        expected = {signal.SIGINT: 130}.get(number, -signal.SIGKILL)  # a stopped one does not stay
        assert ranks[lost].returncode == expected
        assert not any("Traceback" in said for _, said in ended.values())
    finally:
        for process in ranks:
            process.kill()
            with process:  # its pipes are closed
                pass
