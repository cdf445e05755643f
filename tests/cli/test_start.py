"""The first minutes with the command: what is piped, sampled and said about it; the config file and the
environment.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
from support.command import COMMAND, QUESTION, call, refusal, run, sampling_of
from support.key_transforms import drawn_format

from kvant.cli.app import COMMANDS, make_app
from kvant.cli.help import GROUPED, GROUPS
from kvant.engine.load import POCKET, find_model
from kvant.text.tokenizer import load_tokenizer

FIXED = ["--temp", "0", "-q", "-m", "20"]


def test_piped_text_goes_before_the_argument() -> None:
    piped, question = "The fox lives in a den.", "Where does the fox live?"
    whole = call("generate", f"{piped}\n\n{question}", *FIXED).stdout
    assert call("generate", question, *FIXED, stdin=f"{piped}\n").stdout == whole
    assert call("generate", "--prompt", question, *FIXED, stdin=piped).stdout == whole
    plain, exact = (
        call("generate", *which, "-m", "1", stdin=f"{question}\n\n\n").stderr for which in ([], ["-"])
    )
    counts = [int(re.search(r"prompt: (\d+) tokens", said)[1]) for said in (plain, exact)]  # type: ignore[index]
    assert counts[0] < counts[1]


def test_a_pipe_that_stays_open_is_waited_for_and_named() -> None:
    command = subprocess.Popen(
        [*COMMAND, "generate", QUESTION, "-q", "-m", "2"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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
    assert (
        sampling_of("--top-p", "0.5", "--seed", "7", "--model", str(model))
        == f"{given}, {of_file}, seed 7 (given)"
    )
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


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_described_alike_in_both_helps(name: str) -> None:
    command = typer.main.get_command(make_app([name])).commands[name]  # type: ignore[attr-defined]
    assert command.help.partition("\n\n")[0] == COMMANDS[name] == command.get_short_help_str(limit=80)


def test_the_help_lists_flags_in_groups() -> None:
    """Each flag once, the common ones first, and no long list among them."""
    titles = ["Arguments", "Common options", *GROUPS]
    for name in GROUPED:
        text = call(name, "--help").stdout
        shown = [title for title in titles if f"\n{title}:\n" in text]
        assert shown == re.findall(r"^(\w.*):$", text, re.MULTILINE)
        assert {"Common options", "Cache options", "Speed options", "Advanced options"} <= {*shown}
        command = typer.main.get_command(make_app([name])).commands[name]  # type: ignore[attr-defined]
        listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
        assert sorted(listed) == sorted(
            next(flag for flag in parameter.opts if flag.startswith("--"))
            for parameter in command.get_params(typer.Context(command))
            if parameter.param_type_name == "option"
        )
        common = text.partition("Common options:\n")[2].partition("\n\n")[0]
        assert len(re.findall(r"^  -", common, re.MULTILINE)) <= 15
        assert max(map(len, text.splitlines())) <= 80
    grouped = {name for names in GROUPS.values() for name in names}
    parameters = [
        parameter.name
        for name in GROUPED
        for parameter in typer.main.get_command(make_app([name])).commands[name].params  # type: ignore[attr-defined]
    ]
    assert grouped <= {*parameters}


def test_one_argument_beside_a_prompt_of_a_flag_is_the_model() -> None:
    whole = call("generate", QUESTION, *FIXED).stdout
    for arguments in (
        ["pocket", QUESTION],
        ["pocket", "--prompt", QUESTION],
        [QUESTION, "--model", "pocket"],
    ):
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
    assert call("generate", prompt, *FIXED, "--ignore-chat-template").stdout == done.stdout.removeprefix(
        begun
    )


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
        return call(
            command, "--model", str(model), "-q", "--temp", "0", "-m", "30", *flags, stdin=f"{QUESTION}\n"
        )

    plain = text("--chat-template-config", '{"thank": false}').stdout
    assert text().stdout == plain != text("--chat-template-config", '{"thank": true}').stdout
    misspelt = text("--chat-template-config", '{"thanx": 1}')
    assert (misspelt.returncode, misspelt.stdout) == (2, "")
    assert "did you mean 'thank'" in misspelt.stderr


def test_a_shell_completes_commands_flags_and_models() -> None:
    def process() -> subprocess.CompletedProcess[str]:
        return subprocess.run([Path(sys.executable).with_name("kvant")], capture_output=True, text=True)

    def completed(line: str, ask: Callable[[], subprocess.CompletedProcess[str]] = call) -> list[str]:
        words = {
            "_KVANT_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        }
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


Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text)
        monkeypatch.setenv("KVANT_CONFIG", str(path))
        return path

    return write


def test_a_flag_wins_over_a_preset_over_the_file_over_the_model(write: Write) -> None:
    write("temp = 0.4\ntop-p = 0.6\nseed = 5\n[generate]\ntemp = 0.5\n[presets.poet]\ntop-p = 0.7\n")
    poet = ["--preset", "poet"]
    assert sampling_of() == "temperature 0.5, top-p 0.6, seed 5 (config.toml)"
    assert (
        sampling_of(*poet) == "temperature 0.5 (config.toml), top-p 0.7 (preset poet), seed 5 (config.toml)"
    )
    assert "top-p 0.8 (given)" in sampling_of(*poet, "--top-p", "0.8")
    assert sampling_of("--temp", "-0.0") == "temperature 0 (given)", (
        "what the file says without effect is dropped"
    )
    chat = call("chat", "-m", "1", stdin="Hi\n/stats\n").stderr
    assert "sampling: temperature 0.4, top-p 0.6, seed 5 (config.toml)" in chat


def test_what_the_file_sets_is_applied(write: Write) -> None:
    write('max-tokens = 3\nkv-bits = 4\nmax-kv-size = 100\nstop = ["zzz"]\nkv-bias-split = false\n')
    done = call("generate", QUESTION)
    assert "cache: 100 tokens reserved, 4 bits in groups of 32" in done.stderr
    assert "cut at --max-tokens 3" in done.stderr
    assert "100 tokens at 4 bits" in call("plan").stdout, "a plan is of what generate would do"
    assert "cache: 100 tokens reserved, float32" in call("generate", QUESTION, "--kv-bits", "0").stderr
    write("kv-group-size = 16\n[chat]\nmax-tokens = 2\nquiet = true\n")
    assert call("chat", stdin="Hi\n").stderr == "cut at max_tokens, 2; /set max_tokens changes it\n"
    assert "groups of 16" in call("generate", QUESTION, "-m", "1").stderr
    assert call("generate", QUESTION, "-m", "1", "--kv-bits", "0").returncode == 0


def test_a_format_in_the_file_gives_way_to_a_flag_and_takes_a_setting_s_place(
    write: Write, tmp_path: Path, pocket: Any
) -> None:
    drawn_format(pocket[0], 4, 32).write(tmp_path / "tuned.json")
    write(f"kv-format = '{tmp_path / 'tuned.json'}'\n")
    line = "4 bits in groups of 32, scales fitted, keys centered+balanced+rotated,"
    assert line in call("generate", QUESTION, "-m", "1").stderr
    assert "8 bits in groups of 32," in call("generate", QUESTION, "-m", "1", "--kv-bits", "8").stderr
    write("kv-bits = 8\nkv-group-size = 64\n")
    assert line in call("generate", QUESTION, "-m", "1", "--kv-format", str(tmp_path / "tuned.json")).stderr
    write("kv-format = 'pmx'\n")  # of 4 bits: it gives way to others
    assert "8 bits in groups of 32," in call("generate", QUESTION, "-m", "1").stderr
    assert "scales fitted, " in (plain := call("generate", QUESTION, "-m", "1", "--kv-bits", "4").stderr)
    assert "rotated" not in plain


def test_a_model_of_the_environment(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pocket_folder: Path
) -> None:
    (tmp_path / "other").symlink_to(pocket_folder)
    other = str(tmp_path / "other")
    for setting, flags, expected in (
        (other, [], other),
        (other, ["pocket"], "pocket"),
        (other, ["--model", "pocket"], "pocket"),
        ("", [], "from-the-file"),
        ("none", ["--model", other], other),
    ):
        monkeypatch.setenv("KVANT_MODEL", setting)
        write('model = "from-the-file"\n[presets.small]\nmodel = "pocket"\n')
        done = call("plan", *flags)
        assert expected in (done.stdout or done.stderr).splitlines()[0]
    monkeypatch.setenv("KVANT_MODEL", "none")
    assert call("generate", QUESTION, "-q", "-m", "1", "--preset", "small").returncode == 0


def test_the_file_lies_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where platformdirs has it; on Linux under XDG_CONFIG_HOME."""
    assert call("config", "--path").stdout == "\n", "KVANT_CONFIG is empty here: no file"
    monkeypatch.delenv("KVANT_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    path = Path(call("config", "--path").stdout.removesuffix("\n"))
    assert path.is_relative_to(tmp_path)
    assert path.parts[-2:] == ("kvant", "config.toml")
    if sys.platform == "linux":
        assert path == tmp_path / "own" / "kvant" / "config.toml"
    assert call("config").stdout == f"# {path} does not exist\n"
    path.parent.mkdir(parents=True)
    path.write_text("max-kv-size = 77\n")
    assert "cache: 77 tokens reserved" in call("generate", "Hi", "-m", "1").stderr


def test_the_command_shows_it(write: Write) -> None:
    path = write("temp = 0.4\n[presets.poet]\ntop-p = 0.7\n")
    done = call("config")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"# {path}\n{path.read_text()}", "")
    write("[report]\nnonsense = 1\n")
    assert call("config").returncode == 2, "all tables are checked"
    assert call("generate", "Hi", "-q", "-m", "1").returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tmp = 1", "tmp is not a flag of generate and chat; did you mean 'temp'?"),
        ("[generate]\ntokens = 1", "generate.tokens is not a flag of generate"),
        ("[presets.a]\npreset = 'b'", "presets.a.preset is not a flag of a preset"),
        ("temp = '0.5'", "temp is '0.5'; expected a number"),
        ("max-tokens = 1.5", "max-tokens is '1.5'; expected a whole number"),
        ("stop = 'a'", "stop is 'a'; expected a list of strings"),
        ("[presets]\na = 5", "presets.a is 5; expected a table, [presets.a]"),
        ("temp 1", "config.toml: not TOML: "),
        (f"max-tokens = {10**23}", f"max-tokens is '{10**23}'; expected a number of 64 bits"),
        (
            f"max-kv-size = 0x{'f' * 9000}",
            "max-kv-size is 'a number of thousands of digits'; expected a number of 64",
        ),
        (
            "temp = -1",
            "--temp is -1.0; expected 0, or from 0.001 on, at most 1e+20; --temp is from config.toml",
        ),
        (
            "temp = 0\nseed = 1",
            "--seed is 1, which has no effect at temperature 0; --seed is from config.toml",
        ),
        ("chat-template-config = '{'", "--chat-template-config is '{': not JSON"),
        ("preset = 'a'\n[presets.b]\ntemp = 1", "--preset is 'a'; "),
    ],
)
def test_mistakes(write: Write, text: str, message: str) -> None:
    write(text)
    assert message in refusal(2, "generate", "Hi")


def test_presets_and_files_that_are_not_there(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("[presets.poet]\ntemp = 1\n[presets.clerk]\ntemp = 0\n")
    error = refusal(2, "chat", "--preset", "poets")
    assert f"--preset is 'poets'; {path} has poet, clerk; did you mean 'poet'?" in error
    write("a." * 20_000 + "a = 1")
    assert "at most 32768" in call("generate", "Hi").stderr
    assert call("models").returncode == 0, "a command that takes nothing from it does not read it"
    for name in (f"{path}.none", "~nobodyhere/x"):
        monkeypatch.setenv("KVANT_CONFIG", name)
        assert f"KVANT_CONFIG is '{name}', which is not a file" in refusal(1, "generate", "Hi")
