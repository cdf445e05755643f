"""Plots in which something is undertaken: a crossing, a feast, a garden, a song, a rescue, a race."""

from __future__ import annotations

from plot import COLOUR, Plot

RIVER = Plot(
    "river",
    (
        (
            "One day {N} wanted to bring {a_thing} to {his} grandmother.",
            "It was grandmother's birthday, and {N} had {a_thing} for her.",
        ),
        ("But the river was wide, and there was no bridge.", "But the bridge over the river was gone."),
    ),
    (
        (
            "{N} put one foot into the water, but it was too deep.",
            "{N} tried to build a bridge of wood, but the water took it away.",
        ),
        ("{He} sat on a stone and did not know what to do.", "{He} walked up and down and sighed."),
    ),
    ("I must cross the river", "I can not cross the river with my {thing}"),
    (
        ("{H} had a small boat.", "{H} went away and came back with a small boat."),
        ("{H} carried the {bare} and {N} sat in front.", "Together they crossed the wide river."),
    ),
    (
        ("Grandmother stood at the door and was full of joy.", "Grandmother was waiting on the other side."),
        (
            "She loved the {thing} and made soup for both of them.",
            "{N} gave her the {thing}, and she laughed.",
        ),
    ),
    (
        COLOUR,
        (("What did {N} bring to grandmother?", "What did {N} give to grandmother?"), "{A_thing}."),
        (("What did they have to cross?", "What did {N} have to cross?"), "The river."),
    ),
    "cake basket scarf blanket book lamp cup pillow pear hat",
)

FEAST = Plot(
    "feast",
    (
        (
            "One day {N} wanted to make a big soup for all {his} friends.",
            "It was the day of the feast, and {N} wanted to make soup.",
        ),
        ("But the soup did not taste good.", "But there was nothing in the house but water and salt."),
    ),
    (
        (
            "{N} put grass and leaves into the soup, but that was bad.",
            "{N} put more salt into the soup, but then it was too salty.",
        ),
        ("Soon the friends would come.", "{He} was afraid that nobody would like it."),
    ),
    ("My soup is not good", "My friends will come soon, and the soup is bad"),
    (
        (
            "{H} ran home and brought {a_thing} full of good things.",
            "{H} came back with {a_thing} full of good things.",
        ),
        ("{H} knew just what to put into the soup.", "They cut and cooked and sang together."),
    ),
    (
        (
            "All the friends came and ate until they were full.",
            "The friends said it was the best soup of the year.",
        ),
        ("The {thing} stood on the table for all to see.", "{N} filled the {thing} with soup for {H}."),
    ),
    (
        COLOUR,
        (("What did {H} bring?", "What did {H} bring to {N}?"), "{A_thing}."),
        (("What did {N} make?", "What did {N} want to make?"), "Soup."),
    ),
    "pot basket bottle jar cup bag spoon",
)

GARDEN = Plot(
    "garden",
    (
        ("One spring {N} planted a seed and waited.", "In spring {N} put a little seed into the ground."),
        ("Days went by, but nothing came out of the ground.", "{He} waited and waited, but nothing grew."),
    ),
    (
        ("{N} sang to the seed, but it did not grow.", "{N} talked to the seed every day, but it slept on."),
        ("The ground was dry and hard.", "{He} was sad and thought the seed was bad."),
    ),
    ("My seed does not grow", "I planted a seed, but nothing comes"),
    (
        ("{H} brought water every morning.", "{H} knew that a seed needs water and gave it some."),
        ("{H} and {N} cared for it day after day.", "They waited for the sun together."),
    ),
    (
        ("One morning there was a {colour} flower.", "Then a {colour} flower opened in the sun."),
        (
            "{N} found {a_thing} beside the {colour} flower, left there by {H}.",
            "{H} gave {N} {a_thing} to put beside the flower.",
        ),
    ),
    (
        (("What colour was the flower?", "Which colour was the flower?"), "The flower was {colour}."),
        (("What did {N} plant?", "What did {N} put into the ground?"), "A seed."),
        (("What did the seed need?",), "Water."),
    ),
)

SONG = Plot(
    "song",
    (
        ("{N} loved music and had {a_thing}.", "{N} had one treasure, and it was {a_thing}."),
        (
            "But when {he} sang, everyone ran away.",
            "{He} wanted to sing at the feast, but {he} did not know any song.",
        ),
    ),
    (
        ("{N} sang to the birds, but they flew away.", "{N} sang to the trees, but they did not answer."),
        ("{He} was afraid to try again.", "{His} voice was small and sad."),
    ),
    ("I want to sing, but I can not", "Nobody likes my song"),
    (
        ("{H} taught {N} an old song, line by line.", "{H} knew many songs and taught one to {N}."),
        ("They sang it every day until it was good.", "{N} sang it day after day, and {H} listened."),
    ),
    (
        (
            "At the feast {N} sang the song, and everyone danced.",
            "Then {N} sang at the feast, and all the people were quiet.",
        ),
        ("{N} gave the {thing} to {H} to say thank you.", "For this {H} got the {thing} from {N}."),
    ),
    (
        COLOUR,
        (("What did {H} teach?", "What did {N} learn from {H}?"), "A song."),
        (("What did {N} give to {H}?", "What did {H} get from {N}?"), "{A_thing}."),
    ),
    "flute drum bell whistle",
)

BABY = Plot(
    "baby",
    (
        ("One evening {N} heard someone cry {spot}.", "One day {N} heard a small voice {spot}."),
        ("It was a baby bird that had lost its mother.", "A little bird sat there, alone and cold."),
    ),
    (
        ("{N} called for the mother, but nobody came.", "{N} looked for the nest, but could not find it."),
        (
            "{He} put the bird into {a_thing} to keep it warm.",
            "{He} made a bed for the bird out of {a_thing}.",
        ),
    ),
    ("This little bird has lost its mother", "I can not find the nest of this bird"),
    (
        ("{H} knew every tree and every nest.", "{H} had seen a nest that morning."),
        (
            "{H} carried the bird and {N} carried the {thing}.",
            "They walked slowly, and {H} sang to the bird.",
        ),
    ),
    (
        ("High in a tree the mother was waiting.", "There was the nest, and the mother was full of joy."),
        ("The little bird was home again.", "The mother sang for {N} all evening."),
    ),
    (
        COLOUR,
        (("What did {N} hear?", "Who was lost?", "Who had lost its mother?"), "A little bird."),
        (("Where was the bird?", "Where did {N} hear the bird?"), "The bird was {spot}."),
    ),
    "hat scarf basket sock glove blanket pillow bag shoe",
)

RACE = Plot(
    "race",
    (
        (
            "One day there was a big race, and the prize was {a_thing}.",
            "There was a race every summer, and this time one could win {a_thing}.",
        ),
        ("{N} wanted to win it, but {he} was slow.", "{N} wanted to run too, but everyone laughed."),
    ),
    (
        (
            "{N} ran up and down alone, but soon {he} was tired.",
            "{N} tried to run fast and fell over a stone.",
        ),
        ("{He} thought {he} could never win.", "{His} feet hurt and {he} sat down."),
    ),
    ("I want to win the race", "I am too slow for the race"),
    (
        ("{H} showed {N} how to run and how to rest.", "{H} ran beside {N} every morning."),
        ("Day by day they ran a little more.", "Slowly {N} became strong and fast."),
    ),
    (
        ("On the day of the race {N} ran like the wind.", "Then the race began, and {N} ran and ran."),
        ("{N} came in first and won the {thing}.", "{N} won the race and got the {thing}."),
    ),
    (
        COLOUR,
        (("What did {N} win?", "What was the prize?"), "{A_thing}."),
        (("What did {N} want to win?",), "The race."),
    ),
)

#: All of them, in no order of rank.
ADVENTURES = (RIVER, FEAST, GARDEN, SONG, BABY, RACE)
