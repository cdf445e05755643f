"""Retired words stay out of names, docstrings and pages: STYLE asks for the ordinary words of the field."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
RETIRED = {
    "work", "wanted", "picked", "found", "front", "part", "turn", "chain", "beside", "apart", "alone", "ahead",
    "held", "kept", "taken", "told", "own", "given", "waits",
}  # fmt: skip
EXCEPTIONS: dict[str, str] = {}  # a name that has to stay, such as a public keyword -> the reason
PHRASES = re.compile(
    r"\b(but for|(go|goes|gone) on with|is gone on|not a word|are told|for ever)\b", re.IGNORECASE
)


def _sources() -> Iterator[Path]:
    return (REPOSITORY / "src").rglob("*.py")


def _defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def test_names_are_not_retired_words() -> None:
    retired = [
        f"{path.name}:{line}: {name}"
        for path in _sources()
        for line, name in _defined(ast.parse(path.read_text(encoding="utf-8")))
        if name.strip("_").lower() in RETIRED and name not in EXCEPTIONS
    ]
    assert not retired


def test_prose_has_no_dialect() -> None:
    pages = [*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md"]
    texts = [(page.name, page.read_text(encoding="utf-8")) for page in pages]
    texts += [
        (path.name, ast.get_docstring(node) or "")
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [(name, match[0]) for name, text in texts for match in PHRASES.finditer(text)] == []
