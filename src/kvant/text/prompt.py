"""Text or messages to token ids."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from kvant.errors import PromptError, library_errors
from kvant.text.tokenizer import Tokenizer

Message = Mapping[str, str]


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int] | mx.array, vocab_size: int) -> list[int]:
    """Token ids of a prompt: text is encoded as it is, ids are checked.

    A beginning-of-text token is added only where the tokenizer adds it and the text does not begin with it.
    """
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        ids = _encode(tokenizer, prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
        return token_ids(ids, vocab_size)
    return token_ids(prompt, vocab_size)


def token_ids(prompt: Iterable[int] | mx.array, vocab_size: int) -> list[int]:
    """The ids of a prompt."""
    if isinstance(prompt, mx.array):
        if prompt.ndim != 1 or not mx.issubdtype(prompt.dtype, mx.integer):
            raise PromptError(f"prompt is {prompt.dtype} of shape {tuple(prompt.shape)}; expected one row of token ids")
        ids: list[int] = prompt.tolist()  # type: ignore[assignment]
    elif isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable):
        raise PromptError(f"prompt is a {type(prompt).__name__}; expected text or token ids")
    else:
        ids = [_token_id(token) for token in prompt]
    if not ids:
        raise PromptError("the prompt is empty; expected at least one token")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise PromptError(f"the prompt has token id {token}; the model knows 0 to {vocab_size - 1}")
    return ids


def render_chat(tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
    """Messages through the model's chat template, up to where the assistant's answer begins.

    Args:
        variables: further variables of the template, such as ``enable_thinking``.
    """
    if not tokenizer.has_chat_template:
        raise PromptError("the model has no chat template")
    with library_errors(PromptError, "the chat template failed"):
        given = {**(variables or {}), "tokenize": False, "add_generation_prompt": True}
        return str(tokenizer.apply_chat_template(list(messages), **given))


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of text that a chat template wrote. Its special tokens are there already."""
    return _encode(tokenizer, text, add_special_tokens=False)


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    with library_errors(PromptError, "the prompt cannot be encoded"):
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _token_id(token: object) -> int:
    if not isinstance(token, bool):
        try:
            return operator.index(token)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise PromptError(
        f"the prompt has {str(token)[:80]!r} among its token ids; messages go through apply_chat_template"
    )
