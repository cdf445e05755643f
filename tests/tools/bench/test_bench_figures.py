"""Every figure of a report, against values computed by hand or by numpy from times that are known; and its
plot.
"""

import io
import json
import math
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.recordings import RUN, add_run, empty, record, streams

from kvant.errors import KvantError
from kvant.tools.bench.figures import Summary, summarize
from kvant.tools.bench.plot import plot
from kvant.tools.bench.recording import Recording
from kvant.tools.bench.table import tables
from kvant.tools.drawing import check_plot_path
from kvant.tools.statistics import Spread, percentile

WIDE = Spread(0.123, 0.0456, 12.34, 3)


def _printed(summaries: list[Summary]) -> str:
    """The tables, which fit 80 columns, the widest ratios too."""

    def widest(each: Summary) -> Summary:
        return replace(
            each, **{name: WIDE for name, value in asdict(each).items() if isinstance(value, dict)}
        )

    for shown in ([*map(widest, summaries)], summaries):
        out = io.StringIO()
        Console(file=out, width=80).print(tables(shown))
        assert max(map(len, out.getvalue().splitlines())) <= 80
        assert "…" not in out.getvalue()
        assert all(out.getvalue().count(word) for each in shown for word in each.engine.split())
    return out.getvalue()


def _drifting(label: str, run: int, context: int, position: int) -> float:
    """Latency a + b * position with slow tokens, in rounds each slower than the last; a first token of its
    own.
    """
    pace = {"fast": 0.6, "slow": 1.0}[label] * 2**run
    if position == context:
        return 0.5 * context * pace
    slow = 40.0 if (position + run) % 10 == 0 else 0.0
    return (2 + 0.001 * position + slow) * pace


def test_every_figure_of_known_delays() -> None:
    contexts, tokens, rounds = (128, 1024), 101, 3
    summaries = summarize(record(_drifting, contexts=contexts, tokens=tokens, rounds=rounds))
    assert [(s.context, s.engine) for s in summaries] == [(c, e) for c in contexts for e in ("fast", "slow")]
    for s in summaries:
        places = range(s.context + 1, s.context + tokens)
        later = np.array([[_drifting(s.engine, run, s.context, p) for p in places] for run in range(rounds)])
        p50, p95, p99 = np.percentile(later, [50, 95, 99])
        first = np.array([_drifting(s.engine, run, s.context, s.context) for run in range(rounds)])
        # The token at position p attends to p cached ones, of 2000 bytes each; the weights are 10 MB.
        read = 10e6 + 2000 * (np.mean(np.arange(s.context + 1, s.context + tokens)))
        assert (s.runs, s.streams) == (3, None)
        assert s.first_token_ms == pytest.approx(first[1])
        assert s.prefill_tokens_per_s == pytest.approx(s.context / first[1] * 1e3)
        assert [s.latency_p50_ms, s.latency_p95_ms, s.latency_p99_ms] == pytest.approx([p50, p95, p99])
        assert s.tokens_per_s == pytest.approx(np.median(1e3 / later.mean(axis=1)))
        assert (s.peak_memory_bytes, s.cache_bytes) == (30_000_000, 4_000_000)
        assert s.bytes_read_per_token == pytest.approx(read)
        assert s.achieved_gb_per_s == pytest.approx(read / (p50 / 1e3) / 1e9)
        assert s.copy_bandwidth_share == pytest.approx(read / (p50 / 1e3) / 10e9)
        for ratio in (s.ratio, s.first_token_ratio):
            expected = 0.6 if s.engine == "fast" else 1.0
            assert [ratio.median, ratio.minimum, ratio.maximum] == pytest.approx([expected] * 3)
            assert ratio.count == rounds


def test_rounds_that_disagree_are_marked() -> None:
    """As on a busy machine; those that agree are not."""

    def noisy(label: str, run: int, context: int, position: int) -> float:
        return 5.0 * (1.5 if label == "fast" and run == busy else 1)

    busy = 1
    printed = _printed(summarize(record(noisy)))
    assert "~1.00 (1.00-1.50)" in printed
    assert "~ The rounds disagree: the machine was busy." in printed
    busy = -1
    assert "~" not in _printed(summarize(record(noisy)))


def test_percentiles_among_infinite_values_are_no_nan() -> None:
    values = [1.0, math.inf, math.inf]
    assert [percentile(values, percent) for percent in (0, 40, 50, 75, 100)] == [1.0, *[math.inf] * 4]
    with pytest.raises(ValueError, match="of at least one"):
        percentile([], 50)


def test_a_figure_that_is_not_known_is_null_and_in_no_table() -> None:
    recording = empty(["one"], baseline="none")
    add_run(recording, "one", 0, 4, [10.0, 2.0, 4.0], **dict.fromkeys(RUN))
    (summary,) = summarize(recording)
    known = {
        name: value for name, value in json.loads(json.dumps(asdict(summary))).items() if value is not None
    }
    facts = {"engine": "one", "context": 4, "runs": 1, "first_token_ms": 10.0, "prefill_tokens_per_s": 400.0}
    facts |= {
        "latency_p50_ms": 3.0,
        "latency_p95_ms": pytest.approx(3.9),
        "latency_p99_ms": pytest.approx(3.98),
    }
    assert known == facts | {"tokens_per_s": pytest.approx(1000 / 3)}
    printed = _printed([summary])
    assert "Memory" not in printed
    assert "baseline" not in printed
    recording = empty(["one"])
    add_run(recording, "one", 0, 4, [10.0])
    (summary,) = summarize(recording)
    assert (summary.first_token_ms, summary.cache_bytes) == (10.0, 4_000_000)
    assert (summary.latency_p50_ms, summary.tokens_per_s, summary.bytes_read_per_token) == (None, None, None)


def test_drafts_are_judged_by_the_mean() -> None:
    """Seven tokens in two steps of 14 and 7 ms, in bursts: 3 ms each; without drafts 5 and 6 ms. No
    percentile.
    """
    slow, bursts = [10.0, *[5.0] * 7], [10.0, 14.0, 0.001, 0.001, 0.001, 6.995, 0.001, 0.001]
    recording = empty(["kvant", "kvant, drafts"], baseline="kvant")
    for run in range(2):
        add_run(recording, "kvant", run, 4, [10.0, *(ms + run for ms in slow[1:])])
        counts = {"steps": 2, "drafted": 10 - run, "accepted": 5, "off": "why" if run else None}
        add_run(recording, "kvant, drafts", run, 4, bursts, drafts=counts)
    plain, drafted = summarize(recording)
    assert (plain.latency_p50_ms, plain.tokens_per_step, plain.plain_ratio) == (5.5, None, None)
    assert drafted.tokens_per_s == pytest.approx(1000 / 3)
    assert (drafted.tokens_per_step, drafted.draft_acceptance, drafted.drafts_off) == (
        3.5,
        pytest.approx(10 / 19),
        1,
    )
    for ratio in (drafted.plain_ratio, drafted.ratio):
        assert [ratio.minimum, ratio.maximum] == pytest.approx([3 / 6, 3 / 5])
    assert (drafted.latency_p50_ms, drafted.latency_p99_ms, drafted.achieved_gb_per_s) == (None,) * 3
    printed = _printed([plain, drafted])
    assert "Drafts" in printed
    assert "0.55 (0.50-0.60)" in printed


def test_every_figure_of_streams() -> None:
    summaries = summarize(streams())
    kvant, alone, other = summaries
    assert (kvant.engine, kvant.streams, kvant.runs, kvant.context) == ("kvant", 2, 2, 9)
    assert kvant.total_tokens_per_s == (6 / 0.060 + 6 / 0.120) / 2  # the median of two
    assert kvant.first_token_ms == 40.0  # of 40, 20, 80, 40
    gaps = [10, 10, 30, 10, 20, 20, 60, 20]
    given = [kvant.latency_p50_ms, kvant.latency_p95_ms, kvant.latency_p99_ms]
    assert given == pytest.approx(np.percentile(gaps, [50, 95, 99]))
    middles = [spread and spread.median for spread in (kvant.plain_ratio, kvant.plain_cpu_ratio)]
    assert middles == pytest.approx([1 / 2, 1 / 3])
    middles = [spread and spread.median for spread in (kvant.total_ratio, kvant.cpu_ratio, alone.total_ratio)]
    assert middles == [1.0, 0.5, 2.0]
    assert (alone.plain_ratio, kvant.ratio) == (None, None)  # the other engine's tokens come at once
    assert (other.latency_p50_ms, other.peak_memory_bytes, other.tokens_per_s) == (0.0, 7, None)
    printed = _printed(summaries)
    assert "streams" in printed
    assert "one by one" in printed


def _recording(**options: Any) -> Recording:
    return record(
        lambda _, run, context, position: (1 + run) * (500 if position == context else 2), **options
    )


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    for name, message in (
        ("a.txt", r"ends in \.png or \.svg"),
        ("a", r"\.png or \.svg"),
        ("no/a.png", "does not exist"),
        ("x.png", "cannot be written"),
    ):
        with pytest.raises(ValueError, match=message):
            check_plot_path(tmp_path / name)
    with pytest.raises(KvantError, match="nothing to draw"):
        plot(_recording(tokens=1), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KvantError, match=r"; pip install .*\[plot\]"):
        check_plot_path(tmp_path / "a.png")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the last figure shows, in the data's own units: lines, band, scale and caption."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    seen, save = SimpleNamespace(), Figure.savefig

    def savefig(figure: Figure, *args: Any, **options: Any) -> None:
        axes = figure.axes[0]
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        points = [list(zip(*(x.tolist() for x in line.get_data()), strict=True)) for line in axes.lines]
        seen.lines = dict(zip(labels, points, strict=True))
        if axes.collections:
            corners = axes.collections[0].get_paths()[0].vertices[:, 1]
            seen.band = (corners.min(), corners.max())
        seen.scale, seen.caption = axes.get_yscale(), figure.get_supxlabel()
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return seen


def test_an_svg_has_a_label_an_engine_and_is_the_same_again(tmp_path: Path, drawn: SimpleNamespace) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    labels = ["fast", "slow", "$x$_[b] & <c>"]
    for name in ("a.svg", "b.svg", "a.PNG"):
        plot(_recording(engines=labels, contexts=(8, 32)), tmp_path / name)
    assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG\r\n")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    texts = re.findall(r"<text[^>]*>(.*?)</text>", (tmp_path / "a.svg").read_text(), re.DOTALL)
    for label in ("fast", "slow", "$x$_[b] &amp; &lt;c&gt;", "latency, ms a token"):
        assert texts.count(label) == 1
    assert [t for t in texts if "prompt of" in t] == [f"position, tokens (prompt of {c})" for c in (8, 32)]
    assert "pocket on a processor, 2 cores" in texts


def test_lines_are_medians_over_runs_in_a_band(tmp_path: Path, drawn: SimpleNamespace) -> None:
    """Runs of 2, 4 and 6 ms; then of five, whose quartiles are 4 and 8. The first token's 500 ms are
    nowhere.
    """
    plot(_recording(rounds=3), tmp_path / "a.png")
    assert drawn.lines["fast"] == [(position, 4.0) for position in range(9, 14)]
    assert drawn.band == (2.0, 6.0)
    assert drawn.caption == "line: median over 3 runs; band: lowest to highest; first tokens left out"
    plot(_recording(rounds=5), tmp_path / "a.png")
    assert drawn.lines["slow"] == [(position, 6.0) for position in range(9, 14)]
    assert drawn.band == (4.0, 8.0)
    assert "25th to 75th percentile" in drawn.caption


def test_streams(tmp_path: Path, drawn: SimpleNamespace) -> None:
    plot(streams(), tmp_path / "a.svg")
    assert drawn.lines["kvant"] == [(2, 75.0)]  # tokens a second in all
    text = (tmp_path / "a.svg").read_text()
    assert "tokens a second, all streams" in text
    assert "kvant, one by one" in text
