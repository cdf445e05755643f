"""A batch is sampled as its rows alone: the same tokens, and the same bits of the log-probabilities."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.counts import count

from kvant.engine.draw import SeededSampler, draw_keys, for_a_run, greedy
from kvant.engine.row_sampling import Row, check_options, sample_rows
from kvant.engine.sampling import make_logits_processors, make_sampler
from kvant.operators.exponential import logsumexp

SIZES = (13, 300, 1283)  # multiples of no vector's width among them


def _second_likeliest(logprobs: mx.array) -> mx.array:
    return mx.argsort(logprobs, axis=-1)[:, -2].astype(mx.int32)


def _no_repeats(tokens: mx.array, logits: mx.array) -> mx.array:
    """A user's processor, in another dtype: the last token never comes again."""
    vocab = mx.arange(logits.shape[-1])
    return mx.where(vocab == tokens[-1], -math.inf, logits).astype(mx.bfloat16)


def _flattened(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits / (1 + tokens.size)


def _row(random: Random, vocab_size: int) -> Row:
    """A request with options of its own."""
    some = random.sample(range(vocab_size), 3)
    sampler: Any = random.choice([greedy, _second_likeliest, *[None] * 6])
    if sampler is None:
        sampler = make_sampler(
            random.choice([0.3, 1.0, 2.5]),
            random.choice([0.0, 0.0, 0.5, 0.9, 1.0]),
            random.choice([0.0, 0.0, 0.02, 0.3]),
            random.choice([1, 4]),
            random.choice([0, 0, 1, 5, 12]),
            random.choice([0.0, 0.0, 0.5, 1.0]),
            random.choice([0.01, 0.1]),
            random.choice([None, some]),
            seed=random.choice([random.randrange(2**64), random.randrange(3), None]),
        )
    processors = make_logits_processors(
        random.choice([None, None, {token: random.uniform(-5, 5) for token in some}]),
        random.choice([None, 1.3, 0.8]),
        random.choice([3, 20]),
        random.choice([None, 0.7]),
        random.choice([1, 20]),
        random.choice([None, 0.4, -0.4]),
        random.choice([5, 64]),
    )
    tokens = random.choices(range(min(vocab_size, 30)), k=random.choice([1, 2, 10, 100]))
    if random.random() < 0.3:
        processors.insert(random.randint(0, len(processors)), random.choice([_no_repeats, _flattened]))
    random.shuffle(processors)
    if all(processor in (_flattened,) for processor in processors) and random.random() < 0.5:
        tokens = []
    return Row(for_a_run(sampler), processors, random.randrange(5000), tokens)


def _logits(random: Random, rows: int, vocab_size: int) -> mx.array:
    """Rows of several kinds, ties and tokens that are excluded among them."""
    key = mx.random.key(random.randrange(2**32))
    normal = mx.random.normal((rows, vocab_size), key=key)
    kinds = [normal * 3, normal * 30, mx.round(normal), mx.where(normal > 0.3, normal, -math.inf)]
    chosen = mx.array([[random.randrange(len(kinds))] for _ in range(rows)])
    logits = kinds[0]
    for number, kind in enumerate(kinds):
        logits = mx.where(chosen == number, kind, logits)
    return logits.astype(random.choice([mx.float32, mx.bfloat16]))


def _alone(logits: mx.array, row: Row) -> tuple[int, mx.array]:
    """By its own functions, one after the other: logits (1, vocab)."""
    logits, tokens = logits.astype(mx.float32), mx.array(list(row.tokens), mx.int32)
    for processor in row.processors:
        logits = processor(tokens, logits).astype(mx.float32)
    logprobs = logits - logsumexp(logits)
    keys = [draw_keys([row.sampler], [row.position])] if isinstance(row.sampler, SeededSampler) else []
    return int(row.sampler(logprobs, *keys).item()), logprobs.squeeze(0)  # type: ignore[arg-type, call-arg]


def _bits(array: mx.array) -> bytes:
    assert array.dtype == mx.float32
    return np.array(array).tobytes()


@pytest.mark.parametrize("vocab_size", SIZES)
def test_every_row_is_what_it_is_alone(vocab_size: int) -> None:
    """In random company and order, with rows of padding behind."""
    random = Random(vocab_size)
    for _ in range(count(12, 400)):
        size = random.choice([1, 2, 5, 16])
        rows = [_row(random, vocab_size) for _ in range(size)]
        logits = _logits(random, size + random.choice([0, 3]), vocab_size)
        expected = [_alone(logits[number : number + 1], row) for number, row in enumerate(rows)]
        for _ in range(2):
            order = random.sample(range(size), random.randint(1, size))
            padded = mx.concatenate([logits[mx.array(order)], mx.full((2, vocab_size), math.nan)])
            tokens, logprobs = sample_rows(padded, [rows[number] for number in order])
            assert tokens.shape == (len(order),)
            assert logprobs.shape == (len(order), vocab_size)
            for place, number in enumerate(order):
                token, alone = expected[number]
                assert tokens[place].item() == token, rows[number]
                assert _bits(logprobs[place]) == _bits(alone), rows[number]


def test_a_large_vocabulary() -> None:
    vocab_size = 151_936
    random = Random(0)
    for _ in range(count(1, 10)):
        rows = [_row(random, vocab_size) for _ in range(5)]
        logits = _logits(random, 5, vocab_size)
        tokens, logprobs = sample_rows(logits, rows)
        for number, row in enumerate(rows):
            token, alone = _alone(logits[number : number + 1], row)
            assert tokens[number].item() == token
            assert _bits(logprobs[number]) == _bits(alone)


def test_a_draw_goes_by_its_own_seed_and_position() -> None:
    """Equal rows but for these: the draws of one key agree, those of different keys are different ones."""
    samplers = {seed: make_sampler(1.0, seed=seed) for seed in range(4)}
    positions = count(20, 50)
    keys = [(seed, position) for seed in samplers for position in range(positions)] * 2
    Random(1).shuffle(keys)
    flat = mx.zeros((len(keys), 100_000))
    rows = [Row(samplers[seed], (), position, []) for seed, position in keys]
    drawn: dict[tuple[int, int], set[int]] = {}
    for key, token in zip(keys, sample_rows(flat, rows)[0].tolist(), strict=True):  # type: ignore[arg-type]
        drawn.setdefault(key, set()).add(token)
    assert all(len(tokens) == 1 for tokens in drawn.values())
    assert len({tokens.pop() for tokens in drawn.values()}) > 4 * positions - 5


def test_rows_that_are_broken_leave_the_others() -> None:
    logits = mx.random.normal((6, 50), key=mx.random.key(4))
    seeded = make_sampler(1.0, 0.9, 0.05, top_k=10, xtc_probability=0.5, seed=3)
    rows = [Row(sampler, (), 7, []) for sampler in (greedy, seeded, greedy, seeded, seeded, greedy)]
    expected = sample_rows(logits, rows)[0].tolist()
    assert expected[0] == np.array(logits[0]).argmax()
    for broken in (math.nan, -math.inf, math.inf):
        for victims in ([1, 2, 4], [0, 3]):
            bad = mx.array(logits)
            bad[mx.array(victims)] = broken
            given = sample_rows(bad, rows)[0].tolist()
            assert [given[row] for row in range(6) if row not in victims] == [
                expected[row] for row in range(6) if row not in victims
            ]
            assert all(0 <= token < 50 for token in given)


def test_functions_and_options_that_fail() -> None:
    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        raise KeyError("mine")

    logits = mx.random.normal((1, 20), key=mx.random.key(5))
    for row, error, words in (
        (Row(greedy, (fails, _flattened), 4, [1]), KeyError, "mine"),
        (Row(lambda logprobs: logprobs, (), 4, [1]), ValueError, "returned the shape (1, 20); expected (1,)"),
        (
            Row(greedy, (lambda _, logits: logits[:, :3],), 4, [1]),
            ValueError,
            "returned the shape (1, 3); expected (1, 20)",
        ),
        (
            Row(greedy, (lambda tokens, logits: None,), 4, [1]),  # type: ignore[arg-type, return-value]
            ValueError,
            "returned a NoneType; expected (1, 20)",
        ),
    ):
        with pytest.raises(error, match=re.escape(words)):
            sample_rows(logits, [row])
    for sampler, processors, words in (
        (make_sampler(1.0, top_k=20, seed=1), (), "top_k is 20; expected at most 19"),
        (greedy, make_logits_processors({20: 1.0}), "logit_bias has token 20; the model knows 0 to 19"),
        (greedy, [5], "no logits processor"),
    ):
        with pytest.raises(ValueError, match=words):
            check_options(sampler, processors, 20)  # type: ignore[arg-type]


def test_a_users_functions_see_their_own_row() -> None:
    seen: list[tuple[list[int], list[list[float]]]] = []

    def watching(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append((tokens.tolist(), logits.tolist()))  # type: ignore[arg-type]
        return logits

    logits = mx.arange(12).reshape(3, 4).astype(mx.float32)
    bias = make_logits_processors({0: 100.0})
    rows = [
        Row(greedy, (watching,), 2, [1, 2]),
        Row(greedy, bias, 0, []),
        Row(lambda logprobs: mx.argmin(logprobs, axis=-1), (*bias, watching), 1, [3]),
    ]
    assert sample_rows(logits, rows)[0].tolist() == [3, 0, 1]
    assert sorted(seen) == [([1, 2], [[0.0, 1, 2, 3]]), ([3], [[108.0, 9, 10, 11]])]


def _probabilities(logits: np.ndarray, temp: float, top_p: float, top_k: int) -> np.ndarray:
    """NumPy, float64: of a row without ties."""
    order = np.argsort(-logits)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    kept = order[: 1 + int(np.searchsorted(np.cumsum(probs[order]), top_p))][:top_k]
    weights = np.zeros_like(probs)
    weights[kept] = np.exp((logits[kept] - logits.max()) / temp)
    return weights / weights.sum()


def _chi_square(counted: Counter[int], probs: np.ndarray) -> float:
    """Pearson's statistic of frequent tokens, in standard deviations above its mean; infinite for impossible tokens."""
    expected = probs * counted.total()
    if not set(counted) <= set(np.flatnonzero(expected)):
        return math.inf
    often = np.flatnonzero(expected > 5)
    assert len(often) > 3
    statistic = sum((counted[token] - expected[token]) ** 2 / expected[token] for token in often)
    return float((statistic - (len(often) - 1)) / math.sqrt(2 * (len(often) - 1)))


@pytest.mark.parametrize("varied", ["position", "seed"])
def test_the_rows_draws_have_their_own_probabilities(varied: str) -> None:
    """Chi-square of each row's draws, of one seed over the positions and of one position over the seeds."""
    logits = np.random.default_rng(3).normal(size=(3, 11)).astype(np.float32) * 1.5
    options: Sequence[dict[str, Any]] = (
        {"temp": 0.7, "top_p": 1.0, "top_k": 10},
        {"temp": 1.0, "top_p": 0.8, "top_k": 10},
        {"temp": 2.0, "top_p": 0.95, "top_k": 4},
    )
    draws, batch = count(6000, 60_000), 500
    counts = [Counter[int]() for _ in options]
    repeated = mx.repeat(mx.array(logits), batch, axis=0)
    for first in range(0, draws, batch):
        rows = [
            Row(
                make_sampler(**each, seed=number if varied == "seed" else 5),
                (),
                77 if varied == "seed" else number,
                [],
            )
            for each in options
            for number in range(first, first + batch)
        ]
        for counted, tokens in zip(counts, np.array(sample_rows(repeated, rows)[0]).reshape(3, -1), strict=True):
            counted.update(tokens.tolist())
    for row, each in enumerate(options):
        assert abs(_chi_square(counts[row], _probabilities(logits[row].astype(np.float64), **each))) < 6
        others = options[(row + 1) % 3]
        assert _chi_square(counts[row], _probabilities(logits[row].astype(np.float64), **others)) > 20


def test_neighbours_in_a_sequence_are_independent() -> None:
    """Pairs of draws at positions that follow each other, against the product of their probabilities."""
    draws, size = count(20_000, 200_000), 8
    sampler = make_sampler(1.0, seed=9)
    rows = [Row(sampler, (), position, []) for position in range(draws)]
    tokens = np.array(sample_rows(mx.zeros((draws, size)), rows)[0])
    pairs = np.bincount(tokens[:-1] * size + tokens[1:], minlength=size**2)
    expected = (draws - 1) / size**2
    chi_square = float(((pairs - expected) ** 2 / expected).sum())
    assert abs(chi_square - (size**2 - 1)) < 4 * math.sqrt(2 * (size**2 - 1))


def test_a_token_that_is_left_out_is_never_drawn() -> None:
    """However sums are rounded: MLX's own draw of one row picks such a token now and then in a large vocabulary."""
    vocab_size = 40_000
    logits = mx.where(mx.arange(vocab_size) % 3 == 0, -math.inf, 0.0)[None] + mx.zeros((64, 1))
    logits[:, vocab_size // 2 :] = -math.inf
    for first in range(0, count(3, 100) * 64, 64):
        rows = [Row(make_sampler(1.0, seed=first + number), (), 0, []) for number in range(64)]
        tokens = np.array(sample_rows(logits, rows)[0])
        assert (tokens < vocab_size // 2).all()
        assert (tokens % 3 != 0).all()
