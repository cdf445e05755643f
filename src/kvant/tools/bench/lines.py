"""The lines of a benchmark's recording: what each holds, checked where it is made."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

VERSION = 1
ENGINES = ("kvant", "mlx-lm", "concat", "none", "server")
WIDEST = 2**63 - 1  # the largest number a line may hold

ATTENTION = ("attention_bytes_read", "attention_bytes_written", "attention_launches")

Case = tuple[str, int, int]  # engine label, round, prompt tokens: what one run is known by


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What was run, where and with what. Attributes that are None are not known."""

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
        _check_texts(self, ("date", "kvant", "mlx", "python", "system", "device", "model"))
        _check_texts(self, ("command",), empty=True)
        _check_texts(self, ("mlx_lm", "blas", "baseline"), optional=True)
        _check_whole(self, "cores", 1)
        _check_whole(self, "seed", -WIDEST)
        _check_number(self, "copy_bandwidth_gb_s", positive=True, optional=True)
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
        _check_texts(self, ("engine",))
        _check_texts(self, ("dtype",), optional=True)
        if self.name not in ENGINES:
            raise ValueError(f"name is {shown(self.name)}; expected one of {', '.join(ENGINES)}")
        for name, least in (("kv_bits", 0), ("kv_group_size", 1), ("weight_bytes", 0), ("weight_bytes_read", 0)):
            _check_whole(self, name, least, optional=True)


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
        _check_case(self)
        _check_whole(self, "position", self.context)
        _check_number(self, "latency_ms", positive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The end of one run; a run without it was interrupted. Attributes that are None are not known.

    Attributes:
        engine, run, context: as a token's.
        tokens: tokens generated.
        token_ids: their ids.
        peak_memory_bytes: the most memory held.
        cache_bytes: held by the cache at the end.
        cache_bytes_per_token: read for each cached token in one decode step.
        attention_bytes_read, attention_bytes_written, attention_launches: of one decode step in the middle of the
            tokens after the first, all layers, by the byte model (kvant.tools.bench.bytes). Older recordings lack them.
    """

    engine: str
    run: int
    context: int
    tokens: int
    token_ids: tuple[int, ...] | None
    peak_memory_bytes: int | None
    cache_bytes: int | None
    cache_bytes_per_token: float | None
    attention_bytes_read: float | None = None
    attention_bytes_written: float | None = None
    attention_launches: float | None = None

    def __post_init__(self) -> None:
        _check_case(self)
        _check_whole(self, "tokens", 1)
        _check_whole(self, "peak_memory_bytes", 0, optional=True)
        _check_whole(self, "cache_bytes", 0, optional=True)
        for name in ("cache_bytes_per_token", *ATTENTION):
            _check_number(self, name, positive=False, optional=True)
        ids = self.token_ids
        if ids is None:
            return
        if not isinstance(ids, list | tuple) or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"token_ids is {shown(ids)}; expected a list of token ids, or null")
        if len(ids) != self.tokens:
            raise ValueError(f"token_ids has {len(ids)} ids; expected {self.tokens}, as tokens says")
        object.__setattr__(self, "token_ids", tuple(ids))  # a list where it comes from JSON


Line = Header | Engine | Token | Run
KINDS: dict[str, type[Line]] = {"header": Header, "engine": Engine, "token": Token, "run": Run}
NAMES = {kind: name for name, kind in KINDS.items()}


def _check_case(line: Token | Run) -> None:
    _check_texts(line, ("engine",))
    _check_whole(line, "run", 0)
    _check_whole(line, "context", 1)


def _check_texts(line: object, names: Iterable[str], *, empty: bool = False, optional: bool = False) -> None:
    """Texts, none empty unless said."""
    for name in names:
        value = getattr(line, name)
        if (value is None and optional) or (isinstance(value, str) and (value or empty)):
            continue
        raise ValueError(f"{name} is {shown(value)}; expected {'' if empty else 'not empty '}text{_or_null(optional)}")


def _check_whole(line: object, name: str, least: int, *, optional: bool = False) -> None:
    """A whole number from ``least`` on."""
    value = getattr(line, name)
    if (value is None and optional) or (type(value) is int and least <= value <= WIDEST):
        return
    raise ValueError(f"{name} is {shown(value)}; expected a whole number of at least {least}{_or_null(optional)}")


def _check_number(line: object, name: str, *, positive: bool, optional: bool = False) -> None:
    """A finite number, of 0 only where ``positive`` is not asked for."""
    value = getattr(line, name)
    if value is None and optional:
        return
    if type(value) in (int, float) and (0 < value <= WIDEST or (value == 0 and not positive)):  # NaN is neither
        return
    kind = "above 0" if positive else "of at least 0"
    raise ValueError(f"{name} is {shown(value)}; expected a finite number {kind}{_or_null(optional)}")


def shown(value: object) -> str:
    """A value in an error, not longer than a part of a line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _or_null(optional: bool) -> str:
    return ", or null" if optional else ""
