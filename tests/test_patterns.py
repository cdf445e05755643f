"""Every regular expression takes linear time, whatever text it is given: Python's hold up all threads
meanwhile.
"""

import ast
import importlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvant

ROOT = Path(kvant.__file__).parent
METHODS = {"match", "search", "fullmatch", "sub", "subn", "split", "findall", "finditer"}
# Names in patterns that are made in functions, each with a value of its kind.
LOCALS = {
    "longest": 64,
    "digits": 40,
    "key": "abc",
    "dest": Path("made"),
    "mark": "```",
    "longest_first": ["<a>", "<"],
}
LOCALS["members"] = "[^a-c]"
UNITS = [
    "\n",
    " ",
    "\t",
    "[",
    "]",
    "{",
    "(",
    '"',
    "'",
    "\\",
    "`",
    "<",
    ">",
    "a",
    "0",
    ".",
    "/",
    "\r",
    "\x1b",
    "\x7f",
]
UNITS += ["a[\n", '\\"', "' ", "a ", "a.", "\n ", " [", '"a', "</", "1.", "\x1b[", "_-", "a\n"]


def _patterns() -> Iterator[tuple[str, re.Pattern[Any], set[str]]]:
    """Each pattern of the source with its place, and how it is used; an unknown use is any."""
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "re." not in source:
            continue
        name = ".".join(["kvant", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args):
                continue
            method = ast.unparse(node.func).removeprefix("re.")
            if method not in METHODS | {"compile"}:
                continue
            module = vars(importlib.import_module(name))
            flags = [k.value for k in node.keywords if k.arg == "flags"]
            flags += [arg for arg in node.args[1:] if ast.unparse(arg).startswith("re.")]
            pattern, *given = (
                eval(ast.unparse(each), {**module, **LOCALS}) for each in (node.args[0], *flags)
            )
            made = re.compile(pattern, *given)
            named = [key for key, value in module.items() if isinstance(value, re.Pattern) and value == made]
            called = set(re.findall(rf"\b{named[0] if named else ''}\.(\w+)\(", source)) & METHODS
            uses = {method} if method in METHODS else called
            yield f"{name}:{node.lineno}", made, uses or METHODS


PATTERNS = list(_patterns())
assert len(PATTERNS) > 20


def _texts(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str, str]]:
    """Beginnings, what is repeated behind them, and ends: signs, and literal parts of the pattern."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    source = re.sub(r"\(\?P<\w+>", "(", source)  # names of groups are in no text
    literals = re.findall(r"[<\w/=>]{4,}", source.replace("\\s*", "").replace("\\n", ""))
    yield from itertools.product(
        ["", *literals], [*UNITS, *literals, *(f"{each} " for each in literals)], ["", "!"]
    )


def _seconds(run: Callable[[], object]) -> float:
    """Of this thread, whatever else the machine does."""
    times = [time.thread_time()]
    for _ in range(3):
        run()
        times.append(time.thread_time())
    return min(after - before for before, after in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("pattern", "uses"), [each[1:] for each in PATTERNS], ids=[each[0] for each in PATTERNS]
)
def test_the_cost_of_a_pattern_is_linear(pattern: re.Pattern[Any], uses: set[str]) -> None:
    """Eight times as much text takes about eight times as long; a square would take 64 times."""
    once = {"match": pattern.match, "fullmatch": pattern.fullmatch}
    runs = [once[use] for use in uses & once.keys()]
    if uses - once.keys():
        runs.append(lambda text: sum(1 for _ in pattern.finditer(text)))
    for beginning, unit, end in _texts(pattern):
        short, long = (beginning + unit * (size // len(unit)) + end for size in (1_000, 8_000))
        if isinstance(pattern.pattern, bytes):
            short, long = short.encode(), long.encode()
        for run in runs:
            little = _seconds(lambda run=run, text=short: run(text))
            much = _seconds(lambda run=run, text=long: run(text))
            assert much < 24 * little + 0.004, (pattern.pattern, beginning, unit, end, little, much)
