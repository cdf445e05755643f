"""Imports point downward only, as the design draws the house, and never in a circle."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import kvant

ROOT = Path(kvant.__file__).parent
# From the ground up. A module imports its own package and those before it.
FLOORS = [
    "errors", "files", "atomic", "private", "digests", "tensor_header", "fields", "sizes", "threads", "installation",
    "weights", "blas", "operators", "cache", "models", "bridge", "text", "engine", "sample_utils", "__init__",
    "machine", "ranks", "plan", "tools", "server", "cli", "__main__",
]  # fmt: skip
DATA = ["pocket"]  # files, no code


def _modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["kvant", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _is_for_annotations(node: ast.If) -> bool:
    return ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"


@cache
def _imported(path: Path) -> set[str]:
    """Return the modules that a file imports when it runs: those under ``TYPE_CHECKING`` are for
    annotations.
    """
    found, tree = set(), ast.parse(path.read_text(encoding="utf-8"))
    blocks = [
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and _is_for_annotations(node)
        for part in node.body
    ]
    skipped = {node for block in blocks for node in ast.walk(block)}
    for node in {*ast.walk(tree)} - skipped:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = [f"{node.module}.{a.name}" for a in node.names]
            names = [name if name in MODULES else node.module or "" for name in full]
        found |= {name for name in names if name in MODULES}
    return found


def _floor(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_imports_point_downward() -> None:
    for name, path in MODULES.items():
        floor, imported = _floor(name), {*map(_floor, _imported(path))}
        if floor in DATA:
            assert not imported
            continue
        assert floor in FLOORS, f"{floor} has no place in the house yet"
        above = {other for other in imported - {floor} if FLOORS.index(other) > FLOORS.index(floor)}
        assert not above, f"{path} imports {above}"


def test_no_modules_import_each_other() -> None:
    assert len(MODULES) > 100
    graph = {name: _imported(path) for name, path in MODULES.items()}
    assert graph["kvant.operators.dispatch"] >= {"kvant.operators.probe", "kvant.operators.kernels.launch"}
    TopologicalSorter(graph).prepare()  # a CycleError names the circle


def test_no_import_hides_in_a_string() -> None:
    """But where a name is imported when it is first asked for."""
    names = ("__init__.py", "cli/app.py", "cli/config.py")
    for path in {*MODULES.values()} - {ROOT / name for name in names}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
                "import_module",
                "__import__",
            ):
                assert "kvant" not in ast.unparse(node), f"{path}: {ast.unparse(node)}"


def test_no_folders_import_each_other() -> None:
    """A file at the top counts as a folder of its own."""

    def folder(name: str) -> str:
        path = MODULES[name]
        return name if path.parent == ROOT else str(path.parent.relative_to(ROOT))

    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if name == "kvant.operators":  # it imports PMX's names when they are first asked for
            continue
        own = graph.setdefault(folder(name), set())
        own |= {folder(other) for other in _imported(path)} - {folder(name)}
    assert "operators" not in graph["operators/kernels"]
    TopologicalSorter(graph).prepare()


def test_operators_know_no_model_and_no_file() -> None:
    """But the record of what was tried on this device; a CPU's attention calls BLAS."""
    others = {"kernel_record.py": {"files", "private"}}
    others |= {"cpu_decode.py": {"blas"}, "cpu_stored.py": {"blas"}}
    for path in (ROOT / "operators").rglob("*.py"):
        assert {*map(_floor, _imported(path))} <= {"operators"} | others.get(path.name, set())


def test_the_engine_does_without_pmx() -> None:
    """Only the public names and the cache of PMX's contract import the package of its signatures."""
    pmx = "kvant.operators.pmx"
    users = {
        name
        for name, path in MODULES.items()
        if not name.startswith(pmx) and any(each.startswith(pmx) for each in _imported(path))
    }
    assert users == {"kvant.operators", "kvant.cache.quantized"}
    code = "import kvant.models, kvant.engine.generate, sys; print([n for n in sys.modules if '.pmx' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    verbs = ["can_trim", "load", "make", "save", "trim"]
    caches = [f"{verb}_prompt_cache" for verb in verbs]
    names = [
        "GenerationResponse",
        "__version__",
        "generate",
        "load",
        "sample_utils",
        "stream_generate",
        *caches,
    ]
    names += ["batch_generate", "embed"]
    assert kvant.__all__ == sorted(names)
    assert all(hasattr(kvant, name) for name in kvant.__all__)


def test_no_test_imports_another() -> None:
    for path in Path(__file__).parent.rglob("*.py"):
        names = re.findall(r"^ *(?:from|import) ([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        bad = [name for name in names if name.split(".")[-1].startswith("test_") or name == "conftest"]
        assert not bad, f"{path} imports {bad}"
