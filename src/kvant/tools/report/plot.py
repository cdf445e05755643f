"""KLD against bytes a token, drawn: two markers a format."""

import math
from collections.abc import Sequence
from pathlib import Path

from kvant.errors import KvantError
from kvant.tools.drawing import COLORS, check_plot_path, drawing, plain
from kvant.tools.report.measure import FormatResult, Report

NEAR = 0.03  # of the axis' width: formats that are nearer to each other are drawn side by side


def plot(report: Report, path: Path) -> None:
    """Draw every format's mean KLD, filled, and its 99th percentile, hollow, over the bytes a token takes.

    Args:
        path: where to write; .png or .svg.

    Raises:
        ValueError, KvantError: as ``check_plot_path`` says, or no format has a finite KLD above 0.
    """
    check_plot_path(path)
    drawn = [r for r in report.results if 0 < r.figures.mean_kld_nats < math.inf]
    if not drawn:
        raise KvantError("there is nothing to draw: no format has a finite KLD above 0")
    caption = "filled: mean; hollow: 99th percentile; formats of about the same bytes are drawn side by side"
    left_out = [r.format.label for r in report.results if r not in drawn]
    if left_out:
        caption += f"\nnot drawn, KLD 0 or not finite: {', '.join(left_out)}"
    # Colors by bits and group, markers by whether the biases are split off.
    kinds = list(dict.fromkeys((r.format.bits, r.format.group) for r in drawn))
    with drawing(path, 8.0, caption) as figure:
        axes = figure.subplots()
        for result, place in zip(drawn, side_by_side(drawn), strict=True):
            color = COLORS[kinds.index((result.format.bits, result.format.group)) % len(COLORS)]
            marker = "o" if result.format.split else "s"
            low, high = result.figures.mean_kld_nats, result.figures.p99_kld_nats
            axes.plot(place, low, marker, color=color, markersize=8, label=result.format.label)
            if 0 < high < math.inf:
                axes.plot([place, place], [low, high], color=color, linewidth=1, zorder=1)
                axes.plot(place, high, marker, color=color, markersize=8, markerfacecolor="white")
        axes.set_yscale("log")
        axes.set_xlabel("cache, bytes a token")
        axes.set_ylabel("KLD, nats")
        axes.margins(x=0.08)
        axes.set_title(plain(f"{report.model}: {report.text.tokens:,} tokens of {report.text.name}"))
        figure.legend(loc="outside right upper", frameon=False, title="format")


def side_by_side(results: Sequence[FormatResult]) -> list[float]:
    """Where to draw each: at its bytes, or beside those that are about as large."""
    sizes = [r.bytes_per_token for r in results]
    width = (max(sizes) - min(sizes)) or max(sizes)
    order = sorted(range(len(results)), key=lambda index: sizes[index])
    places = [0.0] * len(results)
    for rank, index in enumerate(order):
        least = places[order[rank - 1]] + NEAR * width if rank else -math.inf
        places[index] = max(float(sizes[index]), least)
    return places
