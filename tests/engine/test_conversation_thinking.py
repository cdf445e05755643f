"""What a model thinks stays out of the history, as its template says. Ids are compared with transformers'
own.
"""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from support.checkpoints import qwen3_config, reference_model, save_checkpoint
from support.conversations import asking, check_consistent
from support.tokenizers_made import write_tokenizer
from transformers import AutoTokenizer

import kvant
from kvant.engine.conversation import Conversation
from kvant.engine.generate import GenerationResponse
from kvant.models import LanguageModel
from kvant.text.tokenizer import Tokenizer

# Written for this test: in the manner of Qwen3, which drops what was thought before the last question; of
# DeepSeek R1, whose prompt begins the thinking; and one that keeps it all.
DROPS = """
{%- set ns = namespace(last=messages|length - 1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.reasoning_content is string and loop.index0 > ns.last %}
        {{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
OPENS = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
KEEPS = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and m.reasoning_content is defined %}
        {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
THOUGHT = "<think>\nThe user asks.\n\nI say yes.\n</think>\n\n"
TURNS = ["Sunny, 21 degrees.", "We'll see.\n\nIt isn't.", "The fox jumps over the dog."]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[LanguageModel, Tokenizer, Any]]:
    """A function of a template: a small model, its tokenizer, and transformers'."""

    def loaded(template: str) -> tuple[LanguageModel, Tokenizer, Any]:
        folder = tmp_path_factory.mktemp("thinking") / "model"
        config = qwen3_config(vocab_size=768, eos_token_id=None)
        save_checkpoint(folder, config, reference_model(config))
        write_tokenizer(folder, "qwen3", extra_special_tokens=["<think>", "</think>"], chat_template=template)
        (folder / "config.json").write_text(json.dumps(config))
        return *kvant.load(folder), AutoTokenizer.from_pretrained(folder)

    return loaded


def _say(
    conversation: Conversation, tokenizer: Tokenizer, question: str, text: str
) -> list[GenerationResponse]:
    script, end = iter(tokenizer.encode(text, add_special_tokens=False)), tokenizer.eos_token_id
    return list(conversation.send(question, sampler=lambda _: mx.array([next(script, end)]), max_tokens=200))


@pytest.mark.parametrize(
    ("template", "variables", "said", "thought", "reuses_all"),
    [
        (DROPS, {}, THOUGHT, "The user asks.\n\nI say yes.", False),
        (DROPS, {}, "<think>\n\n</think>\n\n", None, False),
        (DROPS, {"enable_thinking": False}, "", None, False),
        (OPENS, {}, THOUGHT.removeprefix("<think>\n"), "The user asks.\n\nI say yes.", False),
        (KEEPS, {}, THOUGHT, "The user asks.\n\nI say yes.", True),
        (KEEPS, {}, "", None, True),
    ],
)
def test_the_template_says_what_stays(
    load: Any, template: str, variables: dict[str, Any], said: str, thought: str | None, reuses_all: bool
) -> None:
    model, tokenizer, reference = load(template)
    conversation = Conversation(model, tokenizer, model.make_cache(512), template_variables=variables)
    for turn, answer in enumerate(TURNS):
        question, held = f"What's the weather, {turn}?", conversation.num_tokens
        before = [dict(message) for message in conversation.messages]
        responses = _say(conversation, tokenizer, question, said + answer)
        ids = reference.apply_chat_template(
            [*before, asking(question)], add_generation_prompt=True, return_dict=False, **variables
        )
        assert conversation._cache.ids[: len(ids)] == ids
        assert responses[0].prompt_tokens == len(ids) - conversation.reused_tokens
        if turn:
            assert (conversation.reused_tokens == held) is reuses_all
            assert conversation.reused_tokens > len(ids) // 3
        reasoning = {} if thought is None else {"reasoning_content": thought}
        assert conversation.messages[-1] == {"role": "assistant", "content": answer} | reasoning
        splitter = conversation.thinking()
        assert splitter is not None
        assert splitter.split("".join(response.text for response in responses)) == (thought or "", answer)
        check_consistent(conversation)


def test_an_answer_that_is_stopped_while_it_thinks(load: Any) -> None:
    model, tokenizer, reference = load(DROPS)
    conversation = Conversation(model, tokenizer, model.make_cache(512))
    script = iter(tokenizer.encode(THOUGHT, add_special_tokens=False))
    answer = conversation.send("Why?", sampler=lambda _: mx.array([next(script)]))
    heard = "".join(next(answer).text for _ in range(6))
    assert heard.startswith("<think>\nThe")
    conversation._end_turn()
    thought = heard.removeprefix("<think>\n")
    assert conversation.messages[-1] == {"role": "assistant", "content": "", "reasoning_content": thought}
    messages = [dict(message) for message in conversation.messages]
    _say(conversation, tokenizer, "And now?", "Yes.")
    ids = reference.apply_chat_template(
        [*messages, asking("And now?")], add_generation_prompt=True, return_dict=False
    )
    assert conversation._cache.ids[: len(ids)] == ids


def test_thinking_longer_than_the_context_forgets_turns_and_goes_on(load: Any) -> None:
    model, tokenizer, reference = load(DROPS)
    conversation = Conversation(model, tokenizer, model.make_cache(180), overflow="forget")
    for turn in range(3):
        _say(conversation, tokenizer, f"Question {turn}?", "Yes, it is so.")
    long = "<think>\n" + "I think of it again. " * 6 + "\n</think>\n\nNo."
    responses = _say(conversation, tokenizer, "And?", long)
    assert conversation.forgotten
    assert "".join(response.text for response in responses) == long
    assert conversation.messages[-1]["content"] == "No."
    ids = reference.apply_chat_template(
        conversation.messages[:-1], add_generation_prompt=True, return_dict=False
    )
    answer = [response.token for response in responses[:-1]]
    assert conversation._cache.ids == ids + answer
