"""`kvant report` as its user meets it."""

import json
import shutil
from pathlib import Path
from typing import Any

from support.adapters import adapter_config, save_adapter
from support.checkpoints import load_reference
from support.command import call


def run(*arguments: str) -> tuple[int, str, str]:
    """The command in this process: exit code, standard output, standard error."""
    done = call("report", *arguments)
    return done.returncode, done.stdout, done.stderr


def test_a_table_and_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "kld.svg"
    code, output, errors = run("--tokens", "300", "--formats", "8g32,4g64", "--plot", str(plot))
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0].startswith("pocket on built-in held-out conversations: 300 tokens; the ")
    rows = [line.split() for line in lines if line.startswith((" 0 ", " 8g32 ", " 4g64 "))]
    assert [(row[0], row[-3]) for row in rows] == [("0", "4096"), ("8g32", "1088"), ("4g64", "544")]
    assert len({row[-1] for row in rows}) == 1  # of the first conversation every cache recalls as much
    assert "/" in rows[0][-1]
    assert all(len(line) <= 80 for line in lines[3:])
    drawn = plot.read_text()
    for text in ("8g32", "4g64", "KLD, nats", "cache, bytes a token"):
        assert drawn.count(f">{text}<") == 1


def test_an_adapter(pocket_folder: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", adapter_config(), load_reference(pocket_folder))
    arguments = ["--tokens", "32", "--formats", "8g32", "--json"]
    found = []
    for flags in ([], ["--adapter-path", str(adapter)]):
        code, output, errors = run(*arguments, *flags)
        assert (code, errors) == (0, "")
        found.append(json.loads(output))
    assert [one["model"] for one in found] == ["pocket", f"pocket with {adapter}"]
    assert found[0]["reference"]["perplexity"] != found[1]["reference"]["perplexity"]


def test_json_of_a_text(tmp_path: Path) -> None:
    """One object; no questions: the text is the user's."""
    text = tmp_path / "a text.txt"
    text.write_text("The fox went home. " * 20, encoding="utf-8")
    code, output, errors = run("--text", str(text), "--tokens", "64", "--formats", "4g32:nosplit,0", "--json")
    assert (code, errors) == (0, "")
    report = json.loads(output)
    assert report["model"] == "pocket"
    assert report["text"] == {"name": str(text), "tokens": 64, "pieces": 1, "tokens_left_out": 101 - 64}
    assert report["versions"].keys() == {"kvant", "mlx", "mlx_lm", "transformers", "python"}
    four, none = report["formats"]
    assert none == report["reference"]
    assert four["format"] == "4g32:nosplit"
    assert four["flags"] == "--kv-bits 4 --kv-group-size 32 --no-kv-bias-split"
    assert (four["bytes_per_token"], four["positions"], four["non_finite"]) == (576, 64, 0)
    assert 0 == none["mean_kld_nats"] < four["mean_kld_nats"] < four["p99_kld_nats"]
    assert len(four["layer_attention_errors"]) == 4
    assert min(four["layer_attention_errors"]) > 0
    assert four["recall"] == {"right": 0, "asked": 0}


def test_a_text_of_several_pieces(make_checkpoint: Any, pocket_folder: Path) -> None:
    """A model of its own with pocket's tokenizer, whose context is shorter than the text."""
    folder, _ = make_checkpoint(vocab_size=1280, max_position_embeddings=24)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket_folder / name, folder)
    code, output, errors = run("--model", str(folder), "--tokens", "60", "--formats", "8g64")
    assert (code, errors) == (0, "")
    assert " on built-in held-out conversations: 60 tokens in " in output
    assert " pieces of up to 24; the " in output
