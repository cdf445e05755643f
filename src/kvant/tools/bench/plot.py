"""Latency against position, drawn: a line an engine."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvant.errors import KvantError
from kvant.tools.bench.recording import Recording, Run, Token
from kvant.tools.drawing import COLORS, check_plot_path, drawing, plain
from kvant.tools.statistics import percentile

POINTS = 80  # of a line; with more positions, neighbors are put together
RUNS_FOR_QUARTILES = 4  # with fewer, the band is from the lowest to the highest
LOG_RATIO = 8.0  # of the slowest line to the fastest, from which the latency axis is logarithmic

Runs = list[tuple[Run, list[Token]]]


def plot(recording: Recording, path: Path) -> None:
    """Draw the completed runs: at each position the median over runs, in a band; first tokens are left out.

    Every context has a panel of its own; all panels share the latency axis.

    Args:
        recording: as read or as just recorded.
        path: where to write; .png or .svg.

    Raises:
        ValueError, KvantError: as :func:`check_plot_path` says, or no completed run has a second token.
    """
    check_plot_path(path)
    cases: dict[int, dict[str, Runs]] = {}  # by context, by engine
    for run, tokens in recording.completed():
        if len(tokens) > 1:
            cases.setdefault(run.context, {}).setdefault(run.engine, []).append((run, tokens))
    if not cases:
        raise KvantError("there is nothing to draw: no completed run has a second token")
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    contexts = sorted(cases)
    counts = {len(runs) for engines in cases.values() for runs in engines.values()}
    width = max(_width(context, runs) for context in contexts for runs in cases[context].values())
    with drawing(path, min(16.0, max(8.0, 3.2 * len(contexts))), _caption(counts, width)) as figure:
        panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
        lines: dict[str, Any] = {}
        medians: list[float] = []
        for axes, context in zip(panels, contexts, strict=True):
            for number, label in enumerate(recording.engines):
                if label not in cases[context]:
                    continue
                places, middle, low, high = _curve(context, cases[context][label], min(counts) >= RUNS_FOR_QUARTILES)
                medians.append(median(middle))
                color, dashes = COLORS[number % len(COLORS)], "-" if number < len(COLORS) else "--"
                axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)
                (lines[label],) = axes.plot(places, middle, dashes, color=color, linewidth=1.6)
            axes.set_xlabel(f"position, tokens (prompt of {context:,})")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.margins(x=0.02)
        panels[0].set_ylabel("latency, ms a token")
        if max(medians) > LOG_RATIO * min(medians):
            panels[0].set_yscale("log")
            panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panels[0].yaxis.set_major_formatter("{x:g}")
            panels[0].yaxis.set_minor_formatter(NullFormatter())
        else:
            panels[0].set_ylim(bottom=0)
        header = recording.header
        labels = [label for label in recording.engines if label in lines]
        figure.legend(
            [lines[label] for label in labels],
            [plain(label) for label in labels],
            loc="outside upper center",
            ncols=min(4, len(labels)),
            frameon=False,
            title=plain(f"{header.model} on {header.device}, {header.cores} cores"),
            title_fontsize=12,
        )


def _width(context: int, runs: Runs) -> int:
    """Positions that are put together; odd, for the median of an even number lets a single slow token through."""
    width = math.ceil((max(token.position for _, tokens in runs for token in tokens) - context) / POINTS)
    return width + (width % 2 == 0)


def _curve(context: int, runs: Runs, quartiles: bool) -> tuple[Sequence[float], ...]:
    """Places on the axis, and there the median over runs and the band's low and high.

    Where positions are put together, each run is first reduced to its median among them.
    """
    width = _width(context, runs)
    bins: dict[int, dict[int, list[float]]] = {}  # by bin, by round
    for run, tokens in runs:
        for token in tokens[1:]:
            number = (token.position - context - 1) // width
            bins.setdefault(number, {}).setdefault(run.run, []).append(token.latency_ms)
    points = []
    for number, by_round in sorted(bins.items()):
        values = [median(latencies) for latencies in by_round.values()]
        low, high = (percentile(values, percent) for percent in ((25, 75) if quartiles else (0, 100)))
        points.append((context + 1 + number * width + (width - 1) / 2, median(values), low, high))
    return tuple(zip(*points, strict=True))


def _caption(counts: set[int], width: int) -> str:
    """The meaning of lines and bands."""
    runs = "-".join(str(n) for n in sorted({min(counts), max(counts)}))
    if max(counts) == 1:
        text = "one run"
    else:
        band = "25th to 75th percentile" if min(counts) >= RUNS_FOR_QUARTILES else "lowest to highest"
        text = f"line: median over {runs} runs; band: {band}"
    if width > 1:
        text += f"; medians of up to {width} neighboring positions"
    return f"{text}; first tokens left out"
