"""Facts: short lists of who has what, to be recalled among distractors, and the drills that teach
recalling.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from document import Document
from lexicon import COLOURS, HOMES, LETTERS, NAMES, THINGS, article
from naming import compose_name
from stories import Story, draw_story


@dataclass(frozen=True)
class Relation:
    """One type of fact: keys are told apart, values are looked up; `backward` asks for the key."""

    keys: Sequence[str]
    values: Sequence[str]
    fact: str
    forward: tuple[str, ...]
    answer: str
    backward: tuple[str, ...] = ()
    reverse: str = ""


OWNS = Relation(
    NAMES, THINGS, "{k} has the {v}.",
    ("What does {k} have?", "Which thing does {k} have?"), "It says {k} has the {v}.",
    ("Who has the {v}?",), "It says the {v} is with {k}.",
)  # fmt: skip
LIKES = Relation(
    NAMES,
    COLOURS,
    "{k} likes {v}.",
    ("What does {k} like?", "Which colour does {k} like?"),
    "It says {k} likes {v}.",
)
HOLDS = Relation(
    LETTERS, THINGS, "Box {k} holds the {v}.",
    ("What does box {k} hold?", "What is in box {k}?"), "It says box {k} holds the {v}.",
    ("Which box holds the {v}?", "Where is the {v}?"), "It says the {v} is in box {k}.",
)  # fmt: skip
LIVES = Relation(NAMES, HOMES, "{k} lives {v}.", ("Where does {k} live?",), "It says {k} lives {v}.")
TINTED = Relation(
    THINGS,
    COLOURS,
    "The {k} is {v}.",
    ("What colour is the {k}?", "Which colour is the {k}?"),
    "It says the {k} is {v}.",
)
BELONGS = Relation(
    THINGS,
    NAMES,
    "The {k} is with {v}.",
    ("Who has the {k}?", "With whom is the {k}?"),
    "It says the {k} is with {v}.",
)
LIES = Relation(
    THINGS, LETTERS, "The {k} is in box {v}.",
    ("Which box holds the {k}?", "Where is the {k}?"), "It says the {k} is in box {v}.",
)  # fmt: skip
RELATIONS = (OWNS, LIKES, HOLDS, LIVES, TINTED, BELONGS, LIES)

LEADS = (
    "Here is a list.",
    "Read this list.",
    "Remember these facts.",
    "These things are true.",
    "Listen well.",
)


def draw_pairs(rng: random.Random, relation: Relation, count: int) -> list[tuple[str, str]]:
    """Draw facts of one relation; keys differ, and values differ where there are enough of them."""
    count = min(count, len(relation.keys))
    keys = rng.sample(list(relation.keys), count)
    distinct = relation.backward or count <= len(relation.values) // 2
    values = (
        rng.sample(list(relation.values), count) if distinct else rng.choices(list(relation.values), k=count)
    )
    return list(zip(keys, values, strict=True))


def question(rng: random.Random, relation: Relation, key: str, value: str) -> tuple[str, str]:
    """Draw a question about one fact, with its answer."""
    if relation.backward and rng.random() < 0.25:
        ask, reply = rng.choice(relation.backward), relation.reverse
    else:
        ask, reply = rng.choice(relation.forward), relation.answer
    return ask.format(k=key, v=value), reply.format(k=key, v=value)


def recall(rng: random.Random, count: int, asked: int, padding: int = 0, heldout: bool = False) -> Document:
    """Facts of one type in a user turn, then questions; `padding` is the words of story told in between."""
    relation = rng.choice(RELATIONS)
    pairs = draw_pairs(rng, relation, count)
    document = Document(f"recall-{count}" if not padding else "recall-far")
    told = " ".join([rng.choice(LEADS)] + [relation.fact.format(k=key, v=value) for key, value in pairs])
    while padding > 0:
        sentences = _unrelated_story(rng, {key for key, _ in pairs}, heldout).sentences
        told += " " + " ".join(sentences)
        padding -= sum(len(sentence.split()) for sentence in sentences)
    for index, (key, value) in enumerate(rng.sample(pairs, min(asked, len(pairs)))):
        ask, reply = question(rng, relation, key, value)
        document.ask(f"{told} {ask}" if index == 0 else ask)
        document.answer(reply)
    return document


def _unrelated_story(rng: random.Random, keys: set[str], heldout: bool) -> Story:
    """Draw a story that names none of the keys, so that it cannot contradict a fact."""
    while True:
        story = draw_story(rng, heldout)
        if keys.isdisjoint((story.slots["N"], story.slots["H"], story.slots["bare"])):
            return story


def mixed_facts(rng: random.Random, heldout: bool = False) -> Document:
    """A list of facts of several types about a few people and things, then questions about it."""
    facts: list[tuple[Relation, str, str]] = []
    for relation in rng.sample(RELATIONS, rng.randint(2, 3)):
        facts += [(relation, key, value) for key, value in draw_pairs(rng, relation, rng.randint(1, 3))]
    rng.shuffle(facts)
    told = " ".join(
        [rng.choice(LEADS)] + [relation.fact.format(k=key, v=value) for relation, key, value in facts]
    )
    document = Document("facts")
    for index, (relation, key, value) in enumerate(rng.sample(facts, min(len(facts), rng.randint(2, 5)))):
        ask, reply = question(rng, relation, key, value)
        document.ask(f"{told} {ask}" if index == 0 else ask)
        document.answer(reply)
    return document


def owned_facts(rng: random.Random, heldout: bool = False) -> Document:
    """Sentences about people with composed names and coloured things, then questions about both."""
    count = rng.randint(2, 5)
    names = [compose_name(rng, heldout) if rng.random() < 0.7 else rng.choice(NAMES) for _ in range(count)]
    things, homes = rng.sample(THINGS, count), rng.sample(HOMES, count)
    told, asks = [], []
    for name, thing, home in zip(names, things, homes, strict=True):
        if names.count(name) > 1:
            continue
        colour = rng.choice(COLOURS)
        verb = rng.choice(("has", "owns"))
        told.append(f"{name} {verb} {article(colour)} {thing} and lives {home}.")
        asks.append((f"What does {name} have?", f"It says {name} has {article(colour)} {thing}."))
        asks.append((f"Who has the {thing}?", f"It says the {thing} is with {name}."))
        asks.append((f"Where does {name} live?", f"It says {name} lives {home}."))
        asks.append((f"What colour is the {thing}?", f"It says the {thing} is {colour}."))
    document = Document("facts")
    if not told:
        return mixed_facts(rng, heldout)
    for index, (ask, reply) in enumerate(rng.sample(asks, min(len(asks), rng.randint(2, 5)))):
        document.ask(" ".join([rng.choice(LEADS), *told, ask]) if index == 0 else ask)
        document.answer(reply)
    return document


def drill(rng: random.Random, count: int, words: int) -> Document:
    """Facts told once, then again and again in other orders; only what can be recalled has weight.

    Bare facts, a key and its value side by side, stand among the sentences: the step from bare to bare is
    learned first, and from there it is one step to finding a value behind a sentence's words.
    """
    document = Document(f"drill-{count}")
    form = rng.random()
    if form < 0.1:
        return repetition(rng, max(4, count * 2), words)
    relation = rng.choice(RELATIONS)
    pairs = draw_pairs(rng, relation, count)
    bare = rng.choice((0.0, 0.4, 0.6))
    before, after = relation.fact.split("{v}")
    backward = rng.choice((0.0, 0.5))
    used, first = 0, True
    while used < words:
        rng.shuffle(pairs)
        for key, value in pairs:
            head, tail, stop = f" {before.rstrip()}", value, after
            if relation.backward and not first and rng.random() < backward:
                head, tail, stop = f" {relation.reverse[8:-4].rstrip()}", key, "."
            if rng.random() < bare:
                head, stop = " {k}" if tail == value else " {v}", ";"
            document.add_text(head.format(k=key, v=value), 0.02)
            document.add_text(f" {tail}", 0.02 if first else 1.0)
            document.add_text(stop, 0.02)
            used += len(head.split()) + len(tail.split()) + 1
        first = False
    return document


def repetition(rng: random.Random, length: int, words: int) -> Document:
    """Random words and composed names, repeated: the barest form of copying."""
    document = Document("drill-repeat")
    pool = (NAMES, THINGS, COLOURS, LETTERS)
    items = [rng.choice(rng.choice(pool)) if rng.random() < 0.7 else compose_name(rng) for _ in range(length)]
    text = "".join(f" {item}" for item in items)
    document.add_text(text, 0.02)
    for _ in range(max(1, words // length - 1)):
        document.add_text(";", 0.02)
        document.add_text(text, 0.5)
    return document
