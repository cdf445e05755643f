"""Convert text or messages to token ids, with a user's variables for the chat template."""

import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import mlx.core as mx

from kvant.errors import PromptError, did_you_mean, library_errors
from kvant.text.template import all_templates
from kvant.text.tokenizer import REFUSED, Tokenizer

Message = Mapping[str, str]
# Variables that a conversation or kvant sets.
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"}
RESERVED |= {"conversation", "chat_template", *REFUSED}
SYSTEM_PROBE = "kvant_system_probe"


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int] | mx.array, vocab_size: int) -> list[int]:
    """Return a prompt's token ids: encode text without a template, or check ids.

    A beginning-of-text token is added only if the tokenizer does that and the text does not begin with it.
    """
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
    return token_ids(prompt, vocab_size)


def token_ids(prompt: Iterable[int] | mx.array, vocab_size: int) -> list[int]:
    """Return the ids of a prompt as a list, after checking them."""
    if isinstance(prompt, mx.array):
        if prompt.ndim != 1 or not mx.issubdtype(prompt.dtype, mx.integer):
            raise PromptError(
                f"prompt is {prompt.dtype} of shape {tuple(prompt.shape)}; expected one row of token ids"
            )
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


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
) -> str:
    """Render messages with the model's chat template, up to where the assistant's answer begins.

    ``variables``: further variables of the template, such as ``enable_thinking``.
    """
    if not tokenizer.has_chat_template:
        raise PromptError("the model has no chat template")
    with library_errors(PromptError, "the chat template failed"):
        options = {**(variables or {}), "tokenize": False, "add_generation_prompt": True}
        return str(tokenizer.apply_chat_template(list(messages), **options))


def system_place(tokenizer: Tokenizer) -> Literal["anywhere", "first", "nowhere"]:
    """Find out where the chat template shows a system message; it may drop or refuse one elsewhere."""
    user = {"role": "user", "content": "x"}
    system = {"role": "system", "content": SYSTEM_PROBE}

    def shows(*messages: Message) -> bool:
        try:
            return SYSTEM_PROBE in render_chat(tokenizer, messages)
        except PromptError:
            return False

    if not shows(system, user):
        return "nowhere"
    answered = (user, {"role": "assistant", "content": "x"})
    return "anywhere" if shows(user, system) and shows(*answered, system, user) else "first"


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode text that a chat template wrote, which already has its special tokens."""
    return tokenizer.encode(text, add_special_tokens=False)


def _token_id(token: object) -> int:
    if not isinstance(token, bool):
        try:
            return operator.index(token)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise PromptError(
        f"the prompt has {str(token)[:80]!r} among its token ids; messages go through apply_chat_template"
    )


def check_variables(tokenizer: Tokenizer, names: Collection[str]) -> None:
    """Refuse a variable that the user may not set, or that the chat template does not mention."""
    words = mentioned(tokenizer) if names else set()
    for name in names:
        if name in RESERVED:
            raise ValueError(f"has {name[:80]!r}, which kvant sets itself")
        if name not in words:
            raise ValueError(
                f"has {name[:80]!r}, which the chat template does not mention{did_you_mean(name, words)}"
            )


def mentioned(tokenizer: Tokenizer) -> set[str]:
    """Return all words in the model's chat templates that could be names."""
    return set(re.findall(r"[A-Za-z_]\w*", all_templates(tokenizer.chat_template)))


class KnownText:
    """A rendered conversation with the token ids that were fed and generated for it.

    A model may write an answer with other tokens than its text encodes to. When a later rendering repeats the
    text, it gets the same tokens again, so that it matches the cache.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        unknown = tokenizer.unk_token
        self._special = tuple(token for token in tokenizer.all_special_tokens if token and token != unknown)
        self._text = ""
        self._ids: list[int] = []
        self._answers: list[tuple[int, int]] = []  # end of each answer, in characters and in tokens

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered conversation."""
        for characters, tokens in reversed(self._answers):
            # Only at a special token can a text be split without changing its encoding.
            if text.startswith(self._text[:characters]) and text.startswith(self._special, characters):
                return self._ids[:tokens] + encode_rendered(self._tokenizer, text[characters:])
        return encode_rendered(self._tokenizer, text)

    def answered(self, text: str, ids: Sequence[int], answer: Sequence[int]) -> None:
        """Remember a rendered conversation, its ids, and its answer's ids without a token that ended it."""
        same = len(self._answers)
        for characters, tokens in reversed(self._answers):
            if text.startswith(self._text[:characters]) and list(ids[:tokens]) == self._ids[:tokens]:
                break
            same -= 1
        decoded = self._decode(answer)
        self._text = text + decoded
        self._ids = [*ids, *answer]
        self._answers = [*self._answers[:same], (len(self._text), len(self._ids))]

    def restore(self, ids: Sequence[int]) -> None:
        """Remember only ids, which end with an answer."""
        self._text = self._decode(ids)
        self._ids = list(ids)
        self._answers = [(len(self._text), len(self._ids))]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
