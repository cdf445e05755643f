"""The benchmark's runner against engines with known delays: order, prompts, figures, and whatever can go wrong."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.recordings import empty

from kvant.errors import BenchError
from kvant.tools.bench import runner
from kvant.tools.bench.engines import EngineSpec
from kvant.tools.bench.figures import summarize
from kvant.tools.bench.prompts import random_prompts
from kvant.tools.bench.recording import Recording
from kvant.tools.bench.runner import Plan, measure

FAKE = Path(__file__).parents[2] / "support" / "fake_engine.py"
FAST, SLOW = EngineSpec("kvant", 8, 32), EngineSpec("mlx-lm", 0)


class Bench:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log, self._monkeypatch = folder / "log", monkeypatch
        self.file = folder / "recording.jsonl"
        self.progress: list[str] = []
        self.recording = empty([], baseline="mlx-lm")
        monkeypatch.setattr(runner, "CLOSE_S", 0.5)

    def measure(
        self,
        contexts: tuple[int, ...] = (8,),
        rounds: int = 2,
        tokens: int = 5,
        streams: tuple[int, ...] = (),
        fails: dict[str, tuple[int, str]] | None = None,
    ) -> None:
        """Run; an engine fails in a run counted from its first, which is a warm-up."""
        script = {"log": str(self._log), "fail": fails or {}}
        self._monkeypatch.setattr(runner, "WORKER_COMMAND", [sys.executable, str(FAKE), json.dumps(script)])
        plan = Plan((FAST, SLOW), Path("model"), 512, contexts, tokens, rounds, random_prompts(7, 300), streams)
        with self.file.open("w") as file:
            self.recording = Recording(self.recording.header, file)
            measure(plan, self.recording, self.progress.append)

    def log(self, kind: str) -> list[list[Any]]:
        lines = map(json.loads, self._log.read_text().splitlines()) if self._log.exists() else ()
        return [line[1:] for line in lines if line[0] == kind]

    def check_no_process_is_left(self) -> None:
        started = self.log("starts")
        assert len(started) == 2
        for _, number, _ in started:
            with pytest.raises(ProcessLookupError):
                os.kill(number, 0)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.delenv("KVANT_BLAS", raising=False)
    return Bench(tmp_path, monkeypatch)


def test_the_order_alternates_after_a_warm_up_and_all_else_is_recorded(bench: Bench) -> None:
    bench.measure(contexts=(8, 4), rounds=3, tokens=5)
    runs = bench.log("runs")
    fast, slow = FAST.label, SLOW.label
    assert [(label, lengths, number) for label, lengths, number, *_ in runs] == [
        *((label, [context], number) for context in (8, 4) for number in (-1, 0) for label in (fast, slow)),
        *((label, [context], 1) for context in (8, 4) for label in (slow, fast)),
        *((label, [context], 2) for context in (8, 4) for label in (fast, slow)),
    ]
    assert {(tokens, together) for *_, tokens, together in runs} == {(5, False)}
    assert {run.run for run in bench.recording.runs} == {0, 1, 2}
    kinds = [json.loads(line)["kind"] for line in bench.file.read_text().splitlines()]
    assert kinds == ["header", "engine", "engine", *["run"] * 12]
    assert [blas for *_, blas in bench.log("starts")] == [None, "mlx"]  # mlx-lm as its users have it
    summaries = {(summary.engine, summary.context): summary for summary in summarize(bench.recording)}
    # The fast one takes 1 ms + 1 us a position + 0.5 ms a round, the slow one 8 ms.
    assert (summaries[fast, 8].runs, summaries[fast, 8].first_token_ms) == (3, 50)
    middles = [summaries[case].latency_p50_ms for case in ((fast, 8), (fast, 4), (slow, 8))]
    assert middles == pytest.approx([1.5105, 1.5065, 8])
    assert summaries[fast, 8].bytes_read_per_token == pytest.approx(2_000_000 + 1000 * 10.5)
    assert bench.progress[0] == "kvant 8-bit: loading"
    assert bench.progress[4].endswith("8 tokens of context, kvant 8-bit: first token 50.0 ms, then 1.01 ms a token")
    bench.check_no_process_is_left()


def test_every_engine_reads_the_same_prompt_and_every_stream_and_round_another(bench: Bench) -> None:
    bench.measure(contexts=(8, 40), rounds=2, streams=(1, 3))
    prompts: dict[tuple[int, int], list[list[list[int]]]] = {}
    for _, lengths, number, given, _, together in bench.log("runs"):
        prompts.setdefault((len(lengths), number), []).append(given)
        assert together
        assert lengths == [8, 40, 8][: len(lengths)]
    assert len(prompts) == 6
    assert all(first == second for first, second in prompts.values())
    drawn = [tuple(prompt) for first, _ in prompts.values() for prompt in first]
    assert len(set(drawn)) == len(drawn) == 3 * (1 + 3)
    assert all(0 <= token < 300 for prompt in drawn for token in prompt)
    assert random_prompts(8, 300)(40, 1) != random_prompts(7, 300)(40, 1) == random_prompts(7, 300)(40, 1)
    assert "3 streams, mlx-lm: " in bench.progress[-2]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exits", "engine mlx-lm: its process ended with exit code 3: out of memory"),
        ("error", "engine mlx-lm: it cannot"),
    ],
)
def test_an_engine_that_fails(bench: Bench, how: str, message: str) -> None:
    with pytest.raises(BenchError) as failure:
        bench.measure(rounds=3, fails={SLOW.label: (2, how)})  # the warm-up and round 1 went well
    assert str(failure.value) == message
    assert [(run.engine, run.run) for run in bench.recording.runs] == [("kvant 8-bit", 0), ("mlx-lm", 0)]
    assert len(bench.file.read_text().splitlines()) == 1 + 2 + 2
    bench.check_no_process_is_left()


def test_interrupted(bench: Bench) -> None:
    def interrupt() -> None:
        while not bench.log("fails"):
            time.sleep(0.01)
        main = threading.main_thread().ident
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        bench.measure(rounds=3, fails={SLOW.label: (2, "hangs")})
    assert [(run.engine, run.run) for run in bench.recording.runs] == [("kvant 8-bit", 0), ("mlx-lm", 0)]
    bench.check_no_process_is_left()
