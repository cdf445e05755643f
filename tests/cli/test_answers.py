"""``generate --n``: each answer is that of a run with its seed, and the prompt is read once."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from support.command import QUESTION, call
from support.counts import count
from support.kinds import KINDS, load_kind

import kvant
from kvant.sample_utils import make_sampler

PROMPT = " ".join(f"w{10 + (7 * at) % 100}" for at in range(40))
PLAIN = ["--ignore-eos", "--ignore-chat-template", "--kv-bits", "0", "--prefill-step-size", "16"]
POOLED = [kind for kind in KINDS if kind != "llama4"]


@pytest.fixture(scope="module", autouse=True)
def _without_compilation() -> Iterator[None]:
    """It would call a C++ compiler, the first time."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize("kind", count(["mistral", "qwen3_next"], POOLED))
def test_each_is_a_run_with_the_next_seed(kind: str, tmp_path: Path) -> None:
    loaded = load_kind(kind, tmp_path / "model")
    loaded[1].eos_token_ids = set()
    options = {"max_tokens": 24, "kv_bits": 0, "prefill_step_size": 16}
    alone = [kvant.generate(*loaded, PROMPT, sampler=make_sampler(temp=3, seed=3 + n), **options) for n in range(4)]
    assert len(set(alone)) == 4
    flags = ["--model", str(tmp_path / "model"), "--temp", "3", "-m", "24", "--seed", "3", "--n", "4", *PLAIN]
    done = call("generate", PROMPT, *flags, "--sequences", "3")
    assert done.stdout == "\n".join(f"{text}\n" for text in alone)
    assert re.findall(r"^prompt: (\d+) tokens", done.stderr, re.MULTILINE) == ["40"]
    assert "for 3 sequences at once" in done.stderr


def test_a_prompt_that_fills_its_pages_and_the_reservation(tmp_path: Path) -> None:
    """Every answer has one token, which is sampled and not fed."""
    load_kind("qwen2", tmp_path / "model")
    prompt = " ".join(f"w{10 + at % 100}" for at in range(128))
    flags = ["--model", str(tmp_path / "model"), "--temp", "3", "--n", "3", "--max-kv-size", "128", *PLAIN]
    done = call("generate", prompt, *flags)
    assert [len(text.split()) for text in done.stdout.split("\n\n")] == [1, 1, 1]
    assert done.stderr.count("cut: the reserved context is full; --max-kv-size reserves more") == 3


def test_several_answers() -> None:
    flags = ["generate", QUESTION, "-m", "20", "--temp", "1", "--seed", "5"]
    done = call(*flags, "--n", "3")
    alone = [text + "\n" for text in done.stdout.removesuffix("\n").split("\n\n")]  # an empty line between two
    assert re.findall(r"^--- \d of \d ---$", done.stderr, re.MULTILINE) == [f"--- {i} of 3 ---" for i in (1, 2, 3)]
    assert done.stderr.count("prompt: ") == 1
    assert done.stderr.count("generated: ") == 3
    lines = [json.loads(line) for line in call(*flags, "--n", "3", "--json", "-q").stdout.splitlines()]
    assert [line["choice"] for line in lines[:6]] == [0, 1, 2] * 2  # as they come, side by side
    assert [[x["index"] for x in lines if x["choice"] == n] for n in range(3)] == [[*range(20)]] * 3
    assert ["".join(x["text"] for x in lines if x["choice"] == n) + "\n" for n in range(3)] == alone
    assert re.search(r"^together: 60 tokens, [\d.]+ tokens/s$", done.stderr, re.MULTILINE)
    assert "384 tokens reserved for 3 sequences at once" in done.stderr
    fewer = call(*flags, "--n", "3", "--sequences", "2")
    assert fewer.stdout == done.stdout
    assert "256 tokens reserved for 2 sequences at once" in fewer.stderr
