"""Show figures as tables."""

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvant.tools.bench.figures import Summary
from kvant.tools.bench.recording import Header
from kvant.tools.statistics import Spread

# heading, attribute of a Summary, factor, and a note for the caption
Column = tuple[str, str, float, str]
BUSY = "~ The rounds disagree: the machine was busy. Measure again when it is idle, or with more --repeats."
PAIRED = "Compared within a round: median over rounds, and range. Below 1 is faster."

TABLES: list[tuple[str, list[Column]]] = [
    (
        "Time",
        [
            ("first\nms", "first_token_ms", 1, "First: until the first token."),
            ("prefill\ntokens/s", "prefill_tokens_per_s", 1, ""),
            ("p50\nms", "latency_p50_ms", 1, "p50 to p99: per token after it."),
            ("p95\nms", "latency_p95_ms", 1, ""),
            ("p99\nms", "latency_p99_ms", 1, ""),
            ("decode\ntokens/s", "tokens_per_s", 1, "Decode: without the first token."),
            ("in all\ntokens/s", "total_tokens_per_s", 1, "In all: over all streams, with reading prompts."),
        ],
    ),
    (
        "Time divided by the baseline's",
        [
            ("a token", "ratio", 1, PAIRED),
            ("first token", "first_token_ratio", 1, ""),
            ("in all", "total_ratio", 1, ""),
            ("CPU", "cpu_ratio", 1, ""),
        ],
    ),
    (
        "Time divided by the same engine's without drafts, or one by one",
        [("time", "plain_ratio", 1, PAIRED), ("CPU", "plain_cpu_ratio", 1, "")],
    ),
    (
        "Drafts",
        [
            ("tokens\na step", "tokens_per_step", 1, ""),
            ("accepted\n%", "draft_acceptance", 100, ""),
            ("runs\noff", "drafts_off", 1, "Off: runs in which drafts did not pay and were switched off."),
        ],
    ),
    (
        "Memory and bandwidth",
        [
            ("peak\nMB", "peak_memory_bytes", 1e-6, ""),
            ("cache\nMB", "cache_bytes", 1e-6, ""),
            (
                "read\nMB/token",
                "bytes_read_per_token",
                1e-6,
                "Read: the weights and the cached tokens, once per step.",
            ),
            ("read\nGB/s", "achieved_gb_per_s", 1, "GB/s: Read divided by p50."),
            (
                "of copy\n%",
                "copy_bandwidth_share",
                100,
                "Of copy: GB/s divided by the device's copy bandwidth.",
            ),
        ],
    ),
]


def describe(header: Header) -> list[str]:
    """Return lines to print above a table: model, machine and versions."""
    machine = header.machine
    versions = ", ".join(f"{name.replace('_', '-')} {version}" for name, version in machine.versions.items())
    return [
        f"{header.model}, seed {header.seed}, {header.date}",
        f"{machine.device}, {machine.cores} cores, {machine.system}, copies "
        f"{_number(header.copy_bandwidth_gb_s)} GB/s",
        versions,
        f"kvant's BLAS: {machine.blas}",
    ]


def tables(summaries: Sequence[Summary]) -> Group:
    """Return the known figures in tables of 80 columns, one row per summary."""
    parts: list[Table | str] = []
    streams = any(summary.streams is not None for summary in summaries)
    for title, columns in TABLES:
        known = [column for column in columns if any(getattr(s, column[1]) is not None for s in summaries)]
        if not known:
            continue
        table = Table(
            box=box.SIMPLE_HEAD,
            title=Text(title),
            title_justify="left",
            caption_justify="left",
            collapse_padding=True,
        )
        table.caption = Text(" ".join(note for *_, note in known if note))
        table.add_column("engine", overflow="fold")
        for heading in ("streams" if streams else "context", *(heading for heading, *_ in known)):
            table.add_column(heading, justify="right", no_wrap=True)
        for case, rows in groupby(summaries, lambda summary: summary.streams if streams else summary.context):
            for summary in rows:
                cells = (_cell(getattr(summary, name), factor) for _, name, factor, _ in known)
                table.add_row(Text(summary.engine), str(case), *cells)
            table.add_section()
        parts += ["", table]
    runs = sorted({summary.runs for summary in summaries})
    parts += ["", f"Rounds: {'-'.join(map(str, dict.fromkeys((runs[0], runs[-1]))))}"]
    values = (getattr(summary, name) for summary in summaries for name in Summary.__slots__)
    if any(isinstance(value, Spread) and value.is_wide for value in values):
        parts.append(BUSY)
    return Group(*parts[1:])


def _cell(value: float | Spread | None, factor: float) -> str:
    """Format a number, or a spread as 0.61 (0.59-0.64) with a ~ before it if it is wide."""
    if not isinstance(value, Spread):
        return _number(None if value is None else value * factor)
    if value.minimum == value.maximum:
        return _number(value.median)
    mark = "~" if value.is_wide else ""
    return f"{mark}{_number(value.median)} ({_number(value.minimum)}-{_number(value.maximum)})"


def _number(value: float | None) -> str:
    if not value:
        return "-" if value is None else "0"
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:,.{decimals}f}"
