"""Flags that concern the model's tokenizer: variables of its chat template, and the tokens that end a text."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.cli.options import BadValueError
from kvant.errors import PromptError, library_errors
from kvant.text.prompt import Message, encode_rendered, render_chat
from kvant.text.tokenizer import Tokenizer


def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    system_prompt: str | None = None,
    begun: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of messages through the chat template, up to where the answer begins, or with what it has ``begun``.

    The system prompt goes before the messages, unless they begin with one of their own.
    """
    if not tokenizer.has_chat_template:
        raise PromptError("the model has no chat template; --ignore-chat-template continues the prompt as it is")
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if begun is None:
        rendered = render_chat(tokenizer, messages, variables)
    else:
        given = {**(variables or {}), "tokenize": False, "continue_final_message": True}
        with library_errors(PromptError, "the chat template failed"):
            rendered = str(tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": begun}], **given))
    ids = encode_rendered(tokenizer, rendered)
    if not ids:
        raise PromptError("the prompt is empty: the chat template renders nothing")
    return ids


def set_ends(tokenizer: Tokenizer, extra: Sequence[str], vocab_size: int, *, ignored: bool) -> None:
    """Let further tokens end a text, or none."""
    if ignored:
        tokenizer.eos_token_ids = set()
    for text in extra:
        try:
            tokenizer.add_eos_token(text)
        except ValueError:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) != 1:
                raise BadValueError(
                    f"--extra-eos-token is {text!r}, which is {len(ids)} tokens for this model; expected one, or its id"
                ) from None
            tokenizer.add_eos_token(str(ids[0]))
        if text.isdecimal() and int(text) >= vocab_size:
            raise BadValueError(f"--extra-eos-token is {text}; the model knows 0 to {vocab_size - 1}")
