"""The lines of a benchmark's recording: each is checked where it is made."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from types import NoneType, UnionType
from typing import get_args, get_type_hints

VERSION = 1
ENGINES = ("kvant", "mlx-lm", "server")
WIDEST = 2**63 - 1  # the largest number a line may hold

Case = tuple[str, int, int]  # engine label, round, prompt tokens: they identify a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The model, the machine and the versions of a benchmark. Attributes that are None are not known."""

    version: int = VERSION
    date: str  # ISO 8601, UTC
    kvant: str  # versions
    mlx: str
    mlx_lm: str | None
    python: str
    system: str
    device: str
    blas: str | None  # what multiplies kvant's matrices where the device is a CPU
    cores: int
    copy_bandwidth_gb_s: float | None  # 1e9 bytes read and written a second
    command: str  # the arguments, without the program
    model: str
    seed: int
    baseline: str | None  # an engine's label

    def __post_init__(self) -> None:
        if type(self.version) is not int or self.version != VERSION:
            raise ValueError(f"version is {shown(self.version)}; expected {VERSION}, the one this kvant writes")
        _check(self, cores=1, seed=-WIDEST)
        try:
            utc = datetime.fromisoformat(self.date).utcoffset() == timedelta(0)
        except ValueError:
            utc = False
        if not utc:
            raise ValueError(f"date is {shown(self.date)}; expected ISO 8601 in UTC, as 2026-01-31T12:00:00+00:00")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine with its settings. Attributes that are None are not known, or do not apply."""

    engine: str  # the label, by which everything else names it
    name: str  # of ENGINES
    kv_bits: int | None  # 0: not quantized
    kv_group_size: int | None
    dtype: str | None
    weight_bytes: int | None  # all weights held
    weight_bytes_read: int | None  # by one decode step

    def __post_init__(self) -> None:
        _check(self, kv_group_size=1)
        if self.name not in ENGINES:
            raise ValueError(f"name is {shown(self.name)}; expected one of {', '.join(ENGINES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token.

    Attributes:
        engine: the label.
        run: the round, from 0.
        context: prompt tokens of the case.
        position: the token's index in the sequence; the first generated one has ``context``.
        latency_ms: since the token before was ready; the first one's, since the request.
    """

    engine: str
    run: int
    context: int
    position: int
    latency_ms: float

    def __post_init__(self) -> None:
        _check(self, context=1)
        _check(self, position=self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The end of one run; a run without it was interrupted. Attributes that are None are not known.

    Attributes:
        engine, run, context: as a token's.
        tokens: tokens generated.
        token_ids: their ids.
        peak_memory_bytes: the most memory held.
        cache_bytes: held by the cache at the end.
        cache_bytes_per_token: that divided by the tokens the cache has room for.
    """

    engine: str
    run: int
    context: int
    tokens: int
    token_ids: tuple[int, ...] | None
    peak_memory_bytes: int | None
    cache_bytes: int | None
    cache_bytes_per_token: float | None

    def __post_init__(self) -> None:
        _check(self, context=1, tokens=1)
        ids = self.token_ids
        if ids is None:
            return
        if not isinstance(ids, list | tuple) or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"token_ids is {shown(ids)}; expected a list of token ids, or null")
        if len(ids) != self.tokens:
            raise ValueError(f"token_ids has {len(ids)} ids; expected {self.tokens}, as tokens says")
        object.__setattr__(self, "token_ids", tuple(ids))  # a list where it comes from JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """A run of several requests that came at once.

    Attributes:
        engine, run: as a token's.
        prompt_tokens: of each request.
        arrivals_ms: when each token of each request was ready, since they came.
        token_ids: of each request; None of a server, which sends text.
        cpu_ms: processor time of the engine's process, of all its threads; None: not known.
        peak_memory_bytes: as a run's.
    """

    engine: str
    run: int
    prompt_tokens: tuple[int, ...]
    arrivals_ms: tuple[tuple[float, ...], ...]
    token_ids: tuple[tuple[int, ...], ...] | None
    cpu_ms: float | None
    peak_memory_bytes: int | None

    def __post_init__(self) -> None:
        _check(self)
        for name in ("arrivals_ms", "token_ids"):
            rows = getattr(self, name)
            if rows is None and name == "token_ids":
                continue
            if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) and row for row in rows):
                raise ValueError(f"{name} is {shown(rows)}; expected a list for each request")
            object.__setattr__(self, name, tuple(map(tuple, rows)))  # lists where it comes from JSON
        object.__setattr__(self, "prompt_tokens", tuple(self.prompt_tokens))
        counts = [len(times) for times in self.arrivals_ms]
        ids = counts if self.token_ids is None else [len(row) for row in self.token_ids]
        if not counts or counts != ids or len(counts) != len(self.prompt_tokens):
            raise ValueError(
                f"{len(self.prompt_tokens)} requests, {counts} times, {ids} ids; expected the same of each request"
            )
        for times in self.arrivals_ms:
            if not all(type(t) in (int, float) and 0 < t <= WIDEST for t in times) or list(times) != sorted(times):
                raise ValueError(
                    f"arrivals_ms has {shown(times)}; expected finite numbers above 0 that do not decrease"
                )

    @property
    def streams(self) -> int:
        """Requests."""
        return len(self.prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What rank 0 of several sent, received and summed in the decode steps of a run, before the run's end.

    Attributes:
        engine, run, context: as a token's.
        ranks: processes in all.
        parallel: "pipeline" or "tensor".
        steps: of a token each.
        sums: arrays that all ranks added up or gathered.
        messages: arrays to or from one other rank.
        bytes: of the arrays in both.
    """

    engine: str
    run: int
    context: int
    ranks: int
    parallel: str
    steps: int
    sums: int
    messages: int
    bytes: int

    def __post_init__(self) -> None:
        _check(self, context=1, ranks=2, steps=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What drafts did in a run, before the run's end.

    Attributes:
        engine, run, context: as a token's.
        steps: of the model, for the tokens after the first.
        drafted: tokens that were drafted.
        accepted: of these, tokens that are in the text.
        off: why nothing was drafted any more; None: it was, where it paid.
    """

    engine: str
    run: int
    context: int
    steps: int
    drafted: int
    accepted: int
    off: str | None

    def __post_init__(self) -> None:
        _check(self, context=1, steps=1)
        if self.accepted > self.drafted:
            raise ValueError(f"accepted is {self.accepted}; expected at most the {self.drafted} drafted")


Line = Header | Engine | Token | Run | Streams | Sent | Drafted
KINDS: dict[str, type[Line]] = {
    "header": Header,
    "engine": Engine,
    "token": Token,
    "run": Run,
    "streams": Streams,
    "sent": Sent,
    "drafts": Drafted,
}
NAMES = {kind: name for name, kind in KINDS.items()}
# Of each kind of line, its fields of text and of numbers: name, type, and whether null is allowed.
_FIELDS = {
    kind: [
        (name, types[0], NoneType in types)
        for name, hint in get_type_hints(kind).items()
        if (types := get_args(hint) if isinstance(hint, UnionType) else (hint,))[0] in (str, int, float)
    ]
    for kind in KINDS.values()
}


def _check(line: Line, **least: int) -> None:
    """Texts are not empty, whole numbers at least 0 or ``least``, other numbers finite and above 0."""
    for name, kind, optional in _FIELDS[type(line)]:
        value = getattr(line, name)
        if value is None and optional:
            continue
        if kind is str:
            sound, expected = isinstance(value, str) and (value or name == "command"), "not empty text"
        elif kind is int:
            low = least.get(name, 0)
            sound = type(value) is int and low <= value <= WIDEST
            expected = f"a whole number of at least {low}"
        else:
            sound = type(value) in (int, float) and 0 < value <= WIDEST  # NaN is not
            expected = "a finite number above 0"
        if not sound:
            raise ValueError(f"{name} is {shown(value)}; expected {expected}{', or null' if optional else ''}")


def shown(value: object) -> str:
    """A value in an error, not longer than a part of a line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
