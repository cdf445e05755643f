"""What a plot is: a course of events as data, each part of it a list of wordings to choose from.

Slots: N hero, H helper, kind and hkind what they are (a_kind, a_hkind with article), home and hhome where
    they live,
thing (with colour: thing, a_thing; without: bare), spot where things are found, he him his He His for the
hero, hhe for the helper, trait. A question is (wordings of the question, answer).
"""

from __future__ import annotations

from dataclasses import dataclass

Wordings = tuple[str, ...]


@dataclass(frozen=True)
class Plot:
    """One course of events, told in five parts, and the questions that only it can answer.

    `things` are the things that fit the plot, in one string; empty when any does.
    """

    name: str
    problem: tuple[Wordings, ...]
    attempt: tuple[Wordings, ...]
    lament: Wordings
    help: tuple[Wordings, ...]
    success: tuple[Wordings, ...]
    questions: tuple[tuple[Wordings, str], ...]
    things: str = ""


FOUND = (("What did {N} find?", "What did {N} find in the end?"), "{A_thing}.")
WHERE = (("Where was the {bare}?", "Where did they find the {bare}?"), "The {bare} was {spot}.")
COLOUR = (("What colour was the {bare}?", "Which colour was the {bare}?"), "The {bare} was {colour}.")
WANTED = (("What did {N} want?", "What did {N} wish for?"), "{A_thing}.")
GIFT = (("What did {H} give to {N}?", "What did {N} get from {H}?"), "{A_thing}.")
