"""A benchmark's recording: JSON lines, written as the tokens come, so that an interruption loses none."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TextIO

from kvant.errors import KvantError
from kvant.tools.bench.lines import (
    KINDS,
    NAMES,
    VERSION,
    Case,
    Drafted,
    Engine,
    Header,
    Line,
    Run,
    Sent,
    Streams,
    Token,
    shown,
)

__all__ = [
    "Case",
    "Drafted",
    "Engine",
    "Header",
    "Line",
    "Recorder",
    "Recording",
    "Run",
    "Sent",
    "Streams",
    "Token",
    "read_recording",
]


@dataclass(slots=True)
class Recording:
    """All lines, in the order in which they came."""

    header: Header
    engines: dict[str, Engine] = field(default_factory=dict, init=False)
    tokens: list[Token] = field(default_factory=list, init=False)
    runs: list[Run] = field(default_factory=list, init=False)
    streams: list[Streams] = field(default_factory=list, init=False)
    sent: dict[Case, Sent] = field(default_factory=dict, init=False)
    drafts: dict[Case, Drafted] = field(default_factory=dict, init=False)
    _tokens_of: dict[Case, list[Token]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _ended: set[Case] = field(default_factory=set, init=False, repr=False, compare=False)

    def add(self, line: Line) -> None:
        """Take the next line.

        Raises:
            ValueError: it does not belong here: a second header or engine of one label, an engine not yet named, a
                token that does not continue its run, the end of a run that has ended or has no tokens.
        """
        if isinstance(line, Header):
            raise ValueError("a second header; expected one, on the first line")
        if isinstance(line, Engine):
            if line.engine in self.engines:
                raise ValueError(f"a second engine {shown(line.engine)}; expected every label once")
            self.engines[line.engine] = line
            return
        if line.engine not in self.engines:
            raise ValueError(f"a {NAMES[type(line)]} of {shown(line.engine)}; expected an engine named before")
        if isinstance(line, Streams):
            case = (line.engine, line.run, line.streams)
            if case in ((other.engine, other.run, other.streams) for other in self.streams):
                raise ValueError(f"a second run {line.run} of {shown(line.engine)} with {line.streams} streams")
            self.streams.append(line)
            return
        case = (line.engine, line.run, line.context)
        if case in self._ended:
            raise ValueError(f"a {NAMES[type(line)]} of a run that has ended; expected another round or context")
        if isinstance(line, Sent | Drafted):
            held: dict[Case, Any] = self.sent if isinstance(line, Sent) else self.drafts
            if case in held:
                raise ValueError(f"a second {NAMES[type(line)]} of a run; expected one")
            held[case] = line
            return
        before = self._tokens_of.get(case, [])
        if isinstance(line, Token):
            if not before and line.position != line.context:
                raise ValueError(f"position is {line.position}; expected {line.context}, as it is a run's first token")
            if before and line.position <= before[-1].position:
                raise ValueError(f"position is {line.position}; expected more than {before[-1].position}, the last one")
            self._tokens_of.setdefault(case, []).append(line)
            self.tokens.append(line)
        else:
            if not 1 <= len(before) <= line.tokens:
                raise ValueError(f"tokens is {line.tokens}; the run has {len(before)} token lines")
            self._ended.add(case)
            self.runs.append(line)

    def completed(self) -> list[tuple[Run, list[Token]]]:
        """The runs that came to their end, with their tokens."""
        return [(run, self._tokens_of[run.engine, run.run, run.context]) for run in self.runs]

    def interrupted(self) -> list[Case]:
        """The runs that did not: their tokens are kept, but are in no figure."""
        return [case for case in self._tokens_of if case not in self._ended]


def _extended(recording: Recording | None, line: Line) -> Recording:
    """The recording with one more line, or a new one from its header."""
    if recording is not None:
        recording.add(line)
        return recording
    if not isinstance(line, Header):
        raise ValueError(f"found a line of kind {NAMES[type(line)]}; expected the header first")
    return Recording(line)


class Recorder:
    """Keeps a recording and, if it has a path, appends every line to that new file at once."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._recording: Recording | None = None

    def __enter__(self) -> "Recorder":
        if self._path is not None:
            try:
                self._file = self._path.open("x", encoding="utf-8", newline="\n")
            except FileExistsError:
                raise KvantError(f"{self._path} exists; a recording goes to a new file") from None
            except OSError as error:
                raise KvantError(f"{self._path} cannot be written: {error.strerror}") from None
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()
            if self._recording is None:  # nothing to keep
                self._path.unlink()

    @property
    def recording(self) -> Recording:
        """The lines written so far."""
        if self._recording is None:
            raise ValueError("nothing is recorded yet; expected a header first")
        return self._recording

    def write(self, line: Line) -> None:
        """Append one line, the header first.

        Raises:
            ValueError: the line does not belong here; nothing is written then.
        """
        self._recording = _extended(self._recording, line)
        if self._file is not None:
            print(json.dumps({"kind": NAMES[type(line)], **asdict(line)}), file=self._file, flush=True)


def read_recording(path: Path) -> Recording:
    """Read a :class:`Recorder`'s file; a last line that was cut short is left out.

    Raises:
        KvantError: a file that cannot be read or, with its line number, is not a recording.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise KvantError(f"{path} cannot be read: {error.strerror}") from None
    last = lines.pop()  # after the last line's end: nothing, unless the writing was cut short
    if last and not _is_cut(last):
        lines.append(last)
    recording = None
    for number, line in enumerate(lines, start=1):
        try:
            recording = _extended(recording, _parse(line))
        except ValueError as error:
            raise KvantError(f"{path}, line {number}: {error}") from None
    if recording is None:
        raise KvantError(f"{path}, line 1: no line; expected a recording's header")
    return recording


def _is_cut(line: bytes) -> bool:
    """Whether this is the beginning of an object whose end is missing."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith(b"{")
    return False


def _parse(text: bytes) -> Line:
    """One line of the file; a ValueError that names the fault."""
    try:
        values: Any = json.loads(text, parse_constant=_refuse)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError(f"found {shown(text)}; expected one JSON object") from None
    if not isinstance(values, dict):
        raise ValueError(f"found {shown(values)}; expected one JSON object")
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind is {shown(kind)}; expected one of {', '.join(KINDS)}")
    if kind == "header" and values.get("version", VERSION) != VERSION:  # whose fields may be others
        raise ValueError(f"version is {shown(values['version'])}; expected {VERSION}, the one this kvant reads")
    names = {f.name for f in fields(KINDS[kind])}
    if missing := sorted(names - values.keys()):
        raise ValueError(f"the {kind} line lacks {', '.join(missing)}")
    if unknown := sorted(values.keys() - names):
        raise ValueError(f"the {kind} line has {shown(', '.join(unknown))}, which it should not")
    return KINDS[kind](**values)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"found {name}; expected finite numbers")
