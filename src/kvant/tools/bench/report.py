"""Figures as tables for a person: one recording, or two side by side."""

from collections.abc import Callable, Sequence
from dataclasses import fields

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvant.tools.bench.recording import Header, Recording
from kvant.tools.bench.statistics import Spread
from kvant.tools.bench.summary import Summary, summarize, summary_json

__all__ = ["Summary", "compare", "describe", "summarize", "summary_json", "table"]

Cell = Callable[[Summary], str]
NOT_PAIRED = (
    "Not paired: the recordings were made apart, so that a machine that was busier in one of them shows as a "
    "difference. Only engines of one recording, measured in turns, compare closely."
)


def describe(header: Header) -> list[str]:
    """What was measured, where and with what: lines to print above a table."""
    versions = [f"kvant {header.kvant}", f"MLX {header.mlx}"]
    if header.mlx_lm is not None:
        versions.append(f"mlx-lm {header.mlx_lm}")
    speed = header.copy_bandwidth_gb_s
    copies = "" if speed is None else f", copies {_number(speed)} GB/s"
    return [
        f"{header.model}, seed {header.seed}, {header.date}",
        f"{header.device}, {header.cores} cores, {header.system}{copies}",
        f"{', '.join(versions)}, Python {header.python}",
        *([] if header.blas is None else [f"kvant's BLAS: {header.blas}"]),
    ]


def table(summaries: Sequence[Summary]) -> Group:
    """The figures as tables that fit 80 columns: time, ratios to the baseline, memory and bandwidth."""
    times: list[tuple[str, Cell]] = [
        ("first\nms", lambda s: _number(s.first_token_ms)),
        ("prefill\ntokens/s", lambda s: _number(s.prefill_tokens_per_s)),
        ("p50\nms", lambda s: _number(s.latency_p50_ms)),
        ("p95\nms", lambda s: _number(s.latency_p95_ms)),
        ("p99\nms", lambda s: _number(s.latency_p99_ms)),
        ("decode\ntokens/s", lambda s: _number(s.tokens_per_s)),
        ("slope\nus/1k", lambda s: _number(s.slope_us_per_1k)),
    ]
    ratios: list[tuple[str, Cell]] = [
        ("a token", lambda s: _spread(s.ratio)),
        ("first token", lambda s: _spread(s.first_token_ratio)),
    ]
    memory: list[tuple[str, Cell]] = [
        ("peak\nMB", lambda s: _scaled(s.peak_memory_bytes, 1e-6)),
        ("cache\nMB", lambda s: _scaled(s.cache_bytes, 1e-6)),
        ("read\nMB/token", lambda s: _scaled(s.bytes_read_per_token, 1e-6)),
        ("read\nGB/s", lambda s: _number(s.achieved_gb_per_s)),
        ("of copy\n%", lambda s: _scaled(s.copy_bandwidth_share, 100)),
    ]
    model: list[tuple[str, Cell]] = [
        ("read\nMB/token", lambda s: _scaled(s.model_bytes_read, 1e-6)),
        ("written\nMB/token", lambda s: _scaled(s.model_bytes_written, 1e-6)),
        ("launches\na token", lambda s: _number(s.attention_launches)),
    ]
    paired = (
        "Median over rounds of this engine's time by the baseline's of the same round, and the range; below 1 is "
        "faster."
    )
    read = "Read: the weights and cached tokens of one step, by p50; of copy: of the device's measured copy bandwidth."
    moved = (
        "Computed, not measured: the weights, and what each operation of attention and of the cache reads and writes "
        "in one step, where dequantized rows and scores count too; launches: those operations."
    )
    shown: list[Table | str] = [_table(summaries, "Time", times, _times_caption(summaries))]
    for title, columns, caption in (
        ("Time against the baseline", ratios, paired),
        ("Memory and bandwidth", memory, read),
        ("Attention's operations, by the byte model", model, moved),
    ):
        more = _table(summaries, title, columns, caption)
        if len(more.columns) > 2:
            shown += ["", more]
    return Group(*shown)


def compare(a: Recording, b: Recording, names: tuple[str, str] = ("A", "B")) -> Table:
    """Two recordings side by side: cases of the same engine label and context, and what differs around them.

    Args:
        a, b: the recordings; ratios are b's figures by a's.
        names: what to call them.
    """
    table = Table(box=box.SIMPLE_HEAD, title=f"{names[0]} and {names[1]}", title_justify="left", caption_justify="left")
    table.add_column("engine", overflow="fold")
    table.add_column("context", justify="right", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    for name in (*names, f"{names[1]} / {names[0]}"):
        table.add_column(Text(name), justify="right")
    cases = [{(s.engine, s.context): s for s in summarize(r) if s.runs} for r in (a, b)]
    for case in [case for case in cases[0] if case in cases[1]]:
        table.add_section()
        heading = [Text(case[0]), Text(str(case[1]))]
        for figure, value in _COMPARED:
            given = [value(of[case]) for of in cases]
            if given == [None, None]:
                continue
            ratio = None if given[0] is None or given[1] is None or given[0] == 0 else given[1] / given[0]
            table.add_row(*heading, figure, *(_number(x) for x in given), _number(ratio))
            heading = [Text(""), Text("")]
    table.caption = Text("\n".join([*_differences(a, b), *_alone(cases, names), NOT_PAIRED]))
    return table


_COMPARED: list[tuple[str, Callable[[Summary], float | None]]] = [
    ("latency p50, ms", lambda s: s.latency_p50_ms),
    ("first token, ms", lambda s: s.first_token_ms),
    ("prefill, tokens/s", lambda s: s.prefill_tokens_per_s),
    ("peak memory, MB", lambda s: _times(s.peak_memory_bytes, 1e-6)),
    ("cache, MB", lambda s: _times(s.cache_bytes, 1e-6)),
]


def _differences(a: Recording, b: Recording) -> list[str]:
    """What differs in the machine, the model, the versions and the settings of engines of one label."""
    names = ("device", "cores", "system", "model", "seed", "kvant", "mlx", "mlx_lm", "python")
    pairs: list[tuple[str, object, object]] = [(n, getattr(a.header, n), getattr(b.header, n)) for n in names]
    for label, engine in a.engines.items():
        if other := b.engines.get(label):
            pairs += [(f"{label}'s {f.name}", getattr(engine, f.name), getattr(other, f.name)) for f in fields(engine)]
    return [f"Differs: {name}, {first} and {second}" for name, first, second in pairs if first != second]


def _alone(cases: list[dict[tuple[str, int], Summary]], names: tuple[str, str]) -> list[str]:
    """The cases that only one of the recordings has."""
    lines = []
    for name, own, other in ((names[0], *cases), (names[1], *reversed(cases))):
        if missing := [f"{label} at {context}" for label, context in own if (label, context) not in other]:
            lines.append(f"Only in {name}: {', '.join(missing)}")
    return lines


def _empty(title: str) -> Table:
    """A table of the project's look with the two columns that say what a row is of."""
    table = Table(
        box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", caption_justify="left", collapse_padding=True
    )
    table.add_column("engine", overflow="fold")
    table.add_column("context", justify="right", no_wrap=True)
    return table


def _table(summaries: Sequence[Summary], title: str, columns: list[tuple[str, Cell]], caption: str) -> Table:
    """A row for each summary, in sections by context; columns of which nothing is known are left out."""
    known = [(name, cell) for name, cell in columns if any(cell(s) != "-" for s in summaries)]
    table = _empty(title)
    table.caption = Text(caption)
    for name, _ in known:
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for summary in summaries:
        if last not in (None, summary.context):
            table.add_section()
        last = summary.context
        table.add_row(Text(summary.engine), str(summary.context), *(cell(summary) for _, cell in known))
    return table


def _times_caption(summaries: Sequence[Summary]) -> str:
    runs = sorted({s.runs for s in summaries})
    rounds = "-".join(str(n) for n in dict.fromkeys((runs[0], runs[-1]))) if runs else "0"
    lines = [
        f"First: until the first token; p50 to slope: of the tokens after it; from {rounds} "
        f"{'run' if rounds == '1' else 'runs'} each.",
        "Slope: microseconds a token more with every 1,000 tokens of context.",
    ]
    lines += [
        f"Interrupted and left out: {s.interrupted} {'run' if s.interrupted == 1 else 'runs'} of {s.engine} "
        f"at {s.context}"
        for s in summaries
        if s.interrupted
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    """About three digits."""
    if value is None:
        return "-"
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:,.{decimals}f}"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _scaled(value: float | None, factor: float) -> str:
    return _number(_times(value, factor))


def _spread(value: Spread | None) -> str:
    """As 0.61 (0.59-0.64); the median alone where there is no range."""
    if value is None:
        return "-"
    if value.minimum == value.maximum:
        return _number(value.median)
    return f"{_number(value.median)} ({_number(value.minimum)}-{_number(value.maximum)})"
