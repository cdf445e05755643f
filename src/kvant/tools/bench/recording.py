"""A benchmark's recording: a header, engines and runs, each a JSON line of the file."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from kvant.machine import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The model, the machine, the command and the label of the engine that others are compared with."""

    date: str  # ISO 8601, UTC
    command: str
    model: str
    seed: int
    baseline: str
    copy_bandwidth_gb_s: float  # 1e9 bytes read and written a second
    machine: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine with its settings; None if unknown or not applicable."""

    engine: str  # the label
    name: str
    kv_bits: int | None  # 0: not quantized
    kv_group_size: int | None
    dtype: str | None
    weight_bytes: int | None
    weight_bytes_read: int | None  # by one decode step


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One engine's answer to a request, or to several that came at once; None if unknown."""

    engine: str  # the label
    run: int  # the round, from 0
    prompt_tokens: tuple[int, ...]  # one per request
    together: bool  # whether the engine used its way of serving several requests
    arrivals_ms: list[list[float]]  # for each request, when each token was ready after the start
    token_ids: list[list[int]] | None = None
    cpu_ms: float | None = None  # processor time of all threads of the engine's process
    peak_memory_bytes: int | None = None
    cache_bytes: int | None = None
    cache_bytes_per_token: float | None = None  # cache_bytes divided by the tokens there is room for
    # steps, drafted and accepted tokens, and why drafts were switched off
    drafts: dict[str, Any] | None = None


@dataclass(slots=True)
class Recording:
    """Engines and runs in the order in which they came; each is written to the file at once."""

    header: Header
    file: TextIO | None = None
    engines: dict[str, Engine] = field(default_factory=dict, init=False)
    runs: list[Run] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._write(self.header)

    def add(self, line: Engine | Run) -> None:
        if isinstance(line, Engine):
            self.engines[line.engine] = line
        else:
            self.runs.append(line)
        self._write(line)

    def _write(self, line: Header | Engine | Run) -> None:
        if self.file is not None:
            print(
                json.dumps({"kind": type(line).__name__.lower(), **asdict(line)}), file=self.file, flush=True
            )
