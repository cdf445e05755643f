"""Generated tasks of memory and reasoning, of the kinds of the benchmark RULER: what a cache format forgets shows.

RULER: arXiv 2404.06654. As there, the score is the share of expected strings that occur in the answer.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.engine.generate import stream_generate
from kvant.errors import LogitsError
from kvant.models import LanguageModel
from kvant.text.prompt import encode_prompt, encode_rendered, render_chat
from kvant.text.tokenizer import Tokenizer
from kvant.tools.report.formats import REFERENCE, CacheFormat
from kvant.tools.report.texts import STORY_WORDS, heldout_documents, read_text

KEYS, VALUES = 4, 4  # of the tasks with several
CHAINS, HOPS = 2, 4  # of variables; a chain has a variable more
COMMON, MOST_TIMES = 5, 10  # words that are counted, and how often they occur in a long list
LEAST_TEXT = 160  # characters around what is to be found
MOST_TEXT = 8  # characters a token, more than any language has
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
# The embedded model knows these.
NAMES = ("Ada Ben Emma Felix Gus Hugo Jack Leo Lily " + "Max Milo Rex Ruby Sam Tara Theo Tom Zoe").split()
THINGS = ("ball bell book boat cup drum flag hat jar " + "key kite lamp map ring rope shell spoon stone").split()


@dataclass(frozen=True, slots=True)
class Task:
    """What is read, what is asked about it, how the answer begins, and the strings that it should have."""

    text: str
    question: str
    begun: str
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A task as a prompt."""

    kind: str
    tokens: int  # that prompt and answer have at most
    ids: tuple[int, ...]  # of the prompt and the begun answer
    max_tokens: int  # of the answer: twice what it takes to write the expected strings, and more
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """Each format's answers to the samples."""

    samples: tuple[Sample, ...]
    formats: tuple[CacheFormat, ...]  # the full cache first
    texts: tuple[tuple[str, ...], ...]  # (formats, samples)

    def rows(self) -> list[dict[str, Any]]:
        """Of each kind and length the formats' scores, in percent, and how many answers are the full cache's."""
        places: dict[tuple[str, int], list[int]] = {}
        for place, sample in enumerate(self.samples):
            places.setdefault((sample.kind, sample.tokens), []).append(place)

        def figures(cache: CacheFormat, texts: Sequence[str], own: Sequence[int]) -> dict[str, Any]:
            right = sum(score(texts[n], self.samples[n].expected) for n in own)
            same = sum(texts[n] == self.texts[0][n] for n in own)
            return {"format": cache.label, "score_percent": round(100 * right / len(own), 2), "same_answers": same}

        return [
            {"kind": kind, "tokens": tokens, "samples": len(own)}
            | {"formats": [figures(*each, own) for each in zip(self.formats, self.texts, strict=True)]}
            for (kind, tokens), own in places.items()
        ]


def score(answer: str, expected: Sequence[str]) -> float:
    """The share of the expected strings that occur in an answer; capitals do not matter."""
    return sum(each.lower() in answer.lower() for each in expected) / len(expected)


class Hay:
    """A piece of a text, and words and numbers that are not in it.

    Args:
        text: repeated where it is shorter than the piece.
        size: characters of the piece; it begins with a random sentence.
        depth: of what is hidden, 0 to 1.
    """

    def __init__(self, text: str, size: int, depth: float, rng: random.Random) -> None:
        self.size, self.depth, self.rng = size, depth, rng
        start = _sentence(text, rng.randrange(len(text)))
        piece = text[start : start + size]
        if len(piece) < size:
            piece = (piece + f" {text}" * (1 + size // len(text)))[:size]
        self.piece, self._lower = piece, piece.lower()

    def new(self, draw: Callable[[], str]) -> str:
        """Draw until it is not in the piece."""
        while (drawn := draw()).lower() in self._lower:
            pass
        return drawn

    def word(self) -> str:
        """Three syllables."""
        return self.new(lambda: "".join(self.rng.choices(SYLLABLES, k=3)))

    def number(self) -> str:
        """Five digits."""
        return self.new(lambda: str(self.rng.randrange(10_000, 100_000)))

    def place(self, others: Sequence[str], sentence: str) -> list[str]:
        """Put a sentence among others, so that :meth:`hide` hides it at the depth."""
        place = int(self.depth * (1 + len(others)))
        return [*others[:place], sentence, *others[place:]]

    def hide(self, sentences: Sequence[str]) -> str:
        """The piece with sentences between its own, in their order: one at the depth, the others at equal distances."""
        shown, count = self.piece, len(sentences)
        for place in reversed(range(count)):
            at = _sentence(self.piece, int((self.depth % (1 / count) + place / count) * self.size))
            shown = f"{shown[:at]}{sentences[place]} {shown[at:]}"
        return shown


def _sentence(text: str, place: int) -> int:
    """Where the sentence at a place begins; of a text without sentences, somewhere before."""
    low = max(0, place - 400)
    end = text.rfind(". ", low, place)
    return low if end < 0 else end + 2


def _numbers(hay: Hay, keys: int, values: int) -> Task:
    words = [hay.word() for _ in range(keys)]
    facts = [(word, hay.number()) for word in words for _ in range(values)]
    sentences = [f"A secret number of {word} is {number}." for word, number in facts]
    if keys > 1:
        sentences = hay.place(sentences[1:], sentences[0])
    asked = "What is the secret number" if values == 1 else "What are all the secret numbers"
    begun = f"The secret number{'s'[: values - 1]} of {words[0]} {'is' if values == 1 else 'are'}"
    expected = tuple(number for word, number in facts if word == words[0])
    text = f"Remember the secret numbers in this text. {hay.hide(sentences)}"
    return Task(text, f"{asked} of {words[0]}?", begun, expected)


def _facts(hay: Hay) -> Task:
    """Sentences and a question that the embedded model knows."""
    names, things = hay.rng.sample(NAMES, len(NAMES)), hay.rng.sample(THINGS, KEYS)
    names = sorted(names, key=hay.piece.count)[:KEYS]  # a story of the same name would be in the way
    sentences = [f"{name} has the {thing}." for name, thing in zip(names, things, strict=True)]
    text = hay.hide(hay.place(sentences[1:], sentences[0]))
    return Task(f"Read this list. {text}", f"What does {names[0]} have?", f"It says {names[0]} has the", (things[0],))


def _variables(hay: Hay) -> Task:
    chains = [[hay.word().upper() for _ in range(1 + HOPS)] for _ in range(CHAINS)]
    values = [hay.number() for _ in chains]
    lines = [
        f"VAR {chain[hop]} = {f'VAR {chain[hop - 1]}' if hop else value}."
        for hop in range(1 + HOPS)
        for chain, value in zip(chains, values, strict=True)
    ]
    question = f"Which {1 + HOPS} variables have the value {values[0]}, directly or from another variable?"
    begun = f"The variables that have the value {values[0]} are"
    return Task(f"Follow the variables in this text. {hay.hide(lines)}", question, begun, tuple(chains[0]))


def _common(hay: Hay) -> Task:
    """Some words occur several times, the others once. They have four syllables of two letters each."""
    count = hay.size // 10
    numbers = hay.rng.sample(range(len(SYLLABLES) ** 4), count)
    words = ["".join(SYLLABLES[n // len(SYLLABLES) ** place % len(SYLLABLES)] for place in range(4)) for n in numbers]
    times = min(MOST_TIMES, max(2, count // (2 * COMMON)))
    listed = words[:COMMON] * times + words[COMMON:][: max(0, count - COMMON * times)]
    hay.rng.shuffle(listed)
    text, question = f"Here is a list. {', '.join(listed)}.", f"Which {COMMON} words occur most often in the list?"
    return Task(text, question, "The words that occur most often are", tuple(words[:COMMON]))


KINDS: Mapping[str, Callable[[Hay], Task]] = {
    "needle": lambda hay: _numbers(hay, 1, 1),
    "keys": lambda hay: _numbers(hay, KEYS, 1),
    "values": lambda hay: _numbers(hay, 1, VALUES),
    "facts": _facts,
    "variables": _variables,
    "common": _common,
}


def haystack(path: Path | None) -> str:
    """The text that surrounds what is to be found: a file's, or stories of the embedded model's held-out documents."""
    if path is not None:
        return " ".join(read_text(path).split())
    documents = heldout_documents()
    told = [each["text"] for each in documents if "text" in each]
    said = [message for each in documents for message in each.get("messages", ())]
    told += [message["content"] for message in said if message["role"] == "assistant"]  # users tell facts, too
    return " ".join(dict.fromkeys(story for story in told if len(story.split()) > STORY_WORDS))


def make_samples(
    tokenizer: Tokenizer, vocab_size: int, text: str, lengths: Sequence[int], samples: int, seed: int
) -> list[Sample]:
    """So many samples of each kind and length; the same seed makes the same.

    Args:
        text: from :func:`haystack`; the more of it as fits is read.
        lengths: tokens that prompt and answer have at most; what is hidden is at depths that are spread evenly.

    Raises:
        ValueError: a length that a task does not fit.
        PromptError: the chat template, or the tokenizer, fails.
    """

    def made(kind: str, tokens: int, number: int) -> Sample:
        def sized(size: int) -> Sample:
            rng = random.Random(f"{seed} {kind} {tokens} {number}")
            task = KINDS[kind](Hay(text, size, (number + 0.5) / samples, rng))
            prompt = f"{task.text}\n\n{task.question}"
            if tokenizer.has_chat_template:
                rendered = render_chat(tokenizer, [{"role": "user", "content": prompt}])
                ids = encode_rendered(tokenizer, rendered + task.begun)
            else:
                ids = encode_prompt(tokenizer, f"{prompt} {task.begun}", vocab_size)
            answer = len(encode_rendered(tokenizer, ", ".join(task.expected)))
            return Sample(kind, tokens, tuple(ids), 2 * answer + 8, task.expected)

        best, low, high = sized(LEAST_TEXT), LEAST_TEXT, MOST_TEXT * tokens
        if len(best.ids) + best.max_tokens > tokens:
            raise ValueError(f"{tokens} tokens; {kind!r} takes at least {len(best.ids) + best.max_tokens}")
        while high - low > 1:
            found = sized(middle := (low + high) // 2)
            if len(found.ids) + found.max_tokens > tokens:
                high = middle
            else:
                best, low = found, middle
        return best

    return [made(kind, tokens, number) for kind in KINDS for tokens in lengths for number in range(samples)]


def answer_samples(
    model: LanguageModel,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    formats: Sequence[CacheFormat],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Answers:
    """Answer every sample greedily with every format; one cache is there at a time.

    Args:
        formats: checked by ``check_formats``; the full cache among them is not asked twice.
        progress: called with (prompt tokens read, prompt tokens to be read).
    """
    asked = (REFERENCE, *(f for f in formats if f != REFERENCE))
    total, done = len(asked) * sum(len(sample.ids) for sample in samples), 0
    texts = []
    for each in asked:
        cache = each.make_cache(model, max(sample.tokens for sample in samples))
        own = []
        for sample in samples:
            cache.reset()
            text = ""
            with suppress(LogitsError):  # as far as it went
                for response in stream_generate(
                    model, tokenizer, sample.ids, max_tokens=sample.max_tokens, prompt_cache=cache
                ):
                    text += response.text
            own.append(text)
            progress(done := done + len(sample.ids), total)
        texts.append(tuple(own))
    return Answers(tuple(samples), asked, tuple(texts))
