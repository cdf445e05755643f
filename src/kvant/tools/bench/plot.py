"""Plot a recording: latency against position, or speed against the number of streams."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvant.errors import KvantError
from kvant.tools.bench.figures import gaps_ms, summarize
from kvant.tools.bench.recording import Recording, Run
from kvant.tools.drawing import COLORS, drawing, plain
from kvant.tools.statistics import percentile

POINTS = 80  # per line; with more positions, neighbors are merged
RUNS_FOR_QUARTILES = 4  # with fewer runs, the band shows the whole range
LOG_RATIO = 8.0  # if the slowest line is more than this times the fastest, the latency axis is logarithmic


def plot(recording: Recording, path: Path) -> None:
    """Draw the runs into a .png or .svg; raise a KvantError if no run has a second token."""
    if not any(gaps_ms(run) for run in recording.runs):
        raise KvantError("there is nothing to draw: no completed run has a second token")
    if recording.runs[0].together:
        _plot_streams(recording, path)
    else:
        _plot_positions(recording, path)


def _plot_positions(recording: Recording, path: Path) -> None:
    """Draw the median over runs at each position, within a band; one panel per context."""
    from matplotlib.ticker import MaxNLocator

    cases: dict[int, dict[str, list[Run]]] = {}  # by context, by engine
    for run in recording.runs:
        if gaps_ms(run):
            cases.setdefault(run.prompt_tokens[0], {}).setdefault(run.engine, []).append(run)
    contexts = sorted(cases)
    counts = {len(runs) for engines in cases.values() for runs in engines.values()}
    width = max(_width(runs) for engines in cases.values() for runs in engines.values())
    with drawing(path, min(16.0, max(8.0, 3.2 * len(contexts))), _caption(counts, width)) as figure:
        panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
        lines: dict[str, Any] = {}
        medians = []
        for axes, context in zip(panels, contexts, strict=True):
            for number, label in enumerate(recording.engines):
                if label not in cases[context]:
                    continue
                places, middle, low, high = _curve(cases[context][label], min(counts) >= RUNS_FOR_QUARTILES)
                medians.append(median(middle))
                color = COLORS[number % len(COLORS)]
                dashes = "-" if number < len(COLORS) else "--"
                axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)
                (lines[label],) = axes.plot(places, middle, dashes, color=color, linewidth=1.6)
            axes.set_xlabel(f"position, tokens (prompt of {context:,})")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.margins(x=0.02)
        panels[0].set_ylabel("latency, ms a token")
        if max(medians) > LOG_RATIO * min(medians):
            _logarithmic(panels[0])
        else:
            panels[0].set_ylim(bottom=0)
        _legend(figure, recording, {label: lines[label] for label in recording.engines if label in lines})


def _plot_streams(recording: Recording, path: Path) -> None:
    """Draw total tokens per second, and the time between tokens, against the number of streams."""
    summaries = summarize(recording)
    counts = sorted({summary.streams or 0 for summary in summaries})
    rounds = min(s.runs for s in summaries)
    caption = f"medians of {rounds} rounds; between tokens: the median, dotted the 99th percentile"
    with drawing(path, 10.0, caption) as figure:
        speed, between = figure.subplots(1, 2)
        lines: dict[str, Any] = {}
        for number, label in enumerate(recording.engines):
            rows = [summary for summary in summaries if summary.engine == label]
            color = COLORS[number % len(COLORS)]
            for axes, name, style in (
                (between, "latency_p50_ms", "o-"),
                (between, "latency_p99_ms", ":"),
                (speed, "total_tokens_per_s", "o-"),
            ):
                points = [(s.streams, value) for s in rows if (value := getattr(s, name)) is not None]
                (lines[label],) = axes.plot(*zip(*points, strict=True), style, color=color, markersize=4)
        for axes, label in (
            (speed, "tokens a second, all streams"),
            (between, "ms between tokens of a stream"),
        ):
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_xlabel("streams")
            axes.set_ylabel(label)
        speed.set_ylim(bottom=0)
        _logarithmic(between)
        _legend(figure, recording, lines)


def _logarithmic(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Any, recording: Recording, lines: dict[str, Any]) -> None:
    machine = recording.header.machine
    figure.legend(
        list(lines.values()),
        [plain(label) for label in lines],
        loc="outside upper center",
        ncols=min(4, len(lines)),
        frameon=False,
        title=plain(f"{recording.header.model} on {machine.device}, {machine.cores} cores"),
        title_fontsize=12,
    )


def _width(runs: Sequence[Run]) -> int:
    """Return how many positions to merge; an odd number, since medians of even counts pass an outlier on."""
    width = math.ceil(max(len(run.arrivals_ms[0]) - 1 for run in runs) / POINTS)
    return width + (width % 2 == 0)


def _curve(runs: Sequence[Run], quartiles: bool) -> tuple[Sequence[float], ...]:
    """Return positions on the axis, and for each the median over runs and the band's low and high."""
    width = _width(runs)
    context = runs[0].prompt_tokens[0]
    bins: dict[int, list[float]] = {}  # each run's median of the merged positions
    for run in runs:
        gaps = gaps_ms(run)
        for number in range(math.ceil(len(gaps) / width)):
            bins.setdefault(number, []).append(median(gaps[number * width : (number + 1) * width]))
    points = []
    for number, values in bins.items():
        low, high = (percentile(values, percent) for percent in ((25, 75) if quartiles else (0, 100)))
        points.append((context + 1 + number * width + (width - 1) / 2, median(values), low, high))
    return tuple(zip(*points, strict=True))


def _caption(counts: set[int], width: int) -> str:
    runs = "-".join(str(n) for n in sorted(counts)[:: max(1, len(counts) - 1)])
    band = "25th to 75th percentile" if min(counts) >= RUNS_FOR_QUARTILES else "lowest to highest"
    text = "one run" if max(counts) == 1 else f"line: median over {runs} runs; band: {band}"
    text += f"; medians of up to {width} neighboring positions" if width > 1 else ""
    return f"{text}; first tokens left out"
