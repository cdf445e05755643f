"""The commands of a conversation: lines that begin with a slash."""

import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kvant.cache.snapshot import read_header
from kvant.cli.chat.talk import Talk, notice
from kvant.cli.options import RunOptions
from kvant.cli.statistics import RunStatistics
from kvant.engine.sampling import OPTIONS
from kvant.errors import ArgumentError, SnapshotError, did_you_mean
from kvant.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Command:
    names: tuple[str, ...]  # with the slash; /help shows the first one first
    usage: str  # describes the argument; empty: there is none
    help: str
    run: Callable[[Talk, str], None]  # called with the stripped argument
    needs: bool = False  # whether the argument is required
    completes: Literal["", "path", "setting"] = ""  # what Tab completes


def find(line: str) -> Command | str | None:
    """Return the command of a line; None if the line is for the model; or a message if it is neither.

    A path is for the model, and so is text after //.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    name = line.split(maxsplit=1)[0]
    if name in BY_NAME:
        return BY_NAME[name]
    if "/" in name[1:]:
        return None
    near = difflib.get_close_matches(name.lower(), BY_NAME, n=1, cutoff=0.75)
    if name != line and not near:
        return None
    meant = f"did you mean {near[0]}?" if near else "/help lists them."
    return f"{name} is not a command; {meant} // begins a message with a slash"


def do(talk: Talk, line: str) -> None:
    """Run the command of a line, or send it to the model."""
    command = find(line)
    name, _, argument = line.partition(" ") if " " in line.split("\n")[0] else line.partition("\n")
    argument = argument.strip()
    if isinstance(command, str):
        notice(command)
    elif command is None:
        talk.answer(partial(talk.conversation.send, line[1:] if line.startswith("//") else line))
    elif argument and not command.usage:
        raise ArgumentError(name, f"takes no argument, but got {argument[:40]!r}")
    elif command.needs and not argument:
        raise ArgumentError(name, f"needs {command.usage}")
    else:
        command.run(talk, argument)


def _help(talk: Talk, argument: str) -> None:
    names = [f"{', '.join(command.names)} {command.usage}".rstrip() for command in COMMANDS]
    width = max(map(len, names))
    lines = [f"{name:{width}}  {command.help}" for name, command in zip(names, COMMANDS, strict=True)]
    notice("\n".join([*lines, "// begins a message with a slash; Ctrl-C stops an answer; Ctrl-D ends"]))
    if sys.stdin.isatty():
        notice('Alt-Enter begins a new line, and so does Enter after """ until the next """; Tab completes')


def _leave(talk: Talk, argument: str) -> None:
    raise EOFError  # like the end of the input


def _reset(talk: Talk, argument: str) -> None:
    talk.conversation.reset()
    talk.statistics = RunStatistics()
    notice("the conversation is forgotten", talk.run.quiet)


def _system(talk: Talk, argument: str) -> None:
    conversation = talk.conversation
    if not argument:
        current = conversation.system_prompt
        notice(
            "there is no system prompt"
            if current is None
            else f'system prompt: {current}\n/system "" removes it'
        )
    elif argument == '""':
        conversation.set_system_prompt(None)
        notice("the system prompt is removed", talk.run.quiet)
    else:
        conversation.set_system_prompt(argument)
        notice("the system prompt is set; the turns so far stay", talk.run.quiet)


def _undo(talk: Talk, argument: str) -> None:
    question = talk.conversation.undo()
    talk.statistics = RunStatistics()
    notice("there is nothing to undo" if question is None else f"undone: {_start(question)}")


def _edit(talk: Talk, argument: str) -> None:
    if argument:
        talk.answer(partial(talk.conversation.edit, argument))
        return
    asked = _questions(talk)
    if not asked:
        notice("nothing was asked yet")
    elif not sys.stdin.isatty():
        raise ArgumentError("/edit", "needs TEXT, the new question")
    else:
        talk.draft = f"/edit {asked[-1]}"


def _stats(talk: Talk, argument: str) -> None:
    statistics = talk.statistics
    lines = [f"conversation: {_describe(talk)}"]
    if statistics.last is not None:
        reused = talk.conversation.reused_tokens
        lines.append(
            f"last turn: {reused} tokens were in the cache, {statistics.last.prompt_tokens} were fed"
        )
    lines.append(f"cache: {talk.session.describe_cache()}")
    notice("\n".join([*lines, *statistics.lines(talk.session), talk.session.sampling_line]))


def _cache(talk: Talk, argument: str) -> None:
    session = talk.session
    used = talk.conversation.num_tokens
    reserved = session.cache.max_seq_len
    share = f", {used / reserved:.0%} of the reserved ones" if reserved else ""
    notice("\n  ".join([f"cache: {session.describe_cache()}", *session.describe_layers()]))
    notice(f"used: {used} tokens{share}")


def _save(talk: Talk, argument: str) -> None:
    path = Path(argument).expanduser()
    if not talk.conversation.messages:
        notice("there is nothing to save")
        return
    if not path.parent.is_dir():
        raise SnapshotError(f"{argument}: cannot be written: the folder {path.parent} does not exist")
    if path.is_dir():
        raise SnapshotError(f"{argument}: cannot be written: it is a folder; expected a file")
    if path.exists() and path != talk.file:
        try:
            read_header(path)
        except SnapshotError as error:
            raise SnapshotError(f"{argument} exists already, and is not a conversation: {error}") from error
        talk.file = path
        talk.draft = f"/save {argument}"
        how = "Enter replaces it, Ctrl-C does not" if sys.stdin.isatty() else "the same command replaces it"
        notice(f"{argument} has a saved conversation already; {how}")
        return
    talk.conversation.save(path)
    talk.file = path
    notice(f"saved {_describe(talk)} to {argument} ({format_bytes(path.stat().st_size)})")


def _load(talk: Talk, argument: str) -> None:
    path = Path(argument).expanduser()
    talk.conversation.load(path)
    talk.file = path
    talk.statistics = RunStatistics()
    asked = _questions(talk)
    notice(f"loaded {_describe(talk)}" + (f"; the last question was: {_start(asked[-1])}" if asked else ""))


def _describe(talk: Talk) -> str:
    return f"{len(talk.conversation.messages)} messages, {talk.conversation.num_tokens} tokens in the cache"


def _questions(talk: Talk) -> list[str]:
    return [message["content"] for message in talk.conversation.messages if message["role"] == "user"]


def _set(talk: Talk, argument: str) -> None:
    if not argument:
        values: dict[str, Any] = {"max_tokens": talk.run.max_tokens}
        values |= {name: getattr(talk.sampling, name) for name in OPTIONS}
        width = max(map(len, values))
        notice("\n".join(f"{name:{width}}  {_shown(value)}" for name, value in values.items()))
        notice(talk.session.sampling_line)
        return
    option, _, text = argument.partition(" ")
    name = option.replace("-", "_")
    if name not in SETTINGS:
        near = did_you_mean(name, SETTINGS) or did_you_mean(name[:4], SETTINGS) or "; /set lists them"
        raise ArgumentError(f"/set {option}", f"is not an option{near}")
    if not text.strip():
        raise ArgumentError(f"/set {option}", "needs a value; default resets it")
    value = _value(name, text.strip())
    if name == "max_tokens":
        talk.run = replace(talk.run, max_tokens=RunOptions().max_tokens if value is None else value)
    else:
        changed: dict[str, Any] = {name: OPTIONS[name].default if value is None else value}
        talk.set_sampling(replace(talk.sampling, **changed))
    notice(f"{name} is {text.strip()} from the next answer on", talk.run.quiet)


def _value(name: str, text: str) -> Any:
    """Parse a value; None means the default."""
    if text in ("default", "none"):
        return None
    is_fraction = name in OPTIONS and "float" in str(OPTIONS[name].type)
    try:
        return float(text) if is_fraction else int(text)
    except ValueError:
        kind = "a number" if is_fraction else "a whole number"
        raise ArgumentError(name, f"is {text[:40]!r}; expected {kind}, or default") from None


def _shown(value: Any) -> str:
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _start(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


SETTINGS = ("max_tokens", *OPTIONS)
COMMANDS = (
    Command(("/help", "/?"), "", "lists the commands", _help),
    Command(("/exit", "/quit", "/bye"), "", "ends the conversation", _leave),
    Command(
        ("/retry",),
        "",
        "answers the last question again",
        lambda talk, _: talk.answer(talk.conversation.retry),
    ),
    Command(
        ("/edit",), "[TEXT]", "asks TEXT instead of the last question; without TEXT you edit that", _edit
    ),
    Command(("/undo",), "", "removes the last question and its answer", _undo),
    Command(("/reset",), "", "forgets every turn; the system prompt stays", _reset),
    Command(("/system",), "[TEXT]", "sets the system prompt, or shows it", _system),
    Command(
        ("/set",),
        "[NAME VALUE]",
        "sets max_tokens or a sampling option, or shows all",
        _set,
        completes="setting",
    ),
    Command(("/save",), "PATH", "saves the conversation and its cache", _save, needs=True, completes="path"),
    Command(("/load",), "PATH", "continues a saved conversation", _load, needs=True, completes="path"),
    Command(("/stats",), "", "shows the numbers of the last answer", _stats),
    Command(("/cache",), "", "shows what the cache has reserved and used", _cache),
)
BY_NAME = {name: command for command in COMMANDS for name in command.names}
