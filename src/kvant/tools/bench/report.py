"""Figures as tables for a person: one recording, or two side by side."""

from collections.abc import Sequence
from dataclasses import fields

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvant.tools.bench.recording import Header, Recording
from kvant.tools.bench.streams import StreamsSummary
from kvant.tools.bench.summary import Summary, summarize
from kvant.tools.statistics import Spread

Column = tuple[str, str, float]  # heading, attribute of a Summary, factor of the attribute
Case = tuple[str, int]  # engine label, context

TIMES: list[Column] = [
    ("first\nms", "first_token_ms", 1),
    ("prefill\ntokens/s", "prefill_tokens_per_s", 1),
    ("p50\nms", "latency_p50_ms", 1),
    ("p95\nms", "latency_p95_ms", 1),
    ("p99\nms", "latency_p99_ms", 1),
    ("decode\ntokens/s", "tokens_per_s", 1),
    ("slope\nus/1k", "slope_us_per_1k", 1),
]
RATIOS: list[Column] = [("a token", "ratio", 1), ("first token", "first_token_ratio", 1)]
MEMORY: list[Column] = [
    ("peak\nMB", "peak_memory_bytes", 1e-6),
    ("cache\nMB", "cache_bytes", 1e-6),
    ("read\nMB/token", "bytes_read_per_token", 1e-6),
    ("read\nGB/s", "achieved_gb_per_s", 1),
    ("of copy\n%", "copy_bandwidth_share", 100),
]
BETWEEN_RANKS: list[Column] = [
    ("step p50\nms", "latency_p50_ms", 1),
    ("sums\na token", "sums_per_token", 1),
    ("messages\na token", "messages_per_token", 1),
    ("sent\nkB/token", "sent_bytes_per_token", 1e-3),
]
DRAFTED: list[Column] = [
    ("mean\nms", "ms_per_token", 1),
    ("tokens\na step", "tokens_per_step", 1),
    ("accepted\n%", "draft_acceptance", 100),
    ("against\nplain", "draft_ratio", 1),
    ("runs\noff", "drafts_off", 1),
]
STREAMS_TIMES: list[Column] = [
    ("in all\ntokens/s", "tokens_per_s", 1),
    ("first\nms", "first_token_ms", 1),
    ("p50\nms", "between_p50_ms", 1),
    ("p99\nms", "between_p99_ms", 1),
    ("peak\nMB", "peak_memory_bytes", 1e-6),
]
STREAMS_GAINS: list[Column] = [("time", "gain", 1), ("CPU time", "cpu_gain", 1)]
STREAMS_RATIOS: list[Column] = [
    ("time", "ratio", 1),
    ("CPU time", "cpu_ratio", 1),
    ("a step", "step_ratio", 1),
]
TOGETHER = (
    "In all: tokens of all streams a second, prompts read included. First: until a stream's first token; p50 and p99: "
    "between two tokens of a stream."
)
GAINED = (
    "Tokens a second, and tokens a second of CPU time, divided by those one by one in the same round: median over "
    "rounds, and range. Above 1 is faster."
)
LESS = (
    "Time a token of all, its CPU time, and the median time between tokens, divided by the baseline's of the same "
    "round: median over rounds, and range. Below 1 is faster."
)
COMPARED: list[Column] = [
    ("latency p50, ms", "latency_p50_ms", 1),
    ("mean of drafts, ms", "ms_per_token", 1),
    ("first token, ms", "first_token_ms", 1),
    ("prefill, tokens/s", "prefill_tokens_per_s", 1),
    ("peak memory, MB", "peak_memory_bytes", 1e-6),
    ("cache, MB", "cache_bytes", 1e-6),
]
PAIRED = (
    "This engine's time divided by the baseline's of the same round: median over rounds, and range. Below 1 is faster."
)
READ = (
    "Read: the weights and the cached tokens, once a step. GB/s: that divided by p50. Of copy: that divided by the "
    "device's measured copy bandwidth."
)
BY_RANK_0 = (
    "Sums: arrays that all ranks add up or gather. Messages: arrays to or from one other rank. Sent: the bytes of "
    "both. All are of rank 0 alone, as are times and memory."
)
MEANS = (
    "Mean: the time of all tokens after the first divided by their number. Tokens of one step come at once: their "
    "median says nothing. Against plain: that mean divided by the one without drafts of the same round: median over "
    "rounds, and range. Below 1 is faster. Off: runs in which drafts did not pay and were switched off."
)
NOT_PAIRED = (
    "Not paired: the recordings were made apart. A machine that was busier in one of them shows as a difference. "
    "Only engines of one recording, measured in turns, compare closely."
)


def describe(header: Header) -> list[str]:
    """Model, machine and versions: lines to print above a table."""
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
    parts: list[Table | str] = []
    for title, columns, caption in (
        ("Time", TIMES, _times_caption(summaries)),
        ("Time against the baseline", RATIOS, PAIRED),
        ("Memory and bandwidth", MEMORY, READ),
        *([("Drafts: a token's time, in the mean", DRAFTED, MEANS)] if _drafts(summaries) else []),
        *_between_ranks(summaries),
    ):
        known = [column for column in columns if any(getattr(s, column[1]) is not None for s in summaries)]
        if known or not parts:
            parts += ["", _table(summaries, title, known, caption)]
    return Group(*parts[1:])


def streams_table(summaries: Sequence[StreamsSummary]) -> Group:
    """The figures of several streams, and their ratios, as tables that fit 80 columns."""
    times = _table(summaries, "Streams that come at once", STREAMS_TIMES, TOGETHER, "streams")
    parts = [times]
    if together := [summary for summary in summaries if summary.gain is not None]:
        parts.append(_table(together, "Together against one by one", STREAMS_GAINS, GAINED, "streams"))
    parts.append(_table(summaries, "Against the baseline", STREAMS_RATIOS, LESS, "streams"))
    return Group(*[each for part in parts for each in ("", part)][1:])


def compare(a: Recording, b: Recording, names: tuple[str, str] = ("A", "B")) -> Table:
    """Two recordings side by side: cases of the same engine label and context, and the differences around them.

    Args:
        a, b: the recordings; ratios are b's figures divided by a's.
        names: theirs in the table.
    """
    table = _empty(f"{names[0]} and {names[1]}")
    table.add_column("figure", no_wrap=True)
    for name in (*names, f"{names[1]} / {names[0]}"):
        table.add_column(Text(name), justify="right")
    first, second = ({(s.engine, s.context): s for s in summarize(r) if s.runs} for r in (a, b))
    for case in [case for case in first if case in second]:
        table.add_section()
        heading = [Text(case[0]), Text(str(case[1]))]
        for figure, name, factor in COMPARED:
            given = [_value(of[case], name, factor) for of in (first, second)]
            if given == [None, None]:
                continue
            ratio = None if given[1] is None or not given[0] else given[1] / given[0]
            table.add_row(*heading, figure, *(_number(x) for x in given), _number(ratio))
            heading = [Text(""), Text("")]
    alone = [_alone(names[0], first, second), _alone(names[1], second, first)]
    table.caption = Text("\n".join([*_differences(a, b), *filter(None, alone), NOT_PAIRED]))
    return table


def _differences(a: Recording, b: Recording) -> list[str]:
    """Differences in the machine, the model, the versions and the settings of engines of one label."""
    names = ("device", "cores", "system", "model", "seed", "kvant", "mlx", "mlx_lm", "python")
    pairs: list[tuple[str, object, object]] = [(n, getattr(a.header, n), getattr(b.header, n)) for n in names]
    for label, engine in a.engines.items():
        if other := b.engines.get(label):
            pairs += [(f"{label}'s {f.name}", getattr(engine, f.name), getattr(other, f.name)) for f in fields(engine)]
            pairs.append((f"{label}'s ranks", _ranks(a, label), _ranks(b, label)))
    return [f"Differs: {name}, {first} and {second}" for name, first, second in pairs if first != second]


def _ranks(recording: Recording, label: str) -> int:
    """Processes that an engine's model is divided over."""
    return next((sent.ranks for (engine, _, _), sent in recording.sent.items() if engine == label), 1)


def _alone(name: str, own: dict[Case, Summary], other: dict[Case, Summary]) -> str:
    """The cases that only one of the recordings has."""
    missing = [f"{label} at {context}" for label, context in own if (label, context) not in other]
    return f"Only in {name}: {', '.join(missing)}" if missing else ""


def _empty(title: str, second: str = "context") -> Table:
    """A table of the project's look, with the two columns that name a row's case."""
    table = Table(
        box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", caption_justify="left", collapse_padding=True
    )
    table.add_column("engine", overflow="fold")
    table.add_column(second, justify="right", no_wrap=True)
    return table


def _table(
    summaries: Sequence[Summary] | Sequence[StreamsSummary],
    title: str,
    columns: list[Column],
    caption: str,
    second: str = "context",
) -> Table:
    """A row for each summary, in sections by context, or by streams."""
    table = _empty(title, second)
    table.caption = Text(caption)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for summary in summaries:
        if last not in (None, getattr(summary, second)):
            table.add_section()
        last = getattr(summary, second)
        table.add_row(Text(summary.engine), str(last), *(_cell(summary, *column[1:]) for column in columns))
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


def _drafts(summaries: Sequence[Summary]) -> bool:
    """Whether some engine drafts."""
    return any(summary.tokens_per_step is not None for summary in summaries)


def _between_ranks(summaries: Sequence[Summary]) -> list[tuple[str, list[Column], str]]:
    """The table of what ranks send each other, where there are several."""
    groups = sorted({f"{s.ranks} ranks, {s.parallel}" for s in summaries if s.ranks is not None})
    return [("Between ranks", BETWEEN_RANKS, f"{'; '.join(groups)}. {BY_RANK_0}")] if groups else []


def _value(summary: Summary | StreamsSummary, name: str, factor: float) -> float | None:
    value = getattr(summary, name)
    return None if value is None else value * factor


def _cell(summary: Summary | StreamsSummary, name: str, factor: float) -> str:
    """A number, or a spread as 0.61 (0.59-0.64); the median alone if the range is empty."""
    value = getattr(summary, name)
    if not isinstance(value, Spread):
        return _number(_value(summary, name, factor))
    if value.minimum == value.maximum:
        return _number(value.median)
    return f"{_number(value.median)} ({_number(value.minimum)}-{_number(value.maximum)})"


def _number(value: float | None) -> str:
    """About three digits."""
    if not value:
        return "-" if value is None else "0"
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:,.{decimals}f}"
