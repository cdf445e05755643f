"""An answer as Anthropic's message: the events of its stream, and the whole that they make."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgspec

from kvant.server.generation import Begun, Call, End, Event, Text
from kvant.server.thinking_options import opaque

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageStream:
    """Turns what comes of a generation into events of Anthropic's stream, in its order.

    message_start, then for each block content_block_start, content_block_delta, content_block_stop, then message_delta
    and message_stop. A text, a thinking or a tool call is one block.

    Attributes:
        message: what the events so far have told, as it is answered without a stream.
    """

    def __init__(self, model: str, *, shows_thinking: bool = True) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._shows_thinking = shows_thinking
        self._pieces: list[str] = []  # of the open block
        self._open = ""  # its type

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """The stream's events for the next one; they have to be taken all."""
        match event:
            case Begun():
                self.message["usage"] = {
                    "input_tokens": event.prompt_tokens - event.cached_tokens,
                    "cache_read_input_tokens": event.cached_tokens,
                    "cache_creation_input_tokens": 0,
                    "output_tokens": 0,
                }
                start = {**self.message, "content": [], "usage": dict(self.message["usage"])}
                yield {"type": "message_start", "message": start}
            case Text(text=""):
                pass
            case Text():
                yield from self._text(event)
            case Call():
                yield from self._call(event)
            case End():
                yield from self._end(event)

    def _text(self, event: Text) -> Iterator[dict[str, Any]]:
        kind = "thinking" if event.thinking else "text"
        if kind != self._open:
            yield from self._close()
            self._open = kind
            yield self._begin({"type": kind, kind: "", **({"signature": ""} if event.thinking else {})})
        self._pieces.append(event.text)
        if self._shows_thinking or not event.thinking:
            yield self._delta({"type": f"{kind}_delta", kind: event.text})

    def _call(self, event: Call) -> Iterator[dict[str, Any]]:
        yield from self._close()
        block = {"type": "tool_use", "id": f"toolu_{uuid4().hex}", "name": event.name, "input": {}}
        yield self._begin(block)
        yield self._delta({"type": "input_json_delta", "partial_json": event.arguments})
        block["input"] = msgspec.json.decode(event.arguments)
        yield self._stop()

    def _end(self, event: End) -> Iterator[dict[str, Any]]:
        yield from self._close()
        reason = "stop_sequence" if event.stop is not None else REASONS[event.reason]
        usage = self.message["usage"]
        usage["output_tokens"] = event.tokens
        usage["output_tokens_details"] = {"thinking_tokens": event.thinking_tokens}
        self.message |= {"stop_reason": reason, "stop_sequence": event.stop}
        delta = {"stop_reason": reason, "stop_sequence": event.stop}
        yield {"type": "message_delta", "delta": delta, "usage": dict(usage)}
        yield {"type": "message_stop"}

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self.message["content"].append(block)
        return {"type": "content_block_start", "index": len(self.message["content"]) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.message["content"]) - 1, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": len(self.message["content"]) - 1}

    def _close(self) -> Iterator[dict[str, Any]]:
        """End the open block of text or thinking."""
        if not self._open:
            return
        text, self._pieces = "".join(self._pieces), []
        kind, self._open = self._open, ""
        block = self.message["content"][-1]
        if kind == "text":
            block["text"] = text
        else:
            # Clients send a block back only with a signature. Where they were not given the thinking, it is in there.
            block["thinking"] = text if self._shows_thinking else ""
            block["signature"] = opaque("" if self._shows_thinking else text)
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield self._stop()
