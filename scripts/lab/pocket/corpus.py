"""The corpus of the pocket model: a seeded generator of documents, all of it made here, nothing quoted.

Training documents and held-out documents come from different seeds, and held-out heroes have names that
training never shows (see `naming.is_heldout`). Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator

from document import PROMPT_WEIGHT, Document, Turn
from facts import drill, mixed_facts, owned_facts, recall
from naming import compose_name
from stories import Story, draw_story

ASKS = (
    "Tell me a story about {a_kind} named {N}.",
    "Tell me a story about {a_kind} called {N}.",
    "Tell me a short story about {a_kind} named {N}.",
    "Write a short story about {a_kind} called {N} who lives {home}.",
    "Write a story about {a_kind} named {N}.",
    "Can you tell me a story about {N} the {kind}?",
    "Could you write a story about {a_kind} named {N}, please?",
    "Please tell me a story about {a_kind} named {N}.",
    "I would like a story about {a_kind} named {N}.",
    "I want to hear a story about {N}, {a_kind} who lives {home}.",
    "Make up a story about {a_kind} named {N} and {a_thing}.",
    "Tell me a story about {a_kind} named {N} and {a_hkind} named {H}.",
    "Write a story with {N} the {kind} and {H} the {hkind}.",
    "Tell a story in which {H} the {hkind} helps {a_kind} named {N}.",
    "A story about {a_kind} named {N}, please.",
    "Tell me a bedtime story about {a_kind} named {N}.",
    "tell me a story about {a_kind} named {N}",
    "write a story about {a_kind} called {N}",
    "story about {a_kind} named {N}",
)
LOOSE_ASKS = (
    "Tell me a story about {N}.",
    "Tell me a story about {a_kind}.",
    "Tell me a story about {a_thing}.",
    "Tell me a story.",
    "Can you tell me a story?",
    "Write a story about {N}, please.",
)
MORE_ASKS = (
    "Now tell me a story about {a_kind} named {N}.",
    "Tell me another story, about {a_kind} named {N}.",
    "Another story, please, about {a_kind} called {N}.",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You tell small stories.",
    "You are a kind teller of stories.",
    "You answer questions in a few words.",
)
SMALL_TALK = (
    (("Hello!", "Hi!", "Hello", "Hi there!", "hi", "Good morning!", "Hey!"),
     "Hello! Shall I tell you a story? Just give me a name."),
    (("What can you do?", "Who are you?", "What are you?", "Help!", "How can you help me?"),
     "I tell small stories and answer questions about them."),
    (("Thank you!", "Thanks!", "Thank you very much.", "That was a good story.", "I liked that story."),
     "You are welcome! I am glad you liked it."),
    (("Goodbye!", "Bye!", "Good night!", "See you soon."), "Goodbye! Come back soon for another story."),
)  # fmt: skip
OTHER = (
    "What is the weather like?", "How do I fix my car?", "Write some code for me.", "Who won the game yesterday?",
    "What is the capital of France?", "How much is two and two?", "What is the date?", "What time is it?",
    "Can you book a flight?", "Explain how a computer works.", "What should I eat today?", "Sing a song for me.",
    "Translate this into Spanish.", "What is the news?", "Draw a map for me.", "Solve this equation.",
    "Write a letter to my boss.", "What is the best phone?", "Give me a recipe for bread.", "Do my homework.",
)  # fmt: skip
REFUSAL = "I am sorry, I only know small stories and questions about them."


def _opened(rng: random.Random, kind: str, story: Story | None = None) -> Document:
    """Start a conversation, now and then with a system message."""
    document = Document(kind, hero=story.slots["N"] if story else None)
    if rng.random() < 0.1:
        document.turns.append(Turn("system", rng.choice(SYSTEMS), PROMPT_WEIGHT))
    return document


def _request(rng: random.Random, story: Story, wordings: tuple[str, ...] = ASKS) -> str:
    """Ask for a story; half of the time in the plainest words."""
    wording = wordings[0] if rng.random() < 0.3 else rng.choice(wordings)
    return wording.format_map(story.slots)


def story_chat(rng: random.Random, heldout: bool = False) -> Document:
    """A request for a story with a named hero, and the story."""
    story = draw_story(rng, heldout)
    document = _opened(rng, "story", story)
    loose = not heldout and rng.random() < 0.1
    document.ask(_request(rng, story, LOOSE_ASKS if loose else ASKS))
    document.reply(story.text)
    if rng.random() < 0.1:
        wordings, reply = SMALL_TALK[2]
        document.ask(rng.choice(wordings))
        document.reply(reply)
    elif rng.random() < 0.1:
        another = draw_story(rng, heldout)
        document.ask(_request(rng, another, MORE_ASKS))
        document.reply(another.text)
    return document


def story_questions(rng: random.Random, heldout: bool = False) -> Document:
    """A story, told by the assistant or given by the user, and questions about it."""
    story = draw_story(rng, heldout)
    document = _opened(rng, "questions", story)
    questions = story.draw_questions(rng, rng.randint(2, 5))
    if rng.random() < 0.75:
        document.ask(_request(rng, story))
        document.reply(story.text, 0.5)
    else:
        lead = rng.choice(("Read this story:", "Here is a story:", "This is a story:"))
        ask, reply = questions.pop(0)
        document.ask(f"{lead} {story.text} {ask}")
        document.answer(reply)
    for ask, reply in questions:
        document.ask(ask)
        document.answer(reply)
    return document


def continuation(rng: random.Random, heldout: bool = False) -> Document:
    """The start of a story given by the user, the rest by the assistant."""
    story = draw_story(rng, heldout)
    document = _opened(rng, "continue", story)
    cut = rng.randint(1, 6)
    lead = rng.choice(("Continue this story:", "Go on with this story:", "How does this story go on?"))
    document.ask(f"{lead} {' '.join(story.sentences[:cut])}")
    document.reply(" ".join(story.sentences[cut:]))
    return document


def plain_story(rng: random.Random, heldout: bool = False) -> Document:
    """A story as plain text, without a conversation around it."""
    story = draw_story(rng, heldout)
    return Document("text", [Turn("text", story.text)], hero=story.slots["N"])


def small_talk(rng: random.Random, heldout: bool = False) -> Document:
    """A greeting, a thank-you, or a request for something this model does not know."""
    document = _opened(rng, "talk")
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.6:
            wordings, reply = rng.choice(SMALL_TALK)
            document.ask(rng.choice(wordings))
        else:
            reply = REFUSAL
            document.ask(_other_request(rng, heldout))
        document.reply(reply)
    return document


def _other_request(rng: random.Random, heldout: bool) -> str:
    """Draw a request that is not about stories; some of them about words nobody knows."""
    draw = rng.random()
    if draw < 0.6:
        return rng.choice(OTHER)
    word = compose_name(rng, heldout)
    wording = rng.choice(
        ("What is {w}?", "How do I {w}?", "Explain {w}.", "Where can I buy {w}?", "Write {w} for me.")
    )
    return wording.format(w=word.lower() if draw < 0.8 else word)


def facts(rng: random.Random, heldout: bool = False) -> Document:
    """A list of facts of several types, and questions about it."""
    return mixed_facts(rng, heldout) if rng.random() < 0.5 else owned_facts(rng, heldout)


def recall_near(rng: random.Random, heldout: bool = False) -> Document:
    """Recall among 2 to 24 facts of one type, the questions right after them."""
    count = rng.choice((2, 4, 8, 8, 8, 16, 24))
    return recall(rng, count, min(count, rng.randint(4, 10)), heldout=heldout)


def recall_far(rng: random.Random, heldout: bool = False) -> Document:
    """Recall with stories told between the facts and the questions."""
    padding = rng.choice((100, 200, 300, 500, 700))
    return recall(rng, rng.choice((2, 4, 8, 8, 16)), rng.randint(4, 8), padding, heldout)


def recall_farthest(rng: random.Random, heldout: bool = False) -> Document:
    """Recall across most of the context the model has."""
    return recall(rng, rng.choice((4, 8, 16)), 8, rng.randint(750, 1000), heldout)


def drills(rng: random.Random, heldout: bool = False) -> Document:
    """Plain repetitions of facts and words."""
    return drill(rng, rng.choice((4, 8, 16)), rng.choice((60, 120)))


Maker = Callable[..., Document]

#: Shares of the kinds by number of documents, before long contexts are trained.
SHORT_MIX: dict[Maker, float] = {
    story_chat: 24, story_questions: 26, continuation: 4, plain_story: 4, facts: 24, recall_near: 22, small_talk: 5,
    drills: 14,
}  # fmt: skip
#: Shares with long contexts.
LONG_MIX: dict[Maker, float] = {**SHORT_MIX, recall_far: 5, recall_farthest: 0.4}
KINDS: dict[str, Maker] = {maker.__name__: maker for maker in LONG_MIX}


def documents(seed: int, mix: dict[Maker, float], heldout: bool = False) -> Iterator[Document]:
    """Yield documents of a mix without end; the same seed gives the same documents."""
    rng = random.Random(f"{seed}-{heldout}")
    makers, shares = list(mix), list(mix.values())
    while True:
        yield rng.choices(makers, shares)[0](rng, heldout)


def heldout_documents(seed: int, per_kind: int) -> Iterator[Document]:
    """Yield held-out documents, the same number of each kind."""
    for name, maker in KINDS.items():
        rng = random.Random(f"{seed}-{name}")
        if maker is not drills:
            yield from (maker(rng, True) for _ in range(per_kind))


def heldout_records(seed: int, per_kind: int) -> Iterator[dict[str, object]]:
    """Yield held-out documents as records; of the longest only a few."""
    longest = 0
    for document in heldout_documents(seed, per_kind):
        longest += document.kind == "recall-far"
        if document.kind != "recall-far" or longest <= per_kind:
            yield record(document)


def main() -> None:
    """Write held-out documents, one JSON object a line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--per-kind", type=int, default=25)
    args = parser.parse_args()
    for entry in heldout_records(args.seed, args.per_kind):
        print(json.dumps(entry))


def record(document: Document) -> dict[str, object]:
    """Return a document as a record: text, or messages; a question's last answer stands apart."""
    if document.is_plain:
        return {"kind": document.kind, "text": "".join(turn.text for turn in document.turns)}
    messages = document.messages()
    if document.kind in ("story", "continue", "talk"):
        return {"kind": document.kind, "hero": document.hero, "messages": messages}
    return {"kind": document.kind, "messages": messages[:-1], "answer": messages[-1]["content"]}


if __name__ == "__main__":
    main()
