"""Given names, nicknames and strings that only look like names; a share of each is kept for held-out
documents.
"""

# ruff: noqa: SIM905
from __future__ import annotations

import random
import re
import zlib

from lexicon import NAMES

#: The names of the lexicon by whom they are given to; the others are given to anybody.
HER_NAMES = "Mina Lily Rosa Nora Ada Ivy Ruby Luna Maya Zoe Emma Nina Ella Anna Clara Lola Tara Daisy Poppy Wren".split()
HIS_NAMES = "Tom Ben Max Leo Finn Sam Otto Hugo Theo Jack Oscar Felix Milo Toby Gus Rex Bruno Ned".split()

GIRLS = (
    "Olivia Sophia Isabella Mia Charlotte Amelia Harper Evelyn Abigail Emily Elizabeth Sofia Avery Scarlett Grace "
    "Chloe Victoria Riley Aria Zoey Penelope Layla Lillian Addison Hannah Aubrey Stella Natalie Leah Hazel Violet "
    "Aurora Savannah Audrey Brooklyn Bella Claire Skylar Lucy Paisley Caroline Genesis Kennedy Samantha Allison "
    "Sarah Madeline Gabriella Alice Eva Lydia Julia Sadie Hailey Eliana Valentina Naomi Cora Eleanor Josephine "
    "Rachel Ruth Rebecca Martha Margaret Ingrid Astrid Freya Saoirse Niamh Aisling Priya Anjali Lakshmi Aisha "
    "Fatima Yasmin Leila Noor Zainab Mei Xia Yuki Sakura Hana Akiko Ji-woo Chiara Giulia Francesca Lucia Carmen "
    "Ines Paloma Beatriz Camille Amelie Celine Margot Heidi Greta Liesel Anneliese Katja Svetlana Natasha Olga "
    "Irina Wanjiku Amara Chidinma Zuri Thandiwe Nia Imani Kalani Leilani Moana Winona Dakota Jessica Jennifer "
    "Michelle Melissa Amanda Stephanie Nicole Kim Kelly Tiffany Wendy Mary Jane Sue Peggy Dorothy Gertrude Matilda "
    "Agatha Hermione Ophelia Juliet Cordelia Beatrice Rosalind Pippa Tilly"
).split()
BOYS = (
    "Liam Noah William James Benjamin Lucas Henry Alexander Mason Michael Ethan Daniel Jacob Logan Jackson Levi "
    "Sebastian Mateo Owen Aiden Samuel Joseph John David Wyatt Matthew Luke Asher Carter Julian Grayson Jayden "
    "Gabriel Isaac Lincoln Anthony Hudson Dylan Ezra Thomas Charles Christopher Jaxon Maverick Josiah Isaiah Andrew "
    "Elias Joshua Nathan Caleb Ryan Adrian Miles Eli Nolan Christian Aaron Cameron Ezekiel Colton Luca Landon "
    "Hunter Jonathan Santiago Axel Easton Cooper Jeremiah Angel Roman Connor Jameson Robert Greyson Jordan Ian "
    "Carson Jaxson Leonardo Nicholas Dominic Austin Everett Brooks Xavier Kai Jose Parker Adam Jace Wesley Kayden "
    "Silas Bennett Declan Waylon Weston Evan Emmett Micah Ryder Beau Damian Brayden Gael Rowan Harrison Bryson "
    "Sawyer Amir Kingston Jason Giovanni Vincent Ayden Chase Myles Diego Pablo Juan Carlos Pedro Antonio Marco "
    "Matteo Lorenzo Pierre Jean Jacques Antoine Fritz Hans Karl Jurgen Klaus Lars Sven Bjorn Olaf Ivan Dmitri Boris "
    "Sergei Mikhail Ahmed Mohammed Omar Yusuf Hassan Ali Karim Raj Arjun Rahul Vikram Sanjay Wei Ming Hiroshi Kenji "
    "Takeshi Haruto Min-jun Kofi Kwame Chidi Tendai Jabari Bob Bill Joe Jim Tim Dan Ron Harry Peter Paul George "
    "Frank Fred Arthur Alfred Walter Stanley Barnaby Percival Reginald Archibald Bartholomew"
).split()
PETS = (
    "Fluffy Whiskers Biscuit Cookie Bubbles Sparkle Muffin Pickles Spot Patch Shadow Rusty Ginger Pepper Snowball "
    "Tiger Buttons Waffles Noodle Peanut Mittens Socks Bandit Rocky Buddy Scout Ziggy Zippy Zorro Gizmo Pixel Dash "
    "Bolt Rover Fido Rufus Barkley Boots Simba Nemo Jasper Oreo Mochi Tofu Pumpkin Maple Willow Clover Bramble "
    "Thistle Acorn Flicker Twinkle Stardust Moonbeam Sunny Stormy Blaze Ember Smokey Fang Claws Spike Snappy Slinky "
    "Twiggy Hoppy Flopsy Quackers Beep Bleep Zap Sprocket Cog Widget Clank Rusty Bolts Turbo Robo Zed Nix Pox Jinx "
    "Hex Vex Rax Kobi Tuk Mog Bim Bam Fizz"
).split()
_TITLES = "Mr Mrs Sir Lady Captain Doctor Uncle Aunt King Queen Professor Little Old Big".split()


def is_kept(word: str, share: int = 8) -> bool:
    """Say whether a word is kept for held-out documents, by the word alone."""
    return word not in NAMES and zlib.crc32(f"kept {word.lower()}".encode()) % share == 0


def _letters(rng: random.Random) -> str:
    """Letters in no order, or by turns vowels and others."""
    size = rng.randint(3, 8)
    if rng.random() < 0.5:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(size))
    turns = ("bcdfghjklmnpqrstvwxyz", "aeiouy")
    start = rng.randint(0, 1)
    return "".join(rng.choice(turns[(start + index) % 2]) for index in range(size))


def _changed(rng: random.Random, name: str) -> str:
    """A name with a letter changed, doubled or left out, or two halves of names."""
    draw, at = rng.random(), rng.randrange(1, len(name))
    if draw < 0.3:
        return name[:at] + rng.choice("abcdefghijklmnopqrstuvwxyz") + name[at + 1 :]
    if draw < 0.5:
        return name[:at] + name[at] + name[at:]
    if draw < 0.65 and len(name) > 3:
        return name[:at] + name[at + 1 :]
    other = rng.choice(GIRLS + BOYS + PETS)
    return name[: max(2, at)] + other[len(other) // 2 :]


def _one(rng: random.Random, pool: list[str]) -> str:
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(pool)
    if draw < 0.75:
        return _changed(rng, rng.choice(GIRLS + BOYS + PETS)).capitalize()
    return _letters(rng).capitalize()


def requested_name(rng: random.Random, kind: str, pronoun: str, heldout: bool = False) -> str:
    """Draw a name that somebody may ask for: common, rare, or just letters; now and then two words or a
    number.
    """
    people = GIRLS if pronoun == "she" else BOYS
    pool = people if kind in ("girl", "boy") or rng.random() < 0.5 else PETS
    while True:
        name = _one(rng, pool)
        draw = rng.random()
        if draw < 0.04:
            name = f"{rng.choice(_TITLES)} {name}"
        elif draw < 0.06:
            name = f"{name}-{rng.randint(1, 99)}"
        elif draw < 0.08:
            name = f"{name} {_one(rng, pool)}"
        elif draw < 0.1:
            name = name.upper()
        elif draw < 0.16:
            name = name.lower()
        if any(is_kept(word) for word in (name, *re.split("[ -]", name))) == heldout and len(name) > 1:
            return name


def invented_name(rng: random.Random, pronoun: str) -> str:
    """Draw a name that nobody asked for: one of the lexicon's, so that it is written without a slip."""
    return rng.choice(HER_NAMES if pronoun == "she" else HIS_NAMES)
