"""The commands of a conversation, without a terminal: lines in, text out, what is said on standard error."""

import re
import shutil
from pathlib import Path

from support.command import QUESTION, call

from kvant.cli.chat.commands import BY_NAME, COMMANDS, find
from kvant.engine.load import POCKET, find_model
from kvant.text.tokenizer import load_tokenizer


def test_a_line_is_a_command_or_a_question() -> None:
    assert len(BY_NAME) == sum(len(command.names) for command in COMMANDS)
    for line in ("Hello", "/etc/hosts is what?", "/etc/hosts", "/usr is full", "//help"):
        assert find(line) is None
    for line, name in (
        ("/help", "/help"),
        ("/?", "/help"),
        ("/bye", "/exit"),
        ("/system Be.\nVery.", "/system"),
    ):
        found = find(line)
        assert found.names[0] == name
    for line, near in (
        ("/foo", "/help lists"),
        ("/hepl", "mean /help?"),
        ("/statz now", "mean /stats?"),
        ("/", "lists"),
    ):
        found = find(line)
        assert found.startswith(f"{line.split()[0]} is not a command; ")
        assert near in found


def _said(*lines: str, flags: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """Standard output, and the lines of standard error after the greeting."""
    done = call("chat", "-m", "12", "--temp", "0", *flags, stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()[1:]


def test_help_names_every_command() -> None:
    _, said = _said("/help")
    for command in COMMANDS:
        assert any(line.startswith(", ".join(command.names)) and command.help in line for line in said)


def test_options_are_set_shown_and_taken_back() -> None:
    lines = [
        "Hello!",
        "/set max_tokens 3",
        "/retry",
        "/set max-tokens default",
        "/set temp 1.5",
        "/set seed 4",
        "/set",
    ]
    out, said = _said(*lines, "/set x")
    first, second = (line.split() for line in out.splitlines())
    assert len(second) < len(first)
    shown = {line.split()[0]: line.split()[1] for line in said if re.match(r"[a-z_]+  +", line)}
    assert (shown["max_tokens"], shown["temp"], shown["seed"], shown["top_p"]) == (
        "256",
        "1.5",
        "4",
        "default",
    )
    assert any(line.startswith("sampling: temperature 1.5") and "seed 4" in line for line in said)
    assert said[-1] == "error: /set x is not an option; /set lists them"


def test_an_error_is_a_line_and_changes_nothing() -> None:
    errors = {
        "/set temp": "/set temp needs a value; default resets it",
        "/set temp x": "temp is 'x'; expected a number, or default",
        "/set max_tokens 0": "--max-tokens is 0; expected at least 1",
        "/set top_k 1.5": "top_k is '1.5'; expected a whole number, or default",
        "/set seed 3": "seed is 3, which has no effect at temperature 0",
        "/quit now": "/quit takes no argument, but got 'now'",
        "/edit": "nothing was asked yet",
        "/retry": "nothing was asked yet; ask a question first",
    }
    plain, _ = _said("Hello!")
    out, said = _said(*errors, "Hello!")
    assert out == plain
    assert len(said) == len(errors) + 1  # and that the answer was cut
    for line, error in zip(said, errors.values(), strict=False):
        assert error in line


def test_without_a_seed_a_retry_differs_and_with_one_the_conversation_is_the_same_again() -> None:
    lines = ("Tell me a story.", "/retry", "/retry")
    flags = ("-m", "30", "--temp", "1.2")
    runs = [call("chat", *flags, "--seed", "5", stdin="\n".join(lines)).stdout for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(set(runs[0].splitlines())) == 3


def test_the_system_prompt_is_set_shown_and_removed() -> None:
    out, said = _said(
        "Hello!", "/reset", "/system Talk about foxes.", "/system", "Hello!", '/system ""', "/system"
    )
    assert any(line == "system prompt: Talk about foxes." for line in said)
    assert said[-1] == "there is no system prompt"
    assert len(out.splitlines()) == 2


def test_undo_takes_a_turn_back() -> None:
    out, said = _said("Hello!", QUESTION, "/undo", QUESTION, "/stats", "/undo", "/undo", "/undo", "/cache")
    answers = out.splitlines()
    assert answers[1] == answers[2]
    undone = [line.removeprefix("undone: ") for line in said if "undo" in line]
    assert undone == [QUESTION, QUESTION, "Hello!", "there is nothing to undo"]
    assert "conversation: 4 messages" in "\n".join(said)
    assert said[-1] == "used: 0 tokens, 0% of the reserved ones"


def test_undo_takes_tokens_out_of_the_cache() -> None:
    _, said = _said("Hello!", "/cache", QUESTION, "/cache", "/undo", "/cache", "/stats")
    used = [int(line.split()[1]) for line in said if line.startswith("used: ")]
    assert used[1] > used[2]
    assert abs(used[2] - used[0]) < 10  # the template's tokens around an answer
    assert "nothing was generated" in said  # the last answer's numbers are gone, too


def test_special_tokens_are_not_shown() -> None:
    token = load_tokenizer(find_model(POCKET)).convert_tokens_to_ids("<|im_start|>")
    flags = ("--temp", "0", "-m", "3", "--logit-bias", f"{token}:1e9")
    assert call("generate", "Hi", *flags).stdout == "<|im_start|>" * 3 + "\n"
    done = call("chat", *flags, stdin="Hi")
    assert done.stdout == "\n"
    assert "cut at max_tokens, 3" in done.stderr


def test_a_full_context() -> None:
    lines = [f"{QUESTION} Number {number}." for number in range(8)]
    out, said = _said(*lines, "/stats", flags=("--max-kv-size", "100"))
    assert len(out.splitlines()) == 8
    forgotten = [line for line in said if "forgotten" in line]
    assert re.fullmatch(r"the oldest \d+ messages were forgotten: the context is full", forgotten[0])
    held = int(re.search(r"messages, (\d+) tokens in the cache", "\n".join(said))[1])  # type: ignore[index]
    assert held <= 100
    _, said = _said(*lines, flags=("--max-kv-size", "100", "--overflow", "stop"))
    assert said[-1].endswith("100 are reserved; /reset forgets the conversation; --max-kv-size reserves more")
    out, said = _said("word " * 2500, "Hello!")
    assert said[0].startswith("error: the question alone has ")
    # nobody can reserve more
    assert said[0].endswith("2048 are the model's context; send a shorter message")
    assert out


def test_a_conversation_is_saved_and_goes_on(tmp_path: Path) -> None:
    path, notes = tmp_path / "a talk.kvant", tmp_path / "notes.txt"
    notes.write_text("mine")
    out, said = _said("/save x", "Hello!", f"/save {path}", f"/save {path}", f"/save {notes}", "Thank you!")
    assert said[0] == "there is nothing to save"
    assert re.fullmatch(
        rf"saved 2 messages, \d+ tokens in the cache to {re.escape(str(path))} \([\d.]+ kB\)", said[2]
    )
    assert said[3] == said[2]
    assert said[4].startswith(f"error: {notes} exists already, and is not a conversation: ")
    assert notes.read_text() == "mine"
    assert path.stat().st_mode & 0o777 == 0o600
    another = [f"/save {tmp_path}/no/talk", f"/save {tmp_path}", f"/save {path}"]
    before = path.read_bytes()
    _, said = _said(QUESTION, *another)
    assert said[1] == f"error: {tmp_path}/no/talk: cannot be written: the folder {tmp_path}/no does not exist"
    assert said[2] == f"error: {tmp_path}: cannot be written: it is a folder; expected a file"
    assert said[3] == f"{path} has a saved conversation already; the same command replaces it"
    assert path.read_bytes() == before
    other = shutil.copy(path, tmp_path / "other")
    _, said = _said(QUESTION, f"/save {other}", f"/save {other}")
    assert said[-1].startswith("saved 2 messages")
    _, said = _said(f"/load {other}", f"/save {other}")
    assert said[-1].startswith("saved 2 messages")
    again, said = _said(f"/load {path}", "Thank you!", "/stats")
    assert again.splitlines() == out.splitlines()[1:]
    assert re.fullmatch("loaded 2 messages, .*; the last question was: Hello!", said[0])
    assert int(re.findall(r"last turn: (\d+) tokens were in the cache", "\n".join(said))[0]) > 20
    kept, said = _said("Hello!", f"/load {notes}", f"/load {tmp_path}/nothing", "/load", "Thank you!")
    assert kept == out
    assert said[1].startswith("error: ")
    assert f"{tmp_path}/nothing" in said[2]
    assert said[3] == "error: /load needs PATH"
