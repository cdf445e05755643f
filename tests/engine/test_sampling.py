"""Filters and processors leave what mlx-lm's leave, and every row of a batch is what it is alone."""

import math
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils as theirs
import numpy as np
import pytest
from support.counts import count

from kvant.engine.filters import keep_min_p, keep_top_k, keep_top_p, leave_out_top_choices
from kvant.engine.row_sampling import Row, check_options, sample_rows
from kvant.engine.sampler import (
    SeededSampler,
    draw_keys,
    draw_seeded,
    filtered,
    for_a_run,
    greedy,
)
from kvant.operators.exponential import logsumexp
from kvant.sample_utils import make_logits_processors, make_sampler

COIN = mx.array(0.5)
VOCABULARIES = (5, 300, 151_936)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
KINDS = ("normal", "steep", "ties", "equal", "masked", "one-hot")
# The large vocabulary takes long: in the gate with one dtype.
SIZES = [
    (size, dtype)
    for size, dtype in product(VOCABULARIES, DTYPES)
    if size < 1000 or dtype in DTYPES[: count(1, 3)]
]


@pytest.fixture(autouse=True)
def _theirs_without_a_compiler() -> Iterator[None]:
    """mlx-lm's functions are the same operations compiled or not, but for the rounding of fused ones."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _logits(kind: str, vocab_size: int, seed: int = 0, rows: int = 2) -> mx.array:
    normal = mx.random.normal((rows, vocab_size), key=mx.random.key(seed))
    kinds = {
        "normal": normal * 3,
        "steep": normal * 30,
        "ties": mx.round(normal),
        "equal": mx.zeros((rows, vocab_size)),
        "masked": mx.where((normal > 0.5) | (mx.arange(vocab_size) == 1), normal, -math.inf),
        "one-hot": mx.where(mx.arange(vocab_size) == 3, 0.0, mx.full((rows, vocab_size), -math.inf)),
    }
    return kinds[kind]


def _check_same(given: mx.array, expected: mx.array) -> None:
    assert given.dtype == expected.dtype
    assert mx.array_equal(given, expected).item()


@pytest.mark.parametrize(("vocab_size", "dtype"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_filter_leaves_what_mlx_lms_leaves(kind: str, vocab_size: int, dtype: mx.Dtype) -> None:
    logits = _logits(kind, vocab_size)
    logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(dtype)
    for top_p in (1e-6, 0.3, 0.5, 0.9, 0.999):
        _check_same(keep_top_p(logprobs, top_p), theirs.apply_top_p(logprobs, top_p))
    for min_p, at_least in product((1e-6, 0.05, 0.5, 1.0), (1, 2, 5)):
        _check_same(keep_min_p(logprobs, min_p, at_least), theirs.apply_min_p(logprobs, min_p, at_least))
    for top_k in (1, 3, vocab_size - 1):
        _check_same(keep_top_k(logprobs, top_k), theirs.apply_top_k(logprobs, top_k))
    for threshold, special in product((0.0, 0.01, 0.1, 0.5), ([], [0, 3])):
        given = leave_out_top_choices(logprobs, 1.0, threshold, special, COIN)
        _check_same(given, theirs.apply_xtc(logprobs, 1.0, threshold, special))


@pytest.mark.parametrize("vocab_size", [12, 5000])
def test_the_whole_chain_is_mlx_lms(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every subset of the filters, with a seed and by MLX's random state: the logits that are handed to
    the draw.
    """
    drawn: list[mx.array] = []
    monkeypatch.setattr(mx.random, "categorical", lambda logits, **_: drawn.append(logits) or mx.array([0]))
    random = Random(vocab_size)
    changed = 0
    for number in range(200):
        options: dict[str, Any] = {
            "temp": random.choice([0.3, 0.8, 1.0, 2.5]),
            "top_p": random.choice([0.0, 0.3, 0.8, 0.95, 1.0]),
            "min_p": random.choice([0.0, 0.02, 0.2]),
            "min_tokens_to_keep": random.choice([1, 4]),
            "top_k": random.choice([0, 1, 4, 11]),
            "xtc_probability": random.choice([0.0, 1.0]),
            "xtc_threshold": random.choice([0.02, 0.1, 0.3]),
            "xtc_special_tokens": random.choice([None, [2, 5]]),
        }
        logits = _logits(random.choice(KINDS), vocab_size, seed=number)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for module_sampler in (theirs.make_sampler(**options), make_sampler(**options)):
            module_sampler(logprobs)
        expected, given = drawn[-2:]
        seeded = make_sampler(**options, seed=5)
        assert isinstance(seeded, SeededSampler)
        for ours in (given, filtered(logprobs, [seeded] * 2, mx.array([[0.2], [0.9]]))):
            assert mx.array_equal(ours, expected).item(), options
        changed += not mx.array_equal(expected, logprobs * (1 / options["temp"])).item()
    assert changed > 100


def test_a_top_p_too_small_for_float32_keeps_the_likeliest() -> None:
    """mlx-lm reads past the vocabulary's end there."""
    for logprobs in (mx.array([[-3.0, -0.1, -4.0]]), mx.array([[-300.0, -200.0, -400.0]])):
        assert mx.isfinite(keep_top_p(logprobs, 1e-60)).tolist() == [[False, True, False]]


@pytest.mark.parametrize(("vocab_size", "dtype"), SIZES)
@pytest.mark.parametrize("kind", ["normal", "ties", "masked", "one-hot"])
def test_processors_are_mlx_lms_and_leave_their_argument(kind: str, vocab_size: int, dtype: mx.Dtype) -> None:
    logits = _logits(kind, vocab_size).astype(dtype)
    before = mx.array(np.array(logits.astype(mx.float32))).astype(dtype)
    random = Random(3)
    for options in (
        {"logit_bias": {0: 2.5, 4: -1e9}},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "repetition_context_size": 3},
        {"presence_penalty": 0.8},
        {"presence_penalty": -0.8, "presence_context_size": 1},
        {"frequency_penalty": 0.6, "frequency_context_size": 64},
        {
            "logit_bias": {2: 1.0},
            "repetition_penalty": 2.0,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
        },
    ):
        for length in (0, 1, 5, 64):
            tokens = mx.array([random.randrange(min(vocab_size, 20)) for _ in range(length)], mx.int32)
            given, expected = logits, mx.array(before)
            for processor in make_logits_processors(**options):  # type: ignore[arg-type]
                given = processor(tokens, given)
            for processor in theirs.make_logits_processors(**options):  # type: ignore[arg-type]
                expected = processor(tokens, expected)
            _check_same(given, expected)
            assert mx.array_equal(logits, before).item()


def _second_likeliest(logprobs: mx.array) -> mx.array:
    return mx.argsort(logprobs, axis=-1)[:, -2].astype(mx.int32)


def _no_repeats(tokens: mx.array, logits: mx.array) -> mx.array:
    """A user's processor, in another dtype: the last token never comes again."""
    return mx.where(mx.arange(logits.shape[-1]) == tokens[-1], -math.inf, logits).astype(mx.bfloat16)


def _flattened(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits / (1 + tokens.size)


def _row(random: Random, vocab_size: int) -> Row:
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
    if _no_repeats not in processors and random.random() < 0.2:
        tokens = []
    return Row(for_a_run(sampler), processors, random.randrange(5000), tokens)


def _alone(logits: mx.array, row: Row) -> tuple[int, mx.array]:
    """By its own functions, one after the other: logits (1, vocab)."""
    logits, tokens, sampler = logits.astype(mx.float32), mx.array(list(row.tokens), mx.int32), row.sampler
    for processor in row.processors:
        logits = processor(tokens, logits).astype(mx.float32)
    logprobs = logits - logsumexp(logits)
    if isinstance(sampler, SeededSampler):
        drawn = draw_seeded(logprobs, [sampler], draw_keys([sampler], [row.position]))
    else:
        drawn = sampler(logprobs)
    return int(drawn.item()), logprobs.squeeze(0)


@pytest.mark.parametrize(
    ("vocab_size", "batches"),
    [*((size, count(12, 400)) for size in (13, 300, 1283)), (151_936, count(1, 10))],
)
def test_every_row_is_what_it_is_alone(vocab_size: int, batches: int) -> None:
    random = Random(vocab_size)
    for _ in range(batches):
        size = random.choice([1, 2, 5, 16])
        rows = [_row(random, vocab_size) for _ in range(size)]
        kinds = [_logits(kind, vocab_size, random.randrange(2**32), size) for kind in KINDS[:5]]
        each = [random.choice(kinds)[row : row + 1] for row in range(size)]
        logits = mx.concatenate(each).astype(random.choice([mx.float32, mx.bfloat16]))
        expected = [_alone(logits[number : number + 1], row) for number, row in enumerate(rows)]
        for _ in range(2):
            order = random.sample(range(size), random.randint(1, size))
            padded = mx.concatenate([logits[mx.array(order)], mx.full((2, vocab_size), math.nan)])
            tokens, logprobs = sample_rows(padded, [rows[number] for number in order])
            assert (tokens.shape, logprobs.shape) == ((len(order),), (len(order), vocab_size))
            for place, number in enumerate(order):
                token, alone = expected[number]
                assert tokens[place].item() == token, rows[number]
                assert logprobs.dtype == alone.dtype == mx.float32
                assert np.array(logprobs[place]).tobytes() == np.array(alone).tobytes(), rows[number]


def test_rows_that_are_broken_leave_the_others() -> None:
    logits = mx.random.normal((6, 50), key=mx.random.key(4))
    seeded = make_sampler(1.0, 0.9, 0.05, top_k=10, xtc_probability=0.5, seed=3)
    rows = [Row(sampler, (), 7, []) for sampler in (greedy, seeded, greedy, seeded, seeded, greedy)]
    expected = sample_rows(logits, rows)[0].tolist()
    assert expected[0] == np.array(logits[0]).argmax()
    for broken, victims in product((math.nan, -math.inf, math.inf), ([1, 2, 4], [0, 3])):
        bad = mx.array(logits)
        bad[mx.array(victims)] = broken
        given = sample_rows(bad, rows)[0].tolist()
        assert all(given[row] == expected[row] for row in range(6) if row not in victims)
        assert all(0 <= token < 50 for token in given)


@pytest.mark.parametrize(
    ("sampler", "processors", "words"),
    [
        (make_sampler(1.0, top_k=20, seed=1), (), "top_k is 20; expected at most 19"),
        (
            make_sampler(1.0, min_p=0.1, min_tokens_to_keep=21),
            (),
            "min_tokens_to_keep is 21; expected at most 20",
        ),
        (
            make_sampler(1.0, xtc_probability=1.0, xtc_special_tokens=[20]),
            (),
            "xtc_special_tokens has token 20; the",
        ),
        (greedy, make_logits_processors({20: 1.0}), "logit_bias has token 20; the model knows 0 to 19"),
        (greedy, [5], "nor a logits processor"),
    ],
)
def test_what_a_vocabulary_is_too_small_for(sampler: Any, processors: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_options(sampler, processors, 20)
    if isinstance(sampler, SeededSampler):  # in a loop of mlx-lm's nobody else could say so
        with pytest.raises(ValueError, match=words):
            sampler(mx.zeros((1, 20)))
