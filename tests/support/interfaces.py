"""What the tests of the server's interfaces share: a service without an engine, and events to feed."""

from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

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
