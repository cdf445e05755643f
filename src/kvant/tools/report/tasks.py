"""Generated memory and reasoning tasks, of the kinds in the benchmark RULER, that show what a cache forgets.

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

HOPS = 4  # from the first variable to the last one with its value
# the number of frequent words, and how often they occur in a long list
COMMON = 5
MOST_TIMES = 10
# bounds of the text: characters at least, characters per token at most
LEAST_TEXT = 200
MOST_TEXT = 8
NUMBERS = range(10_000, 100_000)
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
# The embedded model knows these.
NAMES = ("Ada Ben Emma Felix Gus Hugo Jack Leo Lily " + "Max Milo Rex Ruby Sam Tara Theo Tom Zoe").split()
THINGS = (
    "ball bell book boat cup drum flag hat jar " + "key kite lamp map ring rope shell spoon stone"
).split()

# a text, a question, the beginning of the answer, and strings it should contain
Task = tuple[str, str, str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Sample:
    kind: str
    tokens: int  # upper limit for prompt and answer
    ids: tuple[int, ...]  # the prompt and the beginning of the answer
    max_tokens: int  # of the answer: twice as many as the expected strings take, plus 8
    expected: tuple[str, ...]

    @property
    def needed(self) -> int:
        return len(self.ids) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Hay:
    """Text in which something is hidden, how deep (0 to 1), and a source of random numbers."""

    piece: str
    depth: float
    rng: random.Random

    def words(self, count: int, syllables: int = 3) -> list[str]:
        """Draw distinct words made of two-letter syllables."""
        base = len(SYLLABLES)
        numbers = self.rng.sample(range(base**syllables), count)
        return ["".join(SYLLABLES[n // base**place % base] for place in range(syllables)) for n in numbers]

    def hide(self, sentences: Sequence[str]) -> str:
        """Insert sentences at equal distances, in order; number ``int(depth * count)`` lands at the depth."""
        shown = self.piece
        count = len(sentences)
        for place in reversed(range(count)):
            at = _sentence(self.piece, int((self.depth % (1 / count) + place / count) * len(self.piece)))
            shown = f"{shown[:at]}{sentences[place]} {shown[at:]}"
        return shown


def _sentence(text: str, place: int) -> int:
    """Return where the sentence at a position begins; without sentences, a position somewhat before it."""
    low = max(0, place - 400)
    end = text.rfind(". ", low, place)
    return low if end < 0 else end + 2


def _numbers(keys: int, values: int, hay: Hay) -> Task:
    words = hay.words(keys)
    numbers = hay.rng.sample(NUMBERS, keys * values)
    sentences = [f"A secret number of {words[n // values]} is {number}." for n, number in enumerate(numbers)]
    asked = int(hay.depth * keys)
    what, verb = ("number", "is") if values == 1 else (f"{values} numbers", "are")
    return (
        f"Remember the secret numbers in this text. {hay.hide(sentences)}",
        f"What {verb} the secret {what} of {words[asked]}?",
        f"The secret {what} of {words[asked]} {verb}",
        [str(number) for number in numbers[asked * values :][:values]],
    )


def _facts(hay: Hay) -> Task:
    """Write sentences and a question of a kind the embedded model knows, with names rare in the text."""
    names = sorted(hay.rng.sample(NAMES, len(NAMES)), key=hay.piece.count)[:4]
    things = hay.rng.sample(THINGS, len(names))
    asked = int(hay.depth * len(names))
    text = hay.hide([f"{name} has the {thing}." for name, thing in zip(names, things, strict=True)])
    name = names[asked]
    return f"Read this list. {text}", f"What does {name} have?", f"It says {name} has the", [things[asked]]


def _variables(hay: Hay) -> Task:
    """Write two alternating sequences of assignments."""
    words = [word.upper() for word in hay.words(2 + 2 * HOPS)]
    value, other = hay.rng.sample(NUMBERS, 2)
    sources = [str(value), str(other), *(f"VAR {word}" for word in words)]
    text = hay.hide([f"VAR {word} = {source}." for word, source in zip(words, sources, strict=False)])
    question = f"Which {1 + HOPS} variables have the value {value}, directly or from another variable?"
    begun = f"The variables that have the value {value} are"
    return f"Follow the variables in this text. {text}", question, begun, words[::2]


def _common(hay: Hay) -> Task:
    """Write a list about as long as the text, in which some words occur several times and others once."""
    words = hay.words(len(hay.piece) // 10, syllables=4)
    times = min(MOST_TIMES, len(words) // (2 * COMMON))  # at most half of a short list
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
    """Return the text to hide things in: a file's, or stories on which the embedded model was not trained."""
    if path is not None:
        return " ".join(read_text(path).split())
    messages = [message for document in heldout_documents() for message in document.get("messages", ())]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    return " ".join(dict.fromkeys(story for story in answers if len(story.split()) > STORY_WORDS))


def make_samples(
    tokenizer: Tokenizer, text: str, lengths: Sequence[int], samples: int, seed: int
) -> list[Sample]:
    """Make ``samples`` samples of each kind and length; the same seed makes the same ones.

    Each has as much of ``text`` as fits, from a random sentence on, repeated if necessary. Prompt and answer
    have at most as many tokens as the length; hidden things are at evenly spaced depths.
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
    """Return each format's greedy answers, first the full cache's; "" if logits were not finite.

    Only one cache exists at a time. ``progress`` is called with (prompt tokens read, prompt tokens in all).
    """
    answers: dict[CacheFormat, list[str]] = {form: [] for form in (REFERENCE, *formats)}
    total = len(answers) * sum(len(sample.ids) for sample in samples)
    done = 0
    for form, texts in answers.items():
        cache = form.make_cache(model, max(sample.tokens for sample in samples))
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
    """Return the share of the expected strings that occur in an answer, ignoring case."""
    return sum(each.lower() in answer.lower() for each in expected) / len(expected)


def task_rows(
    samples: Sequence[Sample], answers: Mapping[CacheFormat, Sequence[str]]
) -> list[dict[str, Any]]:
    """List by kind and length each score in percent, and how often an answer equals the full cache's."""
    rows = []
    for kind, tokens in dict.fromkeys((sample.kind, sample.tokens) for sample in samples):
        places = [n for n, sample in enumerate(samples) if (sample.kind, sample.tokens) == (kind, tokens)]
        row: dict[str, Any] = {"kind": kind, "tokens": tokens, "samples": len(places), "formats": []}
        for form, texts in answers.items():
            percent = 100 * sum(score(texts[n], samples[n].expected) for n in places) / len(places)
            same = sum(texts[n] == answers[REFERENCE][n] for n in places)
            row["formats"].append(
                {"format": form.label, "score_percent": round(percent, 2), "same_answers": same}
            )
        rows.append(row)
    return rows
