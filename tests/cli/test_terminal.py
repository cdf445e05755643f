"""What a terminal would obey is shown: names, paths and messages always, generated text on a terminal unless --raw."""

import json
import shutil
from pathlib import Path

import pytest
from support.command import call, run
from support.terminal import Terminal

from kvant.cli.terminal import escaped

CLIPBOARD = "\x1b]52;c;aGk=\x07"  # a terminal would put a text into the clipboard
SHOWN = "\\x1b]52;c;aGk=\\x07"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pocket_folder: Path) -> Path:
    """Pocket with an escape sequence among its tokens, in a folder whose name has another."""
    folder = Path(shutil.copytree(pocket_folder, tmp_path_factory.mktemp("models") / "a\x1b[2Jb\x9b"))
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    token = next(token for token, number in raw["model"]["vocab"].items() if number == 1200)
    assert not any(token in pair for pair in raw["model"]["merges"])
    raw["model"]["merges"] = [pair for pair in raw["model"]["merges"] if "".join(pair) != token]
    raw["model"]["vocab"].pop(token)
    raw["model"]["vocab"][CLIPBOARD] = 1200
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 1200, "content": CLIPBOARD, "special": False})
    path.write_text(json.dumps(raw))
    return folder


def _generate(folder: Path, *flags: str) -> list[str]:
    return ["generate", "Hi", "--model", str(folder), "-m", "1", "--logit-bias", "1200:1000", *flags]


def _on_terminal(command: list[str]) -> str:
    with Terminal(*command) as terminal:
        terminal.wait(lambda: not terminal.read(), 60)
        return terminal.written.decode()


def test_generated_text(folder: Path) -> None:
    assert SHOWN in (text := _on_terminal(_generate(folder, "-q")))
    assert "\x1b]52" not in text
    assert CLIPBOARD in _on_terminal(_generate(folder, "-q", "--raw"))
    assert json.loads(_on_terminal(_generate(folder, "-q", "--json")))["text"] == CLIPBOARD
    done = run(*_generate(folder, "-q"))
    assert done.stdout == CLIPBOARD + "\n"  # a pipe gets the text itself


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "{folder}"],
        ["generate", "Hi", "--model", "{folder}/nothing"],
        ["generate", "Hi", "--max-kv-size", "x\x1b[2Jy"],
        ["convert", "{folder}", "{folder}/config.json"],
        ["report", "--model", "{folder}", "--tokens", "64"],
    ],
)
def test_names_paths_and_messages(folder: Path, arguments: list[str]) -> None:
    done = call(*(argument.replace("{folder}", str(folder)) for argument in arguments))
    for stream in (done.stdout, done.stderr):
        assert "\x1b" not in stream
        assert "\x9b" not in stream
    assert "\\x1b[2J" in done.stdout + done.stderr


def test_characters() -> None:
    assert escaped("a\tb\nc\r\nd é 漢 🦊\u200d") == "a\tb\nc\r\nd é 漢 🦊\u200d"
    assert escaped("\x00\r\x1b\x7f\x85\x9b\x08") == "\\x00\\r\\x1b\\x7f\\x85\\x9b\\x08"
