"""The first minutes with the command: what is piped, what is sampled, and what it says about it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from support.command import COMMAND, QUESTION, call, run, sampling_of

from kvant.cli.app import COMMANDS
from kvant.engine.load import POCKET, find_model
from kvant.text.tokenizer import load_tokenizer

FIXED = ["--temp", "0", "-q", "-m", "20"]


def test_piped_text_goes_before_the_argument() -> None:
    piped, question = "The fox lives in a den.", "Where does the fox live?"
    whole = call("generate", f"{piped}\n\n{question}", *FIXED).stdout
    assert call("generate", question, *FIXED, stdin=f"{piped}\n").stdout == whole
    assert call("generate", "--prompt", question, *FIXED, stdin=piped).stdout == whole
    plain, exact = (call("generate", *which, "-m", "1", stdin=f"{question}\n\n\n").stderr for which in ([], ["-"]))
    counts = [int(re.search(r"prompt: (\d+) tokens", said)[1]) for said in (plain, exact)]  # type: ignore[index]
    assert counts[0] < counts[1]


def test_a_pipe_that_stays_open_is_waited_for_and_named() -> None:
    command = subprocess.Popen(
        [*COMMAND, "generate", QUESTION, "-q", "-m", "2"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert "waiting for the end of standard input" in command.stderr.readline()
    command.communicate("Once.", timeout=60)
    assert command.returncode == 0


@pytest.fixture
def model(tmp_path: Path, pocket_folder: Path) -> Path:
    return Path(shutil.copytree(pocket_folder, tmp_path / "model"))


def _says(model: Path, **settings: object) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], **settings}))


def test_the_models_own_options_are_used_and_named(model: Path) -> None:
    _says(model, do_sample=True, temperature=0.6, top_p=0.9, top_k=5000, repetition_penalty=1.3)
    from_file = r"temperature 0.6, top-p 0.9, repetition penalty 1.3 \(generation_config.json\)"
    assert re.fullmatch(rf"{from_file}, seed \d+ \(drawn\)", sampling_of("--model", str(model)))
    of_file = "repetition penalty 1.3 (generation_config.json)"
    assert sampling_of("--temp", "0", "--model", str(model)) == f"temperature 0 (given), {of_file}"
    given = "temperature 0.6 (generation_config.json), top-p 0.5 (given)"
    assert sampling_of("--top-p", "0.5", "--seed", "7", "--model", str(model)) == f"{given}, {of_file}, seed 7 (given)"
    _says(model)
    assert sampling_of("--model", str(model)) == "temperature 0 (default)"
    assert sampling_of("--seed", "7", "--model", str(model)) == "temperature 1 (default), seed 7 (given)"
    _says(model, do_sample=False, temperature=0.6)
    assert sampling_of("--model", str(model)) == "temperature 0 (generation_config.json)"


def test_the_seed_that_was_drawn_repeats_the_run() -> None:
    first = call("generate", QUESTION, "-m", "30")
    (seed,) = re.findall(r"seed (\d+) \(drawn\)", first.stderr)
    assert call("generate", QUESTION, "-m", "30", "--seed", seed, "-q").stdout == first.stdout
    talk = call("chat", "-m", "30", "--seed", seed, "-q", stdin=f"{QUESTION}\n/reset\n{QUESTION}\n").stdout
    assert talk.startswith(first.stdout)
    assert talk != first.stdout * 2


def test_an_answer_that_was_cut_says_so_even_when_quiet() -> None:
    assert call("generate", QUESTION, "-q", "-m", "3").stderr == "cut at --max-tokens 3\n"
    full = call("generate", QUESTION, "-q", "--max-kv-size", "30").stderr
    assert full == "cut: the reserved context is full; --max-kv-size reserves more\n"


def test_the_command_alone_and_its_summaries_fit_a_terminal() -> None:
    alone, asked, of_one = call(), call("--help"), call("generate", "-h")
    assert (alone.returncode, alone.stderr) == (of_one.returncode, of_one.stderr) == (0, "")
    assert of_one.stdout.startswith("Usage: ")
    assert alone.stdout == asked.stdout
    listed = alone.stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert all(len(line) <= 80 and line.endswith(".") and "..." not in line for line in listed)


def test_one_argument_beside_a_prompt_of_a_flag_is_the_model() -> None:
    whole = call("generate", QUESTION, *FIXED).stdout
    for arguments in (["pocket", QUESTION], ["pocket", "--prompt", QUESTION], [QUESTION, "--model", "pocket"]):
        assert call("generate", *arguments, *FIXED).stdout == whole
    assert call("generate", "pocket", "-", *FIXED, stdin=QUESTION).stdout == whole
    assert call("generate", "--prompt", "pocket", *FIXED).returncode == 0


def test_an_answer_begins_as_it_is_told_to() -> None:
    begun = "Once, on a cold morning, a bear"
    done = call("generate", QUESTION, *FIXED, "--prefill-response", begun)
    assert done.stdout.startswith(begun)
    template = load_tokenizer(find_model(POCKET)).apply_chat_template
    messages = [{"role": "user", "content": QUESTION}]
    prompt = template(messages, tokenize=False, add_generation_prompt=True) + begun
    assert call("generate", prompt, *FIXED, "--ignore-chat-template").stdout == done.stdout.removeprefix(begun)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_tokens_that_end_a_text(command: str) -> None:
    def text(*flags: str) -> str:
        done = call(command, "-q", "--temp", "0", "-m", "60", *flags, stdin="Hello!\n")
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole = text()
    assert "<|im_end|>" not in whole
    first = whole.index("I")
    assert text("--extra-eos-token", " I") == whole[: first - 1] + "\n"
    (token,) = load_tokenizer(find_model(POCKET)).encode(" I", add_special_tokens=False)
    assert text("--extra-eos-token", str(token)) == whole[: first - 1] + "\n"
    on = text("--ignore-eos")
    assert on.startswith(whole.rstrip("\n"))
    assert "<|im_end|>" in on


THANKS = "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n"  # whatever the question was


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_variables_of_the_chat_template(command: str, model: Path) -> None:
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    template = f"{{% if thank %}}{THANKS}{{% else %}}{settings['chat_template']}{{% endif %}}"
    path.write_text(json.dumps(settings | {"chat_template": template}))

    def text(*flags: str) -> subprocess.CompletedProcess[str]:
        return call(command, "--model", str(model), "-q", "--temp", "0", "-m", "30", *flags, stdin=f"{QUESTION}\n")

    plain = text("--chat-template-config", '{"thank": false}').stdout
    assert text().stdout == plain != text("--chat-template-config", '{"thank": true}').stdout
    misspelt = text("--chat-template-config", '{"thanx": 1}')
    assert (misspelt.returncode, misspelt.stdout) == (2, "")
    assert "did you mean 'thank'" in misspelt.stderr


def test_a_shell_completes_commands_flags_and_models() -> None:
    def process() -> subprocess.CompletedProcess[str]:
        return subprocess.run([Path(sys.executable).with_name("kvant")], capture_output=True, text=True)

    def completed(line: str, ask: Callable[[], subprocess.CompletedProcess[str]] = call) -> list[str]:
        words = {"_KVANT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        with patch.dict(os.environ, words):
            done = ask()
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    assert completed("kvant ge", process) == completed("kvant ge") == ["generate"]
    assert sorted(completed("kvant generate --prefi")) == ["--prefill-response", "--prefill-step-size"]
    assert completed("kvant plan --model po") == completed("kvant chat po") == ["pocket"]
    assert completed("kvant generate --preset none --ignore-e") == ["--ignore-eos"]
    assert completed("kvant launch -n 2 -- g") == ["generate"]
    assert completed("kvant launch -n 2 -- generate --ignore-e") == ["--ignore-eos"]
    assert run(_KVANT_COMPLETE="source_zsh").stdout.splitlines()[1] == "#compdef kvant"
