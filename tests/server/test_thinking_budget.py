"""How many tokens a model may think, on a model of random weights that would never stop by itself."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.checkpoints import qwen3_config, reference_model, save_checkpoint
from support.interfaces import MESSAGES
from support.server import Running, served
from support.tokenizers_made import write_tokenizer

from kvant.server.turns import ThinkingBudget

TEMPLATE = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("thinking") / "model"
    config = qwen3_config(vocab_size=768, eos_token_id=None)
    save_checkpoint(folder, config, reference_model(config))
    write_tokenizer(folder, "qwen3", extra_special_tokens=["<think>", "</think>"], chat_template=TEMPLATE)
    (folder / "config.json").write_text(json.dumps(config))
    with served(model=str(folder), sequences=2, max_kv_size=256) as found:
        yield found


def _ask(server: Running, **fields: Any) -> tuple[list[dict[str, Any]], int, int]:
    """The blocks of an answer, its tokens, and those of its thinking."""
    answer = MESSAGES.ask(server, "Hi", 40, model=server.service.names[0], **fields)
    usage = answer["usage"]
    return answer["content"], usage["output_tokens"], usage["output_tokens_details"]["thinking_tokens"]


@pytest.mark.parametrize("budget", [8, 16])
def test_thinking_ends_with_its_budget(thinker: Running, budget: int) -> None:
    content, *tokens = _ask(thinker, thinking={"type": "enabled", "budget_tokens": budget})
    assert tokens == [40, budget]
    assert content[-1]["type"] == "text"
    (longer, *_), _, _ = _ask(thinker, thinking={"type": "enabled", "budget_tokens": 39})
    assert longer["thinking"].startswith("".join(block.get("thinking", "") for block in content))


@pytest.mark.parametrize(("kind", "thought"), [(None, 40), ("adaptive", 40), ("disabled", 0)])
def test_without_a_budget_it_thinks_on(thinker: Running, kind: str | None, thought: int) -> None:
    content, *tokens = _ask(thinker, thinking={"type": kind} if kind else None)
    assert tokens == [40, thought]
    assert [block["type"] for block in content] == ["thinking" if thought else "text"]


def test_an_answer_under_a_schema_after_it(thinker: Running) -> None:
    form = {"type": "json_schema", "schema": {**SCHEMA, "additionalProperties": False}}
    fields = {"thinking": {"type": "enabled", "budget_tokens": 8}, "output_config": {"format": form}}
    content, _, thought = _ask(thinker, **fields)
    assert thought == 8
    assert content[-1]["text"] in ('{"sure":true}', '{"sure":false}')
    for budget in (0, 40):  # it has to be less than all
        thinking = {"type": "enabled", "budget_tokens": budget}
        answered = MESSAGES.post(thinker, "Hi", 40, model=thinker.service.names[0], thinking=thinking)
        assert answered.status_code == 400
        assert "thinking.budget_tokens" in answered.json()["error"]["message"]


def test_where_thinking_is_open() -> None:
    """Token 7 begins it and 9 ends it; the prompt has two tokens, which may have the same ids."""
    logits = mx.random.normal((1, 12), key=mx.random.key(0))

    def forced(answer: list[int], start: int | None = 7) -> bool:
        found = ThinkingBudget(2, 4, start, 9)(mx.array([7, 9, *answer]), logits)
        if mx.array_equal(found, logits):
            return False
        assert found.argmax().item() == 9
        assert mx.sum(found > -mx.inf).item() == 1
        return True

    assert [forced(each) for each in ([7, 1], [7, 1, 1], [7, 1, 1, 1], [1, 7, 1])] == [False, True, True, True]
    assert not any(forced(each) for each in ([1, 1, 1, 1, 7], [7, 1, 9, 1], [7, 9, 7, 1, 1, 1]))
    assert [forced(each, None) for each in ([1, 1], [1, 1, 1], [1, 9, 1, 1])] == [False, True, False]
