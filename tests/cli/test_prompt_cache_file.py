"""--prompt-cache-file and --n as their user meets them."""

import json
import re
from pathlib import Path

from support.command import QUESTION, call, refusal
from support.kinds import load_kind

STORY = "The fox Pip lived in a den by the river. He had a friend, a bear named Bob. " * 6
GENERATE = ["generate", "-m", "12", "--temp", "0"]
CHAT = ["chat", "-m", "12", "--temp", "0"]


def _fed(stderr: str) -> int:
    return int(re.search(r"^prompt: (\d+) tokens", stderr, re.MULTILINE)[1])  # type: ignore[index]


def test_a_prompt_continues_what_the_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "story.safetensors"
    first, other = f"{STORY}Who is Bob?", f"{STORY}Where did Pip live?"
    plain = [call(*GENERATE, "-q", prompt).stdout for prompt in (first, other)]
    begun = call(*GENERATE, first, "--prompt-cache-file", str(path))
    assert (begun.returncode, begun.stdout) == (0, plain[0])
    assert path.stat().st_mode & 0o777 == 0o600
    went_on = call(*GENERATE, other, "--prompt-cache-file", str(path))
    assert (went_on.returncode, went_on.stdout) == (0, plain[1])
    held, total = map(
        int, re.search(r"prompt cache: (\d+) of the prompt's (\d+) tokens", went_on.stderr).groups()
    )  # type: ignore[union-attr]
    assert _fed(begun.stderr) > 100
    assert _fed(went_on.stderr) == total - held < 20
    # The same again: its last token is fed for the logits.
    again = call(*GENERATE, other, "--prompt-cache-file", str(path), "--ignore-chat-template", "-q")
    assert again.stdout == call(*GENERATE, other, "--ignore-chat-template", "-q").stdout
    same = call(*GENERATE, other, "--prompt-cache-file", str(path), "--ignore-chat-template")
    assert (same.stdout, _fed(same.stderr)) == (again.stdout, 1)


def test_a_chat_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "chat.safetensors")
    whole = call(*CHAT, "-q", stdin=f"{QUESTION}\nWho helped Pip?\nThank you!\n").stdout
    first, second = (
        call(*CHAT, "--prompt-cache-file", path, stdin=lines)
        for lines in (f"{QUESTION}\nWho helped Pip?\n", "Thank you!\n/stats\n")
    )
    assert (first.returncode, second.returncode, first.stdout + second.stdout) == (0, 0, whole)
    assert f"prompt cache: loaded 4 messages from {path}" in second.stderr
    assert int(re.findall(r"(\d+) were fed", second.stderr)[0]) < 25
    system = call(*CHAT, "--prompt-cache-file", path, "--system-prompt", "Be kind.", stdin="/system\n")
    assert "system prompt: Be kind." in system.stderr


def test_files_that_are_refused(tmp_path: Path) -> None:
    chat, story, folder = (str(tmp_path / name) for name in ("chat", "story", "folder"))
    Path(folder).mkdir()
    assert call(*CHAT, "--prompt-cache-file", chat, stdin="Hello!\n").returncode == 0
    assert call(*GENERATE, "Hello!", "--prompt-cache-file", story).returncode == 0
    before = Path(chat).read_bytes()
    for arguments, words in (
        (
            [*GENERATE, "Hello!", "--prompt-cache-file", chat],
            "contains a conversation; kvant chat --prompt-cache-file",
        ),
        ([*CHAT, "--prompt-cache-file", story], "it holds no conversation"),
        ([*CHAT, "--prompt-cache-file", f"{folder}/none/x"], "cannot be written: the folder does not exist"),
        ([*GENERATE, "Hello!", "--prompt-cache-file", f"{folder}/none/x"], "the folder does not exist"),
        ([*GENERATE, "Hello!", "--prompt-cache-file", folder], "a folder; expected a file"),
        ([*GENERATE, "Hello!", "--prompt-cache-file", story, "--kv-bits", "4"], "of another format"),
        ([*GENERATE, "Hello!", "--prompt-cache-file", story, "--max-kv-size", "14"], "14 reserved"),
    ):
        assert words in refusal(1, *arguments)
    assert Path(chat).read_bytes() == before


def test_several_answers_after_what_a_file_holds(tmp_path: Path) -> None:
    """At full precision, where it does not matter how the prompt was cut."""
    path = str(tmp_path / "story.safetensors")
    flags = ["generate", "-m", "12", "--temp", "1", "--kv-bits", "0"]
    asked = [f"{STORY}{question}" for question in ("Who is Bob?", "Where did Pip live?")]
    first = call(*flags, asked[0], "--seed", "1", "--n", "2", "--prompt-cache-file", path)
    assert first.returncode == 0
    assert "prompt cache: " not in first.stderr
    second = call(*flags, asked[1], "--seed", "5", "--n", "3", "--prompt-cache-file", path)
    held, total = map(
        int,
        re.search(
            r"(\d+) of the prompt's (\d+) tokens are "
            r"in",
            second.stderr,
        ).groups(),
    )  # type: ignore[union-attr]
    assert _fed(second.stderr) == total - held < 20
    alone = [call(*flags, asked[1], "--seed", str(5 + number), "-q").stdout for number in range(3)]
    assert second.stdout == "\n".join(alone)
    # The file holds the last answer.
    again = call(
        *flags, asked[1] + alone[2].removesuffix("\n"), "--ignore-chat-template", "--prompt-cache-file", path
    )
    assert again.returncode == 0
    third = call(*flags, asked[1], "--seed", "7", "--prompt-cache-file", path)
    assert third.stdout == alone[2]


def test_a_prompt_that_fills_its_pages_and_the_reservation(tmp_path: Path) -> None:
    """Every answer has one token, which is sampled and not fed."""
    load_kind("qwen2", tmp_path / "model")
    prompt = " ".join(f"w{10 + at % 100}" for at in range(128))
    flags = ["--temp", "3", "--n", "3", "--max-kv-size", "128", "--ignore-eos", "--ignore-chat-template"]
    done = call("generate", prompt, "--model", str(tmp_path / "model"), "--kv-bits", "0", *flags)
    assert [len(text.split()) for text in done.stdout.split("\n\n")] == [1, 1, 1]
    assert done.stderr.count("cut: the reserved context is full; --max-kv-size reserves more") == 3


def test_several_answers() -> None:
    flags = ["generate", QUESTION, "-m", "20", "--temp", "1", "--seed", "5"]
    alone = [call(*flags[:-1], str(5 + number), "-q").stdout for number in range(3)]
    done = call(*flags, "--n", "3")
    assert len(set(alone)) == 3
    assert done.stdout == "\n".join(alone)  # an empty line between two
    assert re.findall(r"^--- \d of \d ---$", done.stderr, re.MULTILINE) == [
        f"--- {i} of 3 ---" for i in (1, 2, 3)
    ]
    assert done.stderr.count("prompt: ") == 1
    assert done.stderr.count("generated: ") == 3
    lines = [json.loads(line) for line in call(*flags, "--n", "3", "--json", "-q").stdout.splitlines()]
    assert [line["choice"] for line in lines[:6]] == [0, 1, 2] * 2  # as they come, side by side
    assert [[x["index"] for x in lines if x["choice"] == n] for n in range(3)] == [[*range(20)]] * 3
    assert ["".join(x["text"] for x in lines if x["choice"] == n) + "\n" for n in range(3)] == alone
    assert re.search(r"^together: 60 tokens, [\d.]+ tokens/s$", done.stderr, re.MULTILINE)
    assert "384 tokens reserved for 3 sequences at once" in done.stderr
    fewer = call(*flags, "--n", "3", "--sequences", "2")
    assert fewer.stdout == done.stdout
    assert "256 tokens reserved for 2 sequences at once" in fewer.stderr
