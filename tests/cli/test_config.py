"""The config file, its presets and the environment, as a user meets them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import QUESTION, call, refusal, sampling_of

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
    assert sampling_of(*poet) == "temperature 0.5 (config.toml), top-p 0.7 (preset poet), seed 5 (config.toml)"
    assert "top-p 0.8 (given)" in sampling_of(*poet, "--top-p", "0.8")
    assert sampling_of("--temp", "-0.0") == "temperature 0 (given)", "what the file says without effect is dropped"
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
    assert call("config").stdout == f"# {path} is not there\n"
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
        (f"max-kv-size = 0x{'f' * 9000}", "max-kv-size is 'a number of thousands of digits'; expected a number of 64"),
        ("temp = -1", "--temp is -1.0; expected 0, or from 0.001 on; --temp is from config.toml"),
        ("temp = 0\nseed = 1", "--seed is 1, which has no effect at temperature 0; --seed is from config.toml"),
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
