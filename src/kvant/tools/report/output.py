"""Show the report: tables with lines above them, and a plot."""

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
from kvant.tools.report.divergence import Figures
from kvant.tools.report.measure import LEGS, FormatResult, Report
from kvant.tools.report.mlx_lm_reader import MLX_LM
from kvant.tools.report.tune import Row

CAPTION = (
    "KLD: nats, of the distribution without quantization against the format's. Top-1: the same likeliest "
    "token. Layer: the largest relative error of a layer's attention for that layer's unquantized inputs. "
    "Bytes: of the cache, divided by its reserved tokens."
)
RECALL = "Recall: answers exact in every token, of those asked."
OFFSET = 0.03  # distance between formats of the same bytes in the plot, as a share of the axis' width


def describe(report: Report) -> list[str]:
    """Return lines to print above the tables: model, text, machine and versions."""
    text = report.text
    environment = report.environment
    pieces = "" if len(text.pieces) == 1 else f" in {len(text.pieces)} pieces of up to {len(text.pieces[0])}"
    left_out = f"; the {text.left_out} after them are left out" if text.left_out else ""
    compared = "reference,"
    if report.compared_with:
        compared = f"reference: predictions of the second half of each piece in {report.compared_with};"
    return [
        f"{report.model} on {text.name}: {text.tokens} tokens{pieces}{left_out}",
        f"{environment.device}, {environment.cores} cores, {environment.system}; "
        f"kvant {environment.versions['kvant']}, MLX {environment.versions['mlx']}, BLAS: {environment.blas}",
        f"{compared} 0: a cache that is not quantized, {report.dtype}; {report.reserved} tokens reserved",
        *(
            []
            if report.reference.layer_errors
            else ["layers are not measured one by one: the model is mlx-lm's"]
        ),
    ]


def tables(report: Report) -> list[Table]:
    """Return one table per leg: tokens read in chunks, and tokens read one by one after them."""
    results = [report.reference, *(r for r in report.results if r is not report.reference)]
    return [_prefill(report, results), _decode(report, results)]


FIGURES = ("per-\nplexity", "mean\nKLD", "median\nKLD", "p99\nKLD", "p99.9\nKLD", "top-1\n%")


def _prefill(report: Report, results: Sequence[FormatResult]) -> Table:
    count = report.reference.prefill.positions
    table = _table(
        f"Prefill: {count} predictions, read in chunks", (*FIGURES, "layer\nerror", "bytes a\ntoken")
    )
    broken = [
        f"{r.format.label}: {figures.non_finite} of {figures.positions} predictions are not finite ({leg})"
        for r in results
        for leg, figures in r.legs.items()
        if figures.non_finite
    ]
    table.caption = Line("\n".join([CAPTION, *broken]))
    for result in results:
        quantized = result is not report.reference and result.layer_errors
        error = _small(max(result.layer_errors)) if quantized else "-"
        cells = _cells(report, result, result.prefill)
        table.add_row(Line(result.format.label), *cells, error, str(result.bytes_per_token or "-"))
    return table


def _decode(report: Report, results: Sequence[FormatResult]) -> Table:
    count = report.reference.decode.positions
    asked = len(report.reference.recalled)
    title = f"Decode: {count} predictions, read one by one after {report.prompt} tokens"
    table = _table(title, (*FIGURES, *["recall"] * bool(asked)))
    hits = ", ".join(
        f"{r.format.label} {sum(r.after_hit)}/{len(r.after_hit)}" for r in results if r.after_hit
    )
    hits = f"Recall of what was read from shared pages: {hits}." if hits else ""
    table.caption = Line("\n".join(filter(None, [RECALL * bool(asked), hits])))
    for result in results:
        recalled = [f"{sum(result.recalled)}/{asked}"] if asked else []
        table.add_row(Line(result.format.label), *_cells(report, result, result.decode), *recalled)
    return table


def _cells(report: Report, result: FormatResult, figures: Figures) -> list[str]:
    """Return the cells of :data:`FIGURES`; "-" if the reference would be compared with itself."""
    perplexity = f"{figures.perplexity:.4f}" if figures.perplexity < 1e5 else f"{figures.perplexity:.3e}"
    if result is report.reference and not report.compared_with:
        return [perplexity, *["-"] * 5]
    klds = figures.mean_kld_nats, figures.median_kld_nats, figures.p99_kld_nats, figures.p999_kld_nats
    return [perplexity, *map(_small, klds), f"{100 * figures.top1:.2f}"]


def tuning(tried: Sequence[Row]) -> Table:
    table = _table("Tried", ("mean\nKLD", "p99\nKLD", "top-1\n%", "bytes a\ntoken"))
    for row in tried:
        figures = row.figures
        klds = _small(figures.mean_kld_nats), _small(figures.p99_kld_nats)
        table.add_row(Line(row.name), *klds, f"{100 * figures.top1:.2f}", str(row.bytes_per_token))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    """Make a table whose first column names the format."""
    justified: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
    table = Table(box=box.SIMPLE_HEAD, title=Line(title), padding=0, pad_edge=False, **justified)
    table.add_column("format", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _small(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if math.isfinite(value) else "inf"


def plot(report: Report, path: Path) -> None:
    """Draw each format's mean KLD (filled) and its 99th percentile (hollow) over the bytes per token."""
    drawn = [
        r
        for r in report.results
        if r.format.kv_bits and all(0 < f.mean_kld_nats < math.inf for f in r.legs.values())
    ]
    if not drawn:
        raise KvantError("there is nothing to draw: no quantized format has a finite KLD above 0")
    caption = "filled: mean; hollow: 99th percentile; formats of the same bytes are drawn side by side"
    left_out = [r.format.label for r in report.results if r not in drawn]
    if left_out:
        caption += f"\nnot drawn (not quantized, unknown bytes, KLD 0 or not finite): {', '.join(left_out)}"
    # Colors show bits and group size, markers the engine and the bias split.
    sizes = [r.bytes_per_token for r in drawn]
    width = (max(sizes) - min(sizes)) or max(sizes)
    kinds = list(dict.fromkeys((r.format.kv_bits, r.format.kv_group_size) for r in drawn))
    with drawing(path, 9.0, caption) as figure:
        for axes, leg in zip(figure.subplots(1, 2, sharey=True), LEGS, strict=True):
            places = Counter[int]()
            for result in drawn:
                place = result.bytes_per_token + OFFSET * width * places[result.bytes_per_token]
                places[result.bytes_per_token] += 1
                kind = result.format.kv_bits, result.format.kv_group_size
                color = COLORS[kinds.index(kind) % len(COLORS)]
                marker = (
                    "^"
                    if result.format.label.startswith(MLX_LM)
                    else "o"
                    if result.format.bias_split
                    else "s"
                )
                figures = result.legs[leg]
                low = figures.mean_kld_nats
                high = figures.p99_kld_nats
                label = result.format.label if leg == LEGS[0] else None
                axes.plot(place, low, marker, color=color, markersize=8, label=label)
                if 0 < high < math.inf:
                    axes.plot([place, place], [low, high], color=color, linewidth=1, zorder=1)
                    axes.plot(place, high, marker, color=color, markersize=8, markerfacecolor="white")
            axes.set_yscale("log")
            axes.set_xlabel("cache, bytes a token")
            axes.margins(x=0.08)
            axes.set_title(leg)
        figure.axes[0].set_ylabel("KLD, nats")
        figure.suptitle(plain(f"{report.model}: {report.text.tokens:,} tokens of {report.text.name}"))
        figure.legend(loc="outside right upper", frameon=False, title="format")
