"""Texts as token ids, from a file or the built-in held-out conversations, and questions with answers."""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvant.engine.load import POCKET
from kvant.errors import PromptError
from kvant.files import read_user_file
from kvant.text.prompt import encode_prompt, encode_rendered, render_chat
from kvant.text.tokenizer import Tokenizer

MAX_FILE_BYTES = 64 * 1024 * 1024
BUILT_IN = "built-in held-out conversations"
# an assistant's message of more words is a story, not an answer to a question: those have at most 8
STORY_WORDS = 30


@dataclass(frozen=True, slots=True)
class Text:
    """A text in pieces; each is read with nothing before it."""

    name: str  # the file's name, or the built-in text's
    pieces: tuple[tuple[int, ...], ...]  # token ids; all but the last have the context's length
    left_out: int  # tokens of the text after the last piece

    @property
    def tokens(self) -> int:
        return sum(len(piece) for piece in self.pieces)


def halves(text: Text) -> tuple[Text, Text]:
    """Return the even and the odd pieces of a text; raise a PromptError if there is only one piece."""
    if len(text.pieces) < 2:
        raise PromptError(f"{text.name} has {text.tokens} tokens; expected more, for two halves")
    first, second = (replace(text, pieces=text.pieces[n::2]) for n in (0, 1))
    return first, second


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation with its answers. Questions follow the right answers to earlier questions."""

    ids: tuple[int, ...]  # the whole conversation to the end of the last answer
    answers: tuple[tuple[int, int], ...]  # positions of each answer: of its first token, and after its end


@cache
def heldout_documents() -> tuple[dict[str, Any], ...]:
    """Return the embedded model's held-out documents: ``kind``, and ``text`` or ``messages``.

    Questions also have an ``answer``.
    """
    lines = (resources.files("kvant") / POCKET / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def built_in_text(tokenizer: Tokenizer, context: int, tokens: int) -> Text:
    """Return the held-out documents' first ``tokens`` tokens, alternating kinds, in the model's form."""
    ids = [
        token
        for document in _interleaved()
        for token in encode_rendered(tokenizer, _written(tokenizer, document))
    ]
    return _cut(BUILT_IN, ids, context, tokens)


def text_file(path: Path, tokenizer: Tokenizer, vocab_size: int, context: int, tokens: int) -> Text:
    """Return the first ``tokens`` tokens of a UTF-8 text file, encoded without a template."""
    ids = encode_prompt(tokenizer, read_text(path), vocab_size)
    if len(ids) < 2:
        raise PromptError(f"{path}: {len(ids)} token; expected at least 2")
    return _cut(str(path), ids, context, tokens)


def read_text(path: Path) -> str:
    data = read_user_file(path, MAX_FILE_BYTES, PromptError)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise PromptError(f"{path}: empty")
    return text


def _cut(name: str, ids: list[int], context: int, tokens: int) -> Text:
    used = ids[:tokens]
    pieces = tuple(tuple(used[first : first + context]) for first in range(0, len(used), context))
    return Text(name, pieces, len(ids) - len(used))


def recall_dialogues(tokenizer: Tokenizer, tokens: int) -> list[Dialogue]:
    """Return built-in questions for one fact among many of its kind, at most ``tokens`` tokens in all."""
    dialogues: list[Dialogue] = []
    for document in _interleaved("recall"):  # the first few have all lengths
        dialogue = read_dialogue(tokenizer, document)
        tokens -= len(dialogue.ids)
        if tokens < 0:
            break
        dialogues.append(dialogue)
    return dialogues


def read_dialogue(tokenizer: Tokenizer, document: dict[str, Any]) -> Dialogue:
    """Encode a document's ``messages`` and final ``answer``, split where a prompt would end."""
    messages = [*document["messages"], {"role": "assistant", "content": document["answer"]}]
    ids: list[int] = []
    answers = []
    rendered = ""
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render_chat(tokenizer, messages[:place])
        ids += encode_rendered(tokenizer, prompt[len(rendered) :])
        first = len(ids)
        rendered = prompt + message["content"] + tokenizer.eos_token
        ids += encode_rendered(tokenizer, rendered[len(prompt) :])
        if len(message["content"].split()) <= STORY_WORDS:
            answers.append((first, len(ids)))
    return Dialogue(tuple(ids), tuple(answers))


def _interleaved(kinds: str = "") -> list[dict[str, Any]]:
    """Return held-out documents whose kind has this prefix: the first of each kind, then the second, ..."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for document in heldout_documents():
        if document["kind"].startswith(kinds):
            by_kind.setdefault(document["kind"], []).append(document)
    return [document for row in zip_longest(*by_kind.values()) for document in row if document is not None]


def _written(tokenizer: Tokenizer, document: dict[str, Any]) -> str:
    if "text" in document:
        return str(document["text"]) + "\n"
    messages = [*document["messages"]]
    messages += [{"role": "assistant", "content": document["answer"]}] if "answer" in document else []
    if not tokenizer.has_chat_template:
        return "".join(f"{message['content']}\n" for message in messages)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates are programs and can raise anything
        raise PromptError(
            f"the chat template fails on the built-in text: {error}; use --text for another text"
        ) from error
