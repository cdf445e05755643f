"""Tools and a model's chat template: the form of its calls, and calls and their results as messages."""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import PromptError
from kvant.text.answer_parts import AnswerParts, CallPart
from kvant.text.call_form import ToolFormat
from kvant.text.tokenizer import Tokenizer
from kvant.text.tool_forms import Hermes, Llama3, Mistral, MistralArgs, QwenCoder

__all__ = ["ToolFormat", "new_call_id", "template_messages", "tool_format", "wanted_format"]

FORMS: tuple[ToolFormat, ...] = (Hermes(), QwenCoder(), Mistral(), Mistral(space=""), MistralArgs(), Llama3())
PROBE = "kvant_probe"
PROBE_SCHEMA = {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}
PROBE_TOOL = {"type": "function", "function": {"name": PROBE, "description": "A probe.", "parameters": PROBE_SCHEMA}}
PROBE_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": PROBE, "arguments": {"value": "x"}}}


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The form of a model's tool calls: the one in which its chat template writes a call.

    None: the template writes no tools, or it writes calls in no form that is known here.
    """
    asked = [{"role": "user", "content": "x"}]
    call = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}

    def rendered(messages: Sequence[Mapping[str, Any]], **given: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, [PROBE_TOOL], tokenize=False, **given))

    try:
        prompt = rendered(asked, add_generation_prompt=True)
        called = rendered([*asked, call])
    except PromptError:
        return None
    if PROBE not in prompt:
        return None
    same = next((n for n, (a, b) in enumerate(zip(prompt, called, strict=False)) if a != b), len(prompt))
    written = called[same:]
    for form in FORMS:
        parts = AnswerParts(tokenizer, prompt, [PROBE_TOOL], form)
        if form.writing.begin in written and CallPart(PROBE, '{"value":"x"}') in [*parts.add(written), *parts.finish()]:
            return form
    return None


def wanted_format(tokenizer: Tokenizer) -> ToolFormat:
    """As :func:`tool_format`.

    Raises:
        PromptError: there is none; it says why.
    """
    found = tool_format(tokenizer)
    if found is None:
        names = ", ".join(dict.fromkeys(form.name for form in FORMS))
        raise PromptError(f"the model's chat template takes no tools, or writes calls in none of the forms {names}")
    return found


def template_messages(
    messages: Sequence[Mapping[str, Any]],
    form: ToolFormat | None,
) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it, of one as OpenAI's clients send it.

    Text in parts becomes one text, with a line break between them; no content becomes "" in a message with calls.
    Arguments that are JSON text become objects. A result gets the name of the call it answers, and an id that the
    template would refuse is replaced in call and result alike.

    Raises:
        PromptError: content that is not text, or arguments that are no object.
    """
    names: dict[str, str] = {}
    return [_message(message, form, names) for message in messages]


def new_call_id(form: ToolFormat | None) -> str:
    """An id for a call: as OpenAI's, or letters and digits where a template wants a number of them."""
    length = form.id_length if form is not None else None
    return secrets.token_hex(16)[:length] if length is not None else f"call_{secrets.token_hex(12)}"


def _message(message: Mapping[str, Any], form: ToolFormat | None, names: dict[str, str]) -> dict[str, Any]:
    made = dict(message)
    content, calls = made.get("content"), made.pop("tool_calls", None)
    if isinstance(content, list | tuple):
        made["content"] = "\n".join(map(_text, content))
    elif content is not None and not isinstance(content, str):
        raise PromptError(f"a message's content is a {type(content).__name__}; expected text or a list of its parts")
    if calls:
        made["content"] = made.get("content") or ""
        made["tool_calls"] = [_call(call, form, names) for call in calls]
    if (answered := made.get("tool_call_id")) is not None:
        if answered in names:
            made.setdefault("name", names[answered])
        made["tool_call_id"] = _id(answered, form)
    return made


def _text(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise PromptError(f"a part of a message is {kind!r}; expected text")
    return text


def _call(call: Mapping[str, Any], form: ToolFormat | None, names: dict[str, str]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, Mapping):
        raise PromptError(f"arguments of a call of {function['name']!r} are no JSON object")
    made = {"type": "function", "function": {"name": function["name"], "arguments": dict(given)}}
    if (name := call.get("id")) is not None:
        names[name] = function["name"]
        made["id"] = _id(name, form)
    return made


def _id(given: str, form: ToolFormat | None) -> str:
    length = form.id_length if form is not None else None
    if length is None or (len(given) == length and given.isascii() and given.isalnum()):
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:length]
