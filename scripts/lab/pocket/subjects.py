"""What a story may be asked to be about: who, which thing, where, what happens, and themes; some kept for
held-out.
"""

# ruff: noqa: SIM905
from __future__ import annotations

import random

from given_names import is_kept
from lexicon import ANIMALS, HOMES, PEOPLE, THINGS
from naming import compose_word

CREATURES = (
    "elephant lion tiger monkey penguin cow horse dinosaur unicorn panda fairy spider bee butterfly snail whale "
    "shark octopus kitten puppy bird fish snake sheep chicken ghost monster alien vampire troll mermaid parrot "
    "crocodile camel giraffe zebra kangaroo koala seal crab ant worm bat rat rooster swan eagle peacock lizard toad "
    "beetle raccoon moose cheetah leopard hippo rhino gorilla dolphin jellyfish starfish hamster ferret weasel "
    "phoenix griffin goblin elf dwarf ogre snowman scarecrow teddy toy cloud tree car train ship bus tractor rocket "
    "computer toaster teapot pencil potato carrot apple cookie star moon cactus pumpkin firefly dragonfly ladybug "
    "caterpillar grasshopper cricket falcon raven llama alpaca walrus flamingo pelican stork heron lobster salmon "
    "lynx jackal hyena meerkat sloth chameleon iguana gecko"
).split()
FOLK = {
    "child": None, "man": "he", "woman": "she", "pirate": None, "witch": "she", "astronaut": None, "doctor": None,
    "nurse": None, "cook": None, "chef": None, "detective": None, "inventor": None, "scientist": None, "ninja": None,
    "clown": None, "dancer": None, "singer": None, "hunter": None, "fisherman": "he", "soldier": None, "monk": "he",
    "mother": "she", "father": "he", "sister": "she", "brother": "he", "grandmother": "she", "grandfather": "he",
    "aunt": "she", "uncle": "he", "student": None, "pilot": None, "driver": None, "thief": None, "superhero": None,
    "firefighter": None, "policeman": "he", "programmer": None, "librarian": None, "musician": None, "cowboy": "he",
    "viking": None, "samurai": None, "magician": None, "emperor": "he", "empress": "she", "carpenter": None,
    "blacksmith": None, "butcher": None, "beekeeper": None, "postman": "he", "lady": "she", "orphan": None,
}  # fmt: skip
OBJECTS = (
    "treasure sword wand cookie apple star egg chest diamond gem necklace umbrella violin guitar piano trumpet "
    "bicycle car train phone computer camera letter picture painting statue watch compass telescope hammer shovel "
    "bucket chair table plate fork knife pizza sandwich banana lemon melon pumpkin carrot potato flower rose tulip "
    "butterfly balloon puzzle toy robot teddy rocket spaceship submarine sled skateboard tent backpack suitcase "
    "wallet ticket passport crystal pearl potion cauldron broom cloak shield arrow bow helmet armor carpet curtain "
    "vase teapot kettle oven fridge clover acorn mushroom pinecone fossil bone tooth magnet battery microscope "
    "dictionary diary notebook pencil eraser ruler scissors"
).split()
PLACES = (
    "on the moon,in space,in the desert,in the jungle,in the city,at the zoo,at school,in the kitchen,"
    "under the sea,in a big city,in the woods,on a mountain,at the beach,in the park,in the library,"
    "in the hospital,in the swamp,on a ship,in a tree,in the clouds,in the circus,in the mountains,in the snow,"
    "in the basement,in the attic,in Paris,in London,in New York,in Africa,in China,in India,in Japan,in Egypt,"
    "in Brazil,in Rome,in Berlin,on Mars,in a lighthouse,in a haunted house,in a windmill,in a volcano,on a cloud,"
    "in the museum,in the bakery,at the station"
).split(",")
THEMES = (
    "friendship,love,courage,kindness,magic,music,winter,summer,autumn,Christmas,Halloween,space,time,school,"
    "football,hope,family,honesty,sharing,food,chocolate,pizza,dreams,the weather,the stars,growing up,being brave,"
    "getting lost,learning to swim,going to bed,the rain,the wind,fire,water,gold,money,war and peace,science,"
    "history,sports,trust,fear,happiness,loneliness,patience,luck,nature,travel,adventure,a long journey,a bad day,"
    "the first day of school,cooking,dancing,painting,fishing,gardening,jealousy,anger,forgiveness,teamwork,"
    "bedtime,monsters,computers,the future"
).split(",")
QUALITIES = (
    "lonely sad happy angry old tiny big lazy clumsy funny silly grumpy hungry sleepy wise rich poor tall fat thin "
    "beautiful magical purple blue red green white black golden fast slow strong weak honest greedy polite noisy "
    "lost scared fearless invisible forgetful talking flying dancing singing"
).split()
_IRREGULAR = {
    "mouse": "mice", "goose": "geese", "wolf": "wolves", "deer": "deer", "sheep": "sheep", "fish": "fish", "man": "men",
    "woman": "women", "child": "children", "thief": "thieves", "elf": "elves", "dwarf": "dwarves", "knife": "knives",
    "leaf": "leaves", "policeman": "policemen", "fisherman": "fishermen", "postman": "postmen", "snowman": "snowmen",
    "fox": "foxes", "witch": "witches", "tooth": "teeth", "scarf": "scarves", "scissors": "scissors",
}  # fmt: skip

#: What may be asked to happen, by the plot in which it does.
CLAUSES = {
    "lost": (
        "who loses {a_bare}", "who lost {a_thing}", "who looks for {a_bare}", "who lost {his} {bare}",
        "who can not find {his} {bare}", "who finds {a_bare}", "who finds a lost {bare}",
        "who is looking for {his} {thing}",
    ),
    "wish": (
        "who wants {a_bare}", "who wishes for {a_bare}", "who dreams of {a_thing}", "who has a wish",
        "who has no money",
        "who gets {a_bare}", "who wants to have {a_thing}", "who works hard for {a_bare}",
    ),
    "stuck": (
        "who climbs a tree", "whose {bare} gets stuck in a tree", "with {a_bare} in a tree", "who plays with {a_bare}",
        "whose {bare} is stuck",
    ),
    "storm": (
        "and a storm", "in a big storm", "whose roof is broken", "whose house is hit by a storm", "and a broken roof",
    ),
    "map": (
        "who finds a map", "and an old map", "with a secret map", "who finds {a_bare}", "who discovers {a_thing}",
        "who goes on an adventure", "who follows a map and finds {a_bare}", "looking for a secret place",
    ),
    "dark": (
        "who is afraid of the dark", "who can not sleep", "who is scared at night", "who is afraid of the night",
        "who fears the dark",
    ),
    "river": (
        "who visits {his} grandmother", "who crosses a river", "and {his} grandmother",
        "who brings {a_bare} to {his} grandmother",
        "who must cross a river", "and a boat",
    ),
    "feast": (
        "who makes soup", "who cooks for {his} friends", "and a bad soup", "who likes to cook", "who makes a feast",
        "who wants to cook a big soup", "who is a bad cook",
    ),
    "garden": (
        "who plants a seed", "who grows a flower", "with a garden", "and a flower", "who loves flowers",
        "who waits for a flower",
    ),
    "song": (
        "who wants to sing", "who learns to sing", "who can not sing", "who loves music", "who learns a song",
        "who sings at a feast",
    ),
    "baby": (
        "who finds a baby bird", "who saves a bird", "who helps a little bird", "who rescues a baby bird",
        "and a lost bird",
    ),
    "race": (
        "who wins a race", "who runs a race", "who wants to win a race", "who learns to run", "who is too slow",
        "and a big race", "who wins {a_bare}",
    ),
    "treasure": (
        "who finds a treasure", "looking for treasure", "who digs for {a_bare}", "and a treasure",
        "who hunts for treasure",
        "who finds {a_bare} in the ground", "who goes on a treasure hunt", "who discovers a treasure",
        "who finds {a_thing}",
        "who finds a hidden treasure", "who searches for a lost treasure",
    ),
    "birthday": (
        "who has a birthday", "and a birthday party", "whose birthday is forgotten", "on {his} birthday",
        "who gets {a_bare} for {his} birthday",
    ),
    "noise": (
        "who hears a noise", "and a ghost", "who hears a strange noise at night", "who is afraid of ghosts",
        "and a strange noise",
    ),
    "star": ("who finds a star", "who catches a star", "and a fallen star", "who helps a star", "and a little star"),
    "letter": ("who gets a letter", "who finds a letter", "and a strange letter", "with a letter"),
    "winter": ("in winter", "who is lost in the snow", "in the snow", "who gets lost", "on a cold day"),
    "flying": (
        "who wants to fly", "who learns to fly", "who can fly", "who flies to the clouds", "with a balloon",
        "who travels in a balloon",
    ),
    "voyage": (
        "who goes to sea", "who sails a ship", "who sails across the sea", "on a ship", "who finds an island",
        "who goes on a long journey", "who travels far away",
    ),
}  # fmt: skip


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def _pick(rng: random.Random, pool: list[str], heldout: bool) -> str:
    """Draw one that is kept for held-out documents, or one that is not."""
    return rng.choice([item for item in pool if is_kept(item, 6) == heldout])


def asked_kind(rng: random.Random, heldout: bool = False) -> tuple[str, str]:
    """Draw what the hero is to be, and the pronoun."""
    draw = rng.random()
    if draw < 0.2:
        kind, pronoun = ("girl", "she") if rng.random() < 0.5 else ("boy", "he")
    elif draw < 0.4 and not heldout:
        kind, pronoun = rng.choice(ANIMALS), None
    elif draw < 0.5:
        kind = rng.choice(list(PEOPLE))
        pronoun = PEOPLE[kind]
    elif draw < 0.72:
        kind, pronoun = _pick(rng, CREATURES, heldout), None
    elif draw < 0.86:
        kind = _pick(rng, list(FOLK), heldout)
        pronoun = FOLK[kind]
    elif draw < 0.93:
        kind, pronoun = f"{rng.choice(QUALITIES)} {rng.choice(ANIMALS)}", None
    else:
        kind, pronoun = compose_word(rng, heldout), None
    return kind, pronoun or rng.choice(("he", "she"))


def asked_thing(rng: random.Random, things: list[str], heldout: bool = False) -> str:
    """Draw a thing that a story is to have in it."""
    draw = rng.random()
    if draw < 0.35 and not heldout:
        return rng.choice(things or THINGS)
    if draw < 0.9:
        return _pick(rng, OBJECTS, heldout)
    return compose_word(rng, heldout)


def asked_place(rng: random.Random, heldout: bool = False) -> str:
    """Draw where a story is to take place, as a phrase with its preposition."""
    return rng.choice(HOMES) if rng.random() < 0.4 and not heldout else _pick(rng, PLACES, heldout)


def asked_theme(rng: random.Random, heldout: bool = False) -> str:
    """Draw what else a story can be about."""
    return _pick(rng, THEMES, heldout) if rng.random() < 0.8 else compose_word(rng, heldout)
