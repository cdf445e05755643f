"""--prompts-file as its user meets it: the answers of each prompt alone, in the order of the file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import QUESTION, call

from kvant.cli import answering, session
from kvant.engine.batch_stream import Piece
from kvant.machine import Machine

LINES: list[dict[str, Any]] = [
    {"prompt": QUESTION, "max_tokens": 30},
    {"prompt": "Who helped Pip?", "id": "short", "temp": 0},
    {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}], "stop": "!"},
    {"prompt": "What is your name?", "seed": 9, "top_p": 0.5, "id": 77},
    {"prompt": "Thank you! " * 30, "repetition_penalty": 1.3},
]
# Each alone, in the flags of one prompt. Line i draws with the seed + i.
ALONE = [
    [QUESTION, "-m", "30", "--temp", "1", "--seed", "5"],
    ["Who helped Pip?", "--temp", "0"],
    ["Hello!", "--system-prompt", "Be kind.", "--stop", "!", "--temp", "1", "--seed", "7"],
    ["What is your name?", "--temp", "1", "--seed", "9", "--top-p", "0.5"],
    ["Thank you! " * 30, "--temp", "1", "--seed", "9", "--repetition-penalty", "1.3"],
]
FLAGS = ["generate", "--temp", "1", "--seed", "5", "-m", "12", "--kv-bits", "0"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    return str(file)


@pytest.fixture(scope="module")
def alone() -> list[str]:
    return [call("generate", "-q", "-m", "12", "--kv-bits", "0", *flags).stdout for flags in ALONE]


def test_answers_are_those_of_each_prompt_alone(path: str, alone: list[str]) -> None:
    done = call(*FLAGS, "--prompts-file", path, "--json", "--sequences", "2")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert [record["id"] for record in records] == [1, "short", 3, 77, 5]
    assert [record["text"] + "\n" for record in records] == alone
    assert [record["seed"] for record in records] == [5, None, 7, 9, 9]
    assert records[0]["generation_tokens"] == 30
    assert records[0]["finish_reason"] == "length"
    assert records[2]["finish_reason"] == "stop"
    assert all(0 < record["first_token_ms"] <= record["latency_ms"] for record in records)
    assert records[4]["prompt_tokens"] > 60
    # The two longest: the last prompt takes two pages.
    assert re.search(r"^cache: 384 tokens reserved for 2 sequences at once, float32, [\d.]+ MB$", done.stderr, re.M)
    assert "seed 5 (given), where a line says nothing else" in done.stderr
    fed, generated = (sum(record[key] for record in records) for key in ("prompt_tokens", "generation_tokens"))
    assert f"prompts: 5 of 5 answered, {fed} tokens fed" in done.stderr
    assert f"generated: {generated} tokens in " in done.stderr


def test_texts_one_after_another(path: str, alone: list[str]) -> None:
    done = call(*FLAGS, "--prompts-file", "-", stdin=Path(path).read_text())
    assert done.stdout == "\n".join(alone)  # an empty line between two
    assert re.findall(r"^--- (.*) ---$", done.stderr, re.MULTILINE) == ["1", "short", "3", "77", "5"]
    escaped = call(*FLAGS, "--prompts-file", "-", "-m", "1", stdin='{"prompt": "Hi", "id": "a\\n\\u001b[31m"}')
    assert "--- a\\n\\x1b[31m ---\n" in escaped.stderr
    assert "cut at --max-tokens 30" in done.stderr
    assert call(*FLAGS, "--prompts-file", path, "-q").stdout == done.stdout


def test_deterministic_alone_and_in_company(path: str, tmp_path: Path) -> None:
    flags = ["generate", "--temp", "1", "-m", "12", "--deterministic"]
    together = call(*flags, "--seed", "5", "--prompts-file", path)
    single = call(*flags, "--seed", "5", QUESTION, "-q", "-m", "30")
    assert together.stdout.startswith(single.stdout)
    assert call(*flags, "--seed", "4", QUESTION, "-q", "-m", "30", "--n", "2").stdout.endswith(f"\n\n{single.stdout}")


def test_kernels_are_the_pools(path: str, fused_calls: list[Any]) -> None:
    """On a GPU. The stand-in's answers are the unfused operator's."""
    unfused = call(*FLAGS, "--prompts-file", path, "--kernels", "unfused")
    assert (unfused.returncode, fused_calls) == (0, [])
    assert call(*FLAGS, "--prompts-file", path).stdout == unfused.stdout
    assert fused_calls


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "temp": -1}', "line 6: temp is -1"),
        ('{"prompt": "a", "logit_bias": {"99999": 1}}', "line 6: logit_bias has token 99999; the model knows 0 to"),
        (
            '{"messages": [{"role": "tool", "content": "a"}], "top_k": 99999}',
            "line 6: top_k is 99999; expected at most",
        ),
    ],
)
def test_a_bad_line_ends_it_before_anything_is_generated(line: str, words: str, path: str) -> None:
    Path(path).write_text(Path(path).read_text() + f"\n{line}\n")
    done = call(*FLAGS, "--prompts-file", path, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}: {words}" in done.stderr


def test_a_pool_that_does_not_fit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many at once would fit, and they do; one more does not."""
    limit = 228_000_000
    monkeypatch.setattr(session, "this_machine", lambda device=None: Machine("cpu", 2 * limit, limit, "a machine"))
    Path(path).write_text("\n".join(json.dumps({"prompt": QUESTION, "id": n}) for n in range(8)))
    flags = ["generate", "--prompts-file", path, "--stop", "a"]
    refused = call(*flags, "-m", "1900")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "8 sequences of 1918 tokens need " in refused.stderr
    found = re.search(r"; --sequences (\d+) would fit$", refused.stderr)
    assert found is not None, refused.stderr
    fitting = int(found[1])
    assert call(*flags, "-m", "1900", "--sequences", str(fitting)).returncode == 0
    assert call(*flags, "-m", "1900", "--sequences", str(fitting + 1)).returncode == 1


def test_what_has_ended_is_printed_when_it_is_interrupted(
    path: str, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer is the longest: it is under way, and three others wait for it."""
    plain = answering.stream_pieces

    def interrupted(*arguments: Any) -> Iterator[Piece]:
        ended = 0
        for piece in plain(*arguments):
            yield piece
            ended += piece.finish_reason is not None
            if ended == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(answering, "stream_pieces", interrupted)
    done = call(*FLAGS, "--prompts-file", path, "--json")
    assert done.returncode == 130
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == 3
    assert all(record["text"] + "\n" in alone[1:] for record in records)
    assert "prompts: 3 of 5 answered" in done.stderr
