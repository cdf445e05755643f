"""`kvant report` as its user meets it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.adapters import adapter_config, save_adapter
from support.checkpoints import load_reference

from kvant.cli import main

COMMAND = [sys.executable, "-m", "kvant", "report"]


def _run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The command in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["kvant", "report", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    code = ended.value.code or 0
    assert isinstance(code, int)
    return code, output.out, output.err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A function (arguments) -> exit code, standard output, standard error."""
    return lambda *arguments: _run(monkeypatch, capsys, *arguments)


Run = Callable[..., tuple[int, str, str]]


def test_tables_a_plot_and_a_suggestion(tmp_path: Path) -> None:
    plot = tmp_path / "kld.svg"
    arguments = ["--tokens", "160", "--formats", "8g32,4g64", "--suggest", "1", "--plot", str(plot)]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("pocket on built-in held-out conversations: 160 tokens; the ")
    rows = [line.split() for line in lines if line.startswith((" 0 ", " 8g32 ", " 4g64 "))]
    assert [row[0] for row in rows] == ["0", "8g32", "4g64"] * 3
    assert [row[-2] for row in rows[:3]] == ["4096", "1088", "544"]
    assert "Answers: questions" in done.stdout
    assert "Answers: recall" in done.stdout
    assert lines[-1] == "suggested: --kv-bits 4 --kv-group-size 64"
    assert all(len(line) <= 80 for line in lines[3:])
    drawn = plot.read_text()
    for text in ("8g32", "4g64", "KLD, nats", "cache, bytes a token"):
        assert drawn.count(f">{text}<") == 1


def test_an_adapter(run: Run, pocket_folder: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", adapter_config(), load_reference(pocket_folder))
    arguments = ["--tokens", "32", "--formats", "8g32", "--json"]
    found = []
    for flags in ([], ["--adapter-path", str(adapter)]):
        code, output, errors = run(*arguments, *flags)
        assert (code, errors) == (0, "")
        found.append(json.loads(output))
    assert [one["model"] for one in found] == ["pocket", f"pocket with {adapter}"]
    assert found[0]["reference"]["perplexity"] != found[1]["reference"]["perplexity"]
    code, _, errors = run(*arguments, "--adapter-path", "no/such")
    assert (code, errors.count("\n")) == (1, 1)
    assert "adapter 'no/such' is not a folder" in errors


def test_json_of_a_text(run: Run, tmp_path: Path) -> None:
    """One object; no questions: the text is the user's."""
    text = tmp_path / "a text.txt"
    text.write_text("The fox went home. " * 20, encoding="utf-8")
    code, output, errors = run("--text", str(text), "--tokens", "64", "--formats", "4g32:nosplit,0", "--json",
                               "--suggest", "0")  # fmt: skip
    assert (code, errors) == (0, "")
    report = json.loads(output)
    assert report["model"] == "pocket"
    left_out = report["text"].pop("tokens_left_out")
    assert left_out == 101 - 64
    assert report["text"] == {"name": str(text), "tokens": 64, "pieces": 1}
    assert report["versions"].keys() == {"kvant", "mlx", "mlx_lm", "transformers", "python"}
    four, none = report["formats"]
    assert none == report["reference"]
    assert (four["format"], four["flags"]) == (
        "4g32:nosplit", "--kv-bits 4 --kv-group-size 32 --no-kv-bias-split",
    )  # fmt: skip
    assert (four["bytes_per_token"], four["positions"], four["non_finite"]) == (576, 64, 0)
    assert 0 < four["mean_kld_nats"] < four["p99_kld_nats"]
    assert none["mean_kld_nats"] == 0
    assert len(four["layer_attention_errors"]) == 4
    assert min(four["layer_attention_errors"]) > 0
    assert four["answers"] == []
    assert report["layers"]["findings"] == []
    assert report["suggested"] == {"format": "0", "flags": "--kv-bits 0"}


def test_no_format_is_good_enough(run: Run) -> None:
    """The figures are printed all the same."""
    code, output, errors = run("--tokens", "32", "--formats", "4g32", "--suggest", "1e-12", "--json")
    assert code == 1
    assert errors.startswith("kvant: error: no format measured has a mean KLD of at most 1e-12 nats; the lowest is ")
    assert json.loads(output)["suggested"] is None


def test_a_text_of_several_pieces(run: Run, make_checkpoint: Any, pocket_folder: Path, tmp_path: Path) -> None:
    """A model of its own with pocket's tokenizer, whose context is shorter than the text."""
    folder, _ = make_checkpoint(vocab_size=1280, max_position_embeddings=24)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((pocket_folder / name).read_bytes())
    text = tmp_path / "a.txt"
    text.write_text("The fox went home. " * 20, encoding="utf-8")
    code, output, errors = run("--model", str(folder), "--text", str(text), "--tokens", "60", "--formats", "8g64")
    assert (code, errors) == (0, "")
    assert ": 60 tokens in 3 pieces of up to 24; the " in output
    assert "Answers" not in output
    code, output, errors = run("--model", str(folder), "--tokens", "60", "--formats", "8g64", "--json")
    assert (code, errors) == (0, "")
    assert json.loads(output)["text"]["name"] == "built-in held-out conversations"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "8g48"], "--formats: format 8g48: quant_group 48 does not divide the head dimension 64"),
        (["--formats", "3g32"], "--formats: format '3g32' is unknown; expected 0, or BITSgGROUP"),
        (["--formats", "8g32,8g32"], "--formats: format 8g32 is there twice"),
        (["--tokens", "1"], "--tokens is 1; expected at least 2"),
        (["--suggest", "-1"], "--suggest is -1.0; expected a KLD in nats"),
        (["--suggest", "nan"], "--suggest is nan; expected a KLD in nats"),
        (["--suggest", "best"], "--suggest"),
        (["--plot", "HERE/a.pdf"], "--plot: the plot is to be a.pdf; expected a name that ends in .png or .svg"),
        (["--plot", "HERE/none/a.svg"], "its folder does not exist"),
    ],
)
def test_usage_errors(run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    code, output, errors = run(*(text.replace("HERE", str(tmp_path)) for text in arguments))
    assert (code, output) == (2, "")
    assert errors.startswith("kvant: error: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "HERE/none.txt"], "none.txt cannot be read: No such file or directory"),
        (["--text", "HERE"], "cannot be read: Is a directory"),
        (["--text", "HERE/model/config.json", "--model", "HERE/model"], "no tokenizer.json"),
        (["--model", "HERE/none"], "is not a folder"),
    ],
)
def test_failures(run: Run, make_checkpoint: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    make_checkpoint()
    code, output, errors = run(*(text.replace("HERE", str(tmp_path)) for text in arguments))
    assert (code, output) == (1, "")
    assert errors.startswith("kvant: error: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_other_commands_do_not_wait_for_its_imports() -> None:
    late = ("kvant.tools.report", "matplotlib", "rich")
    code = f"import kvant.cli, sys; sys.exit(any(name.startswith({late}) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
