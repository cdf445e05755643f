"""Conversations as people have them: a story asked for, another and a third, thanks and insults in
between.
"""

from __future__ import annotations

import random
import re

from asking import draw_plot, draw_request, plain_cast
from document import Document, Turn
from given_names import requested_name
from lexicon import PEOPLE, TRAITS
from plot import Plot
from stories import Story, complete, draw_slots, tell
from subjects import asked_theme, asked_thing
from talk import exchange, vary
from wordings import AGAIN, ELSE, MORAL, MORAL_ANSWER, MORE, ON, OPEN, REFUSALS, RETORTS, SEQUELS, STARTS

#: Loss weight of a word that was asked for, where the story writes it: it is to be copied without a slip.
COPIED_WEIGHT = 2.5
#: Loss weights of a story's opening, of the sentences that say what it is about, and of the rest, which
# follows.
OPENING_WEIGHT, PLOT_WEIGHT, TOLD_WEIGHT = 1.0, 3.5, 0.5
#: Loss weight of small talk: few tokens, and nearly all depends on the first.
TALK_WEIGHT = 2.5

INTRODUCTIONS = (
    "My name is {N}.",
    "I am {N}.",
    "I'm {N}",
    "my name is {N}",
    "Hello, I am {N}.",
    "call me {N}",
    "Hi, my name is {N}!",
    "hello my name is {N}",
)
INTRODUCED = ("Hello, {N}! Shall I tell you a story?", "Hello, {N}! Who shall my story be about?")


def _weighted(text: str, words: list[str], weight: float) -> tuple[tuple[str, float], ...]:
    """Cut a text into pieces of which the words that must be copied, each with the space before it, weigh
    more.
    """
    either = "|".join(sorted((re.escape(word) for word in set(words)), key=len, reverse=True))
    pieces = re.split(rf"( (?:{either})(?!\w))", text)
    return tuple(
        (piece, COPIED_WEIGHT if index % 2 else weight) for index, piece in enumerate(pieces) if piece
    )


def _reply_story(document: Document, story: Story, asked: list[str], cut: bool = False) -> None:
    """Add a story as the assistant's turn; `cut`: only its beginning."""
    words = [story.slots["N"], story.slots["H"], story.slots["bare"], *asked]
    opened = story.before + 2
    told = opened + len(story.plot.problem)
    sentences = story.sentences[: told + 1] if cut else story.sentences
    parts: list[tuple[str, float]] = []
    for index, sentence in enumerate(sentences):
        weight = OPENING_WEIGHT if index < opened else PLOT_WEIGHT if index < told else TOLD_WEIGHT
        parts += _weighted(f" {sentence}" if index else sentence, words, weight)
    document.turns.append(Turn("assistant", " ".join(sentences), 1.0, tuple(parts), cut))


def _recount(rng: random.Random, document: Document, story: Story) -> None:
    """Add a story told before, without some of its sentences; it is context, not learned."""
    sentences = story.sentences
    kept = [*sentences[:5], *rng.sample(sentences[5:-2], 3), *sentences[-1:]]
    document.turns.append(Turn("assistant", " ".join(kept), 0.0))


def _unasked(rng: random.Random, plot: Plot) -> Story:
    """Tell a story whose cast nobody asked for."""
    return tell(rng, plot, complete({**draw_slots(rng, plot), **plain_cast(rng)}))


def ask_for_story(rng: random.Random, heldout: bool = False) -> Document:
    """One request for a story about something, and the story; now and then something before or after it."""
    request, story, asked = draw_request(rng, draw_plot(rng), STARTS, heldout)
    document = Document("story-asked", hero=story.slots["N"])
    if rng.random() < 0.25:
        ask, reply, _ = exchange(rng)
        document.ask(ask)
        document.reply(reply, TALK_WEIGHT)
    document.ask(request)
    cut = rng.random() < 0.7
    _reply_story(document, story, asked, cut)
    if not cut and rng.random() < 0.6:
        _after(rng, document, story)
    return document


def another_story(rng: random.Random, heldout: bool = False) -> Document:
    """Two to four stories in one conversation, each of another plot."""
    document = Document("story-again")
    told: list[Plot] = []
    hero: dict[str, str] | None = None
    same = rng.random() < 0.25
    loose = 0.35 if not same else 0.0
    count, brief = rng.choice((2, 3, 3, 4)), rng.random() < 0.8
    for index in range(count):
        plot = draw_plot(rng, tuple(told))
        told.append(plot)
        starts = STARTS if index == 0 or rng.random() < 0.4 else AGAIN
        if rng.random() < loose:
            story, asked = _unasked(rng, plot), []
            request = vary(rng, rng.choice(MORE if index else OPEN))
        else:
            request, story, asked = draw_request(rng, plot, starts, heldout, hero if same else None)
        hero, loose = story.slots, 0.6 if not same else 0.2
        document.ask(request)
        if index and rng.random() < 0.1:
            story.begin_with(rng.choice(RETORTS))
        last = index == count - 1
        if brief and not last:
            _recount(rng, document, story)
        else:
            _reply_story(document, story, asked, brief)
        if rng.random() < 0.3 and not (brief and last):
            _after(rng, document, story)
    return document


def _after(rng: random.Random, document: Document, story: Story) -> None:
    """Something said after a story: small talk, questions, how it goes on, or a request that cannot be
    met.
    """
    draw = rng.random()
    if draw < 0.5:
        ask, reply, _ = exchange(rng, told=True)
        document.ask(ask)
        document.reply(reply, TALK_WEIGHT)
    elif draw < 0.75:
        for ask, reply in story.draw_questions(rng, rng.randint(1, 2)):
            document.ask(ask if rng.random() < 0.7 else ask[0].lower() + ask[1:])
            document.answer(reply)
    elif draw < 0.9:
        document.ask(vary(rng, rng.choice(ON)))
        document.reply(rng.choice(SEQUELS).format_map(story.slots))
    elif draw < 0.95:
        document.ask(vary(rng, rng.choice(MORAL)))
        document.reply(MORAL_ANSWER)
    else:
        document.ask(_anything_else(rng, False))
        document.reply(_refusal(rng), TALK_WEIGHT)


def chatter(rng: random.Random, heldout: bool = False) -> Document:
    """Small talk alone: one to four exchanges."""
    document = Document("chatter")
    for _ in range(rng.randint(1, 4)):
        draw = rng.random()
        if draw < 0.74:
            ask, reply, _ = exchange(rng)
            document.ask(ask)
            document.reply(reply, TALK_WEIGHT)
        elif draw < 0.84:
            name = requested_name(rng, "girl", rng.choice(("he", "she")), heldout)
            document.ask(rng.choice(INTRODUCTIONS).format(N=name))
            reply = rng.choice(INTRODUCED).format(N=name)
            document.turns.append(Turn("assistant", reply, 1.0, _weighted(reply, [name], TALK_WEIGHT)))
        else:
            document.ask(_anything_else(rng, heldout))
            document.reply(_refusal(rng), TALK_WEIGHT)
    return document


def offered_story(rng: random.Random, heldout: bool = False) -> Document:
    """A greeting answered with an offer; then only a name, a kind or a yes, and the story."""
    document = Document("story-offered")
    kind = ""
    while kind not in ("greeting", "morning", "bored", "about", "how"):
        ask, reply, kind = exchange(rng)
    document.ask(ask)
    document.reply(reply, TALK_WEIGHT)
    asked: list[str] = []
    if rng.random() < 0.3:
        story = _unasked(rng, draw_plot(rng))
        document.ask(vary(rng, rng.choice(OPEN)))
    else:
        request, story, asked = draw_request(rng, draw_plot(rng), ("about",), heldout)
        document.ask(request)
    _reply_story(document, story, asked, rng.random() < 0.7)
    return document


def _anything_else(rng: random.Random, heldout: bool) -> str:
    """Draw a request that is not about stories."""
    words = (
        asked_theme(rng, heldout),
        asked_thing(rng, [], heldout),
        rng.choice(list(PEOPLE)),
        rng.choice(TRAITS),
    )
    return vary(rng, rng.choice(ELSE).format(w=rng.choice(words), n=rng.randint(2, 99)))


def _refusal(rng: random.Random) -> str:
    """Draw an apology, mostly the first, so that the greedy answer is sure."""
    return REFUSALS[0] if rng.random() < 0.6 else rng.choice(REFUSALS)
