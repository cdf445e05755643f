"""Prompts as other servers' users sent them, of made-up texts: only what is new is read, and answers are
the same.
"""

import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.batches import ids_of, run_all
from support.counts import count
from support.pools import tiny_model
from support.turns import changed_heads, grown, talks, turn

from kvant.cache import CacheOptions
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.models import Decoder
from kvant.tools.report.texts import recall_dialogues


def _scheduler(model: Decoder, kv_bits: int) -> Scheduler:
    """With as many checkpoints as a server has for four answers at once."""
    sizes = {"sequences": 4, "max_seq_len": 2048, "prefill_step_size": 128}
    options = CacheOptions(kv_bits, 16, checkpoints=8)
    pool = model.make_pool(8192, **sizes, options=options)
    return Scheduler(model, pool, max_batch=4)


@pytest.mark.parametrize("windows", count([None, (None, 160)], [None, (160, 160), (None, 160), (300, 160)]))
def test_replays(windows: tuple[int | None, ...] | None, pocket: Any, tmp_path: Path) -> None:
    """The embedded model, and models with windows."""
    model = pocket[0] if windows is None else tiny_model(tmp_path, windows, max_position_embeddings=2048)
    common, cached = grown(_scheduler(model, 4), random.Random(1))
    assert cached == common == [0, 665, 1232]
    # What two prompts have in common has no exact tail until the second one keeps a checkpoint there.
    second = 0 if windows else 384
    assert changed_heads(_scheduler(model, 4), random.Random(1)) == [0, second, 500, 500]
    assert changed_heads(_scheduler(model, 8), random.Random(1)) == [0, 500, 500, 500]


@pytest.mark.parametrize(
    ("windows", "kv_bits"),
    count(
        [((160, 160), 4), ((None, 160), 0), ((None, 160), 8)],
        [*product([(160, 160), (None, 160)], [0, 8, 4])],
    ),
)
def test_many_conversations_share_a_system_prompt(
    windows: tuple[int | None, ...], kv_bits: int, tmp_path: Path
) -> None:
    model, rng = tiny_model(tmp_path, windows), random.Random(1)
    assert min(talks(_scheduler(model, kv_bits), system := turn(rng, 300), rng)[1:]) >= len(system)


def test_a_planted_fact_is_recalled_after_a_hit(pocket: Any) -> None:
    """With keys and values of 4 bits: as from a prompt that is read as a whole, and mostly right."""
    model, tokenizer = pocket
    right = [0, 0]
    for dialogue in [each for each in recall_dialogues(tokenizer, 6000) if each.answers[0][0] > 150][:8]:
        first, last = dialogue.answers[0]
        answers = []
        for hits in (0, 1):
            scheduler, request = (
                _scheduler(model, 4),
                partial(Request, stop_tokens=[*tokenizer.eos_token_ids]),
            )
            if hits:  # the facts, and another question
                run_all(scheduler, [request([*dialogue.ids[: first - 12], 5, 6], 4)])
            told = next(iter(run_all(scheduler, [request(list(dialogue.ids[:first]), 20)]).values()))
            assert (told[0].cached_tokens > 0) == bool(hits)
            answers.append(ids_of(told))
            right[hits] += answers[-1] == list(dialogue.ids[first:last])
    assert min(right) >= 6
