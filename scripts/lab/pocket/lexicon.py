"""The words of the pocket world: who lives there, what they own, and where things are."""

# ruff: noqa: SIM905
from __future__ import annotations

#: Names that are one token each; they are the keys of recall and often the heroes of stories.
NAMES = (
    "Pip Mina Tom Lily Ben Rosa Max Nora Leo Ada Finn Ivy Sam Ruby Otto Luna Hugo Maya Theo Zoe "
    "Jack Emma Oscar Nina Felix Ella Milo Anna Toby Clara Gus Lola Rex Tara Bruno Daisy Kit Poppy Ned Wren"
).split()

#: Things that can be owned, lost and found; one token each. All of them take the article "a".
THINGS = (
    "kite bell lamp drum boat map key book hat coin ring shell stone flute basket rope cup spoon blanket ball "
    "mirror feather button ladder clock candle brush pot wheel pear cake scarf flag whistle lantern pillow bottle "
    "crown doll glove jar leaf nut pen shoe sock bag"
).split()

#: Colours a thing can have.
COLOURS = "red blue green yellow white black pink purple orange brown golden silver".split()

#: Letters that label boxes.
LETTERS = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

#: Homes, each a whole phrase; the last word is unique to it.
HOMES = (
    "by the lake,in the forest,on the hill,near the river,by the sea,in the village,in the valley,near the mill,"
    "in the meadow,on the farm,in the garden,near the mountain,in the town,by the pond,on the island,in the cave,"
    "near the castle,by the road,near the market,in the field"
).split(",")

#: Places where a thing can be found; none of them is a home.
SPOTS = (
    "under the bridge,behind the barn,inside a hollow log,under a big rock,in the well,in the tall grass,on the roof,"
    "behind the door,under the bed,in the old tower,under the bench,behind the fence,in the snow,on the shelf,"
    "near the gate"
).split(",")

#: Animals, any of which may be called "he" or "she".
ANIMALS = (
    "fox owl rabbit bear mouse cat dog frog duck goose hedgehog squirrel badger deer wolf pony goat lamb pig turtle "
    "otter beaver crow sparrow dragon robin hare mole donkey hen robot giant"
).split()

#: People and jobs with the pronoun they take; None means either.
PEOPLE = {
    "girl": "she",
    "boy": "he",
    "baker": None,
    "farmer": None,
    "miller": None,
    "sailor": None,
    "king": "he",
    "queen": "she",
    "prince": "he",
    "princess": "she",
    "painter": None,
    "teacher": None,
    "gardener": None,
    "shepherd": None,
    "tailor": None,
    "knight": None,
    "wizard": None,
}

#: What a hero is like.
TRAITS = "brave kind clever gentle curious cheerful quiet friendly patient shy small young".split()

#: How a hero feels when all is well.
FEELINGS = "happy proud glad thankful".split()


def article(noun: str) -> str:
    """Return the noun phrase with its indefinite article: "a fox", "an owl"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
