"""Folders that others wrote, transformers and mlx-lm, through generate, plan and report, with no way to a network."""

import json
import shutil
from pathlib import Path

import pytest
from mlx_lm.convert import convert
from support.command import call
from support.golden import CASES, GOLDEN
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

TEXT = "w5 w9 w3 w30 w7 w12 " * 8
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


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


@pytest.mark.parametrize(("writer", "group"), [("llama llama3", 4), ("qwen3 yarn", 4), ("mlx-lm", 32)])
def test_generate_plan_and_report(
    writer: str, group: int, tmp_path: Path, pocket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, text = str(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(TEXT)
    if writer == "mlx-lm":
        convert(str(pocket_folder), folder, quantize=True, q_bits=4, q_group_size=64)
    else:
        _by_transformers(Path(folder), writer)
    for name in ("socket.socket.connect", "socket.getaddrinfo"):
        monkeypatch.setattr(name, lambda *arguments, **_: pytest.fail(f"a connection: {arguments}"))
    kv, formats = ["--kv-group-size", str(group)], [f"8g{group}", f"4g{group}"]
    generated, planned, reported = (
        call(*words, "--json").stdout
        for words in (
            ["generate", "w5 w9", "--model", folder, "--max-tokens", "4", *kv],
            ["plan", folder, "--max-kv-size", "32", *kv],
            ["report", "--model", folder, "--text", str(text), "--formats", ",".join(formats)],
        )
    )
    tokens = [json.loads(line)["token"] for line in generated.splitlines()]
    assert 1 <= len(tokens) <= 4
    assert all(0 <= token < 1280 for token in tokens)
    assert json.loads(planned)["fits"]
    found = json.loads(reported)["formats"]
    klds = {figures["format"].partition(":")[0]: figures["mean_kld_nats"] for figures in found}
    assert 0 < klds[formats[0]] < klds[formats[1]]
