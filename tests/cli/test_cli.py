"""The command as its user meets it: a process, its two outputs, its exit code, and what a terminal would
obey.
"""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.checkpoints import change_tensors
from support.command import COMMAND, QUESTION, call, refusal, run
from support.golden import CASES, GOLDEN
from support.server import wait
from support.terminal import Terminal
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import kvant
from kvant.cli.progress import LateProgress
from kvant.cli.terminal import escaped


def test_version() -> None:
    installed = subprocess.run(
        [Path(sys.executable).with_name("kvant"), "--version"], capture_output=True, text=True
    )
    for done in (run("--version"), installed):
        assert (done.returncode, done.stdout, done.stderr) == (0, f"kvant {kvant.__version__}\n", "")


def test_a_warning_is_a_line(tmp_path: Path, pocket_folder: Path) -> None:
    """Of a head that differs from the embedding that config.json ties it to."""
    folder = Path(shutil.copytree(pocket_folder, tmp_path / "pocket"))
    change_tensors(folder / "model.safetensors", {"lm_head.weight": mx.zeros((1280, 256), mx.float16)})
    done = run("generate", "Hello", "--model", str(folder), "-m", "1", "-q")
    assert done.returncode == 0
    assert done.stderr.startswith("kvant: warning: config.json ties the output head")
    assert "warn_of_head" not in done.stderr


def test_text_to_standard_output_and_statistics_to_standard_error() -> None:
    done = run("generate", QUESTION, "--temp", "0")
    assert done.returncode == 0
    assert "Pip" in done.stdout
    assert "<|" not in done.stdout
    assert done.stdout.endswith("\n")
    for pattern in (
        r"^cache: 2048 tokens reserved, 8 bits in groups of 32, keys rotated, \d+\.\d\d MB$",
        r"^prompt: \d+ tokens, [\d.]+ tokens/s$",
        r"^generated: \d+ tokens, [\d.]+ tokens/s, ended by stop$",
        r"^first token: \d+\.\d{3} s, after \d+\.\d\d s of loading$",
        r"^latency: median \d+\.\d\d ms, p95 \d+\.\d\d ms a token$",
        r"^peak memory: \d+\.\d\d MB$",
    ):
        assert re.search(pattern, done.stderr, re.MULTILINE), pattern
    assert done.stderr.count("cache: ") == 1
    quiet = call("generate", QUESTION, "--temp", "0", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, done.stdout, "")


def test_json_lines() -> None:
    text = call("generate", QUESTION, "-q", "-m", "25", "--temp", "0").stdout
    done = call("generate", QUESTION, "--json", "-m", "25", "--temp", "0")
    assert done.returncode == 0
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["index"] for record in records] == list(range(25))
    assert "".join(record["text"] for record in records) == text.removesuffix("\n")
    assert [record["finish_reason"] for record in records] == [None] * 24 + ["length"]
    assert all(record["latency_ms"] > 0 and record["logprob"] <= 0 for record in records)
    assert "generated: 25 tokens" in done.stderr
    shown = re.search(r"^latency: median ([\d.]+) ms, p95 ([\d.]+) ms a token$", done.stderr, re.MULTILINE)
    later = [record["latency_ms"] for record in records[1:]]  # the first token's time is told apart
    assert [float(text) for text in shown.groups()] == pytest.approx(
        np.percentile(later, [50, 95]), abs=0.006
    )  # type: ignore[union-attr]


def test_sampling_flags_are_applied() -> None:
    def text(*flags: str, temp: str = "1.3", seed: str = "1") -> str:
        given = ["-q", "-m", "24", "--temp", temp, *(["--seed", seed] if temp != "0" else [])]
        return call("generate", QUESTION, *given, *flags).stdout

    greedy, plain = text(temp="0"), text()
    assert text() == plain != text(seed="2")
    assert text("--min-p", "1") == greedy != text("--min-p", "1", "--min-tokens-to-keep", "60")
    penalty = ["--repetition-penalty", "9"]
    assert (
        len({greedy, text(*penalty, temp="0"), text(*penalty, "--repetition-context-size", "6", temp="0")})
        == 3
    )
    token = json.loads(text("--json", "-m", "1", temp="0"))["token"]
    assert json.loads(text("--json", "-m", "1", "--logit-bias", f"{token}:-1e9", temp="0"))["token"] != token
    assert text("--stop", greedy[20:30], temp="0") == greedy[:20] + "\n"


def test_late_imports() -> None:
    """The help does not wait for the engine, other commands for bench, report and pull, a benchmark for
    its plot.
    """
    late = ("kvant.tools.bench", "kvant.tools.report", "huggingface_hub", "matplotlib", "rich")
    engine = ("kvant.cache", "kvant.engine", "kvant.models", "kvant.operators", *late)
    code = f"import kvant.cli.app, sys; found = [name for name in sys.modules if name.startswith({engine})]"
    code += f"; import kvant.cli.generate; found += [name for name in sys.modules if name.startswith({late})]"
    code += "; import kvant.tools.bench.plot; sys.exit(bool(found) or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_bytes_that_are_no_text() -> None:
    done = run("generate", "-", stdin=b"\xff\xfe")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvant: error: standard input is not UTF-8")
    done = subprocess.run([*COMMAND, "generate", b"\xff abc"], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, b"kvant: error: the prompt is not valid UTF-8\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_streams(closed: str) -> None:
    command = " ".join([*COMMAND, "generate", "hi", "-q", "-m", "2", "--temp", "0", closed])
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"" if closed == "2>&-" else b"cut at --max-tokens 2\n")
    assert (done.stdout == b"") == (closed == ">&-")


def test_a_template_that_fails_does_not_end_the_chat(pocket_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pocket_folder, tmp_path / "model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = folder / "chat_template.jinja"
    check = "{% if messages[-1]['content'] == 'no' %}{{ raise_exception('not this one') }}{% endif %}"
    template.write_text(check + settings.pop("chat_template"))
    done = call("chat", "--model", str(folder), "-m", "5", stdin="no\nHello!\n//x\n")
    assert done.returncode == 0
    assert "error: the chat template failed: not this one" in done.stderr
    assert done.stdout.strip()
    template.write_text("{{ '' }}")
    done = call("chat", "--model", str(folder), "-q", stdin="Hi\n")
    assert (done.returncode, done.stdout, done.stderr[:7], done.stderr.count("\n")) == (0, "", "error: ", 1)
    assert "empty" in refusal(1, "generate", "Hi", "--model", str(folder), "-q")
    template.unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for command in (["chat"], ["generate", "Hi"]):
        assert "the model has no chat template" in refusal(1, *command, "--model", str(folder), "-q")


def test_a_broken_model_folder(make_checkpoint: Any) -> None:
    folder, _ = make_checkpoint()
    (folder / "tokenizer.json").write_text("{}")
    assert "no model; expected a tokenizer" in refusal(1, "generate", "a", "--model", str(folder))


def test_a_reader_that_leaves() -> None:
    command = [*COMMAND, "generate", QUESTION, "-q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(60) in (0, 1)
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("is_terminal", "quiet", "delay"),
    [(True, False, 0.01), (False, False, 0.01), (True, True, 0.01), (True, False, 60)],
)
def test_progress_appears_late_and_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, quiet: bool, delay: float
) -> None:
    """And it does not end before the work."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("kvant.cli.progress.DELAY_S", delay)
    monkeypatch.setenv("TERM", "xterm")
    appears = is_terminal and not quiet and delay < 1
    with LateProgress("loading", quiet=quiet) as progress:
        for done in range(4):
            progress.update(done + 1, 4)
            if appears:
                wait(
                    lambda done=done: re.search(
                        f"{done + 1}/4" if done < 3 else "(?s)3/4.*loading", stream.getvalue()
                    )
                )
    shown = stream.getvalue()
    assert ("loading" in shown) == ("3/4" in shown) == appears
    assert "4/4" not in shown
    assert "loading" in shown.rpartition("3/4")[2] or not shown


TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.mark.parametrize("case", ["llama llama3", "qwen3 yarn"])
def test_a_folder_that_transformers_wrote(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizer too, with no way to a network."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w1", unk_token="w0", chat_template=TEMPLATE
    )
    fast.save_pretrained(tmp_path)
    shutil.copy(GOLDEN / "weights" / f"{CASES[case]}.safetensors", tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / case.replace(" ", "-") / "config.json", tmp_path)
    (tmp_path / "text.txt").write_text("w5 w9 w3 w30 w7 w12 " * 8)
    for name in ("socket.socket.connect", "socket.getaddrinfo"):
        monkeypatch.setattr(name, lambda *arguments, **_: pytest.fail(f"a connection: {arguments}"))
    flags = ["--model", str(tmp_path), "--json"]
    done = call("generate", "w5 w9", *flags, "--max-tokens", "4", "--kv-group-size", "4")
    tokens = [json.loads(line)["token"] for line in done.stdout.splitlines()]
    assert 1 <= len(tokens) <= 4
    assert all(0 <= token < 32 for token in tokens)
    done = call("report", *flags, "--text", str(tmp_path / "text.txt"), "--formats", "8g4,4g4:notail")
    eight, four = (own["prefill"]["mean_kld_nats"] for own in json.loads(done.stdout)["formats"])
    assert 0 < eight < four


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
        ["report", "--model", "{folder}", "--tokens", "64", "--formats", "8g32"],
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
