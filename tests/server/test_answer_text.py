"""One answer's tokens to text: characters in parts, stop texts, thinking and calls, each with its log-probabilities."""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.interfaces import CHAT, COMPLETIONS, text_of
from support.server import Running, served, sse_events

from kvant.engine.request import Request, Token
from kvant.models import Decoder
from kvant.server.answering import AnswerText
from kvant.server.generation import Call, Text
from kvant.text.answer_parts import AnswerParts
from kvant.text.detokenizer import WindowDetokenizer
from kvant.text.tokenizer import Tokenizer
from kvant.text.tool_forms import tool_format

Pocket = tuple[Decoder, Any]
REQUEST = Request([1])
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def with_marks(tokenizer: Tokenizer, start: str, end: str) -> Tokenizer:
    thinker = copy.copy(tokenizer)
    thinker.think_start, thinker.think_end = start, end
    return thinker


def read(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = (), **parts: Any
) -> tuple[AnswerText, list[Any]]:
    """An answer of these tokens, which then ends: log-probabilities are minus the token's place."""
    text = AnswerText(0, tokenizer, AnswerParts(tokenizer, "", **parts), stop, logprobs=True)
    events: list[Any] = []
    for place, token in enumerate(ids):
        if text.stop is None:
            events += text.take(Token(REQUEST, 0, token, -place, [(token, -place)]))
    if text.stop is None:
        events += text.take(Token(REQUEST, 0, 2, -0.5, finish_reason="stop"))
    return text, events


def places(event: Text) -> list[int]:
    return [-int(token.logprob) for token in event.logprobs]


def test_a_character_of_several_tokens(pocket: Pocket) -> None:
    known = {pocket[1].detokenizer.token_bytes(token): token for token in range(len(pocket[1]))}
    pieces = [b"a", b"\xe2", b"\x82", b"\xac", b"b", b"\xe2", b"\x82"]
    text, events = read(pocket[1], [known[piece] for piece in pieces])
    assert [event.text for event in events[:3]] == ["a", "€", "b"]
    assert "".join(event.text for event in events[3:]) == "\ufffd"
    assert [place for event in events for place in places(event)] == list(range(7))
    assert places(events[1]) == [1, 2, 3]
    assert [token.bytes for token in events[1].logprobs] == [b"\xe2", b"\x82", b"\xac"]
    assert [token.text for token in events[1].logprobs] == ["\ufffd"] * 3
    assert [token.top[0].bytes for token in events[1].logprobs] == [b"\xe2", b"\x82", b"\xac"]
    assert text.tokens == 8  # with the end of text


def test_stop_texts_by_chance(pocket: Pocket) -> None:
    """The text is cut before the first one; the log-probabilities are of the tokens that are whole in it."""
    random_ = random.Random(0)
    tokenizer = pocket[1]
    for _ in range(60):
        written = "".join(random_.choice(["fox ", "bear, ", "ab", "a", "é€", "\n"]) for _ in range(12))
        ids = tokenizer.encode(written, add_special_tokens=False)
        stops = [written[(at := random_.randrange(len(written) - 1)) : at + random_.randrange(1, 5)] for _ in range(2)]
        text, events = read(tokenizer, ids, stops)
        _, end, stop = min((written.find(stop) + len(stop), written.find(stop), stop) for stop in stops)
        assert (text.stop, "".join(event.text for event in events)) == (stop, written[:end])
        told = [place for event in events for place in places(event)]
        assert told == list(range(len(told)))
        lengths = [len(tokenizer.detokenizer.token_bytes(token)) for token in ids]
        whole = len(written[:end].encode())
        assert sum(lengths[: len(told)]) <= whole < sum(lengths[: len(told) + 1])


@pytest.mark.parametrize("stop", [(), ("hm",), ("</think>",), ("es",)])
def test_thinking(pocket: Pocket, stop: Sequence[str]) -> None:
    tokenizer = with_marks(pocket[1], "<think>", "</think>")
    pieces = ["<think>", "\n", "hm", "\n", "</think>", "\n\n", "Yes", ", fox"]
    ids = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    text, events = read(tokenizer, [token for piece in ids for token in piece], stop)
    thought = [event for event in events if event.thinking]
    said = [event for event in events if not event.thinking]
    assert "".join(event.text for event in thought) == "hm"
    assert "".join(event.text for event in said) == ("Y" if stop == ("es",) else "Yes, fox")
    before = sum(map(len, ids[:6]))
    assert text.thinking_tokens == before
    first = len(ids[6]) + len(ids[7])
    told = [place for event in said for place in places(event)]
    assert told == list(range(before, before + (len(told) if stop == ("es",) else first)))


def test_calls(pocket: Pocket) -> None:
    tokenizer = pocket[1]
    form = tool_format(tokenizer)
    written = 'So.\n<tool_call>\n{"name": "look", "arguments": {"a": "é"}}\n</tool_call> <tool_call> no'
    ids = tokenizer.encode(written, add_special_tokens=False)
    text, events = read(tokenizer, ids, ["é"], tools=[TOOL], format=form)
    calls = [event for event in events if isinstance(event, Call)]
    assert calls == [Call(0, 0, "look", '{"a":"é"}')]
    assert "".join(event.text for event in events if isinstance(event, Text)) == "So.<tool_call> no"
    # Log-probabilities are those of the tokens before the call, and of the last ones.
    told = [token for event in events if isinstance(event, Text) for token in event.logprobs]
    assert b"".join(token.bytes for token in told).decode() == "So.<tool_call> no"
    first = len(tokenizer.encode("So.", add_special_tokens=False))
    rest = len(told) - first
    assert [-int(token.logprob) for token in told] == [*range(first), *range(len(ids) - rest, len(ids))]
    assert text.calls == 1
    assert text.stop is None


class Windowed(Tokenizer):
    """A tokenizer whose tokens are not bytes: its process decodes."""

    @property
    def detokenizer(self) -> WindowDetokenizer:
        return WindowDetokenizer(self.decode)


def test_a_tokenizer_that_decodes_in_its_process(server: Running, pocket: Pocket) -> None:
    windowed = copy.copy(pocket[1])
    windowed.__class__ = Windowed
    asked: Any = ("Once upon a time", 30)
    with served(pocket[0], windowed) as found:
        answer = COMPLETIONS.ask(found, *asked, logprobs=2)["choices"]
        assert answer == COMPLETIONS.ask(server, *asked, logprobs=2)["choices"]


@pytest.fixture(scope="module")
def thinker(pocket: Pocket) -> Iterator[Running]:
    """pocket, said to think from "Once" to "time": its stories begin so."""
    tokenizer = with_marks(pocket[1], "Once", "time")
    with served(pocket[0], tokenizer, sequences=2, max_kv_size=256) as found:
        yield found


def test_thinking_over_http(thinker: Running) -> None:
    body = CHAT.body("Tell me a story about a fox.", 20, logprobs=True)
    answer = CHAT.ask(thinker, tokens=20, logprobs=True)
    message, told = answer["choices"][0]["message"], answer["choices"][0]["logprobs"]["content"]
    assert message["reasoning_content"] == " upon a "
    assert message["content"].startswith(" there was a fox")
    assert "".join(each["token"] for each in told) == message["content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 20 - len(told)
    deltas = [event["choices"][0]["delta"] for event in sse_events(thinker, CHAT.path, body)]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    # A format is what follows the thinking. Continued text is not split.
    wanted = {"structured_outputs": {"regex": " there were [0-9]{2}"}}
    assert text_of(CHAT.ask(thinker, tokens=60, **wanted)).startswith(" there were ")
    answer = COMPLETIONS.ask(thinker, "Once upon a time", 4, echo=True)
    assert text_of(answer).startswith("Once upon a time")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
