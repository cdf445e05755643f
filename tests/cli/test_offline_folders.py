"""A folder that transformers wrote, its tokenizer too, is used with no way to a network."""

import json
import shutil
from pathlib import Path

import pytest
from support.command import call
from support.golden import CASES, GOLDEN
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.mark.parametrize("case", ["llama llama3", "qwen3 yarn"])
def test_generate_and_report(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", unk_token="w0", chat_template=TEMPLATE)
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
    done = call("report", *flags, "--text", str(tmp_path / "text.txt"), "--formats", "8g4,4g4")
    eight, four = (figures["mean_kld_nats"] for figures in json.loads(done.stdout)["formats"])
    assert 0 < eight < four
