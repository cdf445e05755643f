"""Conversations through caches with windows, chunks and states, which cannot go back far; and Ctrl-C anywhere."""

import random
from functools import partial

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

pytestmark = pytest.mark.usefixtures("without_compilation")
# Each kind, and the formats where they differ most: everything kept, a window of kvant's own, one of mlx-lm's, a state.
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
        for response in conversation.send(question, max_tokens=5 + 4 * (turn % 5), prefill_step_size=16, **SAY):
            if conversation.forgotten != forgotten:
                start_of_answer += bool(conversation.forgotten and not answer)
                in_answer += forgotten is not None
                forgotten = conversation.forgotten
                ids = prompt_ids(tokenizer, [before[0], *before[1 + forgotten :]]) + answer
                assert conversation._cache.ids[0] == ids
                expected = SAY["logits_processors"][0](mx.array(ids), fed_anew(model, ids, 64, kv_bits=bits))
                assert distance(response.logprobs, expected) < TOLERANCE[bits]
                # Up to the middle between the question alone and all is kept, and not a turn more.
                alone, more = [before[0], before[-1]], [before[0], *before[forgotten - 1 :]]
                middle = (64 + len(prompt_ids(tokenizer, alone)) + len(answer)) // 2
                assert not forgotten or len(ids) <= middle < len(prompt_ids(tokenizer, more)) + len(answer)
            answer.append(response.token)
        assert response.generation_tokens == len(answer)
        assert response.finish_reason == ("length" if len(answer) == 5 + 4 * (turn % 5) else "stop")
        assert conversation.messages[-1]["content"] == tokenizer.decode([each for each in answer if each != 5])
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
