"""The first minutes with the command: what is piped, what is sampled, and what it says about it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.command import COMMAND, QUESTION, call

FIXED = ["--temp", "0", "-q", "-m", "20"]


def _prompt_tokens(*arguments: str, stdin: str = "") -> int:
    done = call("generate", *arguments, "-m", "1", "--temp", "0", stdin=stdin)
    found = re.search(r"prompt: (\d+) tokens", done.stderr)
    assert found, done.stderr
    return int(found[1])


def test_piped_text_goes_before_the_argument() -> None:
    piped, question = "The fox lives in a den.", "Where does the fox live?"
    whole = call("generate", f"{piped}\n\n{question}", *FIXED).stdout
    assert call("generate", question, *FIXED, stdin=f"{piped}\n").stdout == whole
    assert call("generate", "--prompt", question, *FIXED, stdin=piped).stdout == whole
    assert _prompt_tokens(question, stdin=piped) > _prompt_tokens(question) + 4
    assert _prompt_tokens("-", stdin=f"{question}\n\n\n") > _prompt_tokens(stdin=f"{question}\n\n\n")


def test_a_pipe_that_stays_open_is_waited_for_and_named() -> None:
    command = subprocess.Popen(
        [*COMMAND, "generate", QUESTION, "-q", "-m", "2"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stderr is not None
    assert "waiting for the end of standard input" in command.stderr.readline()
    command.communicate("Once.", timeout=60)
    assert command.returncode == 0


def _line(*arguments: str, model: Path | None = None) -> str:
    """The line that says what is sampled with."""
    chosen = [] if model is None else ["--model", str(model)]
    done = call("generate", "Hi", "-m", "1", *arguments, *chosen)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stderr.splitlines() if line.startswith("sampling: ")).removeprefix("sampling: ")


@pytest.fixture
def model(tmp_path: Path, pocket_folder: Path) -> Path:
    """pocket, for another generation_config.json."""
    return Path(shutil.copytree(pocket_folder, tmp_path / "model"))


def _says(model: Path, **settings: object) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], **settings}))


def test_the_models_own_options_are_used_and_named(model: Path) -> None:
    _says(model, do_sample=True, temperature=0.6, top_p=0.9, top_k=5000, repetition_penalty=1.3)
    from_file = r"temperature 0.6, top-p 0.9, repetition penalty 1.3 \(generation_config.json\)"
    assert re.fullmatch(rf"{from_file}, seed \d+ \(drawn\)", _line(model=model))
    assert _line("--temp", "0", model=model) == (
        "temperature 0 (given), repetition penalty 1.3 (generation_config.json)"
    )
    assert _line("--top-p", "0.5", "--seed", "7", model=model) == (
        "temperature 0.6 (generation_config.json), top-p 0.5 (given), "
        "repetition penalty 1.3 (generation_config.json), seed 7 (given)"
    )
    _says(model)
    assert _line(model=model) == "temperature 0 (default)"
    assert _line("--seed", "7", model=model) == "temperature 1 (default), seed 7 (given)"
    _says(model, do_sample=False, temperature=0.6)
    assert _line(model=model) == "temperature 0 (generation_config.json)"
    assert re.fullmatch(
        r"temperature 1 \(default\), top-k 3 \(given\), seed \d+ \(drawn\)", _line("--top-k", "3", model=model)
    )


def test_the_seed_that_was_drawn_repeats_the_run() -> None:
    first = call("generate", QUESTION, "-m", "30")
    seed = re.search(r"seed (\d+) \(drawn\)", first.stderr)
    assert seed, first.stderr
    assert call("generate", QUESTION, "-m", "30", "--seed", seed[1], "-q").stdout == first.stdout
    talk = call("chat", "-m", "30", "--seed", seed[1], "-q", stdin=f"{QUESTION}\n/reset\n{QUESTION}\n").stdout
    assert talk.startswith(first.stdout)
    assert talk != first.stdout * 2


def test_a_mistake_in_the_models_file_is_one_line(model: Path) -> None:
    _says(model, temperature="hot")
    done = call("generate", "Hi", "--model", str(model))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "generation_config.json: temperature is 'hot'; expected 0, or from 0.001 on" in done.stderr
    assert call("generate", "Hi", "--model", str(model), "--temp", "0.5", "-m", "1").returncode == 0


def test_an_answer_that_was_cut_says_so_even_when_quiet() -> None:
    assert call("generate", QUESTION, "-q", "-m", "3").stderr == "cut at --max-tokens 3\n"
    full = call("generate", QUESTION, "-q", "--max-kv-size", "30").stderr
    assert full == "cut: the reserved context is full; --max-kv-size reserves more\n"
