"""The embedded model is what its card says: its files, its architecture, and answers through a quantized
cache.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from mlx import nn
from support.checkpoints import check_three_ways, reference_logits
from support.counts import count

from kvant import generate
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]


def test_it_is_what_its_card_says(pocket: Pocket, pocket_folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in pocket_folder.iterdir() if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "MODEL_CARD.md", "heldout.jsonl"} <= {
        *files
    }
    assert sum(files.values()) <= 8_000_000
    config = pocket[0].config
    assert json.loads((pocket_folder / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (64, 4, 2)
    assert (config.tie_word_embeddings, config.rope.theta, config.max_position_embeddings) == (
        True,
        1e6,
        2048,
    )


def test_its_logits_are_mlx_lms(pocket: Pocket, pocket_mlx_lm: nn.Module, heldout_ids: list[int]) -> None:
    ids = heldout_ids[:96]
    check_three_ways(pocket[0], reference_logits(pocket_mlx_lm, ids), ids)


def _ask(pocket: Pocket, messages: list[dict[str, str]], max_tokens: int, kv_bits: int) -> str:
    model, tokenizer = pocket
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    cache = model.make_cache(len(ids) + max_tokens, kv_bits=kv_bits)
    return generate(model, tokenizer, ids, max_tokens=max_tokens, prompt_cache=cache).strip()


def test_a_story_is_about_whom_it_was_asked_for(pocket: Pocket, heldout: list[dict[str, Any]]) -> None:
    stories = [document for document in heldout if document["kind"] == "story"][: count(3, 10)]
    told = []
    for document in stories:
        asked = [message for message in document["messages"][:2] if message["role"] != "assistant"]
        told.append((document["hero"], _ask(pocket, asked, 256, 8)))
    assert sum(len(re.findall(rf"\b{hero}\b", story)) >= 2 for hero, story in told) >= len(told) - 1
    assert all(60 <= len(story.split()) <= 220 and story.endswith((".", '"', "!")) for _, story in told)


@pytest.mark.parametrize("kv_bits", count([8], [0, 8]))
def test_questions_about_the_context(pocket: Pocket, heldout: list[dict[str, Any]], kv_bits: int) -> None:
    """Recall among facts of the same type, and what a story or a list of facts states."""
    asks = count(12, 24)
    for kinds, share in ((("recall",), 0.9), (("questions", "facts"), 0.75)):
        asked = [d for d in heldout if d["kind"].startswith(kinds)][:asks]
        right = sum(_ask(pocket, d["messages"], 24, kv_bits) == d["answer"] for d in asked)
        assert len(asked) == asks
        assert right >= share * len(asked)
