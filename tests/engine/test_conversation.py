"""Turns taken back, asked again and edited; a history that outgrows its context, in memory that does not grow."""

import gc
import os
from typing import Any

import mlx.core as mx
import pytest
from support.conversations import QUESTIONS, asking, check_consistent, conversation_of, count_fed, prompt_ids, text_of
from support.counts import count

from kvant.errors import ContextError
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler
from kvant.text.process import resident_bytes
from kvant.text.tokenizer import Tokenizer

ANSWERED = {"max_tokens": 25}
Pocket = tuple[Decoder, Tokenizer]


def _endless(tokenizer: Tokenizer) -> dict[str, Any]:
    return {"logits_processors": make_logits_processors(dict.fromkeys(tokenizer.eos_token_ids, -1e9))}


def test_many_turns_feed_their_own_tokens_only(pocket: Pocket, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = pocket
    conversation = conversation_of(pocket, 2048, 8)
    fed = count_fed(monkeypatch)
    turns = count(30, 50)
    for turn in range(turns):
        question = QUESTIONS[turn % len(QUESTIONS)]
        held, before = conversation.num_tokens, [*conversation.messages, asking(question)]
        fed.clear()
        responses = list(conversation.send(question, max_tokens=3 + turn % 16))
        ids = prompt_ids(tokenizer, before)
        assert conversation._cache.ids[0][: len(ids)] == ids
        assert conversation.reused_tokens == held
        assert responses[0].prompt_tokens == len(ids) - held < 45
        # Of the answer all but the last token, and a step that was begun before its end was known.
        assert sum(fed) - (len(ids) - held) in (len(responses) - 1, len(responses))
    assert conversation.num_tokens > 20 * turns
    assert conversation.forgotten == 0
    assert len(conversation.messages) == 2 * turns


def test_memory_stays_through_ten_forgettings(pocket: Pocket) -> None:
    _, tokenizer = pocket
    conversation = conversation_of(pocket, 96, 8, system_prompt="Be kind.", overflow="forget")
    active, resident, forgettings = [], [], 0
    for turn in range(100):
        # Some answers fill the context themselves.
        options = _endless(tokenizer) | {"max_tokens": 40} if turn % 3 == 2 else {"max_tokens": 16}
        for _ in conversation.send(QUESTIONS[turn % len(QUESTIONS)], **options):
            assert conversation.num_tokens <= 96
        forgettings += conversation.forgotten > 0
        check_consistent(conversation)
        assert conversation.system_prompt == "Be kind."
        gc.collect()
        mx.synchronize()
        active.append(mx.get_active_memory())
        if forgettings in (1, 10):
            resident.append(resident_bytes(os.getpid()))
        if forgettings == 10:
            break
    assert forgettings == 10
    assert max(active) - active[0] < 2**14  # a token takes 1 kB at 8 bits
    assert resident[-1] - resident[0] < 2**25


def test_the_last_question_is_kept_or_refused_in_words(pocket: Pocket) -> None:
    conversation = conversation_of(pocket, 100, 8, system_prompt="Be kind.", overflow="forget")
    text_of(conversation.send(QUESTIONS[0], max_tokens=25))
    with pytest.raises(ContextError, match=r"the question alone, with the system prompt, has \d+ tokens; 100 are res"):
        conversation.send("fox " * 120)
    long = "The fox Pip has a friend. " * 8
    assert 60 < len(prompt_ids(pocket[1], [*conversation.messages[:1], asking(long)])) < 100
    responses = list(conversation.send(long, max_tokens=500, **_endless(pocket[1])))
    assert conversation.messages[1:-1] == [asking(long)]
    assert conversation.forgotten == 2
    assert responses[-1].finish_reason == "context"  # question and answer fill it by themselves
    assert conversation.num_tokens == 100
    assert text_of(conversation.send("Thank you!", max_tokens=5))
    assert conversation.forgotten == 2


def test_a_limit_that_nobody_can_raise_is_the_models(pocket: Pocket) -> None:
    for overflow, words in (("stop", "the conversation would have"), ("forget", "the question alone has")):
        conversation = conversation_of(pocket, 2048, 8, overflow=overflow)
        with pytest.raises(ContextError, match=f"{words} .* tokens; 2048 are the model's context"):
            conversation.send("fox " * 2100)
        assert conversation.limit == 2048
    with pytest.raises(ValueError, match="overflow is 'drop'; expected 'forget' or 'stop'"):
        conversation_of(pocket, 64, overflow="drop")


def test_tries_and_edits_feed_what_changed(pocket: Pocket) -> None:
    """Another try feeds the question's last token once more for the logits."""
    _, tokenizer = pocket
    conversation = conversation_of(pocket, 1024)
    text_of(conversation.send(QUESTIONS[0], **ANSWERED))
    before = list(conversation.messages)
    first = text_of(conversation.send("Who helped Pip?", **ANSWERED))
    responses = list(conversation.retry(sampler=make_sampler(temp=1.2, seed=3), **ANSWERED))
    assert responses[0].prompt_tokens == 1
    assert "".join(response.text for response in responses) == conversation.messages[-1]["content"] != first
    text_of(conversation.edit("Who helped Bob?", **ANSWERED))
    pip, bob = (prompt_ids(tokenizer, [*before, asking(f"Who helped {name}?")]) for name in ("Pip", "Bob"))
    assert conversation.reused_tokens == next(at for at in range(len(bob)) if pip[at] != bob[at]) > 40
    # An earlier turn, by hand.
    conversation.messages[0] = asking("Tell me a story about a fox named Bob.")
    text_of(conversation.send("Thank you!", **ANSWERED))
    assert 8 <= conversation.reused_tokens < 18
    ids = prompt_ids(tokenizer, conversation.messages[:-1])
    assert conversation._cache.ids[0][: len(ids)] == ids


def test_a_stop_string_at_the_last_token_of_a_full_context(pocket: Pocket) -> None:
    _, tokenizer = pocket
    conversation = conversation_of(pocket, 90, 8, overflow="forget")
    text_of(conversation.send(QUESTIONS[0], **ANSWERED))
    copy, fresh = (conversation_of(pocket, 90, 8, overflow="forget") for _ in range(2))
    copy.messages = list(conversation.messages)
    answer = [response.text for response in conversation.send("And then?", max_tokens=60, **_endless(tokenizer))]
    room = 91 - len(prompt_ids(tokenizer, [*copy.messages, asking("And then?")]))
    assert 10 < room < 60
    stop = "".join(answer[:room])[-12:]
    assert "".join(answer[: room - 1]).find(stop) < 0
    responses = list(copy.send("And then?", max_tokens=60, stop=[stop], **_endless(tokenizer)))
    assert (responses[-1].finish_reason, len(responses)) == ("stop", room)
    assert (copy.forgotten, copy.num_tokens) == (0, 90)
    assert copy.messages[-1]["content"] == "".join(answer[:room])[:-12]
    fresh.messages = list(copy.messages)
    assert text_of(copy.send(QUESTIONS[1], max_tokens=20)) == text_of(fresh.send(QUESTIONS[1], max_tokens=20))
