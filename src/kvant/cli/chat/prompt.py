"""The input line on a terminal: history, keys and completion, and a status line below."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from kvant.cli import terminal
from kvant.cli.chat.commands import BY_NAME, COMMANDS, SETTINGS
from kvant.cli.chat.talk import Talk, notice

MAX_HISTORY = 1 << 20  # bytes
MAX_SHOWN = 1000  # characters of a paste; a longer one, or one with more lines, is shown as a placeholder
MAX_LINES = 10
QUOTES = '"""'  # a message between these may have lines typed with Enter
STYLE = Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack", "bottom-toolbar.text": ""})


class Prompt:
    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._pastes = _Pastes()
        is_hidden = sys.stdout.isatty() and not sys.stderr.isatty()
        self._session: PromptSession[str] = PromptSession(
            output=create_output(stdout=sys.stdout if is_hidden else terminal.behind(sys.stderr)),
            history=_history(self._pastes),
            completer=_Completer(),
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(self._pastes),
            bottom_toolbar=lambda: self._talk.status(self._session.output.get_size().columns),
            style=STYLE,
            enable_suspend=True,
            enable_open_in_editor=False,
        )

    def read(self) -> str:
        """Read the next message; the line starts with a draft if there is one."""
        draft = self._pastes.shortened(self._talk.draft)
        self._talk.draft = ""
        typed = self._session.prompt("> ", default=draft)
        text = self._pastes.whole(typed).encode("utf-8", "replace").decode().strip()
        if text.startswith(QUOTES):
            text = text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
        return text


class _Pastes:
    """Long texts that the input line shows as short placeholders, because they would fill the screen."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # by placeholder

    def shortened(self, text: str) -> str:
        """Return a placeholder for a long text; return a short text unchanged."""
        if len(text) <= MAX_SHOWN and text.count("\n") < MAX_LINES:
            return text
        number = len(self._texts) + 1
        command, space, message = text.partition(" ") if text.startswith("/edit ") else ("", "", text)
        short = f"[text {number}: {len(message):,} characters]"
        self._texts[short] = message
        return f"{command}{space}{short}"

    def whole(self, text: str) -> str:
        """Replace all placeholders with their texts."""
        for short, long in self._texts.items():
            text = text.replace(short, long)
        return text


def _keys(pastes: _Pastes) -> KeyBindings:
    """Let Enter send, and Alt-Enter (or Escape, then Enter) begin a new line."""
    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.lstrip().startswith(QUOTES) and buffer.text.count(QUOTES) < 2:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add(Keys.BracketedPaste)
    def _(event: KeyPressEvent) -> None:
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(pastes.shortened(text))

    return keys


class _Completer(Completer):
    """Complete commands, and paths and options as their arguments."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, space, argument = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        if not space:
            for command in COMMANDS:
                match = next((known for known in command.names if known.startswith(name)), None)
                if match:
                    yield Completion(match, -len(name), display_meta=command.help)
            return
        kind = BY_NAME[name].completes if name in BY_NAME else ""
        if kind == "path":
            yield from PathCompleter(expanduser=True).get_completions(Document(argument), complete_event)
        for known in SETTINGS if kind == "setting" else ():
            if known.startswith(argument):
                yield Completion(known, -len(argument))


class _History(FileHistory):
    """The history of all conversations, in a file that only this user can read."""

    def __init__(self, path: Path, pastes: _Pastes) -> None:
        super().__init__(path)
        self._pastes = pastes

    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeError):  # do not stop for a full disk or for bytes that are not text
            super().store_string(self._pastes.whole(string))


def _history(pastes: _Pastes) -> History:
    from platformdirs import user_state_path

    path = user_state_path("kvant") / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
        _shorten(path)
    except OSError as error:
        notice(f"the history of questions is not saved: {error}")
        return InMemoryHistory()
    return _History(path, pastes)


def _shorten(path: Path) -> None:
    """Drop the older half of a long history."""
    if path.stat().st_size > MAX_HISTORY:
        newer = path.read_bytes()[-MAX_HISTORY // 2 :]
        path.write_bytes(newer[newer.find(b"\n# ") + 1 :])  # from the start of an entry
