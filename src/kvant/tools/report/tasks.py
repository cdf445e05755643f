"""Generated tasks of memory and reasoning, of the kinds of the benchmark RULER: what a cache format forgets
shows.

RULER: arXiv 2404.06654. As there, the score is the share of expected strings that occur in the answer.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvant.engine.generate import generate
from kvant.errors import LogitsError
from kvant.models import LanguageModel
from kvant.models.checkpoint import Progress
from kvant.text.prompt import encode_rendered, render_chat
from kvant.text.tokenizer import Tokenizer
from kvant.tools.report.formats import REFERENCE, CacheFormat
from kvant.tools.report.texts import STORY_WORDS, heldout_documents, read_text

HOPS = 4  # from a chain's first variable to its last
COMMON, MOST_TIMES = 5, 10  # words that are counted, and how often they occur in a long list
LEAST_TEXT, MOST_TEXT = 200, 8  # characters around what is to be found, and of a token: more than texts have
NUMBERS = range(10_000, 100_000)
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
# The embedded model knows these.
NAMES = ("Ada Ben Emma Felix Gus Hugo Jack Leo Lily " + "Max Milo Rex Ruby Sam Tara Theo Tom Zoe").split()
THINGS = (
    "ball bell book boat cup drum flag hat jar " + "key kite lamp map ring rope shell spoon stone"
).split()

# a text, a question, the answer's beginning, and strings it should have
Task = tuple[str, str, str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Sample:
    kind: str
    tokens: int  # that prompt and answer have at most
    ids: tuple[int, ...]  # of the prompt, with the answer's beginning
    max_tokens: int  # of the answer: twice what it takes to write the expected strings, and more
    expected: tuple[str, ...]

    @property
    def needed(self) -> int:
        return len(self.ids) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Hay:
    """A piece of a text, how deep something is hidden in it, 0 to 1, and the source of what is drawn."""

    piece: str
    depth: float
    rng: random.Random

    def words(self, count: int, syllables: int = 3) -> list[str]:
        """Words of syllables of two letters, none twice."""
        base = len(SYLLABLES)
        numbers = self.rng.sample(range(base**syllables), count)
        return ["".join(SYLLABLES[n // base**place % base] for place in range(syllables)) for n in numbers]

    def hide(self, sentences: Sequence[str]) -> str:
        """The piece with sentences in their order at equal distances, number ``int(depth * count)`` at the
        depth.
        """
        shown, count = self.piece, len(sentences)
        for place in reversed(range(count)):
            at = _sentence(self.piece, int((self.depth % (1 / count) + place / count) * len(self.piece)))
            shown = f"{shown[:at]}{sentences[place]} {shown[at:]}"
        return shown


def _sentence(text: str, place: int) -> int:
    """Where the sentence at a place begins; of a text without sentences, somewhere before."""
    low = max(0, place - 400)
    end = text.rfind(". ", low, place)
    return low if end < 0 else end + 2


def _numbers(keys: int, values: int, hay: Hay) -> Task:
    words, numbers = hay.words(keys), hay.rng.sample(NUMBERS, keys * values)
    told = [f"A secret number of {words[n // values]} is {number}." for n, number in enumerate(numbers)]
    asked = int(hay.depth * keys)
    what, verb = ("number", "is") if values == 1 else (f"{values} numbers", "are")
    return (
        f"Remember the secret numbers in this text. {hay.hide(told)}",
        f"What {verb} the secret {what} of {words[asked]}?",
        f"The secret {what} of {words[asked]} {verb}",
        [str(number) for number in numbers[asked * values :][:values]],
    )


def _facts(hay: Hay) -> Task:
    """Sentences and a question that the embedded model knows, of people whom the piece mentions least."""
    names = sorted(hay.rng.sample(NAMES, len(NAMES)), key=hay.piece.count)[:4]
    things, asked = hay.rng.sample(THINGS, len(names)), int(hay.depth * len(names))
    text = hay.hide([f"{name} has the {thing}." for name, thing in zip(names, things, strict=True)])
    name = names[asked]
    return f"Read this list. {text}", f"What does {name} have?", f"It says {name} has the", [things[asked]]


def _variables(hay: Hay) -> Task:
    """Two chains in turns."""
    words, (value, other) = [word.upper() for word in hay.words(2 + 2 * HOPS)], hay.rng.sample(NUMBERS, 2)
    given = [str(value), str(other), *(f"VAR {word}" for word in words)]
    text = hay.hide([f"VAR {word} = {own}." for word, own in zip(words, given, strict=False)])
    question = f"Which {1 + HOPS} variables have the value {value}, directly or from another variable?"
    begun = f"The variables that have the value {value} are"
    return f"Follow the variables in this text. {text}", question, begun, words[::2]


def _common(hay: Hay) -> Task:
    """A list as long as the piece, in which some words occur several times, the others once."""
    words = hay.words(len(hay.piece) // 10, syllables=4)
    times = min(MOST_TIMES, len(words) // (2 * COMMON))  # half of a short list
    listed = words[:COMMON] * times + words[COMMON : len(words) - COMMON * (times - 1)]
    hay.rng.shuffle(listed)
    question = f"Which {COMMON} words occur most often in the list?"
    return (
        f"Here is a list. {', '.join(listed)}.",
        question,
        "The words that occur most often are",
        words[:COMMON],
    )


KINDS: Mapping[str, Callable[[Hay], Task]] = {
    "needle": partial(_numbers, 1, 1),
    "keys": partial(_numbers, 4, 1),
    "values": partial(_numbers, 1, 4),
    "facts": _facts,
    "variables": _variables,
    "common": _common,
}


def haystack(path: Path | None) -> str:
    """The text around what is to be found: a file's, or stories that the embedded model was not trained
    on.
    """
    if path is not None:
        return " ".join(read_text(path).split())
    said = [message for document in heldout_documents() for message in document.get("messages", ())]
    told = [message["content"] for message in said if message["role"] == "assistant"]  # users tell facts, too
    return " ".join(dict.fromkeys(story for story in told if len(story.split()) > STORY_WORDS))


def make_samples(
    tokenizer: Tokenizer, text: str, lengths: Sequence[int], samples: int, seed: int
) -> list[Sample]:
    """So many samples of each kind and length; the same seed makes the same.

    As much of the ``text`` is read as fits, from a random sentence on, again and again. Prompt and answer
    have at most so many tokens as a length says; what is asked for is at depths that are spread evenly.
    """

    def made(kind: str, tokens: int, number: int, size: int) -> Sample:
        rng = random.Random(f"{seed} {kind} {tokens} {number}")
        start = _sentence(text, rng.randrange(len(text)))
        piece = (text[start : start + size] + f" {text[:size]}" * (size // len(text) + 1))[:size]
        task, question, begun, expected = KINDS[kind](Hay(piece, (number + 0.5) / samples, rng))
        prompt = f"{task}\n\n{question}"
        if tokenizer.has_chat_template:
            rendered = render_chat(tokenizer, [{"role": "user", "content": prompt}])
            ids = encode_rendered(tokenizer, rendered + begun)
        else:
            ids = tokenizer.encode(f"{prompt} {begun}")
        answer = len(encode_rendered(tokenizer, ", ".join(expected)))
        return Sample(kind, tokens, tuple(ids), 2 * answer + 8, tuple(expected))

    def longest(kind: str, tokens: int, number: int) -> Sample:
        sizes = range(LEAST_TEXT, MOST_TEXT * tokens)
        fitting = bisect_right(sizes, tokens, key=lambda size: made(kind, tokens, number, size).needed)
        if not fitting:
            raise ValueError(
                f"{tokens} tokens; {kind!r} takes {made(kind, tokens, number, LEAST_TEXT).needed}"
            )
        return made(kind, tokens, number, sizes[fitting - 1])

    return [
        longest(kind, tokens, number) for kind in KINDS for tokens in lengths for number in range(samples)
    ]


def answer_samples(
    model: LanguageModel,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    formats: Sequence[CacheFormat],
    progress: Progress = lambda done, total: None,
) -> dict[CacheFormat, list[str]]:
    """Each format's greedy answers, the full cache's first; "" where logits were not finite. One cache at a
    time.

    ``progress`` is called with (prompt tokens read, prompt tokens to be read).
    """
    answers: dict[CacheFormat, list[str]] = {own: [] for own in (REFERENCE, *formats)}
    total, done = len(answers) * sum(len(sample.ids) for sample in samples), 0
    for own, texts in answers.items():
        cache = own.make_cache(model, max(sample.tokens for sample in samples))
        for sample in samples:
            cache.reset()
            texts.append("")
            with suppress(LogitsError):
                texts[-1] = generate(
                    model, tokenizer, sample.ids, max_tokens=sample.max_tokens, prompt_cache=cache
                )
            progress(done := done + len(sample.ids), total)
    return answers


def score(answer: str, expected: Sequence[str]) -> float:
    """The share of the expected strings that occur in an answer; capitals do not matter."""
    return sum(each.lower() in answer.lower() for each in expected) / len(expected)


def task_rows(
    samples: Sequence[Sample], answers: Mapping[CacheFormat, Sequence[str]]
) -> list[dict[str, Any]]:
    """Of each kind and length every format's score, in percent, and how many answers are the full cache's."""
    rows = []
    for kind, tokens in dict.fromkeys((sample.kind, sample.tokens) for sample in samples):
        places = [n for n, sample in enumerate(samples) if (sample.kind, sample.tokens) == (kind, tokens)]
        row: dict[str, Any] = {"kind": kind, "tokens": tokens, "samples": len(places), "formats": []}
        for own, texts in answers.items():
            percent = 100 * sum(score(texts[n], samples[n].expected) for n in places) / len(places)
            same = sum(texts[n] == answers[REFERENCE][n] for n in places)
            row["formats"].append(
                {"format": own.label, "score_percent": round(percent, 2), "same_answers": same}
            )
        rows.append(row)
    return rows
