"""Draws have the filters' probabilities and go by seed and position alone, drafted ones too; no compiler
is started.
"""

import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.counts import count
from support.drafts import KnownDrafts, draft_by_chance
from support.kinds import Loaded
from support.runs import Run

from kvant import stream_generate
from kvant.engine import row_sampling
from kvant.engine.row_sampling import Row, sample_rows
from kvant.engine.sampler import splitmix64
from kvant.models import Decoder, LanguageModel
from kvant.sample_utils import make_logits_processors, make_sampler

Pocket = tuple[Decoder, Any]
QUESTION = "Tell me a story about a fox named Pip."


# The filters again, from their papers, on rows without ties: NumPy, float64.


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _expected(logits: np.ndarray, temp: float, **options: float) -> np.ndarray:
    kept = np.ones(logits.size, bool)
    probs = _softmax(logits)
    order = np.argsort(-probs)
    if "top_p" in options:
        kept[order[1 + int(np.searchsorted(np.cumsum(probs[order]), options["top_p"])) :]] = False
    if "min_p" in options:
        kept &= probs >= options["min_p"] * probs.max()
    if "xtc_probability" in options:
        likely = np.flatnonzero(kept & (probs / probs[kept].sum() > options["xtc_threshold"]))
        left_out = likely[probs[likely] > probs[likely].min()] if likely.size else likely
        rest = {k: v for k, v in options.items() if k not in ("xtc_probability", "xtc_threshold")}
        plain = _expected(logits, temp, **rest)
        without = np.where(
            np.isin(np.arange(logits.size), left_out), -np.inf, np.where(kept, logits, -np.inf)
        )
        probability = options["xtc_probability"]
        return (1 - probability) * plain + probability * _softmax(without / temp)
    if "top_k" in options:
        kept[order[int(options["top_k"]) :]] = False
    return _softmax(np.where(kept, logits, -np.inf) / temp)


def _chi_square(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic in standard deviations above its mean; infinite where what cannot be drawn was
    drawn.
    """
    counts, possible = np.bincount(tokens, minlength=expected.size), expected > 0
    if counts[~possible].any():
        return math.inf
    wanted = expected[possible] * counts.sum()
    freedom = max(1, possible.sum() - 1)
    return float((((counts[possible] - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))


DISTRIBUTIONS: list[dict[str, Any]] = [
    {"temp": 1.0},
    {"temp": 0.6},
    {"temp": 1.7, "top_p": 0.8},
    {"temp": 1.0, "min_p": 0.2},
    {"temp": 0.8, "top_k": 4},
    {"temp": 1.0, "top_p": 0.9, "min_p": 0.05, "top_k": 5},
    {"temp": 1.0, "xtc_probability": 0.4, "xtc_threshold": 0.1},
    {"temp": 1.3, "top_p": 0.9, "xtc_probability": 0.7, "xtc_threshold": 0.12},
]


@pytest.mark.parametrize("varied", ["position", "seed"])
def test_draws_follow_each_rows_own_distribution(varied: str) -> None:
    logits = np.random.default_rng(4).normal(size=12) * 1.5
    draws = count(3000, 60_000)
    rows = [
        Row(make_sampler(**each, seed=n if varied == "seed" else 5), (), 77 if varied == "seed" else n, [])
        for each in DISTRIBUTIONS
        for n in range(draws)
    ]
    drawn = np.array(sample_rows(mx.array(np.tile(logits, (len(rows), 1)), mx.float32), rows)[0]).reshape(
        -1, draws
    )
    for number, (options, tokens) in enumerate(zip(DISTRIBUTIONS, drawn, strict=True)):
        assert abs(_chi_square(tokens, _expected(logits, **options))) < 6, options
        assert _chi_square(tokens, _expected(logits, **DISTRIBUTIONS[number - 1])) > 8, options


def test_neighbours_in_a_sequence_are_independent() -> None:
    draws, size = count(20_000, 200_000), 8
    sampler = make_sampler(1.0, seed=9)
    rows = [Row(sampler, (), position, []) for position in range(draws)]
    tokens = np.array(sample_rows(mx.zeros((draws, size)), rows)[0])
    assert abs(_chi_square(tokens[:-1] * size + tokens[1:], np.full(size**2, size**-2))) < 4


def test_a_token_that_is_left_out_is_never_drawn() -> None:
    """However sums are rounded: MLX's own draw of one row picks such a token now and then in a large
    vocabulary.
    """
    vocab_size = 40_000
    logits = mx.where(mx.arange(vocab_size) % 3 == 0, -math.inf, 0.0)[None] + mx.zeros((64, 1))
    logits[:, vocab_size // 2 :] = -math.inf
    for first in range(0, count(3, 100) * 64, 64):
        rows = [Row(make_sampler(1.0, seed=first + number), (), 0, []) for number in range(64)]
        tokens = np.array(sample_rows(logits, rows)[0])
        assert (tokens < vocab_size // 2).all()
        assert (tokens % 3 != 0).all()


def test_a_draw_goes_by_its_own_seed_and_position() -> None:
    """Equal rows but for these: the draws of one key agree, those of different keys are different ones."""
    seeds = [*range(4), 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A]
    keys = list(product(seeds, range(count(20, 50)))) * 2
    Random(1).shuffle(keys)
    rows = [Row(make_sampler(1.0, seed=seed), (), position, []) for seed, position in keys]
    drawn: dict[tuple[int, int], set[int]] = {}
    for key, token in zip(keys, sample_rows(mx.zeros((len(keys), 100_000)), rows)[0].tolist(), strict=True):  # type: ignore[arg-type]
        drawn.setdefault(key, set()).add(token)
    assert all(len(tokens) == 1 for tokens in drawn.values())
    assert len({tokens.pop() for tokens in drawn.values()}) > len(keys) / 2 - 5


def _tokens(pocket: Pocket, seed: int | None, **settings: Any) -> list[int]:
    model, _ = pocket
    cache = model.make_cache(128, kv_bits=8)
    run = Run(
        model, list(range(20, 60)), cache, max_tokens=30, sampler=make_sampler(2.0, seed=seed), **settings
    )
    return [token for token, _ in run]


def test_splitmix64_by_its_published_sequence() -> None:
    """Seed 1234567, as Rosetta Code lists it for the reference implementation."""
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64((1234567 + i * gamma) % 2**64) for i in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_a_seed_is_the_whole_state(pocket: Pocket) -> None:
    state = mx.random.state[0].tolist()  # type: ignore[index]
    first = _tokens(pocket, 5)
    assert mx.random.state[0].tolist() == state  # type: ignore[index]
    mx.random.seed(77)
    assert _tokens(pocket, 5) == first
    assert _tokens(pocket, 6) != first
    assert len(set(first)) > 10
    assert len({tuple(_tokens(pocket, None)) for _ in range(3)}) == 3
    bias = make_logits_processors({0: -1.0})
    assert _tokens(pocket, 5, logits_processors=bias) == _tokens(pocket, 5, logits_processors=bias)


def test_a_run_that_goes_on_draws_as_one_that_was_not_cut(pocket: Pocket) -> None:
    """Positions and processors count what the cache holds, not this run's tokens alone."""
    model, tokenizer = pocket
    processors = make_logits_processors({0: -1e9, 2: -1e9}, repetition_penalty=1.5)
    settings = {"sampler": make_sampler(1.5, seed=4), "logits_processors": processors}
    for bits in (8, 0):
        cache = model.make_cache(100, kv_bits=bits)
        whole = [r.token for r in stream_generate(model, tokenizer, QUESTION, 20, kv_bits=bits, **settings)]
        parts: list[int] = []
        for prompt in (QUESTION, None):
            fed = [parts[-1]] if prompt is None else prompt
            run = stream_generate(model, tokenizer, fed, 10, prompt_cache=cache, **settings)
            parts += [response.token for response in run]
            for layer in cache:
                layer.trim(1)  # the last token is fed again
        assert parts == whole


def test_sampling_starts_no_compiler(tmp_path: Path) -> None:
    for compiler in ("g++", "c++", "clang++"):
        (tmp_path / compiler).write_text(
            '#!/bin/sh\n[ "$1" = --version ] || echo "$@" >> "${0%/*}/compiled"\n'
        )
        (tmp_path / compiler).chmod(0o755)
    flags = [
        "--temp",
        "0.8",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
        "--top-k",
        "50",
        "--xtc-probability",
        "0.2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "kvant", "generate", QUESTION, *flags, "--seed", "1", "-q", "-m", "20"],
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "cut at --max-tokens 20\n")
    assert done.stdout
    assert not (tmp_path / "compiled").exists()


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
    """How often draws of these probabilities are as far from them, by Pearson's sum; 0 if a text is
    impossible.
    """
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
