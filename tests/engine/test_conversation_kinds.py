"""Conversations through caches with windows, chunks and states, which cannot go back far: Ctrl-C anywhere,
and random actions, after which the messages are those kept here, and the answer is as if they were fed anew.
"""

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from support.conversations import (
    SAY,
    asking,
    check_consistent,
    conversation_of,
    distance,
    fed_anew,
    prompt_ids,
    text_of,
)
from support.counts import count
from support.interruption import Interruption
from support.kinds import KINDS, Loaded

from kvant.engine.conversation import Conversation
from kvant.errors import ContextError, PromptError

pytestmark = pytest.mark.usefixtures("without_compilation")
# Each kind, and the formats where they differ most: everything kept, a window of kvant's own, one of
# mlx-lm's, a state.
CASES = [(kind, 0) for kind in KINDS] + [
    (kind, bits) for kind in count(["qwen2", "mistral", "gpt_oss"], KINDS) for bits in (8, 4)
]
TOLERANCE = {8: 0.02, 4: 0.1, 0: 1e-4}  # of a probability, by bits: a rounding may flip a quantized value


def _question(turn: int, words: int = 5) -> str:
    return " ".join(f"w{10 + (7 * turn + 13 * at) % 100}" for at in range(words))


@pytest.mark.parametrize(("loaded", "bits"), CASES, indirect=["loaded"])
def test_turns_and_forgettings(loaded: Loaded, bits: int) -> None:
    model, tokenizer = loaded
    conversation = conversation_of(loaded, 64, bits, system_prompt="w6 w7", overflow="forget")
    start_of_answer = in_answer = 0
    for turn in range(count(7, 40)):
        question = _question(turn, 3 + 8 * (turn % 3))
        before = [*conversation.messages, asking(question)]
        answer: list[int] = []
        forgotten = None
        for response in conversation.send(
            question, max_tokens=5 + 4 * (turn % 5), prefill_step_size=16, **SAY
        ):
            if conversation.forgotten != forgotten:
                start_of_answer += bool(conversation.forgotten and not answer)
                in_answer += forgotten is not None
                forgotten = conversation.forgotten
                ids = prompt_ids(tokenizer, [before[0], *before[1 + forgotten :]]) + answer
                assert conversation._cache.ids == ids
                expected = SAY["logits_processors"][0](mx.array(ids), fed_anew(model, ids, 64, kv_bits=bits))
                assert distance(response.logprobs, expected) < TOLERANCE[bits]
                # Up to the middle between the question alone and all is kept, and not a turn more.
                alone, more = [before[0], before[-1]], [before[0], *before[forgotten - 1 :]]
                middle = (64 + len(prompt_ids(tokenizer, alone)) + len(answer)) // 2
                assert not forgotten or len(ids) <= middle < len(prompt_ids(tokenizer, more)) + len(answer)
            answer.append(response.token)
        assert response.generation_tokens == len(answer)
        assert response.finish_reason == ("length" if len(answer) == 5 + 4 * (turn % 5) else "stop")
        assert conversation.messages[-1]["content"] == tokenizer.decode(
            [each for each in answer if each != 5]
        )
        check_consistent(conversation)
        if turn % 4 == 3:
            text_of(conversation.edit(_question(turn + 50), max_tokens=4, **SAY))
            check_consistent(conversation)
    assert start_of_answer
    assert in_answer


# A KeyboardInterrupt in a weak reference's callback is not raised by Python but reported.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("loaded", count(["mistral", "llama4", "qwen3_next"], KINDS), indirect=True)
def test_interrupted_anywhere(loaded: Loaded) -> None:
    """Ctrl-C at any line of a turn that forgets: the next turn answers as if the messages were fed anew."""

    def talk(conversation: Conversation, question: int) -> str:
        return text_of(conversation.send(_question(question), max_tokens=12, prefill_step_size=16, **SAY))

    def begun() -> Conversation:
        conversation = conversation_of(loaded, 64, system_prompt="w6", overflow="forget")
        for turn in range(3):
            talk(conversation, turn)
        return conversation

    counted = Interruption(0)
    counted.of(partial(talk, begun(), 3))
    interrupted = 0
    for seed in range(count(4, 100)):
        conversation = begun()
        before = list(conversation.messages)
        at = random.Random(seed).randint(1, counted.lines)
        interrupted += Interruption(at).of(partial(talk, conversation, 3))
        conversation._end_turn()
        check_consistent(conversation)
        messages = list(conversation.messages)
        assert messages == before or messages[-2] == asking(_question(3))
        fresh = conversation_of(loaded, 64, overflow="forget")
        fresh.messages = messages
        assert talk(conversation, 4) == talk(fresh, 4)
        assert conversation.messages == fresh.messages
    assert interrupted


OPTIONS: dict[str, Any] = {"max_tokens": 8, "prefill_step_size": 16, **SAY}
ACTIONS = [
    *["send"] * 6,
    *["retry", "edit", "undo", "system", "reset", "save", "load", "fork"],
    *["leave", "leave", "interrupt", "interrupt", "refuse", "meddle"],
]


def _interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


class Talk:
    """A conversation, and the messages that it should have."""

    def __init__(self, loaded: Loaded, folder: Path, rng: Random) -> None:
        self.loaded, self.folder, self.rng = loaded, folder, rng
        self.conversation = self.make()
        self.expected: list[Any] = []
        self.saved: dict[Path, list[Any]] = {}
        self.left: list[Iterator[Any]] = []  # turns that were left suspended

    def make(self, cache: Any = None) -> Conversation:
        model, tokenizer = self.loaded
        return Conversation(model, tokenizer, cache or model.make_cache(72, kv_bits=0), overflow="forget")

    def question(self, least: int = 1) -> str:
        return " ".join(
            f"w{self.rng.randrange(6, 128)}" for _ in range(self.rng.randrange(least, least + 11))
        )

    def begin(self, do: str, question: str, **options: Any) -> tuple[list[Any], str, Iterator[Any]]:
        """The messages before a turn, its question, and its answer."""
        asked = [place for place, message in enumerate(self.expected) if message["role"] == "user"]
        if do == "send":
            return self.expected, question, self.conversation.send(question, **options)
        if not asked:
            with pytest.raises(PromptError, match="nothing was asked yet"):
                self.conversation.retry()
            return self.begin("send", question, **options)
        before, last = self.expected[: asked[-1]], self.expected[asked[-1]]["content"]
        if do == "edit":
            return before, question, self.conversation.edit(question, **options)
        return before, last, self.conversation.retry(**options)

    def record(self, before: list[Any], question: str, text: str) -> None:
        system = before[:1] if before and before[0]["role"] == "system" else []
        kept = before[len(system) + self.conversation.forgotten :]
        self.expected = [*system, *kept, asking(question), {"role": "assistant", "content": text}]

    def turn(self, do: str) -> None:
        before, question, responses = self.begin(do, self.question(), **OPTIONS)
        self.record(before, question, text_of(responses))

    send = retry = edit = turn

    def leave(self, do: str) -> None:
        """The answer is listened to for a while; closed, or held on to while the talk goes on."""
        before, question, responses = self.begin(
            self.rng.choice(["send", "retry"]), self.question(), **OPTIONS
        )
        heard = "".join(response.text for response in islice(responses, self.rng.randrange(1, 5)))
        self.record(before, question, heard)
        self.left.append(responses)
        if self.rng.random() < 0.5:
            responses.close()  # type: ignore[attr-defined]

    def interrupt(self, do: str) -> None:
        again = self.rng.choice(["send", "send", "retry", "edit"])
        _, _, responses = self.begin(again, self.question(50), **OPTIONS, prompt_progress_callback=_interrupt)
        with pytest.raises(KeyboardInterrupt):
            text_of(responses)
        assert self.conversation.forgotten == 0

    def refuse(self, do: str) -> None:
        with pytest.raises(ValueError, match="none empty"):
            self.begin(self.rng.choice(["send", "edit"]), "w6", stop=[""])
        with pytest.raises(ContextError, match="the question alone"):
            self.begin(self.rng.choice(["send", "edit"]), "w6 " * 80)
        self.begin(self.rng.choice(["send", "retry"]), self.question())  # never listened to

    def undo(self, do: str) -> None:
        asked = [place for place, message in enumerate(self.expected) if message["role"] == "user"]
        assert self.conversation.undo() == (self.expected[asked[-1]]["content"] if asked else None)
        self.expected = self.expected[: asked[-1]] if asked else self.expected

    def system(self, do: str) -> None:
        text = self.rng.choice([None, "w6", "w7 w8"])
        self.conversation.set_system_prompt(text)
        assert self.conversation.system_prompt == text
        others = [message for message in self.expected if message["role"] != "system"]
        self.expected = others if text is None else [{"role": "system", "content": text}, *others]

    def reset(self, do: str) -> None:
        self.conversation.reset()
        self.expected = [message for message in self.expected if message["role"] == "system"]

    def save(self, do: str) -> None:
        path = self.folder / f"{len(self.saved)}"
        self.conversation.save(path)
        self.saved[path] = list(self.expected)

    def load(self, do: str) -> None:
        if self.saved:
            path = self.rng.choice(list(self.saved))
            self.conversation.load(path)
            self.expected = list(self.saved[path])

    def fork(self, do: str) -> None:
        """What one appends the other never sees."""
        was = self.conversation
        self.conversation = self.make(was._cache.fork())
        text_of(was.send(self.question(), **OPTIONS))
        self.conversation.messages = list(self.expected)

    def meddle(self, do: str) -> None:
        """Somebody else uses the cache; its tokens are not taken for those of the conversation."""
        self.conversation.undo()  # ends the turn
        self.conversation.messages = list(self.expected)
        self.conversation._cache.reset()
        self.loaded[0](mx.array([[5, 6, 7]]), cache=self.conversation._cache)

    def compare(self, done: list[str]) -> None:
        fresh, question = self.make(), self.question()
        fresh.messages = list(self.expected)
        expected = text_of(fresh.send(question, **OPTIONS))
        assert text_of(self.conversation.send(question, **OPTIONS)) == expected, done
        assert self.conversation.messages == fresh.messages, done
        self.expected = list(fresh.messages)


@pytest.mark.parametrize(
    ("loaded", "seeds"),
    [(kind, count(1, 40)) for kind in count(["mistral", "gpt_oss", "qwen3_next"], KINDS)],
    indirect=["loaded"],
)
def test_everything_together(loaded: Loaded, seeds: int, tmp_path: Path) -> None:
    for seed in range(seeds):
        rng = Random(seed)
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        talk, done = Talk(loaded, folder, rng), list[str]()
        for do in rng.choices(ACTIONS, k=count(40, 60)):
            done.append(do)
            getattr(talk, do)(do)
            if rng.random() < 0.4:
                talk.compare(done)
            elif do != "leave":
                assert talk.conversation.messages == talk.expected, done
                check_consistent(talk.conversation)
        assert len({*done}) > 8
