"""Check whether an evidence file is complete, unaltered and consistent with its own rounds."""

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
MAX_BYTES = 4 * 1024 * 1024  # a real file has about 0.1 MB
MAX_RUNS = 100  # over all models; a real file has half as many, and computing the drift of many runs is slow
PARTS = ("the whole command", "a token of ", "the quality of ", "attention to ")  # required in every record
# Fields that are read before the digest is checked: a test of the value, and what is expected.
KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("left_out", "unchecked", "parts"), (partial(_is_list, of=str), "a list of texts")),
    **dict.fromkeys(("attention", "models"), (partial(_is_list, of=dict), "a list of objects")),
    "command_ms": (partial(_is_list, of=float | int), "a list of numbers"),
    "report": (lambda value: isinstance(value, dict | None), "an object or null"),
}


def sealed(record: Mapping[str, Any]) -> Record:
    """Add the format and a digest, which detects accidents and edits but not a forger."""
    whole = {"format": FORMAT, **record}
    return whole | {DIGEST: _digest(whole)}


def read(path: Path) -> Record:
    """Read a record from a file; raise a KvantError if it is not one."""
    data = read_user_file(path, MAX_BYTES)
    try:
        record = json.loads(data.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise KvantError(f"{path}: {one_line(error)}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise KvantError(f"{path}: not a file of kvant evidence; expected the format {FORMAT!r}")
    for name, (is_right, expected) in KINDS.items():
        if name in record and not is_right(record[name]):
            raise KvantError(f"{path}: {name} is {shown(record[name])}; expected {expected}")
    return record


def problems(record: Mapping[str, Any]) -> list[str]:
    """List what is wrong with a record: it was altered, or a figure does not follow from its rounds."""
    messages = []
    if record.get(DIGEST) != _digest({name: value for name, value in record.items() if name != DIGEST}):
        messages.append("altered: the digest does not match")
    try:
        messages += [f"not consistent: {text}" for text in _inconsistent(record)]
        figures(record)  # raises if the record lacks something
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        messages.append(f"not consistent: {type(error).__name__}: {one_line(error)}")
    return messages


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
        if not any(name.startswith(stem) for name in record["parts"]):
            yield f"no measurement is {stem.strip()!r}"
    if (count := sum(len(model["runs"]) for model in record["models"])) > MAX_RUNS:
        yield f"{count} runs; expected at most {MAX_RUNS}"
        return
    for name in record["parts"]:
        if name not in without and not measured.get(name):
            yield f"{name} is neither there nor left out"
    for model in record["models"]:
        name = model["model"]
        header = Header(**(model["header"] | {"machine": Environment(**model["header"]["machine"])}))
        recording = Recording(header)
        for each in model["engines"]:
            recording.add(Engine(**each))
        for each in model["runs"]:
            recording.add(Run(**(each | {"prompt_tokens": tuple(each["prompt_tokens"])})))
        for computed, recorded in zip(map(asdict, summarize(recording)), model["summaries"], strict=True):
            different = [field for field, value in computed.items() if not _same(value, recorded[field])]
            if different:
                where = f"{recorded['engine']} after {recorded['context']}"
                yield f"{name}, {where}: {', '.join(different)} do not follow from its rounds"
        if not _same(drifts(recording), model["drift"]):
            yield f"{name}: the drift does not follow from its rounds"
        for each in model["memory"]:
            if each["peak"] > each["planned"]:
                yield f"{name}: a peak of {each['peak']} bytes is above its plan of {each['planned']}"
        if name == POCKET and (here := file_digests(find_model(POCKET))) != model["files"]:
            yield f"pocket's weights differ: {model['files']}; here {here}"
    if not record["healthy"]:
        yield "the fused kernel was wrong: " + "; ".join(
            use["problem"] for use in (*record["kernels"], *record["uses"]) if use["problem"] is not None
        )


def _same(computed: Any, recorded: Any) -> bool:
    """Whether two pieces of a record are equal, except for the rounding of numbers."""
    if isinstance(computed, Mapping):
        return (
            isinstance(recorded, Mapping)
            and computed.keys() == recorded.keys()
            and all(_same(computed[k], recorded[k]) for k in computed)
        )
    if isinstance(computed, list | tuple):
        alike = isinstance(recorded, list | tuple) and len(computed) == len(recorded)
        return alike and all(map(_same, computed, recorded))
    if isinstance(computed, float) and isinstance(recorded, float | int):
        return math.isclose(computed, recorded, rel_tol=1e-9)
    return bool(computed == recorded)
