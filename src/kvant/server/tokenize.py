"""``/tokenize``: the token ids of a text or a conversation, without generating."""

import asyncio
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvant.server.answering import read_prompt
from kvant.server.body import Fields, decode
from kvant.server.errors import ApiError
from kvant.server.generation import Generation
from kvant.server.service import Service


class Message(Fields, frozen=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class TokenizeBody(Fields, frozen=True):
    """The body, in vLLM's names.

    Attributes:
        prompt: text, as /v1/completions reads it.
        messages: in its place a conversation, through the chat template.
        return_token_strs: the vocabulary's string of each token is wanted too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool = False


async def endpoint(request: Request) -> Response:
    """The ids, their number, and how many there may be."""
    service: Service = request.app.state.service
    body = decode(await request.body(), TokenizeBody)
    if body.model is not None:
        service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("expected either prompt or messages", param="prompt")
    return JSONResponse(await asyncio.to_thread(_tokens, service, body))


def _tokens(service: Service, body: TokenizeBody) -> dict[str, object]:
    """What is answered. It waits for the tokenizer."""
    messages = None
    if body.messages is not None:
        messages = [{"role": message.role, "content": message.content} for message in body.messages]
    ids = read_prompt(service, Generation(messages=messages, prompt=body.prompt)).ids
    found: dict[str, object] = {"count": len(ids), "max_model_len": service.max_seq_len, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = service.tokenizer.convert_ids_to_tokens(ids)
    return found
