"""Plots in which something is lost, missing or feared."""

from __future__ import annotations

from plot import COLOUR, FOUND, GIFT, WANTED, WHERE, Plot

LOST = Plot(
    "lost",
    (
        (
            "{N} had {a_thing} and loved it more than anything.",
            "{His} best thing was {a_thing}.",
            "Every day {N} played with {a_thing}.",
        ),
        (
            "One morning the {bare} was gone.",
            "One day the wind took the {bare} away.",
            "But one evening {he} lost the {bare}.",
        ),
    ),
    (
        (
            "{N} looked in the house and in the garden, but it was not there.",
            "{N} looked here and there, but could not find it.",
        ),
        (
            "{He} sat down and began to cry.",
            "Soon {he} was tired and very sad.",
            "{He} did not know what to do.",
        ),
    ),
    ("I have lost my {thing}", "My {thing} is gone", "I can not find my {thing}"),
    (
        (
            "{H} had good eyes and looked everywhere.",
            "{H} walked in front and {N} came after.",
            "{H} and {N} looked all day long.",
        ),
        (
            "Then {H} stopped and pointed.",
            "At last {H} called out with joy.",
            "Suddenly {H} saw something {colour}.",
        ),
    ),
    (
        ("There was the {bare}, {spot}!", "The {bare} was {spot} all the time!"),
        ("{N} took the {thing} and held it tight.", "{N} found the {thing} and danced with joy."),
    ),
    (FOUND, WHERE, COLOUR, (("What did {N} lose?", "What had {N} lost?"), "{A_thing}.")),
)

WISH = Plot(
    "wish",
    (
        (
            "More than anything {N} wanted {a_thing}.",
            "{N} had one wish, and it was {a_thing}.",
            "Every night {N} dreamed of {a_thing}.",
        ),
        (
            "But {he} had no money at all.",
            "But there was no {bare} in the shop.",
            "But nobody had one to give away.",
        ),
    ),
    (
        (
            "First {N} tried to make one out of wood, but it broke.",
            "{N} worked hard for many days, but it was not enough.",
        ),
        ("{He} felt sad and went home.", "{He} sat down under a tree and sighed."),
    ),
    ("I wish I had {a_thing}", "All I want is {a_thing}", "I have no money for {a_thing}"),
    (
        (
            "{H} asked {N} to paint the fence.",
            "{H} needed someone to carry the wood.",
            "{H} asked {N} to clean the house.",
        ),
        (
            "They worked together until the sun went down.",
            "{N} worked hard and sang a song.",
            "Together they worked until it was done.",
        ),
    ),
    (
        ("Then {H} opened a box and gave the {thing} to {N}.", "Then {H} smiled and gave {N} the {thing}."),
        ("{N} could not believe it.", "{N} jumped up and down with joy.", "Now the wish had come true."),
    ),
    (WANTED, GIFT, COLOUR),
)

STUCK = Plot(
    "stuck",
    (
        ("One windy day {N} went out with {a_thing}.", "One day {N} went to play with {a_thing}."),
        (
            "The wind took the {bare} and carried it up into a tree.",
            "Up it went, and the {bare} got stuck in a tall tree.",
        ),
    ),
    (
        (
            "{N} jumped as high as {he} could, but the tree was too tall.",
            "{N} tried to climb the tree, but {he} fell down.",
        ),
        ("{He} tried again and again.", "{He} threw a little stone at it, but that did not work."),
    ),
    ("My {thing} is stuck in the tree", "I can not reach my {thing}"),
    (
        ("{H} went to get a long rope.", "{H} brought a tall ladder.", "{H} was good at climbing."),
        ("{N} held on and {H} went up.", "Slowly {H} climbed to the top of the tree."),
    ),
    (
        ("{H} took the {bare} down from the tree.", "Soon the {bare} was out of the tree."),
        ("{N} had the {thing} back.", "{N} took the {thing} and laughed."),
    ),
    (
        COLOUR,
        (("Where was the {bare}?", "Where did the {bare} get stuck?"), "The {bare} was in a tree."),
        (("What got stuck?", "What was stuck in the tree?"), "{A_thing}."),
    ),
    "kite ball hat scarf flag boat feather doll",
)

STORM = Plot(
    "storm",
    (
        (
            "One night a big storm came.",
            "One evening there was a great storm.",
            "Then the wind and the rain came.",
        ),
        (
            "In the morning the roof of the house was broken.",
            "The wind broke the roof, and rain fell into the house.",
        ),
    ),
    (
        (
            "{N} tried to mend the roof alone, but it was too hard.",
            "{N} put some wood on the roof, but it fell down again.",
        ),
        ("{He} was cold and wet.", "All {his} things were wet."),
    ),
    ("The storm broke my roof", "My roof is broken and I am cold"),
    (
        ("{H} came back with {a_thing}.", "{H} ran home and brought {a_thing}."),
        ("With the {bare} the work was easy.", "The {bare} was just what they needed."),
    ),
    (
        ("Together they mended the roof before night.", "By evening the roof was as good as new."),
        ("{N} looked at the {thing} and smiled.", "{H} let {N} keep the {thing}."),
    ),
    (
        COLOUR,
        (("What did {H} bring?", "What did {H} bring to {N}?"), "{A_thing}."),
        (("What did the storm break?", "What was broken?"), "The roof of the house."),
    ),
    "rope ladder blanket brush bag basket pot wheel",
)

MAP = Plot(
    "map",
    (
        ("One day {N} found an old map in a box.", "One morning {N} saw an old map on the floor."),
        ("The map showed a secret place {spot}.", "On the map there was a mark {spot}."),
    ),
    (
        ("{N} went out to look, but the way was long.", "{N} tried to read the map, but it was hard."),
        ("Soon {he} was lost.", "{He} did not know which way to go."),
    ),
    ("I have a map, but I am lost", "I want to know what is {spot}"),
    (
        ("{H} looked at the map and knew the way.", "{H} could read the map very well."),
        ("They walked over the hills together.", "{H} and {N} walked until they came to the place."),
    ),
    (
        ("There, {spot}, they saw {a_thing}.", "And there was {a_thing}, {spot}!"),
        ("{N} found the {thing} and laughed with joy.", "{N} took the {thing} home."),
    ),
    (FOUND, COLOUR, WHERE, (("What showed the way?", "What did {N} have to show the way?"), "An old map.")),
)

DARK = Plot(
    "dark",
    (
        ("But {N} was afraid of the dark.", "There was only one thing: {N} was afraid of the night."),
        ("When the sun went down, {he} could not sleep.", "Every night {he} hid under the bed."),
    ),
    (
        (
            "{N} tried to count the stars, but it did not help.",
            "{N} tried to sing a song, but {his} voice was too small.",
        ),
        ("{He} was still afraid.", "{He} could hear the wind in the trees."),
    ),
    ("I am afraid of the dark", "I can not sleep at night"),
    (
        ("{H} went home and came back with {a_thing}.", "{H} gave {a_thing} to {N}."),
        ("It was made by {H} and it was full of warm light.", "It was the best thing that {H} had."),
    ),
    (
        ("{N} put the {thing} near the bed.", "That night {N} held the {thing}."),
        (
            "Now the dark was soft and warm, and {he} was not afraid.",
            "{He} was not afraid any more and slept well.",
        ),
    ),
    (GIFT, COLOUR, (("What was {N} afraid of?", "Why could {N} not sleep?"), "The dark.")),
    "lamp candle lantern blanket pillow doll book bell mirror",
)

#: All of them, in no order of rank.
TROUBLES = (LOST, WISH, STUCK, STORM, MAP, DARK)
