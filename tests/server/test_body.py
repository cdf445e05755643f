"""What an error of a body says: the field, what it has, and what it may have."""

import json
from typing import Any

import pytest

from kvant.server.anthropic import MessagesBody
from kvant.server.body import decode
from kvant.server.errors import ApiError
from kvant.server.responses import ResponsesBody

RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "y"}]}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ResponsesBody, {"truncation": "auto"}, "Invalid enum value 'auto' - at `$.truncation`; expected \"disabled\""),
        (
            ResponsesBody,
            {"tool_choice": {"type": "mcp"}},
            'Invalid value \'mcp\' - at `$.tool_choice.type`; expected "function" or "allowed_tools"',
        ),
        (
            MessagesBody,
            {"messages": [{"role": "user", "content": [RESULT]}]},
            "Invalid value 'y' - at `$.messages[0].content[0].content[0].type`; "
            'expected "text"',
        ),
        (ResponsesBody, {"metadata": {"a": 1}}, "Expected `str`, got `int` - at `$.metadata[...]`"),
        (MessagesBody, {"container": "c"}, "Expected `null`, got `str` - at `$.container`"),
        (MessagesBody, {}, "Object missing required field `messages`"),
    ],
)  # fmt: skip
def test_what_was_given_and_what_was_expected(kind: Any, fields: dict[str, Any], message: str) -> None:
    body = {"model": "pocket", **({"input": "Hi"} if kind is ResponsesBody else {"max_tokens": 1}), **fields}
    with pytest.raises(ApiError) as caught:
        decode(json.dumps(body).encode(), kind)
    assert caught.value.message == message
