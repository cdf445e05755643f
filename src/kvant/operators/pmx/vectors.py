"""Test vectors for PMX's operators, and a command that runs an implementation against them.

    python -m kvant.operators.pmx.vectors [--check module:function] [--only PATTERN] [--list]

Without --check it runs kvant's operators. Run as a file, ``python vectors.py --check module:function``, it
needs only NumPy and safetensors. scripts/operator_vectors.py writes vectors.json and vectors.safetensors;
docs/operators.md has more.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from safetensors.numpy import load

Array = np.ndarray[Any, np.dtype[Any]]
Implementation = Callable[[str, dict[str, Array], dict[str, Any]], Any]
STORED = ("cache", "scale")  # in-out


@dataclass(frozen=True, slots=True)
class Vector:
    """One call of an operator, and its results.

    Attributes:
        operator: its name in ``kvant.operators``, such as "dynamic_batching.key_value_cache".
        inputs: its arrays by name. An int is an array without dimensions. uint16 holds the bits of bfloat16.
        attributes: its other arguments by name.
        expected: the results by name. An element may differ by ``absolute + relative * |expected|``.
        tolerances: (relative, absolute) by the name of a result.
    """

    name: str
    operator: str
    inputs: dict[str, Array]
    attributes: dict[str, Any]
    expected: dict[str, Array]
    tolerances: dict[str, tuple[float, float]]


def read_vectors(folder: Path = Path(__file__).parent) -> list[Vector]:
    """Read all cases from the two files in a folder."""
    index = json.loads((folder / "vectors.json").read_text(encoding="utf-8"))
    arrays = load((folder / "vectors.safetensors").read_bytes())
    bounds = {name: (rule["relative"], rule["absolute"]) for name, rule in index["tolerances"].items()}
    return [
        Vector(
            name := case["name"],
            case["operator"],
            {key: arrays[f"{name}/inputs/{key}"] for key in case["inputs"]},
            case["attributes"],
            {key: arrays[f"{name}/expected/{key}"] for key in case["expected"]},
            {key: bounds[rule] for key, rule in case["expected"].items()},
        )
        for case in index["cases"]
    ]


def find_faults(vector: Vector, implementation: Implementation) -> list[str]:
    """Run one case; return a line per wrong result, with its first wrong element and largest error."""
    try:
        inputs = {name: x.copy() for name, x in vector.inputs.items()}
        results = implementation(vector.operator, inputs, dict(vector.attributes))
        if not isinstance(results, dict):
            raise TypeError(f"a {type(results).__name__} was returned; expected a dict")
        returned = {name: np.asarray(results[name]) for name in vector.expected if name in results}
    except (Exception, SystemExit) as error:
        return [" ".join(f"{type(error).__name__}: {error}".split())]
    faults = {name: _fault(vector, name, returned.get(name)) for name in vector.expected}
    return [f"{name}: {fault}" for name, fault in faults.items() if fault]


def _fault(vector: Vector, name: str, result: Array | None) -> str:
    """Describe what is wrong with a result, or return "". Unwritten elements must not change by a bit."""
    expected = vector.expected[name]
    relative, absolute = vector.tolerances[name]
    if result is None:
        return "missing"
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return f"{result.dtype} {result.shape}; expected {expected.dtype} {expected.shape}"
    unchanged = np.zeros(expected.shape, bool)
    if name in STORED:
        unchanged = _bits(expected) == _bits(vector.inputs[name])
    values = _numbers(result)
    target = _numbers(expected)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(values - target)
        close = error <= absolute + relative * np.abs(target)
    wrong = (_bits(result) != _bits(expected)) & (unchanged | ~close)
    if not wrong.any():
        return ""
    error = np.where(wrong, np.where(np.isnan(error), np.inf, error), -1)
    first, worst = (tuple(map(int, np.unravel_index(x.argmax(), x.shape))) for x in (wrong, error))
    stays = ", which must stay" if unchanged[first] else ""
    first_wrong = f"first at {first}: {values[first]:.8g}, expected {target[first]:.8g}{stays}"
    return f"{wrong.sum()} of {wrong.size} wrong, {first_wrong}; largest error {error[worst]:.3g} at {worst}"


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _numbers(x: Array) -> Array:
    """Return the values in float64; uint16 holds the bits of bfloat16, the upper half of a float32."""
    return (x if x.dtype != np.uint16 else (x.astype(np.uint32) << 16).view(np.float32)).astype(np.float64)


def kvant_operators(operator: str, inputs: dict[str, Array], attributes: dict[str, Any]) -> dict[str, Array]:
    """Run kvant's operators by the vectors' convention, on MLX arrays and without the fused kernel."""
    import mlx.core as mx  # here, because other implementations do not need it

    from kvant import operators

    def to_mx(x: Array) -> Any:
        array = mx.array(x)
        return int(x) if x.ndim == 0 else array.view(mx.bfloat16) if x.dtype == np.uint16 else array

    converted = {name: to_mx(x) for name, x in inputs.items()}
    path = {"kernels": "unfused"} if operator == "multi_head_cache_attention" else {}
    results = attrgetter(operator)(operators)(**converted, **attributes, **path)
    named = (
        {"output": results} if "attention" in operator else dict(zip(("key", "value"), results, strict=True))
    )
    named |= {name: converted[name] for name in STORED if name in converted}
    return {name: np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x) for name, x in named.items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line, without the usage."""
        self.exit(2, f"{message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all cases pass, else 1. Wrong arguments exit with 2 and one line."""
    parser = _Parser(
        prog="kvant.operators.pmx.vectors", description="Run an implementation against the test vectors."
    )
    default = "kvant.operators.pmx.vectors:kvant_operators"
    parser.add_argument(
        "--check", metavar="MODULE:FUNCTION", default=default, help="the implementation; default: kvant"
    )
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="part of the names of cases; * and ? are any"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    options = parser.parse_args(arguments)
    vectors = [vector for vector in read_vectors() if fnmatchcase(vector.name, f"*{options.only}*")]
    if not vectors:
        parser.error(f"--only {options.only}: no case has such a name; --list prints them")
    if options.list:
        print("\n".join(vector.name for vector in vectors))
        return 0
    module, _, function = options.check.partition(":")
    if not module or not function:
        parser.error(f"--check {options.check}: expected module:function")
    try:
        implementation = getattr(import_module(module), function, None)
    except Exception as error:
        parser.error(" ".join(f"--check {options.check}: {type(error).__name__}: {error}".split()))
    if not callable(implementation):
        parser.error(f"--check {options.check}: {module} has no function {function}")
    failed = 0
    for vector in vectors:
        if faults := find_faults(vector, implementation):
            failed += 1
            print(f"{vector.name}: {'; '.join(faults)}")
    print(f"{len(vectors) - failed} of {len(vectors)} cases passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # Python does so only for -m
    sys.exit(main())
