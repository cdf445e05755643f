"""The text: a file, or the built-in held-out conversations; as token ids, in pieces of a context."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from kvant.engine.load import POCKET
from kvant.errors import PromptError
from kvant.text.prompt import encode_prompt, encode_rendered
from kvant.text.tokenizer import Tokenizer

MAX_FILE_BYTES = 64 * 1024 * 1024
T = TypeVar("T")
BUILT_IN = "built-in held-out conversations"


@dataclass(frozen=True, slots=True)
class Text:
    """A text in pieces; each is read with nothing before it.

    Attributes:
        name: the file's, or the built-in one's.
        pieces: token ids; all but the last as long as the context, or as the text.
        left_out: tokens of the text after the last piece.
    """

    name: str
    pieces: tuple[tuple[int, ...], ...]
    left_out: int

    @property
    def tokens(self) -> int:
        """Tokens in all pieces."""
        return sum(len(piece) for piece in self.pieces)


@cache
def heldout_documents() -> tuple[dict[str, Any], ...]:
    """The embedded model's held-out documents: ``kind``, and ``text`` or ``messages``; questions have an ``answer``."""
    lines = (resources.files("kvant") / POCKET / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def built_in_text(tokenizer: Tokenizer, context: int, tokens: int) -> Text:
    """The first ``tokens`` tokens of the held-out documents, kinds in turn, conversations in the model's own form."""
    ids: list[int] = []
    left_out = 0
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for document in heldout_documents():
        by_kind.setdefault(document["kind"], []).append(document)
    for document in in_turn(by_kind.values()):  # so that the beginning is a mixture
        own = encode_rendered(tokenizer, _written(tokenizer, document))
        room = max(0, tokens - len(ids))
        ids += own[:room]
        left_out += len(own[room:])
    return _cut(BUILT_IN, ids, context, left_out)


def text_file(path: Path, tokenizer: Tokenizer, vocab_size: int, context: int, tokens: int) -> Text:
    """The first ``tokens`` tokens of a UTF-8 text file, encoded as it is.

    Raises:
        PromptError: a file that cannot be read, is not UTF-8, larger than ``MAX_FILE_BYTES``, or too short.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise PromptError(f"the text {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise PromptError(f"the text {path} is larger than {MAX_FILE_BYTES // 1024**2} MiB; expected a smaller file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"the text {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise PromptError(f"the text {path} is empty")
    ids = encode_prompt(tokenizer, text, vocab_size)
    if len(ids) < 2:
        raise PromptError(f"the text {path} is {len(ids)} token long; expected at least 2")
    return _cut(str(path), ids[:tokens], context, len(ids[tokens:]))


def _cut(name: str, ids: list[int], context: int, left_out: int) -> Text:
    pieces = (tuple(ids[first : first + context]) for first in range(0, len(ids), context))
    return Text(name, tuple(pieces), left_out)


def in_turn(groups: Iterable[Sequence[T]]) -> list[T]:
    """The first item of each group, then the second of each, and so on."""
    return [item for row in zip_longest(*groups) for item in row if item is not None]


def _written(tokenizer: Tokenizer, document: dict[str, Any]) -> str:
    if "text" in document:
        return str(document["text"]) + "\n"
    messages = [*document["messages"]]
    if "answer" in document:
        messages.append({"role": "assistant", "content": document["answer"]})
    if not tokenizer.has_chat_template:
        return "".join(f"{message['content']}\n" for message in messages)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program: it can fail in any way
        raise PromptError(f"the chat template fails on the built-in text: {error}; --text takes another") from error
