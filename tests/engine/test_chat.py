"""A conversation feeds only what is new, and survives whatever happens to it."""

import gc
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from kvant.engine.conversation import Conversation
from kvant.engine.generate import GenerationResponse
from kvant.errors import ContextError
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
QUESTIONS = ["Tell me a story about a fox named Pip.", "Who helped Pip?", "Thank you!"]


@pytest.fixture
def conversation(pocket: Pocket) -> Conversation:
    model, tokenizer = pocket
    return Conversation(model, tokenizer, model.make_cache(1024, kv_bits=0))


def _text(responses: Iterator[GenerationResponse]) -> str:
    return "".join(response.text for response in responses)


def _fresh_answer(pocket: Pocket, messages: list[Any], question: str, **options: Any) -> str:
    """The answer of a conversation whose history is fed anew."""
    model, tokenizer = pocket
    other = Conversation(model, tokenizer, model.make_cache(1024, kv_bits=0))
    other.messages = list(messages)
    return _text(other.send(question, **options))


def test_a_stopped_answer_is_the_turn(pocket: Pocket, conversation: Conversation) -> None:
    run = conversation.send(QUESTIONS[0], max_tokens=50)
    heard = "".join(next(run).text for _ in range(12))
    run.close()
    assert conversation.messages[-1]["content"] == heard
    messages = list(conversation.messages)
    expected = _fresh_answer(pocket, messages, QUESTIONS[1], max_tokens=20)
    assert _text(conversation.send(QUESTIONS[1], max_tokens=20)) == expected
    assert conversation.reused_tokens > 20


def test_an_answer_that_is_kept_suspended_is_the_turn(pocket: Pocket, conversation: Conversation) -> None:
    """The iterator may still be held, after a break or after its last response, when the next turn begins."""
    run = conversation.send(QUESTIONS[0], max_tokens=50)
    heard = "".join(next(run).text for _ in range(12))
    again = conversation.send(QUESTIONS[1], max_tokens=6)
    assert conversation.messages[-1]["content"] == heard
    pieces = []
    for response in again:
        pieces.append(response.text)
        if response.finish_reason:
            break
    assert conversation.messages[-1]["content"] == "".join(pieces)
    messages = list(conversation.messages)
    del run, again
    gc.collect()
    assert conversation.messages == messages
    expected = _fresh_answer(pocket, messages, QUESTIONS[2], max_tokens=20)
    assert _text(conversation.send(QUESTIONS[2], max_tokens=20)) == expected


def test_a_refused_turn_leaves_the_record_true(pocket: Pocket, conversation: Conversation) -> None:
    _text(conversation.send(QUESTIONS[0], max_tokens=20))
    messages = list(conversation.messages)
    conversation.messages = []
    with pytest.raises(ValueError, match="none empty"):
        conversation.send("Other", stop=[""])
    conversation.send("never listened to")
    conversation.messages = list(messages)
    expected = _fresh_answer(pocket, messages, QUESTIONS[1], max_tokens=20)
    assert _text(conversation.send(QUESTIONS[1], max_tokens=20)) == expected


def test_processors_see_the_whole_conversation(pocket: Pocket, conversation: Conversation) -> None:
    """Also what is in the cache and is not fed again."""
    seen: list[int] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.size)
        return logits

    _text(conversation.send(QUESTIONS[0], max_tokens=20))
    responses = list(conversation.send(QUESTIONS[1], max_tokens=3, logits_processors=[processor]))
    assert seen[0] == conversation.reused_tokens + responses[0].prompt_tokens
    assert conversation.reused_tokens > 20


def test_answers_are_not_encoded_again(pocket: Pocket, conversation: Conversation) -> None:
    """An answer made of other tokens than its text's encoding is still reused whole."""
    _, tokenizer = pocket
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "cat"]
    assert tokenizer.encode("cat", add_special_tokens=False) != letters
    script = iter([*letters, 2])

    def sampler(_: mx.array) -> mx.array:
        return mx.array([next(script, 2)])

    assert _text(conversation.send(QUESTIONS[0], sampler=sampler)) == "cat"
    held = conversation.num_tokens
    _text(conversation.send(QUESTIONS[1], max_tokens=3))
    assert conversation.reused_tokens == held


def test_an_interrupted_prompt_is_forgotten(pocket: Pocket, conversation: Conversation) -> None:
    _text(conversation.send(QUESTIONS[0], max_tokens=20))
    messages = list(conversation.messages)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _text(conversation.send(QUESTIONS[1], prompt_progress_callback=interrupt))
    assert conversation.messages == messages
    expected = _fresh_answer(pocket, messages, QUESTIONS[1], max_tokens=20)
    assert _text(conversation.send(QUESTIONS[1], max_tokens=20)) == expected
    assert conversation.reused_tokens > 20


def test_a_cache_that_was_used_meanwhile(pocket: Pocket, conversation: Conversation) -> None:
    """Its tokens are not taken for those of the conversation."""
    _text(conversation.send(QUESTIONS[0], max_tokens=20))
    messages = list(conversation.messages)
    conversation._cache.reset()
    pocket[0](mx.array([[5, 6, 7]]), cache=conversation._cache)
    expected = _fresh_answer(pocket, messages, QUESTIONS[1], max_tokens=20)
    assert _text(conversation.send(QUESTIONS[1], max_tokens=20)) == expected


def test_stop_strings_do_not_stay_in_the_history(pocket: Pocket, conversation: Conversation) -> None:
    whole = _fresh_answer(pocket, [], QUESTIONS[0], max_tokens=40)
    stop = whole[30:40]
    answer = _text(conversation.send(QUESTIONS[0], max_tokens=40, stop=[stop]))
    assert answer == whole[: whole.index(stop)]
    expected = _fresh_answer(pocket, conversation.messages, QUESTIONS[1], max_tokens=20)
    assert _text(conversation.send(QUESTIONS[1], max_tokens=20)) == expected


def test_a_full_context_loses_nothing(pocket: Pocket) -> None:
    model, tokenizer = pocket
    conversation = Conversation(model, tokenizer, model.make_cache(48, kv_bits=0))
    endless = make_logits_processors(dict.fromkeys(tokenizer.eos_token_ids, -1000000000.0))
    responses = list(conversation.send(QUESTIONS[0], max_tokens=500, logits_processors=endless))
    assert responses[-1].finish_reason == "context"
    messages = list(conversation.messages)
    with pytest.raises(ContextError, match="48 are reserved"):
        conversation.send("And then?")
    assert conversation.messages == messages
    assert conversation.num_tokens == 48
    conversation.reset()
    assert _text(conversation.send(QUESTIONS[0], max_tokens=3))
