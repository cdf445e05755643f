"""The lines of --prompts-file: what each asks for, and what is refused, by its number."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvant.cli.options import BadValueError
from kvant.cli.prompts_file import Line, read_lines
from kvant.engine.sampling import OPTIONS, SamplingOptions
from kvant.errors import PromptError

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
    assert (second.sampling, second.has_seed) == (SamplingOptions(temp=1.0, seed=5, logit_bias={42: -5.0}), True)
    assert (third.id, third.prompt) == (4, "one\u2028two\x85")
    assert (fourth.id, fourth.where.endswith("prompts.jsonl: line 6")) == (0, True)


def test_a_lines_options_go_before_the_flags(tmp_path: Path) -> None:
    flags = SamplingOptions(temp=0.7, top_p=0.9, seed=3, repetition_penalty=1.1, repetition_context_size=8)
    plain, greedy, other, free = read(
        tmp_path,
        PROMPT,
        PROMPT | {"temp": 0},
        PROMPT | {"top_p": 0.5, "seed": 9},
        PROMPT | {"repetition_penalty": 1},
        flags=flags,
    )
    assert plain.sampling == flags
    # What the flags say beside it would have no effect, and nobody asked for the two together.
    assert greedy.sampling == SamplingOptions(temp=0.0, repetition_penalty=1.1, repetition_context_size=8)
    assert other.sampling == SamplingOptions(
        temp=0.7, top_p=0.5, seed=9, repetition_penalty=1.1, repetition_context_size=8
    )
    assert free.sampling == SamplingOptions(temp=0.7, top_p=0.9, seed=3, repetition_penalty=1.0)


NONE_GIVEN = "expected one of them"
REFUSED: list[tuple[Any, str]] = [
    (b"{", "it is not JSON: Expecting property name enclosed in double quotes, at column 2$"),
    (b'{"prompt": "\xff"}', "it is not UTF-8: "),
    (b'{"prompt": "a", "prompt": "b"}', "it is not JSON: 'prompt' is there twice"),
    ("Hello!", 'it is \'Hello!\'; expected an object, such as {"prompt": "Hi!"}'),
    ({}, f"it has neither of prompt and messages; {NONE_GIVEN}"),
    ({"prompt": " \n"}, r"prompt is ' \\n'; expected text that is not empty"),
    (b'{"prompt": "\\ud800"}', "prompt is .*; expected Unicode, without half of a surrogate pair"),
    ({"messages": []}, r"messages is \[\]; expected a list of objects with role and content"),
    ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\] has None as its content; expected text"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, r"messages\[0\] has 'name'; expected role, con"),
    (PROMPT | {"max_token": 3}, "it has 'max_token'; did you mean 'max_tokens'"),
    (PROMPT | {"n": 3}, "it has 'n'; expected prompt, messages, id, max_tokens, stop and options of sampling"),
    (PROMPT | {"id": 1.5}, "id is 1.5; expected text or a whole number"),
    (PROMPT | {"max_tokens": 0}, "max_tokens is 0; expected a whole number, at least 1"),
    (PROMPT | {"stop": [""]}, r"stop is \[''\]; expected text or a list of texts, none empty"),
    (PROMPT | {"temp": "hot"}, "temp is 'hot'; expected 0, or from 0.001 on"),
    (PROMPT | {"temp": 10**400}, "temp has a number of more than 308 digits; expected a smaller one"),
    (PROMPT | {"temp": 0, "top_p": 0.5}, "top_p is 0.5, which has no effect at temperature 0"),
    (PROMPT | {"seed": -1}, "seed is -1; expected from 0"),
    (PROMPT | {"logit_bias": [1]}, r"logit_bias is \[1\]; expected an object"),
    (PROMPT | {"logit_bias": {"03": 1}}, "logit_bias has 1 for '03'; expected a number for a token's id"),
    (PROMPT | {"logit_bias": {"9" * 5000: 1}}, "logit_bias has 1 for '9+.*; expected a number for a token's id"),
    (PROMPT | {"logit_bias": {"3": float("inf")}}, "logit_bias has inf for token 3; expected finite numbers"),
]


@pytest.mark.parametrize(("record", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_line_that_is_refused(record: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=f"prompts.jsonl: line 3: {words}"):
        read(tmp_path, PROMPT, b"", record)


def test_every_option_of_sampling_can_be_a_lines(tmp_path: Path) -> None:
    values = {name: 1 if "size" in name or name in ("top_k", "min_tokens_to_keep") else 0.5 for name in OPTIONS}
    (line,) = read(tmp_path, PROMPT | values | {"seed": 4, "temp": 2})
    assert line.sampling == SamplingOptions(**values | {"seed": 4, "temp": 2.0})  # type: ignore[arg-type]


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="line 2: id is 'a', as that of line 1; expected one a line"):
        read(tmp_path, PROMPT | {"id": "a"}, PROMPT | {"id": "a"})
    with pytest.raises(BadValueError, match="line 3: id is 3, as that of line 1"):  # its number
        read(tmp_path, PROMPT | {"id": 3}, PROMPT, PROMPT)
    with pytest.raises(BadValueError, match=r"prompts\.jsonl: it has no prompt; expected an object of JSON a line"):
        read(tmp_path, b"\n \n")
    with pytest.raises(BadValueError, match="--prompts-file is empty; expected a file, or - for standard input"):
        read_lines("", SamplingOptions())
    for path in ("none.jsonl", "", "a\0b"):
        with pytest.raises(PromptError, match=r"cannot be read: |not a regular file"):
            read_lines(str(tmp_path / path), SamplingOptions())
