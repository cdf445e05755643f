"""Bytes and launches of a function, counted in the graph MLX traces: no formula of the byte model is used."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from kvant.tools.bench.bytes import Traffic

# They hand on the same bytes under another shape; none of them copies where it occurs here.
VIEWS = ("Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims", "Transpose", "Slice", "View", "Broadcast", "Split")
UPDATES = ("SliceUpdate", "DynamicSliceUpdate")


def graph_traffic(function: Callable[..., Any], *arrays: mx.array) -> tuple[Traffic, list[str]]:
    """What ``function(*arrays)`` moves, and the names of its operations."""
    records: list[dict[str, Any]] = []
    mx.export_function(records.append, function, *arrays)
    held: dict[str, int] = {}  # bytes that are there, by array: of a broadcast one those of its source
    for record in records:
        if record["type"] in ("inputs", "outputs"):
            held |= {name: _bytes(shape, dtype) for name, shape, dtype in record[record["type"]]}
        if record["type"] == "constants":
            held |= {name: value.nbytes if value.size > 1 else 0 for name, value in record["constants"]}
    read = written = launches = 0
    names = []
    operations = [record for record in records if record["type"] == "primitive"]
    for record in operations:
        inputs, outputs = record["inputs"], record["outputs"]
        for name, shape, dtype in outputs:
            held[name] = _bytes(shape, dtype)
        if record["name"] in VIEWS:
            if record["name"] == "Broadcast":
                held[outputs[0][0]] = held[inputs[0][0]]
            continue
        if not any(held[name] for name, *_ in outputs):  # a constant of one element
            continue
        names.append(record["name"])
        launches += 1
        if record["name"] == "Full":  # the tracer merges equal ones; called without it, each array has its own
            users = sum(outputs[0][0] in [name for name, *_ in other["inputs"]] for other in operations)
            launches += users - 1
            written += (users - 1) * held[outputs[0][0]]
        if record["name"] in UPDATES:
            read += held[inputs[1][0]]
            written += held[inputs[1][0]]
        else:
            taken = {name for name, *_ in inputs}
            if record["name"] == "Gather":  # of what it takes from, the elements taken
                taken.remove(inputs[0][0])
                read += held[outputs[0][0]]
            read += sum(held[name] for name in taken)
            written += sum(held[name] for name, *_ in outputs)
    return Traffic(read, written, launches), names


def _bytes(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    size = math.prod(shape)
    return size * dtype.size if size > 1 else 0
