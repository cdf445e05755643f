"""What the tests of the server's interfaces share: a service without an engine, and events to feed."""

import copy
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from kvant.server.endpoint import Encoder
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, Call, End, Event, Text

SWITCHED = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def service(template: str = "{{ messages }}", *, thinks: bool = False) -> Any:
    """A service with a template, and a vocabulary with or without marks of thinking."""
    marks = ("<think>", "</think>") if thinks else (None, None)
    tokenizer = SimpleNamespace(
        chat_template=template,
        think_start=marks[0],
        think_end=marks[1],
        unk_token_id=None,
        convert_tokens_to_ids=lambda tokens: [None for _ in tokens],
    )
    return SimpleNamespace(tokenizer=tokenizer)


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
    """The events of one answer."""
    piece = st.one_of(
        st.builds(Text, st.just(0), st.text(max_size=5), st.booleans()),
        st.builds(Call, st.just(0), st.just(0), st.just("look"), st.sampled_from(['{"at": [1, "\u2028"]}', "{}"])),
    )
    pieces = draw(st.lists(piece, max_size=8))
    reason = draw(st.sampled_from(("stop", "length", "tool_calls")))
    stop = draw(st.sampled_from((None, "END"))) if reason == "stop" else None
    return [Begun(20, 16), *pieces, End(0, reason, 9, 4, stop)]
