"""Names for heroes and helpers: common ones, and composed ones that can only be copied from the request."""

# ruff: noqa: SIM905
from __future__ import annotations

import random
import zlib

from given_names import is_kept
from lexicon import NAMES

_ONSETS = (
    "b br c ch cl d dr f fl g gl gr h j k kr l m n p pl pr qu r s sh sk sl sn st t th tr v w y z zw".split()
)
_VOWELS = "a a e e i i o o u u ai ee ie oo ou ea y".split()
_CODAS = "n r l m s t k x b d p g ck ll nd rt sk ft mp z v".split()
_ENDINGS = "a o i y ie ette in en on us el ix ina ara bert bin dor win ley ton".split()

#: Share of names kept for held-out documents, decided by the name alone.
_HELDOUT_OF = 12


def is_heldout(name: str) -> bool:
    """Say whether a composed name is reserved for held-out documents."""
    return name not in NAMES and zlib.crc32(name.encode()) % _HELDOUT_OF == 0


def _syllable(rng: random.Random, coda: bool) -> str:
    onset = rng.choice(_ONSETS) if rng.random() < 0.92 else ""
    return onset + rng.choice(_VOWELS) + (rng.choice(_CODAS) if coda else "")


def _compose(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.3:
        word = _syllable(rng, True)
    elif draw < 0.7:
        word = _syllable(rng, rng.random() < 0.5) + rng.choice(_ENDINGS)
    elif draw < 0.9:
        word = _syllable(rng, False) + _syllable(rng, True)
    else:
        word = _syllable(rng, False) + _syllable(rng, rng.random() < 0.4) + rng.choice(_ENDINGS)
    return word


def compose_name(rng: random.Random, heldout: bool = False) -> str:
    """Compose a name from syllables; training and held-out names never meet."""
    while True:
        name = _compose(rng).capitalize()
        if (
            3 <= len(name) <= 10
            and name not in NAMES
            and is_heldout(name) == heldout
            and (heldout or not is_kept(name))
        ):
            return name


def compose_word(rng: random.Random, heldout: bool = False) -> str:
    """Compose a lower-case word, for an animal nobody has heard of."""
    return compose_name(rng, heldout).lower()


def hero_name(rng: random.Random, heldout: bool = False) -> str:
    """Draw a hero's name: mostly composed in training, always composed when held out."""
    if heldout or rng.random() < 0.6:
        return compose_name(rng, heldout)
    return rng.choice(NAMES) if rng.random() < 0.85 else NAMES[0]


def other_name(rng: random.Random, taken: str, heldout: bool = False) -> str:
    """Draw a helper's name that differs from the hero's, more often a common one."""
    while True:
        name = rng.choice(NAMES) if rng.random() < 0.6 else compose_name(rng, heldout)
        if name != taken:
            return name
