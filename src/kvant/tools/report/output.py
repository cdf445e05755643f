"""The report for a person: a table with the lines above it, and a plot."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text as Line

from kvant.errors import KvantError
from kvant.tools.drawing import COLORS, drawing, plain
from kvant.tools.report.measure import Report
from kvant.tools.report.tune import Row

CAPTION = (
    "KLD: nats, of the distribution without quantization against the format's. Top-1: the same likeliest "
    "token. "
    "Layer: the largest relative error of a layer's attention, given that layer's own inputs."
)
RECALL = " Recall: answers exact in every token, of those asked."
BESIDE = 0.03  # of the axis' width: formats of the same bytes are drawn so far apart


def describe(report: Report) -> list[str]:
    """Model, text, machine and versions: lines to print above the table."""
    text, environment = report.text, report.environment
    pieces = "" if len(text.pieces) == 1 else f" in {len(text.pieces)} pieces of up to {len(text.pieces[0])}"
    left_out = f"; the {text.left_out} after them are left out" if text.left_out else ""
    compared = "reference,"
    if report.compared_with:
        compared = f"reference: predictions of the second half of each piece in {report.compared_with};"
    return [
        f"{report.model} on {text.name}: {text.tokens} tokens{pieces}{left_out}",
        f"{environment.device}, {environment.cores} cores, {environment.system}; "
        f"kvant {environment.versions['kvant']}, MLX {environment.versions['mlx']}, BLAS: {environment.blas}",
        f"{compared} 0: a cache that is not quantized, {report.dtype}; decode times with "
        f"{len(text.pieces[0])} tokens",
        *(
            []
            if report.reference.layer_errors
            else ["layers are not measured one by one: the model is mlx-lm's"]
        ),
    ]


def table(report: Report) -> Table:
    results = [report.reference, *(r for r in report.results if r.format != report.reference.format)]
    asked = len(report.reference.recalled)
    broken = [
        f"{r.format.label}: {r.figures.non_finite} of {r.figures.positions} predictions are not finite"
        for r in results
        if r.figures.non_finite
    ]
    hits = ", ".join(
        f"{r.format.label} {sum(r.after_hit)}/{len(r.after_hit)}" for r in results if r.after_hit
    )
    hits = f"Recall of what was read from shared pages: {hits}." if hits else ""
    columns = (
        "per-\nplexity",
        "mean\nKLD",
        "p99\nKLD",
        "top-1\n%",
        "layer\nerror",
        "bytes a\ntoken",
        "ms a\ntoken",
    )
    made = _table("Quality by cache format", (*columns, *["recall"] * bool(asked)))
    made.caption = Line("\n".join([CAPTION + RECALL * bool(asked), *filter(None, [hits]), *broken]))
    for result in results:
        figures, exact = result.figures, result.format.kv_bits == 0 and not report.compared_with
        made.add_row(
            Line(result.format.label),
            f"{figures.perplexity:.4f}" if figures.perplexity < 1e5 else f"{figures.perplexity:.3e}",
            "-" if exact else _small(figures.mean_kld_nats),
            "-" if exact else _small(figures.p99_kld_nats),
            "-" if exact else f"{100 * figures.top1:.2f}",
            "-" if not result.format.kv_bits or not result.layer_errors else _small(max(result.layer_errors)),
            str(result.bytes_per_token),
            f"{result.ms_per_token:.2f}",
            *([f"{sum(result.recalled)}/{asked}"] if asked else []),
        )
    return made


def tuning(tried: Sequence[Row]) -> Table:
    made = _table("Tried", ("mean\nKLD", "p99\nKLD", "top-1\n%", "bytes a\ntoken"))
    for row in tried:
        own = row.figures
        klds = _small(own.mean_kld_nats), _small(own.p99_kld_nats)
        made.add_row(Line(row.name), *klds, f"{100 * own.top1:.2f}", str(row.bytes_per_token))
    return made


def _table(title: str, columns: Sequence[str]) -> Table:
    """Its first column names the format."""
    justified: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
    made = Table(box=box.SIMPLE_HEAD, title=Line(title), collapse_padding=True, pad_edge=False, **justified)
    made.add_column("format", no_wrap=True)
    for name in columns:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _small(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if math.isfinite(value) else "inf"


def plot(report: Report, path: Path) -> None:
    """Draw every format's mean KLD, filled, and its 99th percentile, hollow, over the bytes a token takes."""
    drawn = [r for r in report.results if 0 < r.figures.mean_kld_nats < math.inf]
    if not drawn:
        raise KvantError("there is nothing to draw: no format has a finite KLD above 0")
    caption = "filled: mean; hollow: 99th percentile; formats of the same bytes are drawn side by side"
    left_out = [r.format.label for r in report.results if r not in drawn]
    if left_out:
        caption += f"\nnot drawn, KLD 0 or not finite: {', '.join(left_out)}"
    # Colors by bits and group, markers by whether the biases are split off.
    sizes = [r.bytes_per_token for r in drawn]
    width, places = (max(sizes) - min(sizes)) or max(sizes), Counter[int]()
    kinds = list(dict.fromkeys((r.format.kv_bits, r.format.kv_group_size) for r in drawn))
    with drawing(path, 8.0, caption) as figure:
        axes = figure.subplots()
        for result in drawn:
            place = result.bytes_per_token + BESIDE * width * places[result.bytes_per_token]
            places[result.bytes_per_token] += 1
            color = COLORS[kinds.index((result.format.kv_bits, result.format.kv_group_size)) % len(COLORS)]
            marker = "o" if result.format.bias_split else "s"
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
