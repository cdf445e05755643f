"""The embedded model's question and recall sets: whether it still answers exactly, by length of the context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.models import LanguageModel
from kvant.text.prompt import encode_rendered, render_chat
from kvant.text.tokenizer import Tokenizer
from kvant.tools.report.teacher import Fed, feed, logits_of, step_size_of
from kvant.tools.report.texts import heldout_documents, in_turn

BUCKETS = (0, 128, 256, 512, 1024)  # tokens of context from which a bucket begins
# Questions about a story or a list, and recall of one fact among many of its kind.
SETS = {"questions": ("questions", "facts"), "recall": ("recall",)}
STORY_WORDS = 30  # an assistant's turn of more words is a story it tells, not an answer: none of those has more than 8


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation with its answers.

    Attributes:
        ids: all of it, to the end of the last answer.
        answers: of each answer, the place of its first token and the place after its last, its end token. Its context
            is all before it, with right answers to the earlier questions.
    """

    ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Exact answers of a set whose context is of ``context_from`` tokens or more, up to the next bucket."""

    set: str
    context_from: int
    right: int
    asked: int


def question_sets(tokenizer: Tokenizer, tokens: int) -> dict[str, list[Dialogue]]:
    """The built-in sets, conversations of all lengths in turn, at most about ``tokens`` tokens of each set."""
    return {
        name: _evenly(
            [read_conversation(tokenizer, d) for d in heldout_documents() if d["kind"].startswith(kinds)], tokens
        )
        for name, kinds in SETS.items()
    }


def read_conversation(tokenizer: Tokenizer, document: dict[str, Any]) -> Dialogue:
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


def answer(model: LanguageModel, cache: ModelCache, conversation: Dialogue, *, fed: Fed = lambda _: None) -> list[bool]:
    """Whether each answer would be written greedily: each of its tokens is the likeliest after those before it.

    Args:
        cache: emptied first.
    """
    ids = conversation.ids
    states = mx.concatenate(list(feed(model, ids, cache, step_size=step_size_of(model), fed=fed)))
    right = []
    for first, last in conversation.answers:
        logits = logits_of(model, states[first - 1 : last - 1])
        likeliest = mx.argmax(logits, axis=-1) == mx.array(ids[first:last])
        right.append(bool((likeliest.all() & mx.isfinite(mx.logsumexp(logits, axis=-1)).all()).item()))
    return right


def score(name: str, conversations: Sequence[Dialogue], right: Sequence[Sequence[bool]]) -> list[Score]:
    """The answers of a set by bucket of context; buckets without a question are left out."""
    found: dict[int, list[bool]] = {first: [] for first in BUCKETS}
    for conversation, answers in zip(conversations, right, strict=True):
        for (place, _), exact in zip(conversation.answers, answers, strict=True):
            found[_bucket(place)].append(exact)
    return [Score(name, first, sum(exact), len(exact)) for first, exact in found.items() if exact]


def _bucket(tokens: int) -> int:
    return max(first for first in BUCKETS if first <= tokens)


def _evenly(conversations: Sequence[Dialogue], tokens: int) -> list[Dialogue]:
    """Conversations of each length in turn, the longest first, as long as they fit; at least one."""
    by_length: dict[int, list[Dialogue]] = {first: [] for first in reversed(BUCKETS)}
    for conversation in conversations:
        by_length[_bucket(len(conversation.ids))].append(conversation)
    ordered = in_turn(by_length.values())
    chosen: list[Dialogue] = []
    for conversation in ordered:
        if sum(len(c.ids) for c in chosen) + len(conversation.ids) <= tokens:
            chosen.append(conversation)
    return chosen or [min(ordered, key=lambda c: len(c.ids))]
