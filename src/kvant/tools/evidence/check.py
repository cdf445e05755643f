"""Whether a file of evidence is whole, unaltered, and says what its own rounds say."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any

from kvant.engine.load import POCKET, find_model
from kvant.errors import KvantError, one_line
from kvant.fields import shown
from kvant.files import read_user_file, unique_keys
from kvant.machine import Environment
from kvant.tools.bench.figures import summarize
from kvant.tools.bench.recording import Engine, Header, Recording, Run
from kvant.tools.evidence.measure import Record, drifts, figures, file_digests


def _is_list(value: Any, of: type | UnionType) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(each, of) and not isinstance(each, bool) for each in value)


FORMAT = "kvant evidence 1"
DIGEST = "sha256"
MAX_BYTES = 4 * 1024 * 1024  # a file has a tenth of a megabyte
MAX_RUNS = 100  # of all models together: a real file has half as many, and the drift of many runs takes long
PARTS = ("the whole command", "a token of ", "the quality of ", "attention to ")  # a record has one of each
# Fields that are read before their digest is checked: a test of the value, and what is expected.
KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("left_out", "unchecked", "parts"), (partial(_is_list, of=str), "a list of texts")),
    **dict.fromkeys(("attention", "models"), (partial(_is_list, of=dict), "a list of objects")),
    "command_ms": (partial(_is_list, of=float | int), "a list of numbers"),
    "report": (lambda value: isinstance(value, dict | None), "an object or null"),
}


def sealed(record: Mapping[str, Any]) -> Record:
    """A record with its format and digest, which finds accidents and edits, and no forger."""
    whole = {"format": FORMAT, **record}
    return whole | {DIGEST: _digest(whole)}


def read(path: Path) -> Record:
    """The record of a file; a KvantError if it is none."""
    data = read_user_file(path, MAX_BYTES)
    try:
        record = json.loads(data.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise KvantError(f"{path}: {one_line(error)}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise KvantError(f"{path}: no file of kvant evidence; expected its format to be {FORMAT!r}")
    for name, (is_right, expected) in KINDS.items():
        if name in record and not is_right(record[name]):
            raise KvantError(f"{path}: {name} is {shown(record[name])}; expected {expected}")
    return record


def problems(record: Mapping[str, Any]) -> list[str]:
    """What is wrong with a record: it was altered, or a figure is not that of its rounds."""
    found = []
    if record.get(DIGEST) != _digest({name: value for name, value in record.items() if name != DIGEST}):
        found.append("altered: its digest is another")
    try:
        found += [f"not consistent: {text}" for text in _inconsistent(record)]
        figures(record)  # a record of which none can be said is none
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        found.append(f"not consistent: {type(error).__name__}: {one_line(error)}")
    return found


def left_out(record: Mapping[str, Any]) -> list[str]:
    return [*record.get("left_out", ()), *record.get("unchecked", ())]


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _inconsistent(record: Mapping[str, Any]) -> Iterator[str]:
    without = {text.partition(": ")[0] for text in record["left_out"]}
    measured = {
        "the whole command": record["command_ms"],
        **{f"a token of {each['model']}": each["runs"] for each in record["models"]},
        **{f"attention to {each['context']:,} tokens": each["ms"] for each in record["attention"]},
        **({f"the quality of {record['report']['model']}": True} if record["report"] else {}),
    }
    for stem in PARTS:
        if not any(part.startswith(stem) for part in record["parts"]):
            yield f"no part is {stem.strip()!r}"
    if (count := sum(len(model["runs"]) for model in record["models"])) > MAX_RUNS:
        yield f"{count} runs; expected at most {MAX_RUNS}"
        return
    for part in record["parts"]:
        if part not in without and not measured.get(part):
            yield f"{part} is neither there nor left out"
    for model in record["models"]:
        name = model["model"]
        header = Header(**(model["header"] | {"machine": Environment(**model["header"]["machine"])}))
        recording = Recording(header)
        for each in model["engines"]:
            recording.add(Engine(**each))
        for each in model["runs"]:
            recording.add(Run(**(each | {"prompt_tokens": tuple(each["prompt_tokens"])})))
        for own, given in zip(map(asdict, summarize(recording)), model["summaries"], strict=True):
            different = [field for field, value in own.items() if not _same(value, given[field])]
            if different:
                where = f"{given['engine']} after {given['context']}"
                yield f"{name}, {where}: {', '.join(different)} are not those of its rounds"
        if not _same(drifts(recording), model["drift"]):
            yield f"{name}: the drift is not that of its rounds"
        for each in model["memory"]:
            if each["peak"] > each["planned"]:
                yield f"{name}: a peak of {each['peak']} bytes is above its plan of {each['planned']}"
        if name == POCKET and (here := file_digests(find_model(POCKET))) != model["files"]:
            yield f"pocket's weights are others: {model['files']}; here {here}"
    if not record["healthy"]:
        yield "the fused kernel was wrong: " + "; ".join(
            use["problem"] for use in (*record["kernels"], *record["uses"]) if use["problem"] is not None
        )


def _same(own: Any, given: Any) -> bool:
    """Whether two parts of a record are alike, numbers but for rounding."""
    if isinstance(own, Mapping):
        return (
            isinstance(given, Mapping)
            and own.keys() == given.keys()
            and all(_same(own[k], given[k]) for k in own)
        )
    if isinstance(own, list | tuple):
        return isinstance(given, list | tuple) and len(own) == len(given) and all(map(_same, own, given))
    if isinstance(own, float) and isinstance(given, float | int):
        return math.isclose(own, given, rel_tol=1e-9)
    return bool(own == given)
