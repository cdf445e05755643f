"""--prompts-file: what a line asks for, and the answers of each prompt alone, in the order of the file."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command import QUESTION, call, refusal

from kvant.cli import answering, session
from kvant.cli.options import BadValueError
from kvant.cli.prompts_file import Line, read_lines
from kvant.engine.sampling import OPTIONS, SamplingOptions
from kvant.engine.stream import GenerationResponse
from kvant.errors import PromptError
from kvant.machine import Machine

PROMPT = {"prompt": "Hello!"}


def read(folder: Path, *records: Any, flags: SamplingOptions | None = None) -> list[Line]:
    """The lines of a file of these: bytes as they are, all else as JSON."""
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in records))
    return read_lines(str(path), flags or SamplingOptions())


def test_what_a_line_asks_for(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": ""}]
    whole = {"messages": messages, "id": "a", "max_tokens": 7, "stop": "\n", "temp": 1, "seed": 5}
    ended = '{"prompt": "one\u2028two\x85"}\r'.encode()  # ends of lines to Python, not to JSON
    first, second, third, fourth = read(
        tmp_path,
        b"\xef\xbb\xbf" + json.dumps(PROMPT).encode(),  # as PowerShell writes it
        b"",
        whole | {"stop": ["\n", "."], "logit_bias": {"42": -5}, "top_k": None},
        ended,
        b" \t",
        {"prompt": "Hi", "id": 0, "max_tokens": None, "messages": None},
    )
    assert (first.id, first.prompt, first.max_tokens, first.stop) == (1, "Hello!", None, None)
    assert (first.sampling, first.has_seed) == (SamplingOptions(), False)
    assert (second.id, second.prompt, second.max_tokens, second.stop) == ("a", messages, 7, ["\n", "."])
    assert (second.sampling, second.has_seed) == (
        SamplingOptions(temp=1.0, seed=5, logit_bias={42: -5.0}),
        True,
    )
    assert (third.id, third.prompt) == (4, "one\u2028two\x85")
    assert (fourth.id, fourth.where.endswith("prompts.jsonl: line 6")) == (0, True)


def test_a_lines_options_go_before_the_flags(tmp_path: Path) -> None:
    """What the flags say beside a line's temp of 0 would have no effect, and nobody asked for the two
    together.
    """
    flags = SamplingOptions(temp=0.7, top_p=0.9, seed=3, repetition_penalty=1.1, repetition_context_size=8)
    lines = [{}, {"temp": 0}, {"top_p": 0.5, "seed": 9}, {"repetition_penalty": 1}]
    plain, greedy, other, free = read(tmp_path, *(PROMPT | line for line in lines), flags=flags)
    assert plain.sampling == flags
    assert greedy.sampling == SamplingOptions(temp=0.0, repetition_penalty=1.1, repetition_context_size=8)
    assert other.sampling == replace(flags, top_p=0.5, seed=9)
    assert free.sampling == SamplingOptions(temp=0.7, top_p=0.9, seed=3, repetition_penalty=1.0)


NONE_GIVEN = "expected one of them"
REFUSED: list[tuple[Any, str]] = [
    (b"{", "it is not JSON: Expecting property name enclosed in double quotes, at column 2$"),
    (b'{"prompt": "\xff"}', "it is not UTF-8: "),
    (b'{"prompt": "a", "prompt": "b"}', "it is not JSON: 'prompt' is there twice"),
    ("Hello!", 'it is \'Hello!\'; expected an object, such as {"prompt": "Hi!"}'),
    ({}, f"it has neither of prompt and messages; {NONE_GIVEN}"),
    (b'{"prompt": "\\ud800"}', "prompt is .*; expected Unicode, without half of a surrogate pair"),
    (
        {"messages": [{"role": "user", "content": None}]},
        r"messages\[0\] has None as its content; expected text",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "name": "b"}]},
        r"messages\[0\] has 'name'; expected role, con",
    ),
    (PROMPT | {"max_token": 3}, "it has 'max_token'; did you mean 'max_tokens'"),
    (PROMPT | {"stop": [""]}, r"stop is \[''\]; expected text or a list of texts, none empty"),
    (PROMPT | {"temp": 10**400}, "temp has a number of more than 308 digits; expected a smaller one"),
    (PROMPT | {"logit_bias": [1]}, r"logit_bias is \[1\]; expected an object"),
    (PROMPT | {"logit_bias": {"03": 1}}, "logit_bias has 1 for '03'; expected a number for a token's id"),
]


@pytest.mark.parametrize(("record", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_line_that_is_refused(record: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=f"prompts.jsonl: line 3: {words}"):
        read(tmp_path, PROMPT, b"", record)


def test_every_option_of_sampling_can_be_a_lines(tmp_path: Path) -> None:
    values = {
        name: 1 if "size" in name or name in ("top_k", "min_tokens_to_keep") else 0.5 for name in OPTIONS
    }
    (line,) = read(tmp_path, PROMPT | values | {"seed": 4, "temp": 2})
    assert line.sampling == SamplingOptions(**values | {"seed": 4, "temp": 2.0})  # type: ignore[arg-type]


def test_files_that_are_refused(tmp_path: Path) -> None:
    for records, words in (
        (
            [PROMPT | {"id": "a"}, PROMPT | {"id": "a"}],
            "line 2: id is 'a', as on line 1; expected unique ids",
        ),
        ([PROMPT | {"id": 3}, PROMPT, PROMPT], "line 3: id is 3, as on line 1"),  # its number
        ([b"\n \n"], r"prompts\.jsonl: no prompt; expected JSON objects, one per line"),
    ):
        with pytest.raises(BadValueError, match=words):
            read(tmp_path, *records)
    with pytest.raises(
        BadValueError, match="--prompts-file is empty; expected a file, or - for standard input"
    ):
        read_lines("", SamplingOptions())
    for path in ("none.jsonl", "", "a\0b"):
        with pytest.raises(PromptError, match=r"cannot be read: |not a regular file"):
            read_lines(str(tmp_path / path), SamplingOptions())


LINES: list[dict[str, Any]] = [
    {"prompt": QUESTION, "max_tokens": 30},
    {"prompt": "Who helped Pip?", "id": "short", "temp": 0},
    {
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}],
        "stop": "!",
    },
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
    assert re.search(
        r"^cache: 384 tokens reserved for 2 sequences at once, float32, [\d.]+ MB$", done.stderr, re.M
    )
    assert "seed 5 (given), unless a line says otherwise" in done.stderr
    fed, generated = (
        sum(record[key] for record in records) for key in ("prompt_tokens", "generation_tokens")
    )
    assert f"prompts: 5 of 5 answered, {fed} tokens fed" in done.stderr
    assert f"generated: {generated} tokens in " in done.stderr


def test_texts_one_after_another(path: str, alone: list[str]) -> None:
    done = call(*FLAGS, "--prompts-file", "-", stdin=Path(path).read_text())
    assert done.stdout == "\n".join(alone)  # an empty line between two
    assert re.findall(r"^--- (.*) ---$", done.stderr, re.MULTILINE) == ["1", "short", "3", "77", "5"]
    escaped = call(
        *FLAGS, "--prompts-file", "-", "-m", "1", stdin='{"prompt": "Hi", "id": "a\\n\\u001b[31m"}'
    )
    assert "--- a\\n\\x1b[31m ---\n" in escaped.stderr
    assert "cut at --max-tokens 30" in done.stderr
    assert call(*FLAGS, "--prompts-file", path, "-q").stdout == done.stdout


def test_deterministic_alone_and_in_company(path: str, tmp_path: Path) -> None:
    flags = ["generate", "--temp", "1", "-m", "12", "--deterministic"]
    together = call(*flags, "--seed", "5", "--prompts-file", path)
    single = call(*flags, "--seed", "5", QUESTION, "-q", "-m", "30")
    assert together.stdout.startswith(single.stdout)
    assert call(*flags, "--seed", "4", QUESTION, "-q", "-m", "30", "--n", "2").stdout.endswith(
        f"\n\n{single.stdout}"
    )


def test_kernels_are_the_pools(path: str, fused_calls: list[Any]) -> None:
    """On a GPU. The stand-in's answers are the unfused operator's."""
    unfused = call(*FLAGS, "--prompts-file", path, "--kernels", "unfused")
    assert (unfused.returncode, fused_calls) == (0, [])
    assert call(*FLAGS, "--prompts-file", path).stdout == unfused.stdout
    assert fused_calls


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "a", "temp": -1}, "line 6: temp is -1"),
        (
            {"prompt": "a", "logit_bias": {"99999": 1}},
            "line 6: logit_bias has token 99999; the model knows 0 to",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}], "top_k": 99999},
            "line 6: top_k is 99999; expected at most",
        ),
    ],
)
def test_a_bad_line_ends_it_before_anything_is_generated(line: dict[str, Any], words: str, path: str) -> None:
    Path(path).write_text(f"{Path(path).read_text()}\n{json.dumps(line)}\n")
    assert f"{path}: {words}" in refusal(2, *FLAGS, "--prompts-file", path, "--json")


def test_a_pool_that_does_not_fit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many at once would fit, and they do; one more does not."""
    limit = 230_000_000
    monkeypatch.setattr(
        session, "this_machine", lambda device=None: Machine("cpu", 2 * limit, limit, "a machine")
    )
    Path(path).write_text("\n".join(json.dumps({"prompt": QUESTION, "id": n}) for n in range(8)))
    flags = ["generate", "--prompts-file", path, "--stop", "a", "-m", "1900"]
    error = refusal(1, *flags)
    assert "8 sequences of 1918 tokens need " in error
    (fitting,) = map(int, re.findall(r"; --sequences (\d+) would fit$", error))
    assert [call(*flags, "--sequences", str(n)).returncode for n in (fitting, fitting + 1)] == [0, 1]


def test_what_has_ended_is_printed_when_it_is_interrupted(
    path: str, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer is the longest: it is under way, and three others wait for it."""
    plain = answering.responses

    def interrupted(*arguments: Any) -> Iterator[GenerationResponse]:
        ended = 0
        for piece in plain(*arguments):
            yield piece
            ended += piece.finish_reason is not None
            if ended == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(answering, "responses", interrupted)
    done = call(*FLAGS, "--prompts-file", path, "--json")
    assert done.returncode == 130
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == 3
    assert all(record["text"] + "\n" in alone[1:] for record in records)
    assert "prompts: 3 of 5 answered" in done.stderr
