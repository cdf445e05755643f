"""kvant.sample_utils: mlx-lm's names and functions, and samplers in mlx-lm's loop, which tells them no position."""

import inspect
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils as theirs
import pytest
from mlx_lm.generate import generate_step

import kvant
from kvant import sample_utils as ours
from kvant import stream_generate
from kvant.engine.row_sampling import Row, sample_rows
from kvant.errors import ArgumentError
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
VOCAB = 50


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


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("apply_top_p", (0.7,)), ("apply_min_p", (0.1,)), ("apply_top_k", (5,)), ("categorical_sampling", (0.8,))),
        *(("apply_xtc", (1.0, 0.1, [])), ("apply_xtc", (0.5, 0.05, [2, 9])), ("greedy_sampler", ())),
        *((f"make_{kind}_penalty", (1.7, 3)) for kind in ("repetition", "presence", "frequency")),
    ],
)
def test_functions_of_logits(name: str, arguments: tuple[Any, ...]) -> None:
    """Of one row or several, or of a vector, and with the same random numbers."""
    mx.disable_compile()  # a fused operation rounds differently
    try:
        for seed in range(5):
            for logprobs in (_logprobs(seed), _logprobs(seed, rows=3), _logprobs(seed)[0]):
                results = []
                for module in (theirs, ours):
                    mx.random.seed(seed)
                    function = getattr(module, name)
                    if name.endswith("_penalty"):
                        tokens = mx.array([3, 4, 3, 9, 9, 9, 30])
                        results.append(function(*arguments)(tokens, mx.array(logprobs.reshape(-1, VOCAB))))
                    else:
                        results.append(function(logprobs, *arguments))
                assert mx.array_equal(*results)
    finally:
        mx.enable_compile()
    assert results[0].size


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("apply_top_p", (0,), "top_p is 0; expected above 0"),
        ("apply_min_p", (0.1, VOCAB + 1), f"min_tokens_to_keep is {VOCAB + 1}; expected at most {VOCAB}"),
        ("apply_top_k", (VOCAB,), f"top_k is {VOCAB}; expected 1 to {VOCAB - 1} with this"),
        ("apply_xtc", (2, 0.1, []), "xtc_probability is 2; expected from 0 to 1"),
        ("apply_xtc", (1, 0.1, [VOCAB]), f"xtc_special_tokens has token {VOCAB}"),
    ],
)
def test_values_that_are_refused(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        getattr(ours, name)(_logprobs(), *arguments)
    with pytest.raises(ArgumentError, match="penalty is 0; expected above 0"):
        ours.make_repetition_penalty(0)


def test_the_nth_call_draws_as_at_position_n() -> None:
    sampler = ours.make_sampler(1.0, xtc_probability=0.4, xtc_threshold=0.05, seed=5)
    logprobs = _logprobs()
    at_positions = sample_rows(mx.repeat(logprobs, 40, axis=0), [Row(sampler, (), number, ()) for number in range(40)])
    assert [sampler(logprobs).item() for _ in range(40)] == at_positions[0].tolist()


def _draw(pocket: Pocket, sampler: Any, loop: str) -> Iterator[int]:
    """A run of kvant's loop, or of mlx-lm's, which gives a sampler log-probabilities alone."""
    model, tokenizer = pocket
    prompt = tokenizer.encode("Once upon a time")
    if loop == "kvant":
        yield from (each.token for each in stream_generate(model, tokenizer, prompt, 25, sampler=sampler))
    else:
        cache = kvant.make_prompt_cache(model, 128)
        steps = generate_step(mx.array(prompt), model, max_tokens=25, sampler=sampler, prompt_cache=cache)
        yield from (int(token) for token, _ in steps)


def test_seeded_runs_of_mlx_lms_loop_give_interleaved_what_they_give_alone(pocket: Pocket) -> None:
    def run(seed: int) -> Iterator[int]:
        return _draw(pocket, ours.make_sampler(1.3, top_p=0.98, xtc_probability=0.3, seed=seed), "mlx-lm")

    alone = [list(run(seed)) for seed in (1, 2)]
    state = mx.random.state[0].tolist()  # type: ignore[index]
    assert [list(tokens) for tokens in zip(*zip(run(1), run(2), strict=True), strict=True)] == alone
    assert mx.random.state[0].tolist() == state  # type: ignore[index]
    assert alone[0] != alone[1]
    assert len(set(alone[0])) > 5


@pytest.mark.parametrize("loop", ["kvant", "mlx-lm"])
def test_without_a_seed_mlxs_own_makes_a_run_repeatable(pocket: Pocket, loop: str) -> None:
    sampler = ours.make_sampler(1.5, xtc_probability=0.5)
    runs = []
    for seed in (7, 7, 8):
        mx.random.seed(seed)
        runs.append(list(_draw(pocket, sampler, loop)))
    runs.append(list(_draw(pocket, sampler, loop)))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2] != runs[3]
