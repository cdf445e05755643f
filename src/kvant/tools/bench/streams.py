"""The figures of several requests at once, as a table and as a plot."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from kvant.errors import KvantError
from kvant.tools.bench.lines import Streams
from kvant.tools.bench.recording import Recording
from kvant.tools.drawing import COLORS, drawing, plain
from kvant.tools.statistics import Spread, paired_ratio, percentile

ONE_BY_ONE = ", one by one"  # ends the label of an engine that serves one request after another


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSummary:
    """One engine's figures for one number of streams; None: not known.

    Attributes:
        engine, streams: the label, and the requests that came at once.
        runs: from which the figures are.
        prompt_tokens: the shortest and the longest prompt.
        tokens_per_s: of all streams together, from the requests' coming to the last token, median over runs.
        first_token_ms: median over streams and runs.
        between_p50_ms, between_p99_ms: between two tokens of a stream, over all streams and runs.
        cpu_ms_per_token: processor time divided by all tokens, prompts' included in the time only; median over runs.
            None of a server.
        peak_memory_bytes: the largest of the runs.
        gain, cpu_gain: tokens a second, and tokens a second of processor time, divided by those of the same engine
            one by one in the same round; above 1 is faster.
        ratio, cpu_ratio: time a token, and processor time a token, divided by the baseline's in the same round; below
            1 is faster. Only a server may generate fewer tokens than the others.
        step_ratio: the median time between tokens divided by the baseline's in the same round.
    """

    engine: str
    streams: int
    runs: int
    prompt_tokens: tuple[int, int]
    tokens_per_s: float
    first_token_ms: float
    between_p50_ms: float | None
    between_p99_ms: float | None
    cpu_ms_per_token: float | None
    peak_memory_bytes: int | None
    gain: Spread | None
    cpu_gain: Spread | None
    ratio: Spread | None
    cpu_ratio: Spread | None
    step_ratio: Spread | None


def summarize_streams(recording: Recording) -> list[StreamsSummary]:
    """Every number of streams, and of each every engine, in the order of the recording."""
    cases: dict[tuple[int, str], dict[int, Streams]] = {}
    for line in recording.streams:
        cases.setdefault((line.streams, line.engine), {})[line.run] = line
    order = list(recording.engines)
    summaries = []
    for count, label in sorted(cases, key=lambda case: (case[0], order.index(case[1]))):
        runs = cases[count, label]
        lines = list(runs.values())
        base = cases.get((count, recording.header.baseline or ""), {})
        alone = cases.get((count, label + ONE_BY_ONE), {})
        gaps = [gap for line in lines for gap in _gaps(line)]
        cpu = [ms for line in lines if (ms := _cpu_ms(line)) is not None]
        summaries.append(
            StreamsSummary(
                engine=label,
                streams=count,
                runs=len(lines),
                prompt_tokens=(min(lines[0].prompt_tokens), max(lines[0].prompt_tokens)),
                tokens_per_s=median(_tokens(line) / _total_ms(line) * 1e3 for line in lines),
                first_token_ms=median(times[0] for line in lines for times in line.arrivals_ms),
                between_p50_ms=percentile(gaps, 50) if gaps else None,
                between_p99_ms=percentile(gaps, 99) if gaps else None,
                cpu_ms_per_token=median(cpu) if cpu else None,
                peak_memory_bytes=max((line.peak_memory_bytes or 0 for line in lines), default=0) or None,
                gain=paired_ratio(_by_run(alone, _token_ms), _by_run(runs, _token_ms)),
                cpu_gain=paired_ratio(_by_run(alone, _cpu_ms), _by_run(runs, _cpu_ms)),
                ratio=paired_ratio(_by_run(runs, _token_ms), _by_run(base, _token_ms)),
                cpu_ratio=paired_ratio(_by_run(runs, _cpu_ms), _by_run(base, _cpu_ms)),
                step_ratio=paired_ratio(_by_run(runs, _step_ms), _by_run(base, _step_ms)),
            )
        )
    return summaries


def plot_streams(recording: Recording, path: Path) -> None:
    """Draw tokens a second of all streams, and the time between tokens, against the number of streams.

    Raises:
        ValueError, KvantError: as :func:`kvant.tools.drawing.check_plot_path` says, or there is no run.
    """
    summaries = summarize_streams(recording)
    if not summaries:
        raise KvantError("there is nothing to draw: no run came to its end")
    from matplotlib.ticker import LogLocator, NullFormatter

    runs = min(summary.runs for summary in summaries)
    counts = sorted({summary.streams for summary in summaries})
    caption = (
        f"medians of {runs} {'run' if runs == 1 else 'runs'}; between tokens: the median, dotted the 99th percentile"
    )
    with drawing(path, 10.0, caption) as figure:
        speed, between = figure.subplots(1, 2)
        lines: dict[str, Any] = {}
        for number, label in enumerate(recording.engines):
            own = [summary for summary in summaries if summary.engine == label]
            places, color = [summary.streams for summary in own], COLORS[number % len(COLORS)]
            (lines[label],) = speed.plot(places, [s.tokens_per_s for s in own], "o-", color=color, markersize=4)
            known = [summary for summary in own if summary.between_p50_ms is not None]
            for name, style in (("between_p50_ms", "o-"), ("between_p99_ms", ":")):
                values = [getattr(summary, name) for summary in known]
                between.plot([s.streams for s in known], values, style, color=color, markersize=4)
        for axes, label in ((speed, "tokens a second, all streams"), (between, "ms between tokens of a stream")):
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_xlabel("streams")
            axes.set_ylabel(label)
        speed.set_ylim(bottom=0)
        between.set_yscale("log")
        between.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        between.yaxis.set_major_formatter("{x:g}")
        between.yaxis.set_minor_formatter(NullFormatter())
        header = recording.header
        figure.legend(
            list(lines.values()),
            [plain(label) for label in lines],
            loc="outside upper center",
            ncols=min(3, len(lines)),
            frameon=False,
            title=plain(f"{header.model} on {header.device}, {header.cores} cores"),
            title_fontsize=12,
        )


def same_tokens(recording: Recording) -> str | None:
    """How many streams have the same tokens together and one by one; None: there are none to compare."""
    known = {(line.engine, line.run, line.streams): line.token_ids for line in recording.streams}
    pairs: dict[str, list[bool]] = {}
    for (label, run, count), ids in known.items():
        alone = known.get((label + ONE_BY_ONE, run, count), ())
        pairs.setdefault(label, []).extend(a == b for a, b in zip(ids or (), alone or (), strict=False))
    counts = ", ".join(f"{label} in {sum(same)} of {len(same)}" for label, same in pairs.items() if same)
    return f"Streams with the same tokens together and one by one: {counts}." if counts else None


def _gaps(line: Streams) -> list[float]:
    return [after - before for times in line.arrivals_ms for before, after in pairwise(times)]


def _tokens(line: Streams) -> int:
    return sum(map(len, line.arrivals_ms))


def _total_ms(line: Streams) -> float:
    return max(times[-1] for times in line.arrivals_ms)


def _token_ms(line: Streams) -> float:
    return _total_ms(line) / _tokens(line)


def _cpu_ms(line: Streams) -> float | None:
    return None if line.cpu_ms is None else line.cpu_ms / _tokens(line)


def _step_ms(line: Streams) -> float | None:
    gaps = _gaps(line)
    return median(gaps) if gaps else None


def _by_run(runs: dict[int, Streams], figure: Any) -> dict[int, float]:
    values = {number: figure(line) for number, line in runs.items()}
    return {number: value for number, value in values.items() if value}
