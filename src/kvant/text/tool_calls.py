"""Which form of tool calls a model's chat template has."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import PromptError
from kvant.text.answer_parts import AnswerParts, CallPart
from kvant.text.call_form import ToolFormat
from kvant.text.tokenizer import Tokenizer
from kvant.text.tool_forms import Hermes, Llama3, Mistral, MistralArgs, QwenCoder

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
