"""README, CONTRIBUTING and docs: links and paths lead somewhere, commands, flags and examples work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import server_fields
import typer

from kvant.cli.app import COMMANDS, make_app

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / ".github" / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "data").glob("*.md")),
    *sorted((ROOT / "scripts").rglob("*.md")),
    *sorted((ROOT / "src").rglob("*.md")),
]
FOLDERS = "docs|scripts|src|tests"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def page_ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_extras_are_installed_from_the_checkout(page: Path) -> None:
    """No index has kvant yet: only a release's own steps in CONTRIBUTING name it without a folder."""
    expected = {"pip install 'kvant[cpu]'"} if page.name == "CONTRIBUTING.md" else set()
    assert {*re.findall(r"pip install [^`\n]*?'kvant\[\w+\]'", page.read_text())} == expected


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"
    for path in re.findall(rf"`(?:python )?((?:{FOLDERS})/[\w./*-]+)", page.read_text()):
        path = path.replace("NAME", "*")
        assert any(ROOT.glob(path)), f"{path} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_commands_and_their_flags_exist(page: Path) -> None:
    text = page.read_text()
    code = [
        *re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL),
        *re.findall(r"`([^`\n]+)`", text),
    ]
    # What follows a launcher's flags is another command.
    apart = re.sub(r"(kvant launch .*?) -- (kvant )?", r"\1\nkvant ", "\n".join(code))
    for line in apart.splitlines():
        for name, rest in re.findall(r"(?:^|/|\s)kvant ([a-z]+)([^|&;#]*)", line):
            assert name in COMMANDS, f"kvant {name} is not a command"
            command = typer.main.get_command(make_app([name])).commands[name]  # type: ignore[attr-defined]
            flags = {
                flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)
            }
            for flag in re.findall(r"(?<=\s)--[a-z][a-z-]*", rest):
                assert flag in flags, f"kvant {name} has no {flag}"


def test_every_command_is_named() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    for name in COMMANDS:
        assert re.search(rf"^\| `kvant {name}[ `]", text, re.MULTILINE), name


def test_every_command_with_an_adapter_is_named() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    found = re.search(r"`--adapter-path` of (.*) \|$", text, re.MULTILINE)
    assert found is not None
    commands = [typer.main.get_command(make_app([name])).commands[name] for name in COMMANDS]  # type: ignore[attr-defined]
    takes = {command.name for command in commands if any(p.name == "adapter_path" for p in command.params)}
    assert {*re.findall(r"`(\w+)`", found[1])} == takes


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_every_flag_is_named(name: str) -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    command = typer.main.get_command(make_app([name])).commands[name]  # type: ignore[attr-defined]
    for parameter in command.params:
        flags = [flag for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("--")]
        assert not flags or any(re.search(rf"`{flag}[` ]", text) for flag in flags), flags


def test_the_page_of_fields_is_that_of_the_server() -> None:
    assert server_fields.PAGE.read_text("utf-8") == server_fields.page()


HOWTO = (ROOT / "docs" / "README.md").read_text()
# What needs a download, an adapter, a server or another program.
NOT_HERE = re.compile(r"import|adapters|serve|curl|claude")
BLOCKS = [
    block
    for block in re.findall(r"^```sh\n(.*?)^```", HOWTO, re.MULTILINE | re.DOTALL)
    if not NOT_HERE.search(block)
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[-1])
def test_what_how_to_says_works(block: str, tmp_path: Path, pocket_folder: Path) -> None:
    """On the embedded model, with nothing to read on standard input."""
    shutil.copytree(pocket_folder, tmp_path / "my-model")
    kvant = f'kvant() {{ "{sys.executable}" -m kvant "$@"; }}\n'
    script = f"set -e\n{kvant}{block.replace('MODEL', 'pocket')}"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_most_of_how_to_is_tried() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize(
    "page",
    [README, *(ROOT / "docs" / name for name in ("python.md", "performance.md", "operators.md"))],
    ids=page_ids,
)
def test_python_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every block of a page, one after the other; a line's comment after two blanks is what it prints."""
    text = page.read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
        printed = capsys.readouterr().out
        for comment in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE):
            assert comment in printed
