"""Several requests at once: their lines, their figures, and that every engine gives the tokens it should."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.recordings import ENGINE, HEADER

from kvant.engine.load import find_model
from kvant.errors import KvantError
from kvant.tools.bench.adapters import MLXLM, Kvant
from kvant.tools.bench.engines import EngineSpec, stream_specs
from kvant.tools.bench.recording import Engine, Header, Recorder, Recording, Streams, read_recording
from kvant.tools.bench.streams import plot_streams, same_tokens, summarize_streams

PROMPTS = [[5, 77, 1000, 3, 12], [9] * 20, [400, 2, 30]]
TOKENS = 6


def line(engine: str, run: int, arrivals: list[list[float]], **fields: Any) -> Streams:
    ids = tuple(tuple(range(len(times))) for times in arrivals)
    given = {"prompt_tokens": (8,) * len(arrivals), "token_ids": ids, "cpu_ms": 10.0, "peak_memory_bytes": 7}
    return Streams(engine=engine, run=run, arrivals_ms=arrivals, **given | fields)  # type: ignore[arg-type]


def recorded(path: Path | None = None) -> Recording:
    """Two rounds of two streams of three tokens, the second twice as slow; 1 of 4 streams differs one by one."""
    with Recorder(path) as recorder:
        recorder.write(Header(**HEADER | {"baseline": "other"}))
        for label in ("kvant", "kvant, one by one", "other"):
            recorder.write(Engine(engine=label, **ENGINE))
        for run in range(2):
            pace = 1.0 + run
            together = [[40 * pace, 50 * pace, 60 * pace], [20 * pace, 50 * pace, 60 * pace]]
            alone = [[20 * pace, 30 * pace, 45 * pace], [70 * pace, 80 * pace, 120 * pace]]
            recorder.write(line("kvant", run, together, prompt_tokens=(4, 9)))
            ids = ((0, 1, 2), (0, 1, 2 + run))
            recorder.write(line("kvant, one by one", run, alone, cpu_ms=30.0, token_ids=ids))
            recorder.write(line("other", run, [[times[-1] for _ in times] for times in together], cpu_ms=20.0))
    return recorder.recording


def test_every_figure_of_known_times() -> None:
    kvant, alone, other = summarize_streams(recorded())
    assert (kvant.engine, kvant.streams, kvant.runs, kvant.prompt_tokens) == ("kvant", 2, 2, (4, 9))
    assert kvant.tokens_per_s == (6 / 0.060 + 6 / 0.120) / 2  # the median of two
    assert kvant.first_token_ms == 40.0  # of 40, 20, 80, 40
    assert kvant.between_p50_ms == 20.0  # of 10, 10, 30, 10 and twice as much
    assert kvant.between_p99_ms is not None
    assert 55 < kvant.between_p99_ms < 60
    assert kvant.gain is not None
    assert kvant.cpu_gain is not None
    assert kvant.cpu_ratio is not None
    assert kvant.ratio is not None
    assert (kvant.gain.median, kvant.cpu_gain.median) == (2.0, 3.0)
    assert (kvant.ratio.median, kvant.cpu_ratio.median, kvant.step_ratio) == (1.0, 0.5, None)  # other has no gaps
    assert alone.ratio is not None
    assert (alone.gain, alone.ratio.median) == (None, 2.0)
    assert (other.between_p50_ms, other.peak_memory_bytes) == (0.0, 7)


def test_streams_with_the_same_tokens_are_counted() -> None:
    assert same_tokens(recorded()) == "Streams with the same tokens together and one by one: kvant in 3 of 4."


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = recorded(tmp_path / "x.jsonl")
    read = read_recording(tmp_path / "x.jsonl")
    assert read.streams == written.streams
    assert summarize_streams(read) == summarize_streams(written)
    with pytest.raises(ValueError, match="a second run 0 of 'kvant' with 2 streams"):
        read.add(read.streams[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrivals_ms": [[1.0, 0.5], [1.0, 2.0]]}, "that do not decrease"),
        ({"arrivals_ms": [[1.0, float("nan")], [1.0, 2.0]]}, "expected finite numbers"),
        ({"arrivals_ms": [[1.0, 2.0], []]}, "expected a list for each request"),
        ({"arrivals_ms": [[1.0, 2.0]]}, r"2 requests, \[2\] times"),
        ({"token_ids": [[1], [1, 2]]}, r"\[2, 2\] times, \[1, 2\] ids"),
        ({"prompt_tokens": [8]}, "1 requests"),
        ({"cpu_ms": 0.0}, "cpu_ms is 0.0"),
    ],
)
def test_a_line_that_cannot_be(change: dict[str, Any], message: str) -> None:
    sound = {"prompt_tokens": [8, 8], "arrivals_ms": [[1.0, 2.0]] * 2, "token_ids": [[1, 2]] * 2, "cpu_ms": 1.0}
    Streams(engine="kvant", run=0, peak_memory_bytes=1, **sound)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Streams(engine="kvant", run=0, peak_memory_bytes=1, **sound | change)  # type: ignore[arg-type]


def test_a_plot_is_drawn_of_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_streams(recorded(), tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert "tokens a second, all streams" in text
    assert "kvant, one by one" in text
    with pytest.raises(KvantError, match="nothing to draw"):
        plot_streams(Recording(Header(**HEADER)), tmp_path / "y.svg")


def test_the_engines_of_streams() -> None:
    found = stream_specs(["kvant", "mlx-lm:float32"], [8, 0], None, 64)
    labels = ["kvant 8-bit", "kvant full", "kvant 8-bit, one by one", "kvant full, one by one", "mlx-lm float32"]
    assert [spec.label for spec in found] == labels
    found = stream_specs(["kvant:fused"], [8], None, 64)
    assert [spec.label for spec in found] == ["kvant 8-bit fused", "kvant 8-bit fused, one by one"]


def test_kernels_are_the_pools(fused_calls: list[Any]) -> None:
    """On a GPU."""
    tokens = []
    for kernels, is_fused in (("unfused", False), ("fused", True)):
        engine = Kvant(EngineSpec("kvant", 0, kernels=kernels), find_model("pocket"), 512)
        tokens.append(list(engine.streams(PROMPTS, TOKENS)))
        assert bool(fused_calls) == is_fused
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("make", "spec"),
    [(Kvant, EngineSpec("kvant", 0)), (MLXLM, EngineSpec("mlx-lm", 0, dtype="float32"))],
    ids=["kvant", "mlx-lm"],
)
def test_together_each_stream_has_the_tokens_it_has_alone(make: Callable[..., Kvant | MLXLM], spec: EngineSpec) -> None:
    """mlx-lm's own loop says what the tokens are."""
    folder = find_model("pocket")
    alone = MLXLM(EngineSpec("mlx-lm", 0, dtype="float32"), folder, 512)
    tokens = list(make(spec, folder, 512).streams(PROMPTS, TOKENS))
    for number, prompt in enumerate(PROMPTS):
        expected = alone.tokens(prompt, TOKENS)
        assert [token for stream, token in tokens if stream == number] == [next(expected) for _ in range(TOKENS)]
        expected.close()
    order = [stream for stream, _ in tokens]
    assert order != sorted(order)


def test_one_by_one_is_one_after_another() -> None:
    folder = find_model("pocket")
    together = list(Kvant(EngineSpec("kvant", 0), folder, 512).streams(PROMPTS, TOKENS))
    alone = list(Kvant(EngineSpec("kvant", 0, one_by_one=True), folder, 512).streams(PROMPTS, TOKENS))
    assert [stream for stream, _ in alone] == [0] * TOKENS + [1] * TOKENS + [2] * TOKENS
    assert sorted(alone) == sorted(together)
