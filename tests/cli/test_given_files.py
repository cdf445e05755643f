"""Files that a user names, and what is no file: one line, and nothing is read without end."""

import os
from pathlib import Path

import pytest
from support.command import call
from support.terminal import Terminal

from kvant.errors import KvantError
from kvant.files import read_given


@pytest.mark.parametrize("flags", [["generate", "--prompts-file"], ["serve", "--port", "0", "--api-key-file"]])
@pytest.mark.parametrize("kind", ["device", "pipe", "large", "missing"])
def test_what_is_no_file_is_refused(flags: list[str], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "given"
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        with open(path, "wb") as file:
            file.truncate(2**40)
    done = call(*flags, str(path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert str(path) in done.stderr


def test_a_link_and_a_home_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "real").write_bytes(b"text")
    (tmp_path / "link").symlink_to("real")
    assert read_given("~/link", 4) == b"text"
    with pytest.raises(KvantError, match="at most 3"):
        read_given("~/link", 3)
    with pytest.raises(KvantError, match="nobodyhere"):
        read_given("~nobodyhere/link", 4)


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
        chat.wait_for("is there already")
        chat.press(f"{second}\r")
        chat.wait(lambda: not chat.read())
    assert second.stat().st_size > 1000
    assert taken.read_text() == "mine"
