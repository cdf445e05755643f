"""The report for a person: tables, and the lines above them."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text as Line

from kvant.tools.report.measure import FormatResult, Report
from kvant.tools.report.questions import BUCKETS

CAPTION = (
    "KLD: nats, of the distribution without quantization against the format's. Top-1: the same likeliest token. "
    "Layer: the largest relative error of a layer's attention, given that layer's own inputs."
)


def describe(report: Report) -> list[str]:
    """Model, text, machine and versions: lines to print above the tables."""
    text, environment = report.text, report.environment
    pieces = "" if len(text.pieces) == 1 else f" in {len(text.pieces)} pieces of up to {len(text.pieces[0])}"
    left_out = f"; the {text.left_out} after them are left out" if text.left_out else ""
    return [
        f"{report.model} on {text.name}: {text.tokens} tokens{pieces}{left_out}",
        f"{environment.device}, {environment.cores} cores, {environment.system}; "
        f"kvant {environment.versions['kvant']}, MLX {environment.versions['mlx']}, BLAS: {environment.blas}",
        f"reference, 0: a cache that is not quantized, {report.dtype}; decode times with {len(text.pieces[0])} tokens",
        *([] if report.reference.layer_errors else ["layers are not measured one by one: the model is mlx-lm's"]),
    ]


def tables(report: Report) -> Group:
    """Figures of every format, then the answers where questions were asked."""
    results = [report.reference, *(r for r in report.results if r.format != report.reference.format)]
    shown: list[RenderableType] = [_figures(results)]
    for name in dict.fromkeys(own.set for own in report.reference.scores):
        shown += ["", _answers(results, name)]
    return Group(*shown)


def _figures(results: Sequence[FormatResult]) -> Table:
    table = _empty("Quality by cache format", CAPTION)
    for name in ("perplexity", "mean\nKLD", "p99\nKLD", "top-1\n%", "layer\nerror", "bytes a\ntoken", "ms a\ntoken"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        figures, reference = result.figures, result.format.bits == 0
        worst = max(result.layer_errors, default=0.0)
        table.add_row(
            Line(result.format.label),
            f"{figures.perplexity:.4f}" if figures.perplexity < 1e5 else f"{figures.perplexity:.3e}",
            "-" if reference else _small(figures.mean_kld_nats),
            "-" if reference else _small(figures.p99_kld_nats),
            "-" if reference else f"{100 * figures.top1:.2f}",
            f"{_small(worst)} ({result.layer_errors.index(worst)})" if result.layer_errors and not reference else "-",
            str(result.bytes_per_token),
            f"{result.ms_per_token:.2f}",
        )
    broken = [
        f"{r.format.label}: {r.figures.non_finite} of {r.figures.positions} predictions are not finite"
        for r in results
        if r.figures.non_finite
    ]
    table.caption = Line("\n".join([CAPTION, *broken]))
    return table


def _answers(results: Sequence[FormatResult], name: str) -> Table:
    caption = "Exact in every token, of those asked; columns are tokens of context before the answer."
    table = _empty(f"Answers: {name}", caption)
    for own in results[0].scores:
        if own.set == name:
            later = [b for b in BUCKETS if b > own.context_from]
            table.add_column(
                f"{own.context_from}-{later[0] - 1}" if later else f"from {own.context_from}", justify="right"
            )
    for result in results:
        shares = (f"{own.right}/{own.asked}" for own in result.scores if own.set == name)
        table.add_row(Line(result.format.label), *shares)
    return table


def _empty(title: str, caption: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Line(title),
        caption=Line(caption),
        title_justify="left",
        caption_justify="left",
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("format", no_wrap=True)
    return table


def _small(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if math.isfinite(value) else "inf"
