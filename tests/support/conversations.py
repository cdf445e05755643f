"""What tests of conversations share: a turn's text, the tokens that a model is fed, a history fed anew."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from kvant.cache.pool_batch import PoolBatch
from kvant.engine.conversation import Conversation
from kvant.engine.generate import GenerationResponse
from kvant.models import LanguageModel
from kvant.sample_utils import make_logits_processors
from kvant.text.tokenizer import Tokenizer

QUESTIONS = [
    "Tell me a story about a fox named Pip.",
    "Who helped Pip?",
    "Thank you!",
    "Tell me a story about a bear who was brave.",
    "What is your name?",
]
# Of models of support.kinds: the marks' words and those that no text has are never said, so that an answer is
# what its text encodes to.
SAY = {"logits_processors": make_logits_processors({0: -1e9, 1: -1e9, 2: -1e9, 3: -1e9, 4: -1e9, 5: -2.0})}


def conversation_of(loaded: Any, tokens: int, kv_bits: int = 0, **options: Any) -> Conversation:
    """Of a model and its tokenizer, in a cache of so many tokens."""
    model, tokenizer = loaded
    return Conversation(model, tokenizer, model.make_cache(tokens, kv_bits=kv_bits), **options)


def endless(tokenizer: Tokenizer) -> dict[str, Any]:
    """End-of-text tokens are impossible, so that a run has the length asked for."""
    return {"logits_processors": make_logits_processors(dict.fromkeys(tokenizer.eos_token_ids, -1e9))}


def text_of(responses: Iterator[GenerationResponse]) -> str:
    return "".join(response.text for response in responses)


def count_fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of tokens of every step that a cache begins."""
    fed: list[int] = []
    begin = PoolBatch.begin

    def counting(cache: PoolBatch, inputs: mx.array) -> tuple[int, ...]:
        fed.append(inputs.shape[1])
        return begin(cache, inputs)

    monkeypatch.setattr(PoolBatch, "begin", counting)
    return fed


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Any], **variables: Any) -> list[int]:
    """The template's own rendering, tokenized, up to where the answer begins."""
    ids: list[int] = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **variables)
    return ids


def asking(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def fed_anew(model: LanguageModel, ids: Sequence[int], tokens: int = 1024, **options: Any) -> mx.array:
    """Logits (1, vocab) after these ids, from a cache that held nothing."""
    return model(mx.array([ids]), cache=model.make_cache(tokens, **options))[:, -1].astype(mx.float32)


def distance(logprobs: mx.array, logits: mx.array) -> float:
    return float(mx.abs(mx.exp(logprobs) - mx.softmax(logits.squeeze())).max().item())


def check_consistent(conversation: Conversation) -> None:
    """Questions and answers take turns, and every message is whole."""
    roles = [message["role"] for message in conversation.messages]
    if roles[:1] == ["system"]:
        roles = roles[1:]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert all(isinstance(message["content"], str) for message in conversation.messages)
    limit = conversation.limit
    assert limit is None or conversation.num_tokens <= limit
