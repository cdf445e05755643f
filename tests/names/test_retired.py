"""Names that were retired: private words that a newcomer would have to look up."""

import ast
import re
from pathlib import Path

import kvant

ROOT = Path(kvant.__file__).parent
# As a whole name, or as a word of one.
NAMES = {"Work", "Wanted", "Picked", "Front", "Turn", "PagedLayers", "WindowLayers", "Said", "Found"}
WORDS = {"ahead", "alone", "apart", "beside", "chain", "held", "told"}


def test_no_definition_has_a_retired_name() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = None
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            elif isinstance(node, ast.arg):
                name = node.arg
            if name is None:
                continue
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
            retired = words & WORDS or {name} & NAMES
            assert not retired, f"{path.relative_to(ROOT)}:{node.lineno} defines {name}"
