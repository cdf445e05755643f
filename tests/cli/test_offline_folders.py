"""Folders that others wrote, transformers and mlx-lm, through generate, plan and report, with no way to a network."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_lm.convert import convert
from support.golden import CASES, GOLDEN
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

TEXT = "w5 w9 w3 w30 w7 w12 " * 8
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
# Any connection, a name look-up included, ends the command with a traceback.
COMMANDS = """
import socket
def refuse(*arguments, **keywords):
    raise AssertionError(f"a connection: {arguments}")
socket.socket.connect = socket.getaddrinfo = refuse
import contextlib, io, json, sys
from kvant.cli import main
for arguments in json.load(sys.stdin):
    sys.argv = ["kvant", *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, arguments
    print(json.dumps(output.getvalue()))
"""


def _by_transformers(folder: Path, case: str) -> Path:
    """A golden case's config and weights with a tokenizer of 32 words, all written by transformers."""
    words = WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", unk_token="w0", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    shutil.copy(GOLDEN / "weights" / f"{CASES[case]}.safetensors", folder / "model.safetensors")
    shutil.copy(GOLDEN / case.replace(" ", "-") / "config.json", folder)
    return folder


def _by_mlx_lm(folder: Path, pocket_folder: Path) -> Path:
    convert(str(pocket_folder), str(folder), quantize=True, q_bits=4, q_group_size=64)
    return folder


def _kvant(*commands: list[str]) -> list[str]:
    """What commands print, one after the other in one process."""
    given = json.dumps(commands)
    done = subprocess.run([sys.executable, "-c", COMMANDS], input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("writer", "group"), [("llama llama3", 4), ("qwen3 yarn", 4), ("mlx-lm", 32)])
def test_generate_plan_and_report(writer: str, group: int, tmp_path: Path, pocket_folder: Path) -> None:
    folder = tmp_path / "model"
    if writer == "mlx-lm":
        _by_mlx_lm(folder, pocket_folder)
    else:
        _by_transformers(folder, writer)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    kv = ["--kv-group-size", str(group)]
    formats = f"8g{group},4g{group}"
    generated, planned, reported = _kvant(
        ["generate", "w5 w9", "--model", str(folder), "--max-tokens", "4", "--json", *kv],
        ["plan", str(folder), "--max-kv-size", "32", "--json", *kv],
        ["report", "--model", str(folder), "--text", str(text), "--formats", formats, "--json"],
    )
    tokens = [json.loads(line)["token"] for line in generated.splitlines()]
    assert 1 <= len(tokens) <= 4
    assert all(0 <= token < 1280 for token in tokens)
    assert json.loads(planned)["fits"]
    report = json.loads(reported)
    klds = {figures["format"].partition(":")[0]: figures["mean_kld_nats"] for figures in report["formats"]}
    assert 0 < klds[f"8g{group}"] < klds[f"4g{group}"]
