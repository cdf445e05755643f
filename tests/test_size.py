"""Every room has a budget of lines: a capability should replace code that it makes superfluous."""

import ast
import re
import sys
from pathlib import Path
from types import FrameType

import pytest

import kvant
from kvant import stream_generate
from kvant.models import Decoder
from kvant.text.tokenizer import Tokenizer

ROOT = Path(kvant.__file__).parent
REPOSITORY = Path(__file__).parents[1]
# What each room may hold. The sizes leave about 5 % of air, so that nobody packs statements to stay within
# them.
BUDGET = {
    "cli": 7450,
    "server": 6200,
    "plan": 1600,
    "tools": 6500,
    "engine": 5470,
    "ranks": 1980,
    "bridge": 2920,
    "models": 4360,
    "text": 4000,
    "cache": 5400,
    "operators": 5600,
    "weights": 1330,
}
TOP = 1800  # modules beside the rooms, kvant_command.py among them
PLUGIN = 270  # kvant_llm
TESTS = 52000  # with their support
SCRIPTS = 9150  # without scripts/lab, whose results are kept and not made again
PAGES = 10
# Of what docs/tour.md says to read on the path of a token.
TOUR_FILES = 16
TOUR_LINES = 1600
TOUR_CLASSES = 18
# Of what a decoding step runs on a CPU, with the leaves that the tour leaves out: matrices, norms, text.
TRACED_FILES = 36
TRACED_CLASSES = 29


def _lines(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@pytest.mark.parametrize("room", BUDGET)
def test_a_room_is_within_its_budget(room: str) -> None:
    lines = _lines(*(ROOT / room).rglob("*.py"))
    assert lines <= BUDGET[room], f"{room} has {lines} lines; look for what the change makes superfluous"


def test_rooms_tests_scripts_and_pages_are_all_counted() -> None:
    assert {path.name for path in ROOT.iterdir() if any(path.rglob("*.py"))} == {
        *BUDGET,
        "pocket",
    }  # the embedded model
    source = REPOSITORY / "src"  # an installed kvant stands among other packages
    assert _lines(*ROOT.glob("*.py"), *source.glob("*.py")) <= TOP
    assert _lines(*(source / "kvant_llm").glob("*.py")) <= PLUGIN
    assert {path.name for path in source.iterdir() if any(path.rglob("*.py"))} == {"kvant", "kvant_llm"}
    assert _lines(*(REPOSITORY / "tests").rglob("*.py")) <= TESTS
    scripts = (REPOSITORY / "scripts").rglob("*.py")
    assert _lines(*(path for path in scripts if "lab" not in path.parts)) <= SCRIPTS
    assert len([*(REPOSITORY / "docs").glob("*.md")]) <= PAGES


def test_a_tokens_path_is_read_in_one_sitting() -> None:
    rows = re.findall(
        r"^\| `(\S+\.py)` \| (`.+`) \| .+ \|$", (REPOSITORY / "docs" / "tour.md").read_text(), re.M
    )
    tour = [(file, name) for file, names in rows for name in re.findall(r"[\w.]+", names)]
    classes = {(file, name.split(".")[0]) for file, name in tour if name[0].isupper()}
    assert 12 < len(rows) <= TOUR_FILES
    assert 12 < len(classes) <= TOUR_CLASSES
    assert sum(_definition(file, name) for file, name in tour) <= TOUR_LINES


def test_the_tour_names_every_file_once() -> None:
    """Of the rooms that a token passes."""
    text = (REPOSITORY / "docs" / "tour.md").read_text()
    for room in ("engine", "cache", "operators"):
        for path in (ROOT / room).glob("*.py"):
            if path.name != "__init__.py":
                assert text.count(f"`{room}/{path.name}`") == 1, f"{room}/{path.name}"


def test_a_token_meets_few_classes(pocket: tuple[Decoder, Tokenizer]) -> None:
    """Of a decoding step of kvant.stream_generate, on this device, every class a method of which is called."""
    model, tokenizer = pocket
    answer = stream_generate(model, tokenizer, "Once upon a time", max_tokens=8)
    for _ in range(4):
        next(answer)
    called = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        next(answer)
    finally:
        sys.setprofile(None)
    ours = {(file, name) for file, name in called if file.startswith(str(ROOT))}
    classes = {(file, name.split(".")[0]) for file, name in ours if "." in name and name[0].isupper()}
    assert 15 < len(classes) <= TRACED_CLASSES, sorted(name for _, name in classes)
    assert len({file for file, _ in ours}) <= TRACED_FILES


def _definition(file: str, name: str) -> int:
    """The lines of a function, a class or a method of it."""
    found: ast.AST = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for part in name.split("."):
        (found,) = (node for node in ast.iter_child_nodes(found) if getattr(node, "name", None) == part)
    assert isinstance(found, ast.FunctionDef | ast.ClassDef)
    return 1 + (found.end_lineno or 0) - found.lineno


def test_a_pool_a_step_and_a_conversation_are_three_classes() -> None:
    """Nothing takes one for another: no union of them is annotated, and none is changed from another room.

    Neither is what they are made of.
    """
    faces = {"Pool", "PoolBatch", "ModelCache"}
    held = {"pool", "batch", "cache", "sequence", "group", "layer", "local", "prefixes"}
    changed = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
                assert len(names & faces) < 2, f"{path}:{node.lineno}: {ast.unparse(node)}"
            if path.parent.name != "cache" and isinstance(node, ast.Assign):
                for target in node.targets:
                    owner = ast.unparse(getattr(target, "value", target)).rpartition(".")[2].lstrip("_")
                    if isinstance(target, ast.Attribute) and owner in held:
                        changed.add(f"{owner}.{target.attr}")
    # What a scheduler has computed and not handed out; of SequenceLayers, a class of the bridge; of mlx-lm's
    # layers; and the identity that every loader sets, which Lead sets on rank 0's shard.
    assert changed == {"sequence.lookahead", "sequence.copy", "layer.__class__", "local.identity"}
