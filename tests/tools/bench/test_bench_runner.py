"""The benchmark's runner against engines with known delays: every line, every figure, and whatever can go wrong."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.recordings import HEADER, record

from kvant.errors import BenchError
from kvant.tools.bench.engines import EngineSpec
from kvant.tools.bench.process import Worker
from kvant.tools.bench.prompts import random_prompts
from kvant.tools.bench.recording import Header, Recorder, read_recording
from kvant.tools.bench.runner import Plan, measure
from kvant.tools.bench.summary import Summary, agreement, summarize

FAKE = Path(__file__).parents[2] / "support" / "fake_engine.py"
FAST, SLOW = EngineSpec("kvant", 8, 32), EngineSpec("mlx-lm", 0)
DELAYS: dict[str, dict[str, Any]] = {
    FAST.label: {"first_ms": 50.0, "base_ms": 1.0, "slope_ms": 0.001, "round_ms": 0.5},
    SLOW.label: {"first_ms": 200.0, "base_ms": 8.0, "slope_ms": 0.0, "round_ms": 0.0},
}


class Bench:
    """Two fake engines, what they were asked, and what was recorded."""

    def __init__(self, folder: Path) -> None:
        self.file, self._log = folder / "recording.jsonl", folder / "log"
        self.progress: list[str] = []

    def measure(
        self,
        contexts: tuple[int, ...] = (8,),
        rounds: int = 2,
        tokens: int = 5,
        fails: dict[EngineSpec, tuple[int, str]] | None = None,
    ) -> None:
        """Run; an engine fails in a run counted from its first, which is a warm-up."""
        commands = {}
        for spec in (FAST, SLOW):
            script = DELAYS[spec.label] | {"label": spec.label, "log": str(self._log)}
            script["fail"] = (fails or {}).get(spec, (-1, ""))
            commands[spec.label] = [sys.executable, str(FAKE), json.dumps(script)]
        plan = Plan((FAST, SLOW), Path("model"), 512, contexts, tokens, rounds, random_prompts(7, 300))
        with Recorder(self.file) as recorder:
            recorder.write(Header(**HEADER | {"baseline": SLOW.label}))
            measure(plan, recorder, self.progress.append, commands)

    def log(self, kind: str) -> list[list[Any]]:
        """What the engines noted of one kind."""
        lines = map(json.loads, self._log.read_text().splitlines()) if self._log.exists() else ()
        return [line[1:] for line in lines if line[0] == kind]

    def check_no_process_is_left(self) -> None:
        """Every engine that was started has ended."""
        started = self.log("starts")
        assert started
        for _, number in started:
            with pytest.raises(ProcessLookupError):
                os.kill(number, 0)

    def interrupt_when_an_engine_hangs(self) -> None:
        """Ctrl-C, for the test's own process."""

        def wait() -> None:
            while not self.log("hangs"):
                time.sleep(0.01)
            time.sleep(0.05)  # until it listens
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=wait, daemon=True).start()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Nothing has run yet."""
    return Bench(tmp_path)


def test_every_line(bench: Bench) -> None:
    bench.measure(contexts=(8,), rounds=1, tokens=3)
    header, *lines = map(json.loads, bench.file.read_text().splitlines())
    assert header["kind"] == "header"
    weights = {"dtype": "float32", "weight_bytes": 3_000_000, "weight_bytes_read": 2_000_000}
    tokens = [
        {"kind": "token", "engine": label, "run": 0, "context": 8, "position": position, "latency_ms": latency}
        for label, latencies in (("kvant 8-bit", [50.0, 1.009, 1.010]), ("mlx-lm", [200.0, 8.0, 8.0]))
        for position, latency in zip((8, 9, 10), latencies, strict=True)
    ]
    end = {"kind": "run", "run": 0, "context": 8, "tokens": 3, "token_ids": [0, 1, 2]}
    end |= {"peak_memory_bytes": 5_000_000, "cache_bytes": 64_000, "cache_bytes_per_token": 1000.0}
    assert lines == [
        {"kind": "engine", "engine": "kvant 8-bit", "name": "kvant", "kv_bits": 8, "kv_group_size": 32} | weights,
        {"kind": "engine", "engine": "mlx-lm", "name": "mlx-lm", "kv_bits": 0, "kv_group_size": None} | weights,
        *tokens[:3],
        end | {"engine": "kvant 8-bit"},
        *tokens[3:],
        end | {"engine": "mlx-lm"},
    ]


def test_every_figure(bench: Bench) -> None:
    """Expected values by hand: the fast one takes 1 ms + 1 us a position + 0.5 ms a round, the slow one 8 ms."""
    bench.measure(contexts=(1000, 3000), rounds=3, tokens=5)
    summaries = {(s.engine, s.context): s for s in summarize(read_recording(bench.file))}
    fast, late, slow = summaries["kvant 8-bit", 1000], summaries["kvant 8-bit", 3000], summaries["mlx-lm", 1000]
    assert (fast.runs, fast.interrupted, slow.runs) == (3, 0, 3)
    assert fast.first_token_ms == 50
    assert fast.prefill_tokens_per_s == pytest.approx(20_000)  # 1,000 tokens in 50 ms
    # 12 latencies: 2.001 to 2.004, 2.501 to 2.504, 3.001 to 3.004.
    _check(fast, p50=2.5025, p95=3.00345, p99=3.00389, tokens_per_s=1000 / 2.5025)
    _check(late, p50=4.5025, p95=5.00345, p99=5.00389, tokens_per_s=1000 / 4.5025)
    _check(slow, p50=8, p95=8, p99=8, tokens_per_s=125)
    # 2 ms over 2,000 positions; between rounds pairs differ by multiples of 0.5 ms, in both directions.
    assert fast.slope_us_per_1k == pytest.approx(1000)
    assert late.slope_us_per_1k == fast.slope_us_per_1k
    assert slow.slope_us_per_1k == 0
    assert fast.ratio is not None
    assert (fast.ratio.median, fast.ratio.minimum, fast.ratio.maximum, fast.ratio.count) == pytest.approx(
        (2.5025 / 8, 2.0025 / 8, 3.0025 / 8, 3)
    )
    assert slow.ratio is not None
    assert (slow.ratio.median, slow.ratio.minimum, slow.ratio.maximum) == (1, 1, 1)
    assert fast.first_token_ratio is not None
    assert fast.first_token_ratio.median == 0.25
    assert (fast.peak_memory_bytes, fast.cache_bytes) == (5_000_000, 64_000)
    read = 2_000_000 + 1000 * 1002.5  # the weights, and the cached tokens of positions 1,001 to 1,004
    assert fast.bytes_read_per_token == pytest.approx(read)
    assert fast.achieved_gb_per_s == pytest.approx(read / 2.5025e-3 / 1e9)
    assert fast.copy_bandwidth_share == pytest.approx(read / 2.5025e-3 / 10e9)


def test_agreement() -> None:
    recorder = Recorder()
    recording = record(recorder, lambda *_: 1.0, engines=("fast", "slow", "silent"), rounds=2)
    assert agreement(recording) is None  # no ids are known
    ids = {("fast", 0): (1, 2), ("slow", 0): (1, 2), ("fast", 1): (1, 3), ("slow", 1): (1, 2)}
    recording.runs = [replace(run, tokens=2, token_ids=ids.get((run.engine, run.run))) for run in recording.runs]
    assert agreement(recording) == "Runs with the same tokens as slow: fast in 1 of 2."


def _check(summary: Summary, *, p50: float, p95: float, p99: float, tokens_per_s: float) -> None:
    given = (summary.latency_p50_ms, summary.latency_p95_ms, summary.latency_p99_ms, summary.tokens_per_s)
    assert given == pytest.approx((p50, p95, p99, tokens_per_s))


def test_the_order_alternates_after_a_warm_up_that_is_not_recorded(bench: Bench) -> None:
    bench.measure(contexts=(8, 4), rounds=3, tokens=5)
    runs = bench.log("runs")
    fast, slow = FAST.label, SLOW.label
    assert [(label, context, number) for label, context, number, _, _ in runs] == [
        *((label, context, number) for context in (8, 4) for number in (-1, 0) for label in (fast, slow)),
        *((label, context, 1) for context in (8, 4) for label in (slow, fast)),
        *((label, context, 2) for context in (8, 4) for label in (fast, slow)),
    ]
    assert {tokens for *_, tokens in runs} == {5}
    assert {run.run for run in read_recording(bench.file).runs} == {0, 1, 2}
    assert bench.progress[:4] == [
        "kvant 8-bit: loading",
        "mlx-lm: loading",
        "kvant 8-bit: warming up with 8 tokens of context",
        "mlx-lm: warming up with 8 tokens of context",
    ]
    assert bench.progress[4] == (
        "round 1 of 3, 8 tokens of context, kvant 8-bit: first token 50.0 ms, then 1.01 ms a token"
    )
    bench.check_no_process_is_left()


def test_every_engine_reads_the_same_prompt_and_every_round_another(bench: Bench) -> None:
    bench.measure(contexts=(8, 40), rounds=2)
    prompts: dict[tuple[int, int], list[list[int]]] = {}
    for _, context, number, prompt, _ in bench.log("runs"):
        prompts.setdefault((context, number), []).append(prompt)
    assert len(prompts) == 6
    assert all(first == second and len(first) == context for (context, _), (first, second) in prompts.items())
    assert len({tuple(given[0]) for given in prompts.values()}) == 6
    assert all(0 <= token < 300 for given in prompts.values() for token in given[0])
    assert random_prompts(7, 300)(40, 1).ids == prompts[40, 1][0]
    assert random_prompts(8, 300)(40, 1).ids != prompts[40, 1][0]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exits", "engine mlx-lm: its process ended with exit code 3: out of memory"),
        ("killed", "engine mlx-lm: its process was ended by SIGKILL"),
        ("error", "engine mlx-lm: it cannot"),
        ("garbage", r"engine mlx-lm: answered b'loading shards: 100%\n'; expected one JSON object"),
        ("unasked", "engine mlx-lm: answered {'kind': 'ready'}; expected kind 'done'"),
        ("lacking", "engine mlx-lm: its answer lacks 'latencies_ms'"),
        ("short", "engine mlx-lm: its answer is wrong: 5 tokens, 4 latencies; expected 5"),
        ("negative", "engine mlx-lm: its answer is wrong: latency_ms is -1.0; expected a finite number above 0"),
    ],
)
def test_an_engine_that_fails(bench: Bench, how: str, message: str) -> None:
    with pytest.raises(BenchError) as failure:
        bench.measure(rounds=3, fails={SLOW: (2, how)})  # the warm-up and round 1 went well
    assert str(failure.value) == message
    recording = read_recording(bench.file)
    assert [(run.engine, run.run) for run in recording.runs] == [("kvant 8-bit", 0), ("mlx-lm", 0)]
    bench.check_no_process_is_left()


def test_an_engine_that_fails_while_it_warms_up(bench: Bench) -> None:
    with pytest.raises(BenchError, match="engine kvant 8-bit: it cannot"):
        bench.measure(fails={FAST: (0, "error")})
    assert read_recording(bench.file).tokens == []
    bench.check_no_process_is_left()


def test_an_engine_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No such file"):
        Worker("kvant 8-bit", [str(tmp_path / "nothing")])


@pytest.mark.parametrize(("how", "kept"), [("hangs", 3), ("hangs for good", 0)])
def test_interrupted(bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str, kept: int) -> None:
    monkeypatch.setattr("kvant.tools.bench.process.INTERRUPT_S", 0.5)
    monkeypatch.setattr("kvant.tools.bench.process.CLOSE_S", 0.2)
    bench.interrupt_when_an_engine_hangs()
    with pytest.raises(KeyboardInterrupt):
        bench.measure(rounds=3, tokens=5, fails={SLOW: (2, how)})
    recording = read_recording(bench.file)
    assert [(run.engine, run.run) for run in recording.runs] == [("kvant 8-bit", 0), ("mlx-lm", 0)]
    assert [token.latency_ms for token in recording.tokens[10:]] == [200.0, 8.0, 8.0][:kept]
    assert recording.interrupted() == ([("mlx-lm", 1, 8)] if kept else [])
    bench.check_no_process_is_left()


def test_interrupted_while_it_warms_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.tools.bench.process.CLOSE_S", 0.2)
    bench.interrupt_when_an_engine_hangs()
    with pytest.raises(KeyboardInterrupt):
        bench.measure(fails={FAST: (0, "hangs")})
    assert read_recording(bench.file).tokens == []
    bench.check_no_process_is_left()
