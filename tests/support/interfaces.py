"""What the tests of the server's interfaces share: how each is asked, a service without an engine, events
to feed.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from kvant.server.endpoint import Encoder
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, Call, End, Event, Text
from kvant.text.call_form import ToolFormat
from support.server import Running

FOX = "Tell me a story about a fox."


@dataclass(frozen=True)
class Interface:
    """What the fields of its requests are called."""

    path: str
    asked: str
    limit: str = "max_tokens"

    def __str__(self) -> str:
        return self.path.removeprefix("/v1/")

    def body(self, asked: Any = FOX, tokens: int | None = 24, **fields: Any) -> dict[str, Any]:
        """A request; fields that are None are left out."""
        if isinstance(asked, str) and self.asked != "prompt":
            asked = [{"role": "user", "content": asked}]
        body = {"model": "pocket", self.asked: asked, self.limit: tokens, "temperature": 0} | fields
        return {name: value for name, value in body.items() if value is not None}

    def post(self, server: Running, *given: Any, **fields: Any) -> Any:
        return server.client.post(self.path, json=self.body(*given, **fields))

    def ask(self, server: Running, *given: Any, **fields: Any) -> dict[str, Any]:
        answered = self.post(server, *given, **fields)
        assert answered.status_code == 200, answered.text
        return dict(answered.json())


CHAT = Interface("/v1/chat/completions", "messages")
COMPLETIONS = Interface("/v1/completions", "prompt")
MESSAGES = Interface("/v1/messages", "messages")
RESPONSES = Interface("/v1/responses", "input", "max_output_tokens")
INTERFACES = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)


def pieces(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The texts and calls of an answer's first choice."""
    if "content" in answer:
        return list(answer["content"])
    if "output" in answer:
        return [item["content"][0] if item["type"] == "message" else item for item in answer["output"]]
    choice = answer["choices"][0]
    message = choice.get("message") or {"content": choice["text"]}
    texts = [{"text": message["content"]}] if message["content"] else []
    return texts + [{**call, **call["function"]} for call in message.get("tool_calls", ())]


def text_of(answer: dict[str, Any]) -> str:
    return "".join(piece.get("text", "") for piece in pieces(answer))


def counts_of(usage: dict[str, Any]) -> tuple[int, int, int]:
    """The tokens of the prompt, those of them from the cache, and those of the answer."""
    if "prompt_tokens" in usage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, usage["completion_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached, usage["output_tokens"]


SWITCHED = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def service(template: str = "{{ messages }}", *, thinks: bool = False, form: ToolFormat | None = None) -> Any:
    """A service with a template, a vocabulary with or without marks of thinking, and a form of calls."""
    marks = {"think_start": "<think>" if thinks else None, "think_end": "</think>" if thinks else None}
    ids = {
        "unk_token_id": None,
        "convert_tokens_to_ids": lambda tokens: [1 if thinks else None for _ in tokens],
    }
    return SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template=template, **marks, **ids), tool_format=form
    )


def refused(make: Callable[[], object]) -> ApiError:
    """The refusal of a body, in one line."""
    with pytest.raises(ApiError) as caught:
        make()
    assert caught.value.status == 400
    assert "\n" not in caught.value.message
    return caught.value


def streamed(stream: Encoder, events: Iterable[Event]) -> list[dict[str, Any]]:
    """The events of a stream, as they were when they were sent."""
    return [copy.deepcopy(told) for event in events for told in stream.add(event)]


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    piece = st.one_of(
        st.builds(Text, st.just(0), st.text(max_size=5), st.booleans()),
        st.builds(
            Call, st.just(0), st.just(0), st.just("look"), st.sampled_from(['{"at": [1, "\u2028"]}', "{}"])
        ),
    )
    pieces = draw(st.lists(piece, max_size=8))
    reason = draw(st.sampled_from(("stop", "length", "tool_calls")))
    stop = draw(st.sampled_from((None, "END"))) if reason == "stop" else None
    return [Begun(20), *pieces, End(0, reason, 9, 4, stop, 16)]
