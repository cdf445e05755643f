"""What a client asks of a model's thinking, as variables of the chat template; and thinking that it keeps for later."""

import base64
from collections.abc import Mapping
from typing import Any

from kvant.server.errors import ApiError
from kvant.text.thinking import marks_of
from kvant.text.tokenizer import Tokenizer
from kvant.text.variables import mentioned

SWITCH = "enable_thinking"  # of Qwen3's template, and of others after it
EFFORT = "reasoning_effort"  # of gpt-oss
EFFORTS = ("low", "medium", "high")
OPAQUE = "kvant:"  # begins a text that thinking is kept in


def switched(tokenizer: Tokenizer, on: bool, field: str) -> Mapping[str, Any]:
    """Variables that switch thinking on or off; none where the model cannot do otherwise.

    Raises:
        ApiError: the model only thinks, or never does, and the client wants the other.
    """
    if SWITCH in mentioned(tokenizer):
        return {SWITCH: on}
    if on is (marks_of(tokenizer) is not None):
        return {}
    problem = "the model does not think" if on else "the model's chat template cannot switch its thinking off"
    raise ApiError(f"{field} wants thinking {'on' if on else 'off'}; {problem}", param=field)


def with_effort(tokenizer: Tokenizer, effort: str, field: str) -> Mapping[str, Any]:
    """Variables for an effort of thinking; "none" switches it off.

    Raises:
        ApiError: the model's template does not know it.
    """
    if effort == "none":
        return switched(tokenizer, False, field)
    if EFFORT not in mentioned(tokenizer):
        raise ApiError(f"{field} is {effort!r}; the model's chat template knows no {EFFORT}", param=field)
    if effort not in EFFORTS:
        raise ApiError(f"{field} is {effort!r}; expected one of {', '.join(EFFORTS)}", param=field)
    return {EFFORT: effort}


def opaque(thinking: str) -> str:
    """Thinking for a client that keeps it without showing it. It is encoded, not encrypted."""
    return OPAQUE + base64.b64encode(thinking.encode()).decode()


def from_opaque(text: str, field: str) -> str:
    """The thinking in a text of :func:`opaque`.

    Raises:
        ApiError: another server's text.
    """
    try:
        if text.startswith(OPAQUE):
            return base64.b64decode(text.removeprefix(OPAQUE), validate=True).decode()
    except ValueError:  # no ASCII, no base64, or no UTF-8 in it
        pass
    raise ApiError(f"{field} is not from this server; leave the thinking out or send its text", param=field)
