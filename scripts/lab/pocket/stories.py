"""Stories: a cast drawn at random, a plot told about it, and questions about what was told."""

from __future__ import annotations

import random
from dataclasses import dataclass

from adventures import ADVENTURES
from lexicon import ANIMALS, COLOURS, FEELINGS, HOMES, PEOPLE, SPOTS, THINGS, TRAITS, article
from naming import compose_word, hero_name, other_name
from plot import Plot
from troubles import TROUBLES

#: All plots.
PLOTS = (*TROUBLES, *ADVENTURES)

OPENINGS = (
    "Once upon a time there was {a_kind} named {N} who lived {home}.",
    "Once upon a time, {home}, there lived {a_kind} named {N}.",
    "There was once {a_kind} called {N} who lived {home}.",
    "Long ago {a_kind} named {N} lived in a little house {home}.",
    "In a small house {home} lived {a_kind} called {N}.",
)
PORTRAITS = (
    "{N} was {trait} and {trait2}.",
    "{N} was a very {trait} {kind}.",
    "Everyone knew that {N} was {trait}.",
    "All the neighbours liked {N}, who was {trait} and {trait2}.",
)
MEETINGS = (
    "Just then {a_hkind} named {H} came by.",
    "Then {N} met {a_hkind} called {H}.",
    "Not far away lived {a_hkind} named {H}, who heard {him}.",
    "On the way {he} met {H}, {a_hkind} with a warm smile.",
)
CONCERNS = (
    '"What is wrong?" asked {H}.',
    '"Why are you so sad?" asked {H} the {hkind}.',
    '"Can I help you?" said {H} the {hkind}.',
)
LAMENTS = ('"{lament}," said {N}.', '"{lament}," {he} answered.', '"Oh, {H}! {lament}," said {N}.')
OFFERS = (
    '"Do not worry, I will help you," said {H}.',
    '"Let us do it together," said {H} the {hkind}.',
    '"We will find a way," said {H}.',
)
THANKS = (
    '"Thank you, {H}!" said {N}.',
    "{N} thanked {H} the {hkind} with all {his} heart.",
    '"You are a true friend, {H}," said {N}.',
)
RETURNS = (
    "In the evening {he} went back to {his} house {home}.",
    "Then they sat {home} and looked at the stars.",
    "They went home and had tea {home}.",
    "That night there was a light in the house {home}.",
)
ENDINGS = (
    "{N} was very {feeling}, and the two were friends for ever.",
    "From that day on {N} and {H} were best friends, and {N} was {feeling}.",
    "And {N} was {feeling} and never forgot what {H} had done.",
    "{N} fell asleep, {feeling} and warm, and dreamed of {H}.",
)

#: Questions every story answers.
COMMON_QUESTIONS = (
    (("Who helped {N}?", "Who was the helper?", "Who helped?"), "It was {H} the {hkind}."),
    (("Where did {N} live?", "Where was the house of {N}?", "Where does {N} live?"), "{Home}."),
    (("What was {N}?", "What animal was {N}?", "Who was {N}?"), "{A_kind}."),
    (("What was {H}?", "What animal was {H}?", "Who was {H}?"), "{A_hkind}."),
    (("How did {N} feel in the end?", "How did {N} feel?", "How was {N} in the end?"), "Very {feeling}."),
)


@dataclass
class Story:
    """A told story: its sentences, the slots they were filled from, and its questions with answers."""

    plot: Plot
    slots: dict[str, str]
    sentences: list[str]
    questions: list[tuple[tuple[str, ...], str]]
    #: Sentences before the opening.
    before: int = 0

    def begin_with(self, sentence: str) -> None:
        """Put a sentence before the story."""
        self.sentences.insert(0, sentence)
        self.before += 1

    @property
    def text(self) -> str:
        """The whole story in one paragraph."""
        return " ".join(self.sentences)

    def draw_questions(self, rng: random.Random, count: int) -> list[tuple[str, str]]:
        """Draw different questions with their answers; who helped comes up most."""
        pool = list(self.questions)
        rng.shuffle(pool)
        if rng.random() < 0.5:
            pool.sort(key=lambda item: item is not self.questions[0])
        return [(rng.choice(wordings), answer) for wordings, answer in pool[:count]]


def _draw_kind(rng: random.Random, heldout: bool) -> tuple[str, str]:
    """Draw what someone is and the pronoun that goes with it."""
    draw = rng.random()
    if draw < 0.62:
        kind, pronoun = rng.choice(ANIMALS), None
    elif draw < 0.95:
        kind = rng.choice(list(PEOPLE))
        pronoun = PEOPLE[kind]
    else:
        kind, pronoun = compose_word(rng, heldout), None
    return kind, pronoun or rng.choice(("he", "she"))


def _fits(wording: str, slots: dict[str, str]) -> bool:
    """Say whether a question may be asked: only animals are asked which animal they are."""
    return "animal" not in wording or slots["kind" if "{N}" in wording else "hkind"] not in PEOPLE


def draw_slots(rng: random.Random, plot: Plot, heldout: bool = False) -> dict[str, str]:
    """Draw a cast, a place and a thing: all the slots the plot may name."""
    hero = hero_name(rng, heldout)
    kind, he = (
        ("fox", rng.choice(("he", "she")))
        if hero == "Pip" and rng.random() < 0.3
        else _draw_kind(rng, heldout)
    )
    hkind, _ = _draw_kind(rng, heldout)
    while hkind == kind:
        hkind, _ = _draw_kind(rng, heldout)
    colour, bare = rng.choice(COLOURS), rng.choice(plot.things.split() or THINGS)
    trait, trait2 = rng.sample(TRAITS, 2)
    him, his = ("him", "his") if he == "he" else ("her", "her")
    slots = {
        "N": hero, "H": other_name(rng, hero, heldout), "kind": kind, "hkind": hkind,
        "a_kind": article(kind), "a_hkind": article(hkind), "he": he, "him": him, "his": his,
        "home": rng.choice(HOMES), "spot": rng.choice(SPOTS), "colour": colour, "bare": bare,
        "thing": f"{colour} {bare}", "a_thing": f"{article(colour)} {bare}",
        "trait": trait, "trait2": trait2, "feeling": rng.choice(FEELINGS),
    }  # fmt: skip
    return complete(slots)


def complete(slots: dict[str, str]) -> dict[str, str]:
    """Add the forms that begin a sentence, in place."""
    for key in ("a_thing", "a_kind", "a_hkind", "he", "his", "home"):
        slots[key[0].upper() + key[1:]] = slots[key][0].upper() + slots[key][1:]
    return slots


def tell(rng: random.Random, plot: Plot, slots: dict[str, str]) -> Story:
    """Tell a story with the given slots."""
    slots = {**slots, "lament": rng.choice(plot.lament).format_map(slots)}
    parts = [rng.choice(OPENINGS), rng.choice(PORTRAITS)]
    parts += [rng.choice(wordings) for wordings in (*plot.problem, *plot.attempt)]
    parts += [rng.choice(wordings) for wordings in (MEETINGS, CONCERNS, LAMENTS, OFFERS)]
    parts += [rng.choice(wordings) for wordings in (*plot.help, *plot.success)]
    parts += [rng.choice(wordings) for wordings in (THANKS, RETURNS, ENDINGS)]
    sentences = [part.format_map(slots) for part in parts]
    questions = [
        (
            tuple(wording.format_map(slots) for wording in wordings if _fits(wording, slots)),
            answer.format_map(slots),
        )
        for wordings, answer in COMMON_QUESTIONS + plot.questions
    ]
    return Story(plot, slots, sentences, questions)


def draw_story(rng: random.Random, heldout: bool = False) -> Story:
    """Draw a cast and tell a story about it."""
    plot = rng.choice(PLOTS)
    return tell(rng, plot, draw_slots(rng, plot, heldout))
