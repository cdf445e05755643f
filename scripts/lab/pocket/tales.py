"""Eight more plots, told only where they are asked for: the held-out documents draw from `stories.PLOTS`."""

from __future__ import annotations

from plot import COLOUR, FOUND, Plot

TREASURE = Plot(
    "treasure",
    (
        (
            "One day {N} heard of {a_thing} deep in the ground.",
            "An old song told of {a_thing} in the ground.",
        ),
        ("{N} took a spoon and began to dig.", "{He} wanted to find it and went out to dig."),
    ),
    (
        ("{N} dug all day, but there was only sand.", "{He} dug here and there, but found only stones."),
        ("{His} hands hurt and the sun went down.", "At noon {he} was tired and hungry."),
    ),
    ("I am looking for {a_thing}", "I dig and dig, but there is nothing"),
    (
        ("{H} dug on the left and {N} dug on the right.", "{H} knew where to dig."),
        ("Deeper and deeper they went.", "They dug until the moon came up."),
    ),
    (
        ("Then something shone in the ground: it was the {bare}!", "There it was at last, the {bare}!"),
        ("{N} had found the {thing}.", "{N} took the {thing} and held it up to the moon."),
    ),
    (FOUND, COLOUR),
)

BIRTHDAY = Plot(
    "birthday",
    (
        ("It was the birthday of {N}.", "One morning {N} woke up and it was {his} birthday."),
        ("But nobody said a word about it.", "{He} waited at the door, but nobody came."),
    ),
    (
        ("{N} thought that everyone had forgotten.", "{N} asked the neighbours, but they had no time."),
        ("{He} made a small cake and ate it alone.", "{He} looked out of the window all morning."),
    ),
    ("It is my birthday, and nobody knows", "Everyone has forgotten my birthday"),
    (
        ("{H} smiled and led {N} to a big tent.", "{H} said nothing and opened a big door."),
        ("All the friends were there and sang.", 'Everyone jumped up and called: "Happy birthday!"'),
    ),
    (
        ("They had a party until late at night.", "There was music, and there was a big cake."),
        ("The best gift was {a_thing}.", "From {H} there was {a_thing}."),
    ),
    (COLOUR,),
)

NOISE = Plot(
    "noise",
    (
        (
            "One night {N} heard a strange noise {spot}.",
            "In the middle of the night there was a noise {spot}.",
        ),
        ("Tap, tap, tap, it went.", "It went on and on, and {N} could not sleep."),
    ),
    (
        ("{N} hid under {a_thing}.", "{N} took {a_thing} and went to the door."),
        ("{He} thought it was a ghost.", "{His} heart went very fast."),
    ),
    ("There is a ghost {spot}", "I can hear a strange noise"),
    (
        ("They took a light and went to look.", "{H} was not afraid and went first."),
        ("Step by step they came nearer.", "Slowly they looked {spot}."),
    ),
    (
        ("It was only a little mouse that danced!", "There sat a little mouse and played a drum!"),
        ("{N} laughed so much that {he} fell down.", "{N} gave the mouse some cake, and it was quiet."),
    ),
    ((("What made the noise?", "What was the noise?"), "A little mouse."),),
)

STAR = Plot(
    "star",
    (
        ("One night a star fell from the sky.", "One evening {N} saw a star fall down."),
        ("{N} found it {spot}, and it was crying.", "It lay {spot} and was cold."),
    ),
    (
        (
            "{N} threw the star up high, but it came down again.",
            "{N} climbed a tree, but the sky was too far.",
        ),
        ("The light of the star became small.", '"I want to go home," said the star.'),
    ),
    ("This star has fallen from the sky", "I can not bring the star home"),
    (
        ("{H} knew the highest mountain of all.", "{H} made a ladder out of moonlight."),
        ("They put the star into {a_thing} and went up.", "They carried the star in {a_thing}."),
    ),
    (
        ("At the top the star jumped back into the sky.", "Up and up went the star, until it was home."),
        ("Every night it shines for {N}.", "It was the brightest star of all that night."),
    ),
    ((("What fell from the sky?",), "A star."),),
    "basket bag hat jar cup blanket",
)

LETTER = Plot(
    "letter",
    (
        ("One day the wind brought a letter to {N}.", "One morning there was a letter at the door."),
        ("But the rain had made the words wet.", "But it was not for {N}."),
    ),
    (
        ("{N} tried to read it, but could not.", "{N} asked everyone on the road about it."),
        ("Nobody knew who had written it.", "{He} sat down and thought for a long time."),
    ),
    ("I have a letter, and I do not know for whom", "Someone has lost this letter"),
    (
        ("{H} read it and began to laugh.", '"But that letter is from me!" said {H}.'),
        ("It was about {a_thing}, a gift for {N}.", "In it were the words: Come and get {a_thing}."),
    ),
    (
        ("They went to the house of {H} together.", "So {H} gave it to {N} at once."),
        ("There was the {thing}, and it was for {N}.", "{N} got the {thing} that same day."),
    ),
    (COLOUR, (("What did the wind bring?",), "A letter.")),
)

SNOW = Plot(
    "winter",
    (
        ("It was winter, and snow fell all day.", "One winter the snow was as high as the door."),
        ("{N} went out and could not find the way back.", "{N} wanted to get wood and lost the way."),
    ),
    (
        ("{N} walked and walked, but all was white.", "{He} called, but the snow made all things quiet."),
        ("{His} nose was cold and {his} feet were wet.", "The night came, and {he} had no light."),
    ),
    ("I am lost in the snow", "I am so cold and I can not find my house"),
    (
        ("{H} had {a_thing} and a warm fire.", "{H} put {a_thing} on the snow to show the way."),
        ("They drank hot tea until the snow stopped.", "They sat by the fire and told stories."),
    ),
    (
        ("In the morning they made a man of snow.", "Then the sun came out, and the way was easy."),
        ("The snow man got the {thing}.", "{N} kept the {thing} to remember that day."),
    ),
    (COLOUR,),
    "hat scarf lamp lantern blanket flag candle",
)

FLY = Plot(
    "flying",
    (
        ("{N} wanted to fly like a bird.", "Every day {N} looked at the birds and wanted to fly."),
        ("But {he} had no wings.", "Everyone said that it could not be done."),
    ),
    (
        (
            "{N} jumped from the roof and fell into the grass.",
            "{N} made wings out of leaves, but they broke.",
        ),
        ("It hurt, and the birds laughed.", "{He} looked up at the sky and sighed."),
    ),
    ("I want to fly, but I fall down", "I wish I had wings"),
    (
        ("{H} had a big balloon and {a_thing}.", "{H} made a balloon and took {a_thing} along."),
        ("They waited for a good wind.", "They sat down in it and held on."),
    ),
    (
        ("Up they went, over the trees and over the clouds.", "The balloon carried them high into the sky."),
        ("{N} saw the whole world, and {he} was flying.", "The birds flew beside {N} and sang."),
    ),
    ((("What did {N} want?", "What did {N} want to do?"), "To fly."),),
)

SHIP = Plot(
    "voyage",
    (
        ("One day {N} went to sea in a little ship.", "{N} built a ship and sailed far away."),
        ("{He} wanted to see {a_thing} on the other side.", "On the other side, they said, was {a_thing}."),
    ),
    (
        ("On the third day the wind stopped.", "Then big waves came and the sail broke."),
        ("There was only water, left and right.", "The ship went round and round."),
    ),
    ("My ship does not move", "I do not know how to sail on"),
    (
        ("{H} came on board and sang to the wind.", "{H} swam in front and pulled the ship."),
        ("Soon the ship went fast over the waves.", "At last they saw land."),
    ),
    (
        ("They came to an island with golden sand.", "On the beach everyone was waiting for them."),
        ("There {N} got the {thing}.", "And there was the {thing}, as all had said."),
    ),
    (COLOUR,),
)

#: All of them, in no order of rank.
TALES = (TREASURE, BIRTHDAY, NOISE, STAR, LETTER, SNOW, FLY, SHIP)
