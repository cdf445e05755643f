"""The benchmark's runner against engines with known delays: order, prompts, figures, and a run that fails."""

import json
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
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

FAST, SLOW = EngineSpec("kvant", 8, 32), EngineSpec("mlx-lm", 0)
# Of a run's first token, of the others at position p in round r: base + slope * p + by_round * r.
DELAYS = {FAST.label: (50.0, 1.0, 0.001, 0.5), SLOW.label: (200.0, 8.0, 0.0, 0.0)}


class Bench:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "recording.jsonl"
        self.progress: list[str] = []
        self.recording = empty([], baseline="mlx-lm")
        self.started: list[tuple[str, Mapping[str, str]]] = []
        self.ended: list[str] = []
        # label, prompt tokens, round, command
        self.runs: list[tuple[str, list[int], int, dict[str, Any]]] = []
        self.failure: BaseException | None = None  # of the slow one, in round 1
        monkeypatch.setattr(runner, "Worker", partial(KnownEngine, self))

    def measure(
        self,
        contexts: tuple[int, ...] = (8,),
        rounds: int = 2,
        tokens: int = 5,
        streams: tuple[int, ...] = (),
    ) -> None:
        plan = Plan(
            (FAST, SLOW), Path("model"), 512, contexts, tokens, rounds, random_prompts(7, 300), streams
        )
        with self.file.open("w") as file:
            self.recording = Recording(self.recording.header, file)
            measure(plan, self.recording, self.progress.append)


class KnownEngine:
    """In place of a worker's process."""

    def __init__(self, bench: Bench, label: str, environment: Mapping[str, str]) -> None:
        self._bench, self._label = bench, label
        self._runs = Counter[tuple[int, ...]]()
        bench.started.append((label, environment))

    def __enter__(self) -> "KnownEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self._bench.ended.append(self._label)

    def ask(self, **command: Any) -> dict[str, Any]:
        if command["command"] == "load":
            return {"dtype": "float32", "weight_bytes": 3_000_000, "weight_bytes_read": 2_000_000}
        lengths = [len(prompt) for prompt in command["prompts"]]
        number = self._runs[tuple(lengths)] - 1  # of the warm-up -1
        self._runs[tuple(lengths)] += 1
        self._bench.runs.append((self._label, lengths, number, command))
        if self._bench.failure and (self._label, number) == (SLOW.label, 1):
            raise self._bench.failure
        first, base, slope, by_round = DELAYS[self._label]
        latencies = [
            [
                base + slope * position + by_round * number
                for position in range(n + 1, n + command["max_tokens"])
            ]
            for n in lengths
        ]
        figures = {"peak_memory_bytes": 5_000_000, "cache_bytes": 64_000, "cache_bytes_per_token": 1000.0}
        return {
            "arrivals_ms": [[*accumulate(each, initial=first)] for each in latencies],
            "cpu_ms": 1.0,
            **figures,
        }


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_the_order_alternates_after_a_warm_up_and_all_else_is_recorded(bench: Bench) -> None:
    bench.measure(contexts=(8, 4), rounds=3, tokens=5)
    fast, slow = FAST.label, SLOW.label
    assert [(label, lengths, number) for label, lengths, number, _ in bench.runs] == [
        *((label, [context], number) for context in (8, 4) for number in (-1, 0) for label in (fast, slow)),
        *((label, [context], 1) for context in (8, 4) for label in (slow, fast)),
        *((label, [context], 2) for context in (8, 4) for label in (fast, slow)),
    ]
    assert {(command["max_tokens"], command["together"]) for *_, command in bench.runs} == {(5, False)}
    assert {run.run for run in bench.recording.runs} == {0, 1, 2}
    kinds = [json.loads(line)["kind"] for line in bench.file.read_text().splitlines()]
    assert kinds == ["header", "engine", "engine", *["run"] * 12]
    assert bench.started == [(fast, {}), (slow, {"KVANT_BLAS": "mlx"})]  # mlx-lm as its users have it
    summaries = {(summary.engine, summary.context): summary for summary in summarize(bench.recording)}
    # The fast one takes 1 ms + 1 us a position + 0.5 ms a round, the slow one 8 ms.
    assert (summaries[fast, 8].runs, summaries[fast, 8].first_token_ms) == (3, 50)
    middles = [summaries[case].latency_p50_ms for case in ((fast, 8), (fast, 4), (slow, 8))]
    assert middles == pytest.approx([1.5105, 1.5065, 8])
    assert summaries[fast, 8].bytes_read_per_token == pytest.approx(2_000_000 + 1000 * 10.5)
    assert bench.progress[0] == "kvant 8-bit: loading"
    assert bench.progress[4].endswith(
        "8 tokens of context, kvant 8-bit: first token 50.0 ms, then 1.01 ms a token"
    )
    assert sorted(bench.ended) == [fast, slow]


def test_every_engine_reads_the_same_prompt_and_every_stream_and_round_another(bench: Bench) -> None:
    bench.measure(contexts=(8, 40), rounds=2, streams=(1, 3))
    prompts: dict[tuple[int, int], list[Any]] = {}
    for _, lengths, number, command in bench.runs:
        prompts.setdefault((len(lengths), number), []).append(command["prompts"])
        assert command["together"]
        assert lengths == [8, 40, 8][: len(lengths)]
    assert len(prompts) == 6
    assert all(first == second for first, second in prompts.values())
    drawn = [tuple(prompt) for first, _ in prompts.values() for prompt in first]
    assert len(set(drawn)) == len(drawn) == 3 * (1 + 3)
    assert all(0 <= token < 300 for prompt in drawn for token in prompt)
    assert random_prompts(8, 300)(40, 1) != random_prompts(7, 300)(40, 1) == random_prompts(7, 300)(40, 1)
    assert "3 streams, mlx-lm: " in bench.progress[-2]


@pytest.mark.parametrize("failure", [BenchError("it cannot"), KeyboardInterrupt()])
def test_what_was_recorded_before_a_failure_stays(bench: Bench, failure: BaseException) -> None:
    bench.failure = failure
    with pytest.raises(type(failure)):
        bench.measure(rounds=3)
    assert [(run.engine, run.run) for run in bench.recording.runs] == [("kvant 8-bit", 0), ("mlx-lm", 0)]
    assert len(bench.file.read_text().splitlines()) == 1 + 2 + 2
    assert sorted(bench.ended) == ["kvant 8-bit", "mlx-lm"]
