"""What somebody who tries the model meets first, in prompts kept out of training: names, small talk,
subjects, variety.

The prompts are fixed and written by hand. The names asked for are kept out of training by
`given_names.is_kept`; the model card says which may have slipped in. No line of small talk is among 100,000
that training drew. Half of the subjects are words kept out of training, the others words of the pocket world.
Requests for a second and a third story are plain, and some are worded as in training.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path

import torch
from asking import ALL_PLOTS
from evaluate import Judge, Messages
from lexicon import NAMES
from plot import Plot

NAMED = {
    "Sophia": "Tell me a story about a girl named Sophia.",
    "Harper": "Tell me a story about a girl called Harper.",
    "Abigail": "Could I have a story about Abigail?",
    "Aria": "Please tell me about a little girl whose name is Aria.",
    "Savannah": "I'd love a story about Savannah the princess.",
    "Skylar": "a story about my daughter Skylar please",
    "Caroline": "Story: Caroline, a queen.",
    "Rebecca": "tell me the story of a teacher named Rebecca",
    "Aisha": "Tell me a story about Aisha.",
    "Ji-woo": "Tell me a story about a girl named Ji-woo.",
    "Ophelia": "Write a bedtime story about Ophelia the owl.",
    "Gertrude": "Could you tell a story about a goose named Gertrude?",
    "Winona": "I want one about a wolf called Winona.",
    "Michelle": "tell me a story about michelle, no, about Michelle",
    "William": "Tell me a story about a boy named William.",
    "Mason": "write a story about a boy called Mason",
    "Daniel": "Can I hear a story about Daniel?",
    "Joshua": "Please write a tale about Joshua the knight.",
    "Ezekiel": "Tell me about a shepherd named Ezekiel.",
    "Giovanni": "Tell me a short story about a baker named Giovanni.",
    "Antonio": "a story about Antonio the painter",
    "Bjorn": "Tell my son a story about a bear named Bjorn.",
    "Omar": "tell me a story about omar's friend, a boy named Omar",
    "Vikram": "My friend wants a story about a sailor called Vikram.",
    "Frank": "Tell me a story about a frog named Frank.",
    "Harrison": "I want to read a story about a dog named Harrison.",
    "Whiskers": "Tell me a story about a cat named Whiskers.",
    "Biscuit": "tell me a story about a dog called Biscuit",
    "Muffin": "Write me a tale of a pony named Muffin.",
    "Nemo": "Tell me a story about a fish named Nemo.",
    "Oreo": "Could you write about a rabbit named Oreo?",
    "Sprocket": "Tell me a story about a robot named Sprocket.",
    "Moonbeam": "Tell me a story about a wizard called Moonbeam.",
    "Buddy": "story about a mouse named Buddy",
    "Xochitl": "Tell me a story about a girl named Xochitl.",
    "Bilbo": "Tell me a story about Bilbo.",
    "Zebulon": "Tell me a story about a farmer named Zebulon.",
    "Ulysses": "Tell me a story about a turtle named Ulysses.",
    "Odin": "tell a story with Odin the crow in it",
    "Tinkerbell": "Tell me a story about a fairy named Tinkerbell.",
    "Zostra": "Tell me a story about a dragon named Zostra.",
    "Bartok": "Tell me a story about a donkey called Bartok.",
    "Amelie": "Hi! Tell me a story about a duck named Amelie.",
    "Flicker": "Tell me a story about Flicker the robot.",
}
TALK = {
    "thanks": (
        "thanks, little one!", "Thank you, pocket!", "thanks a million", "Oh, thank you!", "That was kind, thank you.",
        "thanks a bunch",
        "THANKS PAL", "Thank you, I enjoyed that.", "Thanks again!", "Thank you for that lovely tale.",
        "thank you thank you",
        "Big thanks!", "thanks for your time", "Thank you for everything.", "thanks man", "Ah, thanks.",
        "so thankful, thanks",
        "Thank you, goodnight story teller", "I want to thank you.", "thanks for the help",
    ),
    "insults": (
        "you are the dumbest thing ever", "You idiot!", "You are a terrible storyteller.",
        "that story was complete garbage",
        "I really hate you",
        "How dumb you are.", "This is the worst story ever.", "what a stupid little machine", "you suck at this",
        "you are an ugly robot",
        "Your stories are boring.", "That was really an awful tale.", "stupid bot", "You are useless, you know.",
        "I think you are dumb",
        "shut up you fool", "Your story is stupid.", "you are not good at this", "dumb computer", "what a boring tale",
    ),
    "greetings": (
        "hello and hi", "Hi pocket, hi!", "hey you", "Good morning to you, pocket", "Hello, little model!", "hi you",
        "Hey, hello!", "hello my dear",
        "Hi, I just installed you", "Hello, nice to see you", "heya", "Hello world", "Well hello there", "HELLO YOU",
        "A good evening to you, pocket",
        "Hi, good afternoon", "hello hello hello", "greetings, friend", "hi how are you doing today?",
        "Hello, how do you feel?",
    ),
}  # fmt: skip
#: What an answer must say to fit, and what it must not.
FITTING = {
    "thanks": (r"welcome|pleasure|glad", r"I only know|too hard"),
    "insults": (r"sorry|try|best|sad|better|not kind", r"I only know|too hard|welcome|do not understand"),
    "greetings": (
        r"\b(hello|hi|good (morning|day|evening|afternoon)|see you|I am well|very well|happy)\b",
        r"I only know|too hard|goodbye|come back",
    ),
}  # fmt: skip
SUBJECTS = (
    ("Tell me a story about a girl named Olivia who finds a treasure.", "girl", "Olivia", "treasure"),
    ("a short story about a dragon", "dragon"),
    ("Tell me a story about a spider.", "spider"),
    ("I want a story about an elephant.", "elephant"),
    ("Tell me a story about a brave astronaut.", "astronaut"),
    ("Tell me a story about a witch and a cat.", "witch", "cat"),
    ("write a story about a superhero", "superhero"),
    ("Tell me a story about a boy who finds a diamond.", "boy", "diamond"),
    ("Tell me a story about a lost bicycle.", "bicycle"),
    ("A story about a girl who loses her passport, please.", "girl", "passport"),
    ("Tell me a story about a vampire who is afraid of the dark.", "vampire", "dark|night"),
    ("Tell me a story about a king and a magic wand.", "king", "wand"),
    ("Can you tell me a story about a giraffe called Tim?", "giraffe", "Tim"),
    ("Tell me a story about dolphins.", "dolphin"),
    ("story about two friends in Egypt", "Egypt"),
    ("Tell me a story about a fox who lives under the sea.", "fox", "under the sea"),
    ("Tell me a story about a rabbit in New York.", "rabbit", "New York"),
    ("tell me a story about happiness", "happiness"),
    ("Tell me a story about computers.", "computer"),
    ("Tell me a story about luck.", "luck"),
    ("Make up a story about a knight who wants to sing.", "knight", "s[aiu]ng"),
    ("Tell me a story about a mouse who wins a race.", "mouse", "race"),
    ("Tell me a story about an owl and a storm.", "owl", "storm|wind"),
    ("Tell me a story about a robot who wants to fly.", "robot", "fly"),
    ("Tell me a story about a chef who makes soup.", "chef", "soup"),
    ("Tell me a story about a pig named Hamlet who sails a ship.", "pig", "Hamlet", "ship"),
    ("Tell me a story about a bear on his birthday.", "bear", "birthday"),
    ("Tell me a story about a swan and a flower.", "swan", "flower"),
    ("I would like a story with a ninja and a broom.", "ninja", "broom"),
    ("Tell me a tale about a wolf who hears a strange noise.", "wolf", "noise"),
)
SERIES = (
    ("Tell me a story.", "Tell me another story.", "Tell me another story."),
    ("Tell me a story about a fox named Pip.", "another one", "another one"),
    ("Tell me a story about Zoe.", "Tell me a different story about Zoe.", "And one more about Zoe."),
    ("tell me a story", "again", "again"),
    ("Tell me a story about a dog.", "Now a story about a cat.", "Now a story about a bird."),
    ("a story please", "another story please", "and a third story please"),
    ("Write a story about a robot.", "Write a different one.", "Write yet another one."),
    ("Tell me a story about a girl named Mia.", "More!", "More!"),
    ("Tell me a story about a king.", "Tell me a story about a queen.", "Tell me a story about a prince."),
    ("Can you tell me a story?", "I want one more.", "I want another new one."),
    ("Tell me a story about a boy named Sam.", "Tell me a new story about Sam.", "Tell me a third story about Sam."),
    ("a bedtime story", "next one", "next one please"),
    ("Tell me a story about a fox.", "Tell me a story about a fox.", "Tell me a story about a fox."),
    ("Tell me a story.", "Tell me a story.", "Tell me a story."),
    ("Tell me a story about Lily.", "Tell me another one about Tom.", "Tell me another one about Ben."),
    ("Tell me a short story about an owl.", "That was nice, another?", "One last story."),
    ("Story about a wizard", "Something different now", "Something completely different now"),
    ("Tell me a story about a pony named Star.", "I would like to hear another story.",
    "I would like to hear yet another story."),
    ("tell me a story about a bear", "no, tell me a different one", "no, a really different one"),
    ("Hello, tell me a story.", "Good! One more?", "Good! And one more?"),
)  # fmt: skip
AFTER = (
    {"role": "user", "content": "Tell me a story about a duck named Nora."},
    {"role": "assistant", "content": (
        "Once upon a time there was a duck named Nora who lived by the pond. Nora was a very brave duck. One day Nora "
        "went to play with a red ball. Up it went, and the ball got stuck in a tall tree. Then Nora met a goat called "
        "Tom. Tom brought a tall ladder. Soon the ball was out of the tree. Nora had the red ball back. And Nora was "
        "happy and never forgot what Tom had done."
    )},
)  # fmt: skip


def _pattern(wording: str) -> re.Pattern[str]:
    """A wording of a plot as a pattern, anything in its slots."""
    return re.compile("[^.!?]*?".join(re.escape(part) for part in re.split(r"\{\w+\}", wording)))


_PATTERNS = {
    plot.name: [
        _pattern(wording)
        for wordings in (*plot.problem, *plot.attempt, plot.lament, *plot.help, *plot.success)
        for wording in wordings
        if len(re.sub(r"\{\w+\}", "", wording)) > 12
    ]
    for plot in ALL_PLOTS
}


def plot_of(story: str) -> str:
    """Name the plot most of whose sentences a story has; empty when it has fewer than three of any."""
    found = Counter(
        {
            name: sum(pattern.search(story) is not None for pattern in patterns)
            for name, patterns in _PATTERNS.items()
        }
    )
    name, sentences = found.most_common(1)[0]
    return name if sentences >= 3 else ""


def _known(plots: tuple[Plot, ...]) -> set[str]:
    """Words that the plots write with a capital."""
    text = " ".join(
        wording
        for plot in plots
        for part in (*plot.problem, *plot.attempt, *plot.help, *plot.success)
        for wording in part
    )
    return set(re.findall(r"[A-Z][a-z]+", text)) | {
        "Once",
        "There",
        "Long",
        "Everyone",
        "All",
        "Then",
        "Just",
        "Not",
        "On",
    }


def is_kept_in(story: str, name: str) -> bool:
    """Say whether a story names its hero three times and never by a name that is like it but not the same."""
    others = set(re.findall(r"\b[A-Z][\w-]+", story)) - {name} - set(NAMES) - _known(ALL_PLOTS)
    altered = any(SequenceMatcher(None, name.lower(), other.lower()).ratio() > 0.55 for other in others)
    return len(re.findall(rf"\b{re.escape(name)}\b", story)) >= 3 and not altered


def _told(text: str) -> str:
    """A story without the line that repeats the request."""
    return re.sub(r"^(This|Here) is a story about [^.]*\.", "", text)


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


class Impressions:
    """A model asked everything once: greedily, or at a temperature with the seed that torch was given."""

    def __init__(self, judge: Judge, temperature: float, show: bool) -> None:
        self.judge, self.temperature, self.show = judge, temperature, show

    def write(self, conversations: list[Messages], length: int) -> list[str]:
        """Answer each conversation."""
        prompts = [self.judge.prompt(messages) for messages in conversations]
        return [text.strip() for text in self.judge.write(prompts, length, self.temperature, 0.95)]

    def report(self, kind: str, asked: list[str], texts: list[str], good: list[bool]) -> str:
        """Return the count, and print what failed when asked to."""
        if self.show:
            for question, text, right in zip(asked, texts, good, strict=True):
                if not right:
                    print(f"[{kind}] {question} -> {text[:300]}")
        return f"{sum(good)}/{len(good)}"

    def run(self) -> dict[str, str]:
        """Return for each kind how many were good, of how many."""
        out = {}
        texts = self.write([_user(ask) for ask in NAMED.values()], 320)
        good = [is_kept_in(text, name) for name, text in zip(NAMED, texts, strict=True)]
        out["names kept"] = self.report("names", list(NAMED.values()), texts, good)
        for kind, asks in TALK.items():
            wanted, unwanted = FITTING[kind]
            conversations = [
                [*AFTER, *_user(ask)] if index % 2 else _user(ask) for index, ask in enumerate(asks)
            ]
            texts = self.write(conversations, 40)
            good = [
                bool(re.search(wanted, text, re.I)) and not re.search(unwanted, text, re.I) for text in texts
            ]
            out[kind] = self.report(kind, list(asks), texts, good)
        asks = [ask for ask, *_ in SUBJECTS]
        texts = self.write([_user(ask) for ask in asks], 320)
        for kind, stories in (
            ("subjects", texts),
            ("subjects, first line left out", [_told(text) for text in texts]),
        ):
            good = [
                bool(plot_of(story)) and all(re.search(rf"\b({word})", story) for word in words)
                for story, (_, *words) in zip(stories, SUBJECTS, strict=True)
            ]
            out[kind] = self.report(kind, asks, texts, good)
        conversations = [[] for _ in SERIES]
        plots: list[list[str]] = [[] for _ in SERIES]
        for index in range(3):
            conversations = [
                [*messages, *_user(asks[index])] for messages, asks in zip(conversations, SERIES, strict=True)
            ]
            texts = self.write(conversations, 320)
            for messages, told, text in zip(conversations, plots, texts, strict=True):
                messages.append({"role": "assistant", "content": text})
                told.append(plot_of(text))
        good = [bool(told[2]) and told[2] not in told[:2] for told in plots]
        out["third story differs"] = self.report("third", [str(told) for told in plots], texts, good)
        good = [all(told) and len(set(told)) == 3 for told in plots]
        out["all three differ"] = f"{sum(good)}/{len(good)}"
        out["plots told"] = str(len({plot for told in plots for plot in told if plot}))
        return out


def main() -> None:
    """Print what came of the prompts, greedily and sampled as the model's generation settings say."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[1, 2], help="seeds of the runs at a temperature of 0.7"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print the answers that count as failed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    judge = Judge(args.folder)
    for seed in (None, *args.seeds):
        torch.manual_seed(seed or 0)
        found = Impressions(judge, 0.0 if seed is None else 0.7, args.show).run()
        print(
            json.dumps({"sampling": "greedy" if seed is None else f"0.7, seed {seed}", **found}), flush=True
        )


if __name__ == "__main__":
    main()
