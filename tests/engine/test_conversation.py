"""Turns taken back, asked again and edited; a history that outgrows its context; a saved one goes on from
its file.
"""

import gc
import os
from pathlib import Path

import mlx.core as mx
import pytest
from support.conversations import (
    QUESTIONS,
    SAY,
    asking,
    check_consistent,
    conversation_of,
    count_fed,
    endless,
    prompt_ids,
    text_of,
)
from support.counts import count

import kvant
from kvant.engine.conversation import KEY, Conversation
from kvant.errors import ContextError, SnapshotError
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler
from kvant.text.process import resident_bytes
from kvant.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("without_compilation")
ANSWERED = {"max_tokens": 25}
Pocket = tuple[Decoder, Tokenizer]


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
        assert conversation._cache.ids[: len(ids)] == ids
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
        options = endless(tokenizer) | {"max_tokens": 40} if turn % 3 == 2 else {"max_tokens": 16}
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
    with pytest.raises(
        ContextError, match=r"the question alone, with the system prompt, has \d+ tokens; 100 are res"
    ):
        conversation.send("fox " * 120)
    long = "The fox Pip has a friend. " * 8
    assert 60 < len(prompt_ids(pocket[1], [*conversation.messages[:1], asking(long)])) < 100
    responses = list(conversation.send(long, max_tokens=500, **endless(pocket[1])))
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
    assert conversation._cache.ids[: len(ids)] == ids


def test_a_stop_string_at_the_last_token_of_a_full_context(pocket: Pocket) -> None:
    _, tokenizer = pocket
    conversation = conversation_of(pocket, 90, 8, overflow="forget")
    text_of(conversation.send(QUESTIONS[0], **ANSWERED))
    copy, fresh = (conversation_of(pocket, 90, 8, overflow="forget") for _ in range(2))
    copy.messages = list(conversation.messages)
    answer = [
        response.text for response in conversation.send("And then?", max_tokens=60, **endless(tokenizer))
    ]
    room = 91 - len(prompt_ids(tokenizer, [*copy.messages, asking("And then?")]))
    assert 10 < room < 60
    stop = "".join(answer[:room])[-12:]
    assert "".join(answer[: room - 1]).find(stop) < 0
    responses = list(copy.send("And then?", max_tokens=60, stop=[stop], **endless(tokenizer)))
    assert (responses[-1].finish_reason, len(responses)) == ("stop", room)
    assert (copy.forgotten, copy.num_tokens) == (0, 90)
    assert copy.messages[-1]["content"] == "".join(answer[:room])[:-12]
    fresh.messages = list(copy.messages)
    assert text_of(copy.send(QUESTIONS[1], max_tokens=20)) == text_of(fresh.send(QUESTIONS[1], max_tokens=20))


def test_a_loaded_conversation_feeds_only_what_is_new(pocket: Pocket, tmp_path: Path) -> None:
    path = tmp_path / "talk.safetensors"
    conversation = conversation_of(pocket, 512, 8, system_prompt="Be kind.")
    for question in QUESTIONS[:2]:
        text_of(conversation.send(question, max_tokens=20))
    suspended = conversation.send(QUESTIONS[2], max_tokens=20)
    next(suspended)
    conversation.save(path)
    messages, held = list(conversation.messages), conversation.num_tokens
    assert len(messages) == 7
    other = conversation_of(pocket, 512, 8)
    text_of(other.send("Hello!", max_tokens=5))
    other.load(path)
    assert (other.messages, other.num_tokens, other.system_prompt) == (messages, held, "Be kind.")
    assert (other.forgotten, other.reused_tokens) == (0, 0)
    responses = list(other.send(QUESTIONS[3], max_tokens=20))
    assert other.reused_tokens == held
    ids = prompt_ids(pocket[1], [*messages, asking(QUESTIONS[3])])
    assert responses[0].prompt_tokens == len(ids) - held
    assert "".join(r.text for r in responses) == text_of(conversation.send(QUESTIONS[3], max_tokens=20))
    assert other.undo() == QUESTIONS[3]


def test_answers_keep_their_tokens(pocket: Pocket, tmp_path: Path) -> None:
    """Those that their text does not encode to; after a load too."""
    _, tokenizer = pocket
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "cat"]
    script = iter([*letters, 2])
    conversation = conversation_of(pocket, 512, 8)
    assert tokenizer.encode("cat", add_special_tokens=False) != letters
    assert text_of(conversation.send(QUESTIONS[0], sampler=lambda _: mx.array([next(script, 2)]))) == "cat"
    conversation.save(tmp_path / "talk")
    other = conversation_of(pocket, 512, 8)
    other.load(tmp_path / "talk")
    for each in (conversation, other):
        held = each.num_tokens
        text_of(each.send(QUESTIONS[1], max_tokens=3))
        assert each.reused_tokens == held


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "it holds no conversation"),
        ("[", "its conversation is malformed"),
        ('{"role": "user"}', "a JSON dict; expected a list"),
        ('[{"role": "user"}]', "message 0 is not an object of a role"),
        ('[{"role": "user", "content": "a", "tool_calls": "b"}]', "message 0 is not an object of a role"),
        ('[{"role": "user", "content": ["a"]}]', "message 0 has a value that is not text"),
        (
            '[{"role": "user", "content": "a", "reasoning_content": 1}]',
            "message 0 has a value that is not text",
        ),
        ('[{"role": "root", "content": "a"}]', "message 0 has the role 'root'"),
        (
            '[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]',
            "message 1 has the role 'system'",
        ),
        ('[{"role": "user", "content": "\\ud800"}]', "its conversation is malformed"),
        ("[" * 100_000, "its conversation is malformed"),
    ],
)
def test_files_that_hold_no_conversation(
    pocket: Pocket, tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "talk"
    conversation = conversation_of(pocket, 512, 8)
    text_of(conversation.send(QUESTIONS[0], max_tokens=5))
    messages, held = list(conversation.messages), conversation.num_tokens
    conversation._cache.save(path, {} if text is None else {KEY: text})
    with pytest.raises(SnapshotError, match=words) as caught:
        conversation.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (conversation.messages, conversation.num_tokens) == (messages, held)
    text_of(conversation.send(QUESTIONS[1], max_tokens=5))
    assert conversation.reused_tokens == held


def test_another_format_is_refused_and_the_conversation_goes_on(pocket: Pocket, tmp_path: Path) -> None:
    saved = conversation_of(pocket, 512, 8)
    text_of(saved.send(QUESTIONS[0], max_tokens=20))
    saved.save(tmp_path / "talk")
    other, fresh = (conversation_of(pocket, 512) for _ in range(2))
    text_of(other.send(QUESTIONS[1], max_tokens=20))
    fresh.messages = list(other.messages)
    with pytest.raises(SnapshotError, match="of another format"):
        other.load(tmp_path / "talk")
    with pytest.raises(SnapshotError):
        other.load(tmp_path / "none")
    assert other.messages == fresh.messages
    assert text_of(other.send(QUESTIONS[2], max_tokens=20)) == text_of(
        fresh.send(QUESTIONS[2], max_tokens=20)
    )


def test_what_could_not_be_loaded_is_not_saved(pocket: Pocket, tmp_path: Path) -> None:
    conversation = conversation_of(pocket, 512, 8)
    conversation.messages = [{"role": "tool", "content": "a"}]
    with pytest.raises(SnapshotError, match="message 0 has the role 'tool'"):
        conversation.save(tmp_path / "talk")
    assert not list(tmp_path.iterdir())


def test_ids_that_the_model_does_not_know_are_not_looked_up(pocket: Pocket) -> None:
    """A stranger's file may have any; logits processors would read past the logits."""
    model, tokenizer = pocket
    cache = model.make_cache(64)
    cache.batch.begin(mx.array([[5, 6]]))
    model.hidden_states(mx.array([[5, 6]]), cache=cache)
    cache.batch.commit(ids=[[5, 2**31]])
    with pytest.raises(ValueError, match="2147483648; the model knows 0 to 1279"):
        kvant.stream_generate(
            model,
            tokenizer,
            [7],
            prompt_cache=cache,
            logits_processors=make_logits_processors(repetition_penalty=2.0),
        )
    assert cache.offset == 2
    # A conversation compares ids, and feeds its own.
    conversation = Conversation(model, tokenizer, cache)
    assert text_of(conversation.send("Hello!", max_tokens=3, **SAY))
