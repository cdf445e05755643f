"""The text, a file or the built-in held-out conversations, as token ids; and questions whose answers are
known.
"""

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
# an assistant's turn of more words is a story it tells, not an answer: none of those has more than 8
STORY_WORDS = 30


@dataclass(frozen=True, slots=True)
class Text:
    """A text in pieces; each is read with nothing before it."""

    name: str  # the file's, or the built-in one's
    pieces: tuple[tuple[int, ...], ...]  # token ids; all but the last as long as the context, or as the text
    left_out: int  # tokens of the text after the last piece

    @property
    def tokens(self) -> int:
        return sum(len(piece) for piece in self.pieces)


def halves(text: Text) -> tuple[Text, Text]:
    """Every second piece of a text, and the others; a PromptError if there is one piece."""
    if len(text.pieces) < 2:
        raise PromptError(f"{text.name} has {text.tokens} tokens; expected more, for two halves")
    first, second = (replace(text, pieces=text.pieces[n::2]) for n in (0, 1))
    return first, second


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation with its answers. An answer's context has right answers to earlier questions."""

    ids: tuple[int, ...]  # all of it, to the end of the last answer
    answers: tuple[tuple[int, int], ...]  # the place of each one's first token, and that after its end token


@cache
def heldout_documents() -> tuple[dict[str, Any], ...]:
    """The embedded model's held-out documents: ``kind``, and ``text`` or ``messages``; questions have an
    ``answer``.
    """
    lines = (resources.files("kvant") / POCKET / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def built_in_text(tokenizer: Tokenizer, context: int, tokens: int) -> Text:
    """The first ``tokens`` tokens of the held-out documents, kinds in turn, conversations in the model's
    own form.
    """
    ids = [
        token
        for document in _interleaved()
        for token in encode_rendered(tokenizer, _written(tokenizer, document))
    ]
    return _cut(BUILT_IN, ids, context, tokens)


def text_file(path: Path, tokenizer: Tokenizer, vocab_size: int, context: int, tokens: int) -> Text:
    """The first ``tokens`` tokens of a UTF-8 text file, encoded as it is."""
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
    kept = ids[:tokens]
    pieces = tuple(tuple(kept[first : first + context]) for first in range(0, len(kept), context))
    return Text(name, pieces, len(ids) - len(kept))


def recall_dialogues(tokenizer: Tokenizer, tokens: int) -> list[Dialogue]:
    """Built-in questions for one fact among many of its kind, at most ``tokens`` tokens of them; maybe
    none.
    """
    found: list[Dialogue] = []
    for document in _interleaved("recall"):  # conversations of all lengths are among the first
        dialogue = read_dialogue(tokenizer, document)
        tokens -= len(dialogue.ids)
        if tokens < 0:
            break
        found.append(dialogue)
    return found


def read_dialogue(tokenizer: Tokenizer, document: dict[str, Any]) -> Dialogue:
    """A document with ``messages`` and the last ``answer`` as token ids, divided where a prompt would end."""
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
    """The held-out documents whose kind begins so: the first of each kind, then the second, and so on."""
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
    except Exception as error:  # a template is a program: it can fail in any way
        raise PromptError(
            f"the chat template fails on the built-in text: {error}; --text takes another"
        ) from error
