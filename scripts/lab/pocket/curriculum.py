"""The curriculum: what is learned in which order, and what must be mastered before the next stage begins."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from conversations import another_story, ask_for_story, chatter, offered_story
from corpus import (
    LONG_MIX,
    SHORT_MIX,
    Maker,
    continuation,
    drills,
    facts,
    plain_story,
    recall_far,
    recall_farthest,
    recall_near,
    small_talk,
    story_chat,
    story_questions,
)
from document import Document
from facts import drill, recall


@dataclass(frozen=True)
class Stage:
    """A mix of documents, the tokens of a step and of a batch, and the accuracy that ends the stage.

    `gate` names the kind whose accuracy counts: of single tokens in a drill, of whole answers otherwise.
    """

    name: str
    mix: dict[Maker, float]
    tokens: int
    micro: int
    gate: str = ""
    accuracy: float = 1.1


def _drill(count: int, words: int) -> Callable[..., Document]:
    def make(rng: random.Random, heldout: bool = False) -> Document:
        return drill(rng, count, words)

    return make


def _recall(counts: tuple[int, ...], asked: int) -> Callable[..., Document]:
    def make(rng: random.Random, heldout: bool = False) -> Document:
        return recall(rng, rng.choice(counts), asked)

    return make


#: Requests in many words and small talk, with enough of every older kind that none is forgotten.
ASKING_MIX: dict[Maker, float] = {
    ask_for_story: 60, another_story: 10, chatter: 20, offered_story: 6, story_chat: 3, story_questions: 8,
    continuation: 1, plain_story: 1, facts: 10, recall_near: 7, small_talk: 4, drills: 2, recall_far: 1,
    recall_farthest: 0.15,
}  # fmt: skip

STAGES = (
    Stage("drill-2", {_drill(2, 40): 1}, 6144, 2048, "drill", 0.85),
    Stage("drill-4", {_drill(2, 40): 1, _drill(4, 80): 3}, 6144, 2048, "drill", 0.88),
    Stage("drill-8", {_drill(4, 60): 1, _drill(8, 90): 3}, 6144, 2048, "drill", 0.9),
    Stage(
        "recall", {_drill(8, 90): 1, _drill(16, 120): 1, _recall((2, 4, 8), 6): 3}, 6144, 2048, "drill", 0.93
    ),
    Stage("short", SHORT_MIX, 12288, 2048, "recall-8", 0.7),
    Stage("long", LONG_MIX, 14336, 2048),
    Stage("asking", ASKING_MIX, 4096, 2048),
)
