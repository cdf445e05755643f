"""``kvant chat`` on a terminal, as its user has it: keys go in, a screen comes out."""

import json
import re
import shutil
import signal
import termios
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.command import QUESTION, call
from support.terminal import Terminal, squeezed

from kvant.cache.snapshot import read_header

# The tokens that end a text, 0 and 2, made impossible: an answer ends at max_tokens.
FLAGS = ["--temp", "0", "-m", "60", "--logit-bias", "0:-1e9", "--logit-bias", "2:-1e9"]
STATUS = re.compile(r"(\d+)/2048 tokens")
PASTE, PASTED = "\x1b[200~", "\x1b[201~"
NEW_LINE = "\x1b\r"  # Alt-Enter
LINE_BEGINS = b"\x1b[?2004h"  # prompt_toolkit turns bracketed paste on where it reads a line
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


class Chat(Terminal):
    """A conversation; between the tests its input is an empty line."""

    def ready(self) -> bool:
        below = self.lines[self.screen.cursor.y :]
        return below[0].startswith((">", " ")) and any(STATUS.search(line) for line in below[1:])

    def wait_ready(self) -> None:
        self.wait(self.ready)

    def send(self, key: str) -> None:
        """Press what ends the line of input, and wait until the next one is there."""
        lines = self.written.count(LINE_BEGINS)
        self.press(key)
        self.wait(lambda: self.written.count(LINE_BEGINS) > lines and self.ready())

    def enter(self, line: str) -> None:
        """Type a line, and wait until what it asks for is done."""
        self.press(line)
        typed = "".join(line.split())[-30:]
        self.wait(lambda: "".join(self.input.split()).endswith(typed))
        self.send("\r")

    def begin_answer(self, tokens: int) -> None:
        self.enter(f"/set max_tokens {tokens}")
        self.press(f"{QUESTION}\r")
        self.wait_for("Pip. Once")

    @property
    def input(self) -> str:
        return "\n".join(["", *self.lines[: self.screen.cursor.y + 1]]).rpartition("\n>")[2].strip()

    def since(self, text: str) -> str:
        """What is shown after a line of input, with a space for every line break."""
        return squeezed("\n".join([*self.history, *self.lines])).rpartition(squeezed(f"> {text}"))[2]

    def clear(self) -> None:
        self.send(CTRL_C)
        assert self.input == ""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def running(home: Path) -> Iterator[Chat]:
    with Chat("chat", *FLAGS, HOME=str(home), XDG_STATE_HOME=str(home / "state")) as chat:
        chat.wait_ready()
        assert any(line.startswith("pocket · 2048 tokens reserved") for line in chat.lines)
        yield chat


@pytest.fixture
def chat(running: Chat) -> Chat:
    running.clear()
    running.enter("/reset")
    running.enter("/set max_tokens 60")
    running.screen.reset()
    running.screen.history.top.clear()
    running.press("\x0c")  # Ctrl-L draws the line of input again
    running.wait_ready()
    return running


@cache
def _answer(question: str, tokens: int = 60) -> str:
    return squeezed(call("chat", "-q", *FLAGS, "-m", str(tokens), stdin=question).stdout).strip()


def test_a_message_of_several_lines(chat: Chat) -> None:
    chat.press(f"one{NEW_LINE}two{PASTE}\nthree\nfour{PASTED}")
    chat.wait(lambda: chat.input.split() == ["one", "two", "three", "four"])
    chat.enter("")
    chat.enter("/edit")
    assert chat.input.split() == ["/edit", "one", "two", "three", "four"]
    assert len(chat.input.split("\n")) == 4
    chat.clear()
    chat.press('"""a\rb')
    chat.wait(lambda: chat.input.split() == ['"""a', "b"])
    chat.enter('"""')
    chat.enter("/undo")
    assert "undone: a b" in chat.since("/undo")
    status = next(line for line in reversed(chat.lines) if STATUS.search(line))
    used = int(STATUS.search(status)[1])  # type: ignore[index]
    assert 0 < used < 100  # of the first question and its answer
    assert "tokens/s" not in status
    chat.enter("/undo")
    chat.wait_for("0/2048 tokens")


def test_a_long_paste_is_one_word_and_sent_whole(chat: Chat) -> None:
    chat.press(f"{PASTE}{'word ' * 2500}{PASTED}")
    chat.wait(lambda: chat.input == "[text 1: 12,500 characters]")
    chat.enter("")
    assert "error: the question alone has " in chat.since("[text 1: 12,500 characters]")
    assert "send a shorter message" in chat.since("[text 1: 12,500 characters]")
    lines = "\n".join(f"line {number}" for number in range(30))
    chat.press(f"/system {PASTE}{lines}{PASTED}")
    chat.enter("")
    chat.enter("/system")
    assert "line 0 line 1 line 2" in chat.since("/system")
    chat.enter('/system ""')


def test_a_file_is_replaced_after_another_enter(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    call("chat", "-q", "-m", "2", stdin=f"Hello!\n/save {path}\n")
    before = path.read_bytes()
    chat.enter("Hi")
    chat.enter(f"/save {path}")
    chat.wait(lambda: chat.input.startswith("/save "))
    assert path.read_bytes() == before
    chat.enter("")
    chat.wait_for("saved 2 messages")
    assert path.read_bytes() != before


def test_ctrl_c_stops_an_answer_and_clears_a_line(chat: Chat) -> None:
    chat.begin_answer(1000)
    chat.wait_for(_answer(QUESTION))
    chat.send(CTRL_C)
    shown = chat.since(QUESTION).partition(" stopped")[0].strip()
    assert shown.startswith(_answer(QUESTION))
    chat.press("half a line")
    chat.wait_for("half a line")
    chat.clear()
    chat.enter("/stats")
    assert "conversation: 2 messages" in chat.since("/stats")
    assert "ended by interruption" in chat.since("/stats")


def test_keys_typed_during_an_answer_are_dropped(chat: Chat) -> None:
    chat.begin_answer(120)
    shown = len(chat.written)
    chat.send("Zx \x1b[A\r")
    assert chat.input == ""
    assert chat.since(QUESTION).strip().startswith(_answer(QUESTION, 120))
    assert all(len(line) <= 79 for line in chat.lines)
    assert "tokens/s" in chat.lines[-1]
    assert b"Zx" not in chat.written[shown:]


def test_commands_and_paths_are_completed(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for typed, shown, completed in (
        ("/sy", "sets the system prompt, or shows it", "/system"),
        ("/set xtc_t", "xtc_threshold", "/set xtc_threshold"),
    ):
        chat.press(typed)
        chat.wait_for(shown)
        chat.press("\t ")
        chat.wait(lambda completed=completed: chat.input == completed)
        chat.clear()
    chat.enter("Hello!")
    chat.press(f"/save {tmp_path}/fol")
    chat.wait_for("folder/")
    chat.press("\t")
    chat.enter("/talk")
    assert (tmp_path / "folder" / "talk").is_file()


def test_resizing_during_an_answer(chat: Chat) -> None:
    chat.begin_answer(120)
    chat.resize(40, 20)
    chat.send("")
    try:
        answer = _answer(QUESTION, 120)
        assert answer in squeezed("\n".join([*chat.history, *chat.lines]))
        assert all(len(line) <= 39 for line in chat.lines[:-2])
    finally:
        chat.resize(80, 24)
        chat.wait_ready()


def test_the_history_is_kept_for_this_user_alone(chat: Chat, home: Path) -> None:
    chat.enter("Who is Pip?")
    (kept,) = home.rglob("chat_history")
    assert kept.stat().st_mode & 0o777 == 0o600
    with Chat("chat", "-q", HOME=str(home), XDG_STATE_HOME=str(home / "state")) as other:
        other.wait_ready()
        other.press(UP)
        other.wait(lambda: other.input == "Who is Pip?")
        other.clear()
        other.press(CTRL_D)
        other.wait(lambda: not other.child.isalive())
        assert other.child.exitstatus == 0


def test_thinking_is_dim_and_not_in_the_history(pocket_folder: Path, tmp_path: Path) -> None:
    """Pocket with a full stop as the end of its thinking, which the template begins."""
    folder = Path(shutil.copytree(pocket_folder, tmp_path / "thinker"))
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    for old, mark in (
        (".", "</think>"),
        (next(t for t, n in raw["model"]["vocab"].items() if n == 1200), "<think>"),
    ):
        raw["model"]["merges"] = [pair for pair in raw["model"]["merges"] if old not in "".join(pair)]
        number = raw["model"]["vocab"].pop(old)
        raw["model"]["vocab"][mark] = number
        raw["added_tokens"].append(
            {**raw["added_tokens"][0], "id": number, "content": mark, "special": False}
        )
    path.write_text(json.dumps(raw))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] += "{% if add_generation_prompt %}<think>\n{% endif %}"
    path.write_text(json.dumps(settings))
    with Chat(
        "chat", "--model", str(folder), *FLAGS, HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path)
    ) as chat:
        chat.wait(lambda: ">" in chat.lines)
        chat.press(f"{QUESTION}\r")
        chat.wait_for("cut at max_tokens")
        chat.wait_ready()
        chat.enter(f"/save {tmp_path}/talk")  # whose path may be broken anywhere
        chat.wait_for("saved 2 messages")
    question, said = json.loads(read_header(tmp_path / "talk").metadata["conversation"])
    assert question["content"] == QUESTION
    assert said["reasoning_content"].startswith("There was once a fox called Pip")
    assert len(said["content"]) > 40
    shown = chat.since(QUESTION).partition(" cut at")[0]
    assert shown.split() == f"{said['reasoning_content']} {said['content']}".split()
    dim = re.findall(r"\x1b\[2m(.*?)\x1b\[0m", chat.written.decode())
    assert said["reasoning_content"].startswith(dim[-1][:20])
    assert not any(said["content"][:20] in text for text in dim)


@pytest.mark.parametrize("during_an_answer", [True, False])
def test_the_terminal_is_as_it_was_after_a_signal(during_an_answer: bool, tmp_path: Path) -> None:
    with Chat("chat", *FLAGS, HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path)) as chat:
        found = termios.tcgetattr(chat.child.child_fd)
        chat.wait_ready()
        assert termios.tcgetattr(chat.child.child_fd)[3] != found[3]
        if during_an_answer:
            chat.begin_answer(1500)
            assert not termios.tcgetattr(chat.child.child_fd)[3] & termios.ECHO
        chat.child.kill(signal.SIGTERM)
        chat.wait(lambda: not chat.child.isalive())
        assert chat.child.exitstatus == 128 + signal.SIGTERM
        assert termios.tcgetattr(chat.child.child_fd) == found


def test_a_conversation_that_cannot_be_saved_can_go_elsewhere(tmp_path: Path) -> None:
    first, taken, second = (tmp_path / name for name in ("first", "taken", "second"))
    first.mkdir()
    taken.write_text("mine")
    with Terminal(
        "chat", "-m", "2", "--prompt-cache-file", str(first / "chat"), columns=200, HOME=str(tmp_path)
    ) as chat:
        chat.wait_for("/2048 tokens")
        chat.press("Hi\r")
        chat.wait_for("cut at max_tokens")
        first.rmdir()
        chat.press("\x04")
        chat.wait_for("save the conversation where?")
        chat.press(f"{taken}\r")
        chat.wait_for("exists already")
        chat.press(f"{second}\r")
        chat.wait(lambda: not chat.read())
    assert second.stat().st_size > 1000
    assert taken.read_text() == "mine"
