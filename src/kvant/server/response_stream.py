"""An answer as OpenAI's response: the events of its stream, and the whole that they make."""

import time
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import msgspec

from kvant.engine.sampling import SamplingOptions
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, Call, End, Event, Generation, Text, Tool
from kvant.server.openai_results import logprobs_content
from kvant.server.responses_body import ResponsesBody
from kvant.server.thinking_options import opaque


class ResponseStream:
    """Turns what comes of a generation into events of OpenAI's stream, in its order.

    response.created, response.in_progress, then each item with its parts, then response.completed, .incomplete or
    .failed. A thinking, a text or a function call is one item.

    Attributes:
        response: what the events so far have told, as it is answered without a stream.
    """

    def __init__(self, model: str, body: ResponsesBody, generation: Generation, sampling: SamplingOptions) -> None:
        """``sampling``: the generation's, filled with the model's."""
        self.response = _response(model, body, generation, sampling)
        reasoning = body.reasoning
        self._summary = reasoning is not None and (reasoning.summary or reasoning.generate_summary) is not None
        self._keeps_opaque = "reasoning.encrypted_content" in (body.include or [])
        self._logprobs = generation.logprobs
        self._events = 0
        self._open = ""  # the type of the open item
        self._pieces: list[str] = []  # of its text
        self._told: list[dict[str, Any]] = []  # its log-probabilities

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """The stream's events for the next one; they have to be taken all."""
        match event:
            case Begun():
                self.response["usage"] = _usage(event)
                begun = {**self.response, "output": [], "usage": None}
                yield self._event("response.created", response=begun)
                yield self._event("response.in_progress", response=begun)
            case Text(text="", logprobs=[] | ()):
                pass
            case Text():
                yield from self._text(event)
            case Call():
                yield from self._call(event)
            case End():
                yield from self._end(event)

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """The last events of an answer that could not be ended. OpenAI's clients raise an error for the first."""
        told = error.openai()["error"]
        yield self._event("error", code=told["code"], message=told["message"], param=told["param"], error=told)
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        yield self._event("response.failed", response=self.response)

    def _text(self, event: Text) -> Iterator[dict[str, Any]]:
        kind = "reasoning" if event.thinking else "message"
        if kind != self._open:
            yield from self._close("completed")
            yield from self._begin(kind)
        self._pieces.append(event.text)
        if event.thinking and self._summary:
            yield self._of_item("response.reasoning_summary_text.delta", summary_index=0, delta=event.text)
        elif event.thinking:
            yield self._of_item("response.reasoning_text.delta", content_index=0, delta=event.text)
        else:
            told = logprobs_content(event.logprobs) if self._logprobs else []
            self._told += told
            yield self._of_item("response.output_text.delta", content_index=0, delta=event.text, logprobs=told)

    def _begin(self, kind: str) -> Iterator[dict[str, Any]]:
        """Open an item for text or thinking, and its part."""
        self._open = kind
        if kind == "message":
            item = {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant", "content": []}
        else:
            item = {"type": "reasoning", "id": _id("rs"), "status": "in_progress", "summary": []}
            if not self._summary:
                item["content"] = []
        yield self._added(item)
        part = self._part("")
        if self._in_summary:
            yield self._of_item("response.reasoning_summary_part.added", summary_index=0, part=part)
        else:
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the open item of text or thinking."""
        if not self._open:
            return
        item = self.response["output"][-1]
        item["status"] = status
        text = "".join(self._pieces)
        part = self._part(text)
        if self._in_summary:
            item["summary"] = [part]
            yield self._of_item("response.reasoning_summary_text.done", summary_index=0, text=text)
            yield self._of_item("response.reasoning_summary_part.done", summary_index=0, part=part)
        else:
            item["content"] = [part]
            kind = "reasoning_text" if self._open == "reasoning" else "output_text"
            told = {"logprobs": self._told} if kind == "output_text" else {}
            yield self._of_item(f"response.{kind}.done", content_index=0, text=text, **told)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        if self._open == "reasoning" and self._keeps_opaque:
            item["encrypted_content"] = opaque(text)
        self._open, self._pieces, self._told = "", [], []
        yield self._event("response.output_item.done", output_index=self._index, item=dict(item))

    def _call(self, event: Call) -> Iterator[dict[str, Any]]:
        yield from self._close("completed")
        item = {
            "type": "function_call",
            "id": _id("fc"),
            "call_id": _id("call"),
            "name": event.name,
            "arguments": "",
            "status": "in_progress",
        }
        yield self._added(item)
        yield self._of_item("response.function_call_arguments.delta", delta=event.arguments)
        yield self._of_item("response.function_call_arguments.done", name=event.name, arguments=event.arguments)
        item |= {"arguments": event.arguments, "status": "completed"}
        yield self._event("response.output_item.done", output_index=self._index, item=dict(item))

    def _end(self, event: End) -> Iterator[dict[str, Any]]:
        status = "incomplete" if event.reason == "length" else "completed"
        if not self.response["output"]:  # clients look for a message
            yield from self._begin("message")
        yield from self._close(status)
        usage = self.response["usage"]
        usage["output_tokens"] = event.tokens
        usage["output_tokens_details"]["reasoning_tokens"] = event.thinking_tokens
        usage["total_tokens"] += event.tokens
        self.response["status"] = status
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        yield self._event(f"response.{status}", response=self.response)

    @property
    def _index(self) -> int:
        """Of the last item."""
        return len(self.response["output"]) - 1

    @property
    def _in_summary(self) -> bool:
        """Whether the open item's text is a summary of the thinking: all of it, in that place."""
        return self._open == "reasoning" and self._summary

    def _part(self, text: str) -> dict[str, Any]:
        """The part of the open item."""
        if self._open == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._told)}
        return {"type": "summary_text" if self._summary else "reasoning_text", "text": text}

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        self.response["output"].append(item)
        return self._event("response.output_item.added", output_index=self._index, item=dict(item))

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the last item's."""
        item_id = self.response["output"][-1]["id"]
        return self._event(kind, item_id=item_id, output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}


def _response(model: str, body: ResponsesBody, generation: Generation, sampling: SamplingOptions) -> dict[str, Any]:
    """A response before its first token, with what is in force for it."""
    reasoning, text = body.reasoning, body.text
    summary = (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None
    form = msgspec.to_builtins(text.format) if text is not None and text.format is not None else {"type": "text"}
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": generation.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temp,
        "text": {"format": {name: value for name, value in form.items() if value is not None}, "verbosity": "medium"},
        "tool_choice": _choice(generation.tool_choice),
        "tools": [_tool(tool) for tool in generation.tools],
        "top_logprobs": generation.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _choice(choice: str | Tool) -> str | Mapping[str, str]:
    return choice if isinstance(choice, str) else {"type": "function", "name": choice.name}


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _usage(event: Begun) -> dict[str, Any]:
    return {
        "input_tokens": event.prompt_tokens,
        "input_tokens_details": {"cached_tokens": event.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": event.prompt_tokens,
    }


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
