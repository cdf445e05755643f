"""Asking for a story in many words: who, which thing, where and what happens are drawn, asked for and
told.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from adventures import ADVENTURES
from given_names import invented_name, requested_name
from lexicon import ANIMALS, HOMES, SPOTS, THINGS, article
from plot import Plot
from stories import Story, complete, draw_slots, tell
from subjects import CLAUSES, QUALITIES, asked_kind, asked_place, asked_theme, asked_thing, plural
from tales import TALES, TREASURE
from troubles import TROUBLES
from wordings import KIN, STARTS

#: Every plot that may be asked for.
ALL_PLOTS = (*TROUBLES, *ADVENTURES, *TALES)

#: Ways to say who the hero is, named or not.
NAMED = (
    "{a_kind} named {N}",
    "{a_kind} named {N}",
    "{a_kind} called {N}",
    "{N} the {kind}",
    "{N}, {a_kind}",
    "{a_trait_kind} named {N}",
)
UNNAMED = ("{a_kind}", "{a_kind}", "{a_kind}", "the {kind}", "{a_trait_kind}", "one {kind}")
THEME_OPENINGS = ("This is a story about {theme}.", "Here is a story about {theme}.")
THEME_ENDINGS = (
    "And that is the story about {theme}.",
    "Now {N} knew something about {theme}.",
    "So {N} learned about {theme}.",
)


@dataclass
class Request:
    """A request and the story that meets it; `asked` are the words asked for, which the story holds."""

    plot: Plot
    slots: dict[str, str]
    asked: list[str] = field(default_factory=list)
    subject: str = ""
    clause: str = ""
    text: str = ""

    def set_thing(self, bare: str) -> None:
        """Make this the thing of the story, and one asked for."""
        colour = self.slots["colour"]
        self.slots.update(
            bare=bare, thing=f"{colour} {bare}", a_thing=f"{article(colour)} {bare}", a_bare=article(bare)
        )
        self.asked.append(bare)

    def set_home(self, home: str) -> None:
        """Make this the place of the story, and one asked for."""
        self.slots["home"] = home
        self.asked.append(home)

    def tell(self, rng: random.Random) -> Story:
        """Tell the story."""
        slots = self.slots
        slots["a_kind"], slots["a_hkind"] = article(slots["kind"]), article(slots["hkind"])
        plot = self.plot
        if plot.name == "river" and "grandmother" in (slots["kind"], slots["hkind"]):
            plot = TREASURE
        story = tell(rng, plot, complete(slots))
        if "theme" in slots:
            story.begin_with(rng.choice(THEME_OPENINGS).format_map(slots))
            story.sentences.append(rng.choice(THEME_ENDINGS).format_map(slots))
        elif self.clause:
            who = "{a_kind} named {N}" if slots["N"] in self.asked else "{a_kind}"
            story.begin_with(f"This is a story about {who} {self.clause}.".format_map(slots))
        return story


def draw_plot(rng: random.Random, told: tuple[Plot, ...] = ()) -> Plot:
    """Draw a plot that was not told before."""
    return rng.choice([plot for plot in ALL_PLOTS if plot not in told])


def pronouns(he: str) -> dict[str, str]:
    """Return the pronouns of somebody who is called "he" or "she"."""
    return {"he": he, "him": "him" if he == "he" else "her", "his": "his" if he == "he" else "her"}


def plain_cast(rng: random.Random) -> dict[str, str]:
    """Draw a hero and a helper that nobody asked for, with names of the lexicon."""
    he = rng.choice(("he", "she"))
    person = "girl" if he == "she" else "boy"
    kind, hkind = rng.sample(ANIMALS, 2)
    if rng.random() < 0.2:
        kind = person
    hero = helper = invented_name(rng, he)
    while helper == hero:
        helper = invented_name(rng, rng.choice(("he", "she")))
    kinds = {"kind": kind, "hkind": hkind, "a_kind": article(kind), "a_hkind": article(hkind)}
    return {"N": hero, "H": helper, **kinds, **pronouns(he)}


def draw_request(
    rng: random.Random,
    plot: Plot,
    starts: tuple[str, ...] = STARTS,
    heldout: bool = False,
    hero: dict[str, str] | None = None,
) -> tuple[str, Story, list[str]]:
    """Draw a request for a story of a plot, the story, and the words asked for. `hero`: slots of one told
    of before.
    """
    request = Request(plot, {**draw_slots(rng, plot), **plain_cast(rng)})
    slots = request.slots
    slots.update(home=rng.choice(HOMES), spot=rng.choice(SPOTS))
    request.set_thing(rng.choice(plot.things.split() or THINGS))
    request.asked.clear()
    named = rng.random() < 0.7 or hero is not None
    if hero:
        slots.update({key: hero[key] for key in ("N", "kind", "he", "him", "his")})
    else:
        kind, he = asked_kind(rng, heldout)
        slots.update(kind=kind, N=invented_name(rng, he), **pronouns(he))
        if named:
            slots["N"] = requested_name(rng, kind, he, heldout)
    if named:
        request.asked.append(slots["N"])
    _draw_clause(rng, request, heldout)
    if named:
        _draw_named(rng, request, known=hero is not None)
    else:
        _draw_unnamed(rng, request, heldout)
    while slots["hkind"] == slots["kind"]:
        slots["hkind"] = rng.choice(ANIMALS)
    while slots["H"] == slots["N"]:
        slots["H"] = invented_name(rng, "he")
    story = request.tell(rng)
    return _word(rng, request, rng.choice(starts)), story, request.asked


def _draw_clause(rng: random.Random, request: Request, heldout: bool) -> None:
    """Draw what is to happen, to be there, or who is to be met; in two of ten requests nothing."""
    slots, draw = request.slots, rng.random()
    things = request.plot.things.split()
    if draw < 0.56:
        request.clause = rng.choice(CLAUSES[request.plot.name])
        if re.search(r"\{(a_)?(bare|thing)\}", request.clause):
            request.set_thing(asked_thing(rng, things, heldout))
        elif "treasure" in request.clause:
            request.set_thing("treasure")
    elif draw < 0.64:
        request.clause = rng.choice(
            ("and {a_bare}", "and {a_bare}", "with {a_bare}", "who has {a_bare}", "and {a_thing}")
        )
        request.set_thing(asked_thing(rng, things, heldout))
    elif draw < 0.72:
        request.clause = rng.choice(("{home}", "who lives {home}", "living {home}"))
        request.set_home(asked_place(rng, heldout))
    elif draw < 0.8:
        request.clause = rng.choice(("and {a_hkind}", "who meets {a_hkind}", "and {his} friend, {a_hkind}"))
        slots["hkind"], hhe = asked_kind(rng, heldout)
        while slots["hkind"] == slots["kind"]:
            slots["hkind"], hhe = asked_kind(rng, heldout)
        slots["H"] = invented_name(rng, hhe)
        request.asked.append(slots["hkind"])
        if rng.random() < 0.5:
            slots["H"] = requested_name(rng, slots["hkind"], hhe, heldout)
            request.clause += rng.choice((" named {H}", " called {H}"))
            request.asked.append(slots["H"])
    slots["a_hkind"] = article(slots["hkind"])


def _draw_named(rng: random.Random, request: Request, known: bool) -> None:
    """Draw how a named hero is asked for."""
    slots, draw = request.slots, rng.random()
    if draw < (0.4 if known else 0.62):
        request.subject = rng.choice(NAMED)
        request.asked.append(slots["kind"])
        if "trait" in request.subject:
            request.asked.append(slots["trait"])
    elif draw < 0.72 and not known:
        kin = rng.choice([kin for kin, whose in KIN.items() if whose in (None, slots["he"])])
        person = "girl" if slots["he"] == "she" else "boy"
        slots["kind"] = kin if kin in ("cat", "dog", "teddy") else person
        request.subject = f"my {kin} {{N}}"
    else:
        if not known and rng.random() < 0.5:
            slots["kind"] = "girl" if slots["he"] == "she" else "boy"
        request.subject = "{N}"


def _draw_unnamed(rng: random.Random, request: Request, heldout: bool) -> None:
    """Draw what a story without a named hero is to be about: a kind, a thing, a theme or a place."""
    slots, draw = request.slots, rng.random()
    alone = not request.clause
    if alone and 0.5 <= draw < 0.62 and slots["kind"].split()[0] not in QUALITIES:
        request.subject = plural(slots["kind"])
        request.asked.append(slots["kind"])
    elif alone and 0.62 <= draw < 0.75:
        request.set_thing(asked_thing(rng, request.plot.things.split(), heldout))
        request.subject = rng.choice(
            ("{a_bare}", "the {bare}", "{a_thing}", "{a_bare}", plural(slots["bare"]))
        )
    elif alone and 0.75 <= draw < 0.85:
        request.subject = slots["theme"] = asked_theme(rng, heldout)
        request.asked.append(slots["theme"])
    elif alone and 0.85 <= draw < 0.92:
        request.set_home(asked_place(rng, heldout))
        request.subject = re.sub(r"^\w+ ", "", slots["home"])
    else:
        request.subject = rng.choice(UNNAMED) if draw < 0.5 else "{a_kind}"
        request.asked.append(slots["kind"])
        if "trait" in request.subject:
            request.asked.append(slots["trait"])


def _word(rng: random.Random, request: Request, start: str) -> str:
    """Put the request into words."""
    slots = {**request.slots, "a_trait_kind": article(f"{request.slots['trait']} {request.slots['kind']}")}
    about = f"{request.subject} {request.clause}".rstrip().format_map(slots)
    if start.lower() in ("tell me", "write"):
        start += " a story"
    text = f"{start} about {about}"
    if start == "about" or (request.clause and rng.random() < 0.1):
        text = about
    if start.startswith(("Can", "Could", "Do", "How")):
        return text + rng.choice(("?", "? Please!", ""))
    return text + rng.choice((".", ".", "", "", ", please.", "?", "!"))
