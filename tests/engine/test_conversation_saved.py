"""Conversations saved and loaded: what goes on is what would have gone on. Files of strangers are refused in words."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from support.conversations import QUESTIONS, SAY, asking, conversation_of, prompt_ids, text_of

import kvant
from kvant.engine.conversation import KEY, Conversation, as_metadata, messages_of
from kvant.errors import SnapshotError
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors
from kvant.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("without_compilation")
Pocket = tuple[Decoder, Tokenizer]


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
        ('[{"role": "user"}]', "message 0 is no object of a role"),
        ('[{"role": "user", "content": "a", "tool_calls": "b"}]', "message 0 is no object of a role"),
        ('[{"role": "user", "content": ["a"]}]', "message 0 has a value that is no text"),
        ('[{"role": "user", "content": "a", "reasoning_content": 1}]', "message 0 has a value that is no text"),
        ('[{"role": "root", "content": "a"}]', "message 0 has the role 'root'"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]', "message 1 has the role 'system'"),
        ('[{"role": "user", "content": "\\ud800"}]', "its conversation is malformed"),
        ("[" * 100_000, "its conversation is malformed"),
    ],
)
def test_files_that_hold_no_conversation(pocket: Pocket, tmp_path: Path, text: str | None, words: str) -> None:
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
    assert text_of(other.send(QUESTIONS[2], max_tokens=20)) == text_of(fresh.send(QUESTIONS[2], max_tokens=20))


def test_what_could_not_be_loaded_is_not_saved(pocket: Pocket, tmp_path: Path) -> None:
    conversation = conversation_of(pocket, 512, 8)
    conversation.messages = [{"role": "tool", "content": "a"}]
    with pytest.raises(SnapshotError, match="message 0 has the role 'tool'"):
        conversation.save(tmp_path / "talk")
    assert not list(tmp_path.iterdir())


def test_messages_there_and_back() -> None:
    messages = [
        {"role": "system", "content": 'Be "kind" \u2028 \x00 🦊'},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "a", "reasoning_content": "b\n"},
    ]
    assert messages_of("x", as_metadata(messages)) == messages
    assert json.loads(as_metadata(messages)[KEY]) == messages


def test_ids_that_the_model_does_not_know_are_not_looked_up(pocket: Pocket) -> None:
    """A stranger's file may have any; logits processors would read past the logits."""
    model, tokenizer = pocket
    cache = model.make_cache(64)
    cache.begin(mx.array([[5, 6]]))
    model.hidden_states(mx.array([[5, 6]]), cache=cache)
    cache.commit(ids=[[5, 2**31]])
    with pytest.raises(ValueError, match="2147483648; the model knows 0 to 1279"):
        kvant.stream_generate(
            model, tokenizer, [7], prompt_cache=cache, logits_processors=make_logits_processors(repetition_penalty=2.0)
        )
    assert cache.offset == 2
    # A conversation compares ids, and feeds its own.
    conversation = Conversation(model, tokenizer, cache)
    assert text_of(conversation.send("Hello!", max_tokens=3, **SAY))
