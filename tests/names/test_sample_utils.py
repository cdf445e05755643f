"""kvant.sample_utils: mlx-lm's names and distributions, and random numbers that are a sampler's own."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils as theirs
import pytest
from mlx_lm.generate import generate_step
from support.counts import count

import kvant
from kvant import sample_utils as ours
from kvant import stream_generate
from kvant.engine.draw import SeededSampler
from kvant.engine.filters import filtered
from kvant.errors import ArgumentError
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
PROMPT = "Once upon a time"
VOCAB = 50
FILTERS: list[dict[str, Any]] = [
    {"temp": 0.7},
    {"temp": 1.5, "top_p": 0.8},
    {"temp": 0.9, "min_p": 0.1, "min_tokens_to_keep": 3},
    {"temp": 1.0, "top_k": 7},
    {"temp": 1.2, "xtc_probability": 1.0, "xtc_threshold": 0.05, "xtc_special_tokens": [0, 3]},
    {"temp": 1.1, "top_p": 0.95, "min_p": 0.02, "top_k": 12, "xtc_probability": 1.0, "xtc_threshold": 0.1},
]


@pytest.fixture(autouse=True)
def _theirs_without_a_compiler() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


def _logprobs(seed: int = 0, rows: int = 1) -> mx.array:
    logits = mx.random.normal((rows, VOCAB), key=mx.random.key(seed)) * 2
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def test_every_name_of_mlx_lm_with_its_arguments() -> None:
    public = [
        name for name, each in vars(theirs).items() if inspect.isfunction(each) and each.__module__ == theirs.__name__
    ]
    compiled = [name for name in vars(theirs) if name.startswith(("apply_", "categorical_"))]
    assert len({*public, *compiled}) == 11
    for name in {*public, *compiled}:
        assert name in ours.__all__
        function = getattr(theirs, name)
        expected = inspect.signature(getattr(function, "__wrapped__", function)).parameters
        given = inspect.signature(getattr(ours, name)).parameters
        assert [*given][: len(expected)] == [*expected], name
        for parameter, each in expected.items():
            default = {"repetition_penalty": None}.get(parameter, each.default)
            assert given[parameter].default == default, (name, parameter)
    assert kvant.sample_utils is ours


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_probabilities_drawn_from_are_mlx_lms(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly: the logits both hand to the draw."""
    drawn: list[mx.array] = []
    monkeypatch.setattr(mx.random, "categorical", lambda logits, **_: drawn.append(logits) or mx.array([0]))
    for seed in range(count(20, 500)):
        logprobs = _logprobs(seed, rows=2)
        theirs.make_sampler(**options)(logprobs)
        ours.make_sampler(**options)(logprobs)
        expected, given = drawn[-2:]
        assert mx.isfinite(expected).any()
        assert mx.array_equal(given, expected)
        seeded = ours.make_sampler(**options, seed=5)
        assert isinstance(seeded, SeededSampler)
        assert mx.array_equal(filtered(logprobs, [seeded] * 2, mx.array([[0.2], [0.9]])), expected)


def test_xtc_applies_as_often_as_it_is_asked_to() -> None:
    logprobs = mx.log(mx.array([[0.7, 0.2, 0.1]]))
    sampler = ours.make_sampler(1.0, xtc_probability=0.4, xtc_threshold=0.15, seed=5)
    calls = 1000
    likeliest = sum(sampler(logprobs).item() == 0 for _ in range(calls))
    share = 0.6 * 0.7  # it is left out in two of five
    assert abs(likeliest - calls * share) < 5 * math.sqrt(calls * share * (1 - share))


def _state() -> list[int]:
    return mx.random.state[0].tolist()  # type: ignore[no-any-return, index]


def _draw(pocket: Pocket, sampler: Any, loop: str, tokens: int = 25) -> Iterator[int]:
    """A run of kvant's loop, or of mlx-lm's, which gives a sampler log-probabilities alone."""
    model, tokenizer = pocket
    prompt = tokenizer.encode(PROMPT)
    if loop == "kvant":
        yield from (each.token for each in stream_generate(model, tokenizer, prompt, tokens, sampler=sampler))
    else:
        cache = kvant.make_prompt_cache(model, 128)
        steps = generate_step(mx.array(prompt), model, max_tokens=tokens, sampler=sampler, prompt_cache=cache)
        yield from (int(token) for token, _ in steps)


@pytest.mark.parametrize("loop", ["kvant", "mlx-lm"])
def test_two_seeded_runs_interleaved_give_what_they_give_alone(pocket: Pocket, loop: str) -> None:
    def sampler(seed: int) -> Any:
        return ours.make_sampler(1.3, top_p=0.98, xtc_probability=0.3, seed=seed)

    alone = [list(_draw(pocket, sampler(seed), loop)) for seed in (1, 2)]
    state = _state()
    together: list[list[int]] = [[], []]
    runs = [_draw(pocket, sampler(seed), loop) for seed in (1, 2)]
    for step in range(50):
        for run, tokens in zip(runs, together, strict=True):
            tokens += [token for token in [next(run, None)] if token is not None]
        if step == 0:
            assert _state() == state
            mx.random.uniform()  # somebody else's
            state = _state()
    assert _state() == state
    assert together == alone
    assert alone[0] != alone[1]
    assert len(set(alone[0])) > 5


@pytest.mark.parametrize("loop", ["kvant", "mlx-lm"])
def test_without_a_seed_mlxs_own_makes_a_run_repeatable(pocket: Pocket, loop: str) -> None:
    """As mlx_lm.chat does it."""
    sampler = ours.make_sampler(1.5, xtc_probability=0.5)
    runs = []
    for seed in (7, 7, 8):
        mx.random.seed(seed)
        runs.append(list(_draw(pocket, sampler, loop)))
    runs.append(list(_draw(pocket, sampler, loop)))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2] != runs[3]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("apply_top_p", (0.7,)), ("apply_min_p", (0.1,)), ("apply_top_k", (5,)), ("categorical_sampling", (0.8,))),
        *(("apply_xtc", (1.0, 0.1, [])), ("apply_xtc", (0.5, 0.05, [2, 9])), ("greedy_sampler", ())),
    ],
)
def test_functions_of_logits(name: str, arguments: tuple[Any, ...]) -> None:
    """Of one row or several, or of a vector, and with the same random numbers."""
    for seed in range(5):
        for logprobs in (_logprobs(seed), _logprobs(seed, rows=3), _logprobs(seed)[0]):
            results = []
            for module in (theirs, ours):
                mx.random.seed(seed)
                results.append(getattr(module, name)(logprobs, *arguments))
            assert mx.array_equal(*results)
    assert results[0].size


@pytest.mark.parametrize("name", ["make_repetition_penalty", "make_presence_penalty", "make_frequency_penalty"])
def test_penalties(name: str) -> None:
    tokens = [3, 4, 3, 9, 9, 9, 30]
    for arguments in ((1.7,), (1.7, 3), (0.4, 100)):
        for seen in (tokens, tokens[:1], []):
            logits = _logprobs(1)
            given, expected = (
                getattr(module, name)(*arguments)(mx.array(seen, mx.int32), mx.array(logits))
                for module in (ours, theirs)
            )
            assert mx.allclose(given, expected, rtol=1e-6).item()
            assert mx.array_equal(given, logits).item() == (not seen)


def test_values_that_are_refused() -> None:
    logprobs = _logprobs()
    for call, message in (
        (lambda: ours.apply_top_p(logprobs, 0), "top_p is 0; expected above 0"),
        (lambda: ours.apply_min_p(logprobs, 1.5), "min_p is 1.5; expected"),
        (lambda: ours.apply_top_k(logprobs, VOCAB), f"top_k is {VOCAB}; expected 1 to {VOCAB - 1} with this"),
        (lambda: ours.apply_xtc(logprobs, 2, 0.1, []), "xtc_probability is 2; expected from 0 to 1"),
        (lambda: ours.apply_xtc(logprobs, 1, 0.7, []), "xtc_threshold is 0.7; expected from 0 to 0.5"),
        (lambda: ours.make_repetition_penalty(0), "penalty is 0; expected above 0"),
        (lambda: ours.make_sampler(-1), "temp is -1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
