"""kvant's samplers and processors: mlx-lm's distributions, exactly."""

import math
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from itertools import product
from random import Random
from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils as theirs
import numpy as np
import pytest
from support.counts import count

from kvant.cli.chat import chat
from kvant.cli.generate import generate
from kvant.engine.draw import SeededSampler, draw_keys, greedy
from kvant.engine.filters import filtered, keep_min_p, keep_top_k, keep_top_p, leave_out_top_choices
from kvant.engine.sampling import SamplingOptions, make_logits_processors, make_sampler

COIN = mx.array(0.5)
VOCABULARIES = (5, 300, 151_936)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@pytest.fixture(autouse=True)
def _theirs_without_a_compiler() -> Iterator[None]:
    """mlx-lm's functions are the same operations compiled or not, but for the rounding of fused ones."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _logits(kind: str, vocab_size: int, seed: int = 0) -> mx.array:
    """(2, vocab) float32, a row of each seed."""
    normal = mx.random.normal((2, vocab_size), key=mx.random.key(seed))
    kinds = {
        "normal": normal * 3,
        "steep": normal * 30,
        "ties": mx.round(normal),
        "equal": mx.zeros((2, vocab_size)),
        "masked": mx.where((normal > 0.5) | (mx.arange(vocab_size) == 1), normal, -math.inf),
        "one-hot": mx.where(mx.arange(vocab_size) == 3, 0.0, mx.full((2, vocab_size), -math.inf)),
    }
    return kinds[kind]


KINDS = ("normal", "steep", "ties", "equal", "masked", "one-hot")
# The large vocabulary takes long: in the gate with one dtype.
SIZES = [
    (size, dtype) for size, dtype in product(VOCABULARIES, DTYPES) if size < 1000 or dtype in DTYPES[: count(1, 3)]
]
CASES = [(kind, *size) for kind, size in product(KINDS, SIZES)]
CASE_NAMES = [f"{kind}-{size}-{str(dtype).rpartition('.')[2]}" for kind, size, dtype in CASES]
each_case = pytest.mark.parametrize(("kind", "vocab_size", "dtype"), CASES, ids=CASE_NAMES)


def _logprobs(kind: str, vocab_size: int, dtype: mx.Dtype) -> mx.array:
    logits = _logits(kind, vocab_size)
    return (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(dtype)


def _check_same(given: mx.array, expected: mx.array) -> None:
    assert given.dtype == expected.dtype
    assert mx.array_equal(given, expected).item()


@each_case
class TestAFilterLeavesWhatMlxLmLeaves:
    def test_top_p(self, kind: str, vocab_size: int, dtype: mx.Dtype) -> None:
        logprobs = _logprobs(kind, vocab_size, dtype)
        for top_p in (1e-6, 0.3, 0.5, 0.9, 0.999):
            _check_same(keep_top_p(logprobs, top_p), theirs.apply_top_p(logprobs, top_p))

    def test_min_p(self, kind: str, vocab_size: int, dtype: mx.Dtype) -> None:
        logprobs = _logprobs(kind, vocab_size, dtype)
        for min_p, at_least in product((1e-6, 0.05, 0.5, 1.0), (1, 2, 5)):
            _check_same(keep_min_p(logprobs, min_p, at_least), theirs.apply_min_p(logprobs, min_p, at_least))

    def test_top_k(self, kind: str, vocab_size: int, dtype: mx.Dtype) -> None:
        logprobs = _logprobs(kind, vocab_size, dtype)
        for top_k in (1, 3, vocab_size - 1):
            _check_same(keep_top_k(logprobs, top_k), theirs.apply_top_k(logprobs, top_k))

    def test_xtc(self, kind: str, vocab_size: int, dtype: mx.Dtype) -> None:
        logprobs = _logprobs(kind, vocab_size, dtype)
        for threshold, special in product((0.0, 0.01, 0.1, 0.5), ([], [0, 3])):
            given = leave_out_top_choices(logprobs, 1.0, threshold, special, COIN)
            _check_same(given, theirs.apply_xtc(logprobs, 1.0, threshold, special))


def _drawn_from(sampler: Any, logprobs: mx.array, monkeypatch: pytest.MonkeyPatch) -> mx.array:
    """The logits a sampler draws from."""
    if isinstance(sampler, SeededSampler):
        return filtered(logprobs, [sampler] * 2, COIN)
    drawn: list[mx.array] = []
    with monkeypatch.context() as patch:
        patch.setattr(mx.random, "categorical", lambda logits, **_: drawn.append(logits) or mx.array([0]))
        sampler(logprobs)
    return drawn[0]


@pytest.mark.parametrize("vocab_size", [12, 5000])
def test_the_whole_chain_is_mlx_lms(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every subset of the filters, in mlx-lm's order: each looks at what those before it left."""
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
        given = _drawn_from(make_sampler(**options), logprobs, monkeypatch)
        expected = _drawn_from(theirs.make_sampler(**options), logprobs, monkeypatch)
        assert mx.array_equal(given, expected).item(), options
        changed += not mx.array_equal(expected, logprobs * (1 / options["temp"])).item()
    assert changed > 100


def test_a_top_p_too_small_for_float32_keeps_the_likeliest() -> None:
    """mlx-lm reads past the vocabulary's end there."""
    for logprobs in (mx.array([[-3.0, -0.1, -4.0]]), mx.array([[-300.0, -200.0, -400.0]])):
        kept = keep_top_p(logprobs, 1e-60)
        assert mx.isfinite(kept).tolist() == [[False, True, False]]


# The filters again, from their papers, on rows without ties: NumPy, float64.


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _expected(logits: np.ndarray, temp: float, **options: float) -> np.ndarray:
    """The probability of each token."""
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
        without = np.where(np.isin(np.arange(logits.size), left_out), -np.inf, np.where(kept, logits, -np.inf))
        probability = options["xtc_probability"]
        return (1 - probability) * plain + probability * _softmax(without / temp)
    if "top_k" in options:
        kept[order[int(options["top_k"]) :]] = False
    return _softmax(np.where(kept, logits, -np.inf) / temp)


def _chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic in standard deviations above its mean; infinite where what cannot be drawn was drawn."""
    possible = expected > 0
    if counts[~possible].any():
        return math.inf
    wanted = expected[possible] * counts.sum()
    freedom = max(1, possible.sum() - 1)
    return float((((counts[possible] - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize(
    "options",
    [
        {"temp": 1.0},
        {"temp": 0.6},
        {"temp": 1.7, "top_p": 0.8},
        {"temp": 1.0, "min_p": 0.2},
        {"temp": 0.8, "top_k": 4},
        {"temp": 1.0, "top_p": 0.9, "min_p": 0.05, "top_k": 5},
        {"temp": 1.0, "xtc_probability": 0.4, "xtc_threshold": 0.1},
        {"temp": 1.3, "top_p": 0.9, "xtc_probability": 0.7, "xtc_threshold": 0.12},
    ],
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    """Draws of one seed, at the positions from 0 on, against float64 probabilities."""
    logits = np.random.default_rng(4).normal(size=12) * 1.5
    logprobs = mx.array(np.log(_softmax(logits))[None].astype(np.float32))
    sampler: Any = make_sampler(**options, seed=11)
    draws = count(20_000, 100_000)
    tokens = sampler(mx.repeat(logprobs, draws, axis=0), draw_keys([sampler] * draws, range(draws)))
    counts = np.bincount(np.array(tokens), minlength=12)
    assert abs(_chi_square(counts, _expected(logits, **options))) < 4
    assert _chi_square(counts, _expected(logits, **options | {"temp": options["temp"] * 1.25})) > 8


# Penalties and bias.


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
        {"logit_bias": {2: 1.0}, "repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
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


def test_penalties_by_their_formulas() -> None:
    logits = _logits("normal", 50)
    tokens = [7, 7, 1, 30, 7, 1, 49]
    row = np.array(logits, np.float64)
    recent, counts = tokens[-5:], np.bincount(tokens[-5:], minlength=50)
    seen = np.isin(np.arange(50), recent)
    formulas = {
        "repetition": np.where(seen, np.where(row > 0, row / 1.5, row * 1.5), row),
        "presence": row - 1.5 * seen,
        "frequency": row - 1.5 * counts,
    }
    for name, expected in formulas.items():
        options: dict[str, Any] = {f"{name}_penalty": 1.5, f"{name}_context_size": 5}
        (processor,) = make_logits_processors(**options)
        np.testing.assert_allclose(np.array(processor(mx.array(tokens), logits)), expected, rtol=1e-6, atol=1e-6)


def test_what_is_off_makes_no_processor() -> None:
    assert make_logits_processors({}, 0, 20, 0.0, 20, 0.0) == []
    assert SamplingOptions().build(300) == (greedy, [])


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temp": -1.0}, "temp is -1.0; expected 0, or from 0.001 on"),
        ({"temp": "warm"}, "temp is 'warm'; expected 0, or"),
        ({"temp": True}, "temp is True"),
        ({"top_p": 1.1}, "top_p is 1.1; expected above 0, at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5; expected from 0 to 1"),
        ({"min_tokens_to_keep": 0}, "min_tokens_to_keep is 0; expected at least 1"),
        ({"top_k": 2.5}, "top_k is 2.5; expected 0"),
        ({"xtc_probability": -0.1}, "xtc_probability is -0.1; expected from 0 to 1"),
        ({"xtc_threshold": 0.7}, "xtc_threshold is 0.7; expected from 0 to 0.5"),
        ({"seed": -1}, "seed is -1; expected from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616; expected from 0"),
        ({"seed": 1.0}, "seed is 1.0"),
    ],
)
def test_bad_samplers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_sampler(**{"temp": 1.0} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0; expected above 0"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan; expected a finite number"),
        ({"frequency_context_size": 0}, "frequency_context_size is 0; expected at least 1"),
    ],
)
def test_bad_processors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_logits_processors(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xtc_threshold": 0.2, "temp": 1.0}, "xtc_threshold is 0.2, which has no effect without xtc_probability"),
        ({"presence_context_size": 5}, "presence_context_size is 5, which has no effect without presence_penalty"),
        ({"frequency_context_size": 5}, "frequency_context_size is 5, which has no effect without frequency_penalty"),
        ({"temp": 0.0, "xtc_probability": 0.2}, "xtc_probability is 0.2, which has no effect at temperature 0"),
        ({"temp": 1.0, "min_tokens_to_keep": 2}, "min_tokens_to_keep is 2, which has no effect without min_p"),
        ({"repetition_context_size": 5}, "repetition_context_size is 5, which has no effect without repetition_pen"),
        ({"temp": 1.0, "top_p": 0}, "top_p is 0; expected above 0"),
        ({"temp": float("nan")}, "temp is nan"),
        ({"temp": 1e-40}, "temp is 1e-40"),
        ({"temp": 1, "top_k": 300}, "top_k is 300; expected at most 299"),
        ({"temp": 1, "min_p": 0.1, "min_tokens_to_keep": 301}, "min_tokens_to_keep is 301; expected at most 300"),
        ({"temp": 0, "seed": 3}, "seed is 3, which has no effect at temperature 0"),
        ({"logit_bias": {300: 1.0}}, "token 300"),
        ({"logit_bias": {5: float("inf")}}, "expected finite"),
        ({"temp": 1.0, "seed": -4}, "seed is -4; expected from 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingOptions(**options).build(300)


@pytest.mark.parametrize(
    ("given", "model", "expected"),
    [
        ({}, {}, {"temp": 0.0, "top_p": 1.0}),
        ({}, {"temp": 0.7, "top_k": 20}, {"temp": 0.7, "top_p": 1.0, "top_k": 20}),
        ({"temp": 0.2}, {"temp": 0.7, "top_p": 0.9}, {"temp": 0.2, "top_p": 0.9}),
        (
            {"temp": 0.0},
            {"temp": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
            {"top_p": 1, "repetition_penalty": 1.1},
        ),
        ({"top_p": 0.5}, {"temp": 0.7, "top_p": 0.9}, {"temp": 0.7, "top_p": 0.5}),
        ({"top_p": 0.5}, {"temp": 0.0}, {"temp": 1.0, "top_p": 0.5}),
        ({"seed": 4}, {}, {"temp": 1.0, "seed": 4}),
        ({"xtc_probability": 0.2}, {}, {"temp": 1.0}),
        ({"top_k": 0}, {}, {"temp": 0.0, "top_k": 0}),
        ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.3}, {"repetition_penalty": 1.0}),
    ],
)
def test_what_was_not_given_is_the_models(
    given: dict[str, Any], model: dict[str, Any], expected: dict[str, Any]
) -> None:
    filled = SamplingOptions(**given).filled(model)
    assert {name: getattr(filled, name) for name in expected} == expected
    assert filled.filled({"temp": 0.3, "min_p": 0.2}) == filled


def test_options_reach_the_sampler() -> None:
    options = SamplingOptions(
        temp=0.5, top_p=0.9, min_p=0.1, min_tokens_to_keep=2, top_k=7, xtc_probability=0.2, seed=3
    )
    sampler, _ = options.build(300, special_tokens=[4, 299, 300, -1])
    expected = make_sampler(0.5, 0.9, 0.1, 2, 7, 0.2, 0.1, [4, 299], seed=3)
    assert sampler == expected
    _, processors = SamplingOptions(
        repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5, frequency_context_size=2, logit_bias={1: 1}
    ).build(300)
    logits = _logits("normal", 300)
    tokens, given, wanted = mx.array([5, 6, 5, 5]), logits, mx.array(logits)
    for processor in processors:
        given = processor(tokens, given)
    for processor in theirs.make_logits_processors({1: 1}, 2.0, 20, 1.0, 20, 0.5, 2):
        wanted = processor(tokens, wanted)
    _check_same(given, wanted)


def test_each_option_has_one_definition() -> None:
    """The flags are the fields, with their defaults; mlx-lm's functions have the same names."""
    wanted = {option.name: option for option in fields(SamplingOptions)}
    names = {*signature(theirs.make_sampler).parameters, *signature(theirs.make_logits_processors).parameters}
    assert wanted.keys() - {"seed"} == names - {"xtc_special_tokens"}
    for command in (generate, chat):
        flags = signature(command).parameters
        assert wanted.keys() <= flags.keys()
        assert all(flags[name].default == wanted[name].default for name in wanted.keys() - {"logit_bias"})


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    logprobs = mx.zeros((1, 5))
    for options, message in (
        ({"top_k": 5}, "top_k is 5; expected at most 4"),
        ({"min_p": 0.1, "min_tokens_to_keep": 6}, "min_tokens_to_keep is 6; expected at most 5"),
        ({"xtc_probability": 1.0, "xtc_special_tokens": [5]}, "xtc_special_tokens has token 5; the model knows 0 to 4"),
    ):
        sampler: Any = make_sampler(1.0, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            sampler(logprobs, draw_keys([make_sampler(1.0, seed=1)], [0]))
