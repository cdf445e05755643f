"""Every figure of a report, against values computed by hand or by numpy from latencies that are known."""

import io
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from rich.console import Console, RenderableType
from support.recordings import ENGINE, HEADER, RUN, record, write_tokens

from kvant.tools.bench.recording import Drafted, Engine, Header, Recorder, Recording, Run
from kvant.tools.bench.report import compare, describe, table
from kvant.tools.bench.summary import Summary, summarize
from kvant.tools.statistics import Spread


def _printed(what: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(what)
    return out.getvalue()


def _one_run(latencies_ms: list[float], context: int = 4, **run: object) -> Recording:
    """A recording of a single run of one engine."""
    with Recorder() as recorder:
        recorder.write(Header(**HEADER))
        recorder.write(Engine(engine="slow", **ENGINE))
        write_tokens(recorder, "slow", 0, context, latencies_ms)
        recorder.write(Run(engine="slow", run=0, context=context, tokens=len(latencies_ms), **RUN | run))  # type: ignore[arg-type]
    return recorder.recording


def _drifting(label: str, run: int, context: int, position: int) -> float:
    """Latency a + b * position with slow tokens, in rounds each slower than the last; a first token of its own."""
    pace = {"fast": 0.6, "slow": 1.0}[label] * 2**run
    if position == context:
        return 0.5 * context * pace
    slow = 40.0 if (position + run) % 10 == 0 else 0.0
    return (2 + 0.001 * position + slow) * pace


def test_every_figure_of_known_delays() -> None:
    contexts, tokens, rounds = (128, 1024), 101, 3
    with Recorder() as recorder:
        recording = record(recorder, _drifting, contexts=contexts, tokens=tokens, rounds=rounds)
    summaries = summarize(recording)
    assert [(s.context, s.engine) for s in summaries] == [(c, e) for c in contexts for e in ("fast", "slow")]
    for s in summaries:
        later = np.array(
            [
                [_drifting(s.engine, run, s.context, p) for p in range(s.context + 1, s.context + tokens)]
                for run in range(rounds)
            ]
        )
        p50, p95, p99 = np.percentile(later, [50, 95, 99])
        first = np.array([_drifting(s.engine, run, s.context, s.context) for run in range(rounds)])
        # The token at position p attends to p cached ones, of 2000 bytes each; the weights are 10 MB.
        read = 10e6 + 2000 * np.mean(np.arange(s.context + 1, s.context + tokens))
        assert (s.runs, s.interrupted) == (3, 0)
        assert s.first_token_ms == pytest.approx(first[1])
        assert s.prefill_tokens_per_s == pytest.approx(s.context / first[1] * 1e3)
        assert [s.latency_p50_ms, s.latency_p95_ms, s.latency_p99_ms] == pytest.approx([p50, p95, p99])
        assert s.tokens_per_s == pytest.approx(np.median(1e3 / later.mean(axis=1)))
        assert (s.peak_memory_bytes, s.cache_bytes) == (30_000_000, 4_000_000)
        assert s.bytes_read_per_token == pytest.approx(read)
        assert s.achieved_gb_per_s == pytest.approx(read / (p50 / 1e3) / 1e9)
        assert s.copy_bandwidth_share == pytest.approx(read / (p50 / 1e3) / 10e9)
        for ratio in (s.ratio, s.first_token_ratio):
            assert ratio is not None
            expected = 0.6 if s.engine == "fast" else 1.0
            assert [ratio.median, ratio.minimum, ratio.maximum] == pytest.approx([expected] * 3)
            assert ratio.count == rounds


@pytest.mark.parametrize("contexts", [(128,), (128, 1024, 4096)])
def test_the_slope_of_known_delays(contexts: tuple[int, ...]) -> None:
    """Within one percent, with one token in ten ten times as slow."""
    with Recorder() as recorder:
        recording = record(
            recorder,
            lambda label, run, context, position: (3 + 0.0025 * position) * (10 if position % 10 == 3 else 1),
            contexts=contexts,
            tokens=150,
        )
    for summary in summarize(recording):
        assert summary.slope_us_per_1k == pytest.approx(2500, rel=0.01)


def test_a_context_does_not_outvote_the_distance_between_contexts() -> None:
    """Tokens get faster within every run, as a device does that warms up; longer contexts are slower all the same."""
    with Recorder() as recorder:
        recording = record(
            recorder,
            lambda label, run, context, position: 3 + 0.001 * context - 0.002 * (position - context),
            contexts=(128, 4096),
            tokens=64,
        )
    assert summarize(recording)[0].slope_us_per_1k == pytest.approx(1000, rel=0.05)


def test_ratio_and_spread_by_hand() -> None:
    """Run medians 3, 4, 5 against 5, 5, 8: 0.6, 0.8, 0.625. The pooled medians say 4 / 5."""
    middles = {"fast": [3.0, 4.0, 5.0], "slow": [5.0, 5.0, 8.0]}
    firsts = {"fast": [10.0, 20.0, 30.0], "slow": [40.0, 40.0, 40.0]}

    def latency(label: str, run: int, context: int, position: int) -> float:
        return firsts[label][run] if position == context else middles[label][run] + (position - context - 2)

    with Recorder() as recorder:
        recording = record(recorder, latency, tokens=4)
    fast, slow = summarize(recording)
    assert fast.ratio == Spread(0.625, 0.6, 0.8, 3)
    assert fast.first_token_ratio == Spread(0.5, 0.25, 0.75, 3)
    assert slow.ratio == Spread(1, 1, 1, 3)
    assert summarize(recording, baseline="fast")[1].ratio == Spread(1.6, 1.25, 5 / 3, 3)
    printed = _printed(table([fast, slow]))
    assert "0.62 (0.60-0.80)" in printed
    assert "0.50 (0.25-0.75)" in printed
    with pytest.raises(ValueError, match="baseline is 'other'; expected one of fast, slow"):
        summarize(recording, baseline="other")


def test_interrupted_runs_are_in_no_figure() -> None:
    with Recorder() as recorder:
        record(recorder, lambda *_: 2.0, rounds=2)
        before = summarize(recorder.recording)
        write_tokens(recorder, "fast", 2, 8, [900.0, 900.0, 900.0])
        write_tokens(recorder, "slow", 0, 99, [900.0, 900.0])
    after = summarize(recorder.recording)
    assert [replace(s, interrupted=0) for s in after[:2]] == before
    assert [s.interrupted for s in after] == [1, 0, 1]
    assert after[2] == Summary(engine="slow", context=99, runs=0, interrupted=1)
    printed = _printed(table(after), 120)
    assert "Interrupted and left out: 1 run of fast at 8" in printed
    assert "Interrupted and left out: 1 run of slow at 99" in printed
    assert "900" not in printed


def test_what_is_not_known_is_null() -> None:
    unknown = {"peak_memory_bytes": None, "cache_bytes": None, "cache_bytes_per_token": None}
    recording = _one_run([10.0, 2.0, 4.0], **unknown)
    (summary,) = summarize(recording)
    expected = {
        "engine": "slow",
        "context": 4,
        "runs": 1,
        "interrupted": 0,
        "first_token_ms": 10.0,
        "prefill_tokens_per_s": 400.0,
        "latency_p50_ms": 3.0,
        "latency_p95_ms": pytest.approx(3.9),
        "latency_p99_ms": pytest.approx(3.98),
        "tokens_per_s": pytest.approx(1000 / 3),
        "slope_us_per_1k": None,  # two tokens say nothing of it
        "peak_memory_bytes": None,
        "cache_bytes": None,
        "bytes_read_per_token": None,
        "achieved_gb_per_s": None,
        "copy_bandwidth_share": None,
        **dict.fromkeys(("ranks", "parallel", "sums_per_token", "messages_per_token", "sent_bytes_per_token")),
        **dict.fromkeys(("ms_per_token", "tokens_per_step", "draft_acceptance", "drafts_off", "draft_ratio")),
        "ratio": {"median": 1.0, "minimum": 1.0, "maximum": 1.0, "count": 1},
        "first_token_ratio": {"median": 1.0, "minimum": 1.0, "maximum": 1.0, "count": 1},
    }
    assert json.loads(json.dumps([asdict(summary)])) == [expected]
    assert "Memory" not in _printed(table([summary]))


def test_drafts_are_judged_by_the_mean() -> None:
    """Seven tokens in two steps of 14 and 7 ms, in bursts: 3 ms each; without drafts 5 and 6 ms. No percentile."""
    slow, bursts = [10.0, *[5.0] * 7], [10.0, 14.0, 0.001, 0.001, 0.001, 6.995, 0.001, 0.001]
    with Recorder() as recorder:
        recorder.write(Header(**HEADER | {"baseline": "kvant"}))
        for label in ("kvant", "kvant, drafts"):
            recorder.write(Engine(engine=label, **ENGINE))
        for run in range(2):
            plain = [10.0, *(ms + run for ms in slow[1:])]
            for label, times in (("kvant", plain), ("kvant, drafts", bursts)):
                write_tokens(recorder, label, run, 4, times)
                if label != "kvant":
                    off = "why" if run else None
                    line = {"engine": label, "run": run, "context": 4, "drafted": 10 - run, "accepted": 5, "off": off}
                    recorder.write(Drafted(steps=2, **line))  # type: ignore[arg-type]
                recorder.write(Run(engine=label, run=run, context=4, tokens=8, **RUN))
    plain_summary, drafted = summarize(recorder.recording)
    assert plain_summary.ms_per_token == pytest.approx(5.5)
    assert (plain_summary.latency_p50_ms, plain_summary.tokens_per_step) == (5.5, None)
    assert drafted.ms_per_token == pytest.approx(3)
    assert drafted.tokens_per_s == pytest.approx(1000 / 3)
    assert (drafted.tokens_per_step, drafted.draft_acceptance, drafted.drafts_off) == (3.5, pytest.approx(10 / 19), 1)
    assert drafted.draft_ratio is not None
    assert drafted.draft_ratio.minimum == pytest.approx(3 / 6)
    assert drafted.draft_ratio.maximum == pytest.approx(3 / 5)
    not_given = (drafted.latency_p50_ms, drafted.latency_p99_ms, drafted.slope_us_per_1k, drafted.ratio)
    assert (*not_given, drafted.achieved_gb_per_s) == (None,) * 5
    printed = _printed(table([plain_summary, drafted]))
    assert "Drafts: a token's time, in the mean" in printed
    assert "0.55 (0.50-0.60)" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_one_token_has_no_latency_after_the_first() -> None:
    (summary,) = summarize(_one_run([10.0]))
    assert summary.first_token_ms == 10.0
    assert summary.cache_bytes == 4_000_000
    assert (summary.latency_p50_ms, summary.tokens_per_s, summary.slope_us_per_1k) == (None, None, None)
    assert (summary.bytes_read_per_token, summary.ratio) == (None, None)


def test_without_a_baseline_there_are_no_ratios() -> None:
    with Recorder() as recorder:
        recording = record(recorder, lambda *_: 2.0, baseline=None, copy_bandwidth_gb_s=None)
    (summary, _) = summarize(recording)
    assert (summary.ratio, summary.first_token_ratio, summary.copy_bandwidth_share) == (None, None, None)
    assert summary.achieved_gb_per_s is not None
    printed = _printed(table([summary]))
    assert "baseline" not in printed
    assert "of copy\n" not in printed


def test_tables_fit_a_terminal() -> None:
    """No number is cut at 80 columns; labels may be of any kind."""
    with Recorder() as recorder:
        labels = ("slow", "mlx-lm float32", "a [bold]server[/bold] at http://localhost:8080/v1")
        recording = record(recorder, lambda *_: 1234.5678, engines=labels, contexts=(131_072,))
    printed = _printed(table(summarize(recording)))
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.count("131072") == 9
    assert printed.count("1,235") == 4 * 3
    assert "[bold]" in printed
    assert describe(recording.header) == [
        "pocket, seed 0, 2026-01-31T12:00:00+00:00",
        "a processor, 2 cores, Linux x86_64, copies 10.0 GB/s",
        "kvant 0.1.0, MLX 0.32.4, mlx-lm 0.32.2, Python 3.11.7",
        "kvant's BLAS: OpenBLAS",
    ]


def _rows(printed: str, figure: str) -> list[list[str]]:
    return [line.split(figure)[1].split() for line in printed.splitlines() if figure in line]


def test_two_recordings_side_by_side() -> None:
    def paced(pace: float, contexts: tuple[int, ...], **header: object) -> Recording:
        with Recorder() as recorder:
            return record(
                recorder,
                lambda label, run, context, position: pace * (20 if position == context else 2),
                contexts=contexts,
                **header,
            )

    a, b = paced(1.0, (8, 16)), paced(1.5, (8, 32), model="other", mlx="0.33.0", seed=7)
    printed = _printed(compare(a, b, names=("before", "after")), 200)
    assert _rows(printed, "latency p50, ms") == [["2.00", "3.00", "1.50"]] * 2
    assert _rows(printed, "first token, ms") == [["20.0", "30.0", "1.50"]] * 2
    assert _rows(printed, "prefill, tokens/s") == [["400", "267", "0.67"]] * 2
    assert _rows(printed, "peak memory, MB") == [["30.0", "30.0", "1.00"]] * 2
    assert _rows(printed, "cache, MB") == [["4.00", "4.00", "1.00"]] * 2
    text = " ".join(printed.split())
    assert "after / before" in text
    for line in (
        "Differs: model, pocket and other",
        "Differs: seed, 0 and 7",
        "Differs: mlx, 0.32.4 and 0.33.0",
        "Only in before: fast at 16, slow at 16",
        "Only in after: fast at 32, slow at 32",
        "Not paired",
    ):
        assert line in text
    assert text.count("Differs") == 3


def test_recordings_with_nothing_in_common() -> None:
    with Recorder() as one, Recorder() as two:
        a, b = record(one, lambda *_: 1.0, engines=["x"]), record(two, lambda *_: 1.0, engines=["y"])
    text = " ".join(_printed(compare(a, b), 120).split())
    assert "Only in A: x at 8" in text
    assert "Only in B: y at 8" in text


def test_engines_of_one_label_that_differ_are_told() -> None:
    a, b = _one_run([1.0, 1.0]), _one_run([1.0, 1.0])
    b.engines["slow"] = replace(b.engines["slow"], kv_bits=4)
    assert "Differs: slow's kv_bits, 8 and 4" in " ".join(_printed(compare(a, b), 120).split())
