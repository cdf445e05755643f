"""What was recorded is read as it was, or refused in a line; what an interruption left is kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.recordings import ENGINE, HEADER, RUN, record, write_tokens

from kvant.errors import KvantError
from kvant.tools.bench.recording import Engine, Header, Recorder, Recording, Run, Token, read_recording

Object = dict[str, Any]
DRAFTS: Object = {
    "kind": "drafts", "engine": "a", "run": 0, "context": 4, "steps": 1, "drafted": 8, "accepted": 2, "off": None
}  # fmt: skip
TOKEN: Object = {"kind": "token", "engine": "a", "run": 0, "context": 4, "position": 4, "latency_ms": 2.5}


def _objects() -> list[Object]:
    """The lines of a sound recording: one run of two tokens."""
    return [
        {"kind": "header", "version": 1, **HEADER},
        {"kind": "engine", "engine": "a", **ENGINE},
        dict(TOKEN),
        TOKEN | {"position": 5, "latency_ms": 1},
        {"kind": "run", "engine": "a", "run": 0, "context": 4, "tokens": 2, **RUN, "token_ids": [7, 8]},
    ]


def _write(path: Path, objects: list[Object]) -> Path:
    path.write_text("".join(json.dumps(o) + "\n" for o in objects), encoding="utf-8")
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Recorder(path) as recorder:
        made = record(recorder, lambda label, run, context, position: 1 + run + position / 64, contexts=(8, 16))
    assert read_recording(path) == made
    assert len(made.tokens) == 2 * 3 * 2 * 6
    assert [len(tokens) for _, tokens in made.completed()] == [6] * 12
    with Recorder() as memory:
        assert record(memory, lambda label, run, context, position: 1 + run + position / 64, contexts=(8, 16)) == made


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    """Field by field, so that files stay readable."""
    path = tmp_path / "a.jsonl"
    with Recorder(path) as recorder:
        recorder.write(Header(**HEADER))
        recorder.write(Engine(engine="a", **ENGINE))
        write_tokens(recorder, "a", 0, 4, [2.5, 1])
        recorder.write(Run(engine="a", run=0, context=4, tokens=2, **RUN | {"token_ids": (7, 8)}))
    assert [json.loads(line) for line in path.read_text().splitlines()] == _objects()
    read = read_recording(path)
    assert read.header == Header(**HEADER)
    assert read.engines == {"a": Engine(engine="a", **ENGINE)}
    assert read.runs[0].token_ids == (7, 8)


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Recorder(path) as recorder:
        recorder.write(Header(**HEADER))
        recorder.write(Engine(engine="a", **ENGINE))
        for count in range(1, 4):
            recorder.write(Token(**{k: v for k, v in TOKEN.items() if k != "kind"} | {"position": 3 + count}))
            assert len(read_recording(path).tokens) == count


def test_a_recording_loses_nothing_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("mine")
    with pytest.raises(KvantError, match=r"a\.jsonl exists"), Recorder(path):
        pytest.fail("it was opened")
    assert path.read_text() == "mine"
    with pytest.raises(KvantError, match="cannot be written: No such file"), Recorder(tmp_path / "no" / "b.jsonl"):
        pytest.fail("it was opened")


def test_a_recorder_that_wrote_nothing_leaves_no_file(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.jsonl") as recorder:
        assert (tmp_path / "a.jsonl").exists()
        with pytest.raises(ValueError, match="header first"):
            _ = recorder.recording
    assert not (tmp_path / "a.jsonl").exists()


def test_a_refused_line_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Recorder(path) as recorder:
        recorder.write(Header(**HEADER))
        with pytest.raises(ValueError, match="expected an engine named before"):
            write_tokens(recorder, "a", 0, 4, [1.0])
        recorder.write(Engine(engine="a", **ENGINE))
    assert read_recording(path) == recorder.recording
    assert len(path.read_text().splitlines()) == 2


def test_an_interrupted_run_is_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def interrupted_in_the_third_round() -> None:
        with Recorder(path) as recorder:
            record(recorder, lambda *_: 1.0, rounds=2)
            write_tokens(recorder, "fast", 2, 8, [1.0, 1.0, 1.0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_in_the_third_round()
    read = read_recording(path)
    assert read.interrupted() == [("fast", 2, 8)]
    assert len(read.tokens) == 2 * 2 * 6 + 3
    assert [(run.engine, run.run) for run, _ in read.completed()] == [
        ("fast", 0),
        ("slow", 0),
        ("fast", 1),
        ("slow", 1),
    ]


def test_a_last_line_may_be_cut_anywhere(tmp_path: Path) -> None:
    """By a kill while it was written; a whole one without its line end counts."""
    sound = _write(tmp_path / "a.jsonl", _objects()).read_bytes()
    path = tmp_path / "b.jsonl"
    start = sound.rindex(b"{")
    for end in range(start, len(sound)):
        path.write_bytes(sound[:end])
        read = read_recording(path)
        whole = end == len(sound) - 1
        assert (len(read.runs), len(read.interrupted())) == ((1, 0) if whole else (0, 1))
        assert len(read.tokens) == 2


Change = Callable[[list[Object]], Any]


def _change(line: int, **values: Any) -> Change:
    return lambda objects: objects[line].update(values)


BAD: list[tuple[str, Change, int, str]] = [
    ("no header", lambda o: o.pop(0), 1, "kind engine; expected the header first"),
    ("a second header", lambda o: o.insert(1, o[0]), 2, "a second header"),
    ("another version", _change(0, version=2), 1, "version is 2; expected 1"),
    ("version true", _change(0, version=True), 1, "version is True; expected 1"),
    ("an unknown kind", _change(2, kind="tokens"), 3, "kind is 'tokens'; expected one of header, engine, token, run"),
    ("more accepted than drafted", lambda o: o.insert(4, DRAFTS | {"accepted": 9}), 5, "accepted is 9; expected at"),
    ("drafts without a step", lambda o: o.insert(4, DRAFTS | {"steps": 0}), 5, "steps is 0; expected .* at least 1"),
    ("drafts twice", lambda o: o.extend([DRAFTS] * 2) or o.append(o.pop(4)), 6, "a second drafts of a run"),
    ("no kind", lambda o: o[2].pop("kind"), 3, "kind is None"),
    ("a kind that is a list", _change(2, kind=[1]), 3, r"kind is \[1\]"),
    ("a missing field", lambda o: o[2].pop("latency_ms"), 3, "the token line lacks latency_ms"),
    ("a field too many", _change(2, speed=1), 3, "the token line has 'speed'"),
    ("a local date", _change(0, date="2026-01-31T12:00:00"), 1, "expected ISO 8601 in UTC"),
    ("no date", _change(0, date="today"), 1, "date is 'today'"),
    ("no cores", _change(0, cores=0), 1, "cores is 0; expected a whole number of at least 1"),
    ("no bandwidth", _change(0, copy_bandwidth_gb_s=0), 1, "copy_bandwidth_gb_s is 0; .*above 0, or null"),
    ("an empty model", _change(0, model=""), 1, "model is ''; expected not empty text"),
    ("an engine twice", lambda o: o.insert(2, o[1]), 3, "a second engine 'a'"),
    ("an engine of no name", _change(1, name="vllm"), 2, "name is 'vllm'; expected one of kvant, mlx-lm"),
    ("bits that are text", _change(1, kv_bits="8"), 2, "kv_bits is '8'; expected a whole number"),
    ("an unknown engine", _change(2, engine="b"), 3, "a token of 'b'; expected an engine named before"),
    ("latency 0", _change(2, latency_ms=0), 3, "latency_ms is 0; expected a finite number above 0"),
    ("latency below 0", _change(3, latency_ms=-1.5), 4, "latency_ms is -1.5"),
    ("latency NaN", _change(3, latency_ms=float("nan")), 4, "found NaN; expected finite numbers"),
    ("latency infinite", _change(3, latency_ms=float("inf")), 4, "found Infinity"),
    ("latency true", _change(3, latency_ms=True), 4, "latency_ms is True"),
    ("latency text", _change(3, latency_ms="1"), 4, "latency_ms is '1'"),
    ("latency null", _change(3, latency_ms=None), 4, "latency_ms is None"),
    ("a huge latency", _change(3, latency_ms=10**400), 4, r"latency_ms is 1000+\.\.\.; expected a finite number"),
    ("a fraction of a run", _change(3, run=0.5), 4, "run is 0.5; expected a whole number of at least 0"),
    ("a position in the prompt", _change(2, position=3), 3, "position is 3; expected a whole number of at least 4"),
    ("a first token elsewhere", _change(2, position=5), 3, "position is 5; expected 4, as it is a run's first token"),
    ("a position twice", _change(3, position=4), 4, "position is 4; expected more than 4"),
    ("a run twice", lambda o: o.append(o[4]), 6, "a run of a run that has ended"),
    ("a token after the end", lambda o: o.append(TOKEN | {"position": 6}), 6, "a token of a run that has ended"),
    ("a run without tokens", _change(4, run=1), 5, "tokens is 2; the run has 0 token lines"),
    ("fewer tokens than lines", _change(4, tokens=1, token_ids=None), 5, "tokens is 1; the run has 2 token lines"),
    ("ids that are not", _change(4, token_ids=[7, -8]), 5, "expected a list of token ids"),
    ("too few ids", _change(4, token_ids=[7]), 5, "token_ids has 1 ids; expected 2"),
    ("a cache of none", _change(4, cache_bytes_per_token=-1), 5, "cache_bytes_per_token is -1; .*above 0, or null"),
    ("memory below 0", _change(4, peak_memory_bytes=-1), 5, "peak_memory_bytes is -1; .*of at least 0, or null"),
]  # fmt: skip


def test_the_lines_that_are_changed_are_sound(tmp_path: Path) -> None:
    assert len(read_recording(_write(tmp_path / "a.jsonl", _objects())).runs) == 1


@pytest.mark.parametrize(("change", "line", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_what_is_malformed_is_one_line(change: Change, line: int, message: str, tmp_path: Path) -> None:
    objects = _objects()
    change(objects)
    path = _write(tmp_path / "a.jsonl", objects)
    with pytest.raises(KvantError, match=rf"^[^\n]*a\.jsonl, line {line}: [^\n]*{message}[^\n]*$") as caught:
        read_recording(path)
    assert len(str(caught.value)) < len(str(path)) + 250


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b"hello", b'{"kind"', b"[1]\n", b"[" * 100_000 + b"\n", b"\xff\xfe\n", b"1" * 5000 + b"\n", b"\0" * 9],
    ids=["empty", "blank", "text", "cut header", "list", "nested", "not UTF-8", "digits", "zeros"],
)  # fmt: skip
def test_what_is_no_recording_is_one_line(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    with pytest.raises(KvantError, match=r"^[^\n]*a\.jsonl, line 1: [^\n]+$") as caught:
        read_recording(path)
    assert len(str(caught.value)) < len(str(path)) + 250


def test_a_last_line_that_is_something_else(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", _objects())
    path.write_text(path.read_text() + "hello")
    with pytest.raises(KvantError, match=r"line 6: found b'hello'; expected one JSON object"):
        read_recording(path)


def test_a_broken_line_within_is_not_a_cut_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(o) for o in _objects()]
    path.write_text("\n".join([*lines[:3], lines[3][:-9], lines[4]]) + "\n")
    with pytest.raises(KvantError, match=r"line 4: found .*; expected one JSON object"):
        read_recording(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(KvantError, match="cannot be read: "):
        read_recording(tmp_path / name)


def test_a_recording_begins_with_a_header() -> None:
    with Recorder() as recorder, pytest.raises(ValueError, match="expected the header first"):
        recorder.write(Engine(engine="a", **ENGINE))
    recording = Recording(Header(**HEADER))
    with pytest.raises(ValueError, match="a second header"):
        recording.add(Header(**HEADER))
