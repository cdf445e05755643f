"""What is drafted is not more likely for it: tokens of many seeds against exact probabilities."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.counts import count
from support.drafts import KnownDrafts, draft_by_chance
from support.kinds import Loaded
from support.runs import Run

from kvant.engine import row_sampling
from kvant.engine.row_sampling import Row, sample_rows
from kvant.models import LanguageModel
from kvant.sample_utils import make_sampler

PROMPT = [9, 17, 30, 17]
KEPT, TEMP, TOKENS = 3, 40.0, 3
RUNS = count(150, 6000)
Pick = Callable[[mx.array, Sequence[Row]], tuple[mx.array, mx.array]]


def _probabilities(model: LanguageModel, tokens: list[int]) -> dict[int, float]:
    """The next token's, exactly: of the likeliest, in float64."""
    logits = np.array(model(mx.array([tokens]))[0, -1].astype(mx.float32), np.float64)
    kept = np.argsort(logits)[-KEPT:]
    weights = np.exp((logits[kept] - logits[kept].max()) / TEMP)
    return dict(zip(kept.tolist(), (weights / weights.sum()).tolist(), strict=True))


def _all_texts(model: LanguageModel) -> dict[tuple[int, ...], float]:
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        texts = {
            (*text, token): share * each
            for text, share in texts.items()
            for token, each in _probabilities(model, [*PROMPT, *text]).items()
        }
    return texts


def _p_value(seen: Counter[tuple[int, ...]], texts: dict[tuple[int, ...], float]) -> float:
    """How often draws of these probabilities are as far from them, by Pearson's sum; 0 if a text is impossible."""
    if set(seen) - set(texts):
        return 0.0
    expected = RUNS * np.array(list(texts.values()))

    def distance(counts: Any) -> Any:
        return ((counts - expected) ** 2 / expected).sum(axis=-1)

    drawn = np.random.default_rng(1).multinomial(RUNS, expected / expected.sum(), size=20_000)
    own = distance(np.array([seen[text] for text in texts]))
    return float((distance(drawn) >= own).mean())


def accepted_unseen(draft: Sequence[int]) -> Pick:
    """A wrong rule: a drafted token counts without being sampled."""

    def pick(logits: mx.array, rows: Sequence[Row]) -> tuple[mx.array, mx.array]:
        tokens, logprobs = sample_rows(logits, rows)
        if len(rows) == 1:
            return tokens, logprobs
        taken = [draft[row.position - len(PROMPT)] for row in rows[:-1]]
        return mx.concatenate([mx.array(taken), tokens[len(taken) :]]), logprobs

    return pick


def one_key(draft: Sequence[int]) -> Pick:
    """A wrong rule: all positions of a step draw with the same number."""
    return lambda logits, rows: sample_rows(logits, [replace(row, position=rows[0].position) for row in rows])


@pytest.mark.parametrize("loaded", ["qwen2"], indirect=True)
@pytest.mark.parametrize("rule", [None, accepted_unseen, one_key])
def test_exact_probabilities(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rule: Callable[[Sequence[int]], Pick] | None
) -> None:
    model, _ = loaded
    draft_by_chance(monkeypatch, 1, sizes=[3])
    texts = _all_texts(model)
    draft = max(texts, key=lambda text: (texts[text], text))
    if rule is not None:
        monkeypatch.setattr(row_sampling, "sample_rows", rule(draft))
    cache = model.make_cache(16, kv_bits=0)
    drafts = KnownDrafts(text=[*PROMPT, *draft], mistakes=0)
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in random.Random(2).sample(range(2**40), RUNS):
        cache.reset()
        sampler = make_sampler(TEMP, top_k=KEPT, seed=seed)
        run = Run(model, PROMPT, cache, max_tokens=TOKENS, sampler=sampler, drafts=drafts)
        seen[tuple(token for token, _ in run)] += 1
        accepted += run.drafts.accepted if run.drafts is not None else 0
    assert accepted > 0.1 * RUNS
    assert len(texts) == KEPT**TOKENS
    assert (_p_value(seen, texts) > 0.001) == (rule is None)
