"""Latency against position, drawn: a line an engine."""

import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvant.errors import KvantError
from kvant.tools.bench.recording import Recording, Run, Token
from kvant.tools.statistics import percentile

SUFFIXES = (".png", ".svg")
POINTS = 80  # of a line; with more positions, neighbors are put together
RUNS_FOR_QUARTILES = 4  # with fewer, the band is from the lowest to the highest
LOG_RATIO = 8.0  # of the slowest line to the fastest, from which the latency axis is logarithmic
# Distinct for most color-blind readers, by Okabe and Ito.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")

Runs = list[tuple[Run, list[Token]]]


def check_plot_path(path: Path) -> None:
    """Find out before a long run that its plot can be written.

    Raises:
        ValueError: the name ends in neither .png nor .svg, its folder does not exist, or it cannot be written.
        KvantError: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"the plot is to be {path.name}; expected a name that ends in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"the plot is to be {path}; its folder does not exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"the plot is to be {path}, which cannot be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise KvantError("a plot needs matplotlib, which is not installed: pip install 'kvant[plot]'")


def plot(recording: Recording, path: Path) -> None:
    """Draw the completed runs: at each position the median over runs, in a band; first tokens are left out.

    Every context has a panel of its own; all panels share the latency axis.

    Args:
        recording: as read or as just recorded.
        path: where to write; .png or .svg. An SVG is the same, byte for byte, for the same recording.

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
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    contexts = sorted(cases)
    counts = {len(runs) for engines in cases.values() for runs in engines.values()}
    quartiles = min(counts) >= RUNS_FOR_QUARTILES
    style = {"svg.hashsalt": "kvant", "svg.fonttype": "none", "font.size": 10, "axes.edgecolor": "#888888"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(min(16.0, max(8.0, 3.2 * len(contexts))), 4.8), layout="constrained")
        panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
        lines: dict[str, Any] = {}
        medians: list[float] = []
        widest = 1
        for axes, context in zip(panels, contexts, strict=True):
            for number, label in enumerate(recording.engines):
                if label not in cases[context]:
                    continue
                width, places, middle, low, high = _curve(cases[context][label], quartiles)
                widest = max(widest, width)
                medians += [median(middle)]
                color, dashes = COLORS[number % len(COLORS)], "-" if number < len(COLORS) else "--"
                axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)
                (lines[label],) = axes.plot(places, middle, dashes, color=color, linewidth=1.6)
            axes.set_xlabel(f"position, tokens (prompt of {context:,})")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.margins(x=0.02)
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
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
            [_plain(label) for label in labels],
            loc="outside upper center",
            ncols=min(4, len(labels)),
            frameon=False,
            title=_plain(f"{header.model} on {header.device}, {header.cores} cores"),
            title_fontsize=12,
        )
        figure.supxlabel(_caption(counts, quartiles, widest), fontsize=8, color="#555555")
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=metadata)


def _curve(
    runs: Runs, quartiles: bool
) -> tuple[int, Sequence[float], Sequence[float], Sequence[float], Sequence[float]]:
    """Positions put together, their places, and there the median over runs and the band's low and high.

    Where positions are put together, each run is first reduced to its median among them.
    """
    context = runs[0][0].context
    last = max(token.position for _, tokens in runs for token in tokens)
    width = math.ceil((last - context) / POINTS)
    width += width % 2 == 0  # odd: the median of an even number lets a single slow token through
    bins: dict[int, dict[int, list[float]]] = {}  # by bin, by round
    for run, tokens in runs:
        for token in tokens[1:]:
            number = (token.position - context - 1) // width
            bins.setdefault(number, {}).setdefault(run.run, []).append(token.latency_ms)
    places, middle, low, high = [], [], [], []
    for number, by_round in sorted(bins.items()):
        values = [median(latencies) for latencies in by_round.values()]
        places.append(context + 1 + number * width + (width - 1) / 2)
        middle.append(median(values))
        low.append(percentile(values, 25 if quartiles else 0))
        high.append(percentile(values, 75 if quartiles else 100))
    return width, places, middle, low, high


def _caption(counts: set[int], quartiles: bool, width: int) -> str:
    """What the lines and bands are."""
    runs = "-".join(str(n) for n in sorted({min(counts), max(counts)}))
    if max(counts) == 1:
        text = "one run"
    else:
        band = "25th to 75th percentile" if quartiles else "lowest to highest"
        text = f"line: median over {runs} runs; band: {band}"
    if width > 1:
        text += f"; medians of up to {width} neighboring positions"
    return f"{text}; first tokens left out"


def _plain(text: str) -> str:
    """Text that matplotlib doesn't take for mathematics."""
    return text.replace("$", r"\$")
