"""Options of sampling: ranges, what has no effect, a model's own in generation_config.json, and what is
built.
"""

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils as theirs
import numpy as np
import pytest
from transformers import GenerationConfig

from kvant.cli.chat import chat
from kvant.cli.generate import generate
from kvant.engine.filters import TopK
from kvant.engine.row_sampling import Row, sample_step
from kvant.engine.sampler import SeededSampler, for_a_run, greedy
from kvant.engine.sampling import NEUTRAL, OPTIONS, SamplingOptions, read_model_sampling
from kvant.errors import ArgumentError, ModelError
from kvant.sample_utils import make_logits_processors, make_sampler


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (make_sampler, {"temp": -1.0}, "temp is -1.0; expected 0, or from 0.001 on"),
        (make_sampler, {"temp": "warm"}, "temp is 'warm'; expected 0, or"),
        (make_sampler, {"temp": math.nan}, "temp is nan"),
        (make_sampler, {"temp": 1e-40}, "temp is 1e-40"),
        (make_sampler, {"top_p": 1.1}, "top_p is 1.1; expected above 0, at most 1"),
        (make_sampler, {"min_p": 1.5}, "min_p is 1.5; expected from 0 to 1"),
        (make_sampler, {"min_tokens_to_keep": 0}, "min_tokens_to_keep is 0; expected at least 1"),
        (make_sampler, {"top_k": 2.5}, "top_k is 2.5; expected 0"),
        (make_sampler, {"xtc_probability": -0.1}, "xtc_probability is -0.1; expected from 0 to 1"),
        (make_sampler, {"xtc_threshold": 0.7}, "xtc_threshold is 0.7; expected from 0 to 0.5"),
        (make_sampler, {"seed": -1}, "seed is -1; expected from 0 to 18446744073709551615"),
        (make_sampler, {"seed": 2**64}, "seed is 18446744073709551616; expected from 0"),
        (
            make_logits_processors,
            {"repetition_penalty": -1.0},
            "repetition_penalty is -1.0; expected 0 .off., or from 0.001",
        ),
        (
            make_logits_processors,
            {"presence_penalty": math.nan},
            "presence_penalty is nan; expected a finite number",
        ),
        (
            make_logits_processors,
            {"presence_context_size": 0},
            "presence_context_size is 0; expected at least 1",
        ),
    ],
)
def test_values_out_of_range(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    for refuse in (make, SamplingOptions):
        with pytest.raises(ValueError, match=message):
            refuse(**({"temp": 1.0} if make is make_sampler else {}) | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"xtc_threshold": 0.2, "temp": 1.0},
            "xtc_threshold is 0.2, which has no effect without xtc_probability",
        ),
        (
            {"repetition_context_size": 5},
            "repetition_context_size is 5, which has no effect without repetition_pen",
        ),
        (
            {"temp": 0.0, "xtc_probability": 0.2},
            "xtc_probability is 0.2, which has no effect at temperature 0",
        ),
        (
            {"temp": 1.0, "min_tokens_to_keep": 2},
            "min_tokens_to_keep is 2, which has no effect without min_p",
        ),
        ({"temp": 0, "seed": 3}, "seed is 3, which has no effect at temperature 0"),
        ({"temp": 1.0, "top_p": 0}, "top_p is 0; expected above 0"),
        ({"temp": 1, "top_k": 300}, "top_k is 300; expected at most 299"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
        ({"logit_bias": {5: math.inf}}, "expected finite"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingOptions(**options).filled().build(300)


@pytest.mark.parametrize(
    ("given", "model", "expected"),
    [
        ({}, {}, {"temp": 0.0, "top_p": 1.0}),
        ({"temp": 0.2}, {"temp": 0.7, "top_p": 0.9}, {"temp": 0.2, "top_p": 0.9}),
        (
            {"temp": 0.0},
            {"temp": 0.7, "top_p": 0.9, "repetition_penalty": 2},
            {"top_p": 1, "repetition_penalty": 2},
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


def test_options_reach_sampler_and_processors() -> None:
    options = SamplingOptions(
        temp=0.5, top_p=0.9, min_p=0.1, min_tokens_to_keep=2, top_k=7, xtc_probability=0.2, seed=3
    )
    state = mx.random.state[0].tolist()  # type: ignore[index]
    sampler, _ = options.filled().build(300, special_tokens=[4, 299, 300, -1])
    assert mx.random.state[0].tolist() == state  # type: ignore[index]
    assert isinstance(sampler, SeededSampler)
    assert replace(sampler, follows_mlx=True) == make_sampler(0.5, 0.9, 0.1, 2, 7, 0.2, 0.1, [4, 299], seed=3)
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    options = SamplingOptions(**penalties, frequency_context_size=2, logit_bias={1: 1})  # type: ignore[arg-type]
    assert options.filled().build(300)[1] == make_logits_processors({1: 1}, 2.0, 20, 1.0, 20, 0.5, 2)
    assert make_logits_processors({}, 0, 20, 0.0, 20, 0.0) == []
    assert SamplingOptions().filled().build(300) == (greedy, [])


EXTREME = [5e-324, 1e-320, 1e-45, 1e-38, 1e-9, 1e9, 1e19, 3e38, 1e39, 1e300, 10**400, math.inf, math.nan]
SMALL = make_sampler(1.0, top_k=3, seed=1)  # leaves most logits at -inf


@pytest.mark.parametrize("name", ["logit_bias", *OPTIONS])
def test_a_value_is_refused_or_leaves_a_token_to_draw(name: str) -> None:
    """A value of 1e-38 once made the logits infinite: the error was the server's, and blamed the weights."""
    logits = mx.array(np.random.default_rng(3).normal(0, 10, (1, 300)), mx.float32)
    taken, refused = 0, []
    for value in (sign * each for each in EXTREME for sign in (1, -1)):
        needs = "" if name == "logit_bias" else OPTIONS[name].metadata["needs"]
        others = {"min_tokens_to_keep": {"min_p": 0.5}, "xtc_threshold": {"xtc_probability": 1.0}}.get(
            name, {}
        )
        others |= {needs: 1.5} if needs.endswith("penalty") else {}
        given: Any = {5: value, 6: value} if name == "logit_bias" else value
        try:
            options = SamplingOptions(**{"temp": 1.0, "top_p": 0.9} | others | {name: given})
            sampler, processors = options.filled().build(300)
        except ArgumentError as error:
            refused.append(str(error))
            continue
        taken += 1
        recent = [5] * 100 + [6] * 100  # more than any window, with repeats
        few = SMALL
        if isinstance(sampler, SeededSampler):
            few = replace(sampler, filters=(*sampler.filters, TopK(3)))
        for draws in (sampler, few):
            (picked,) = sample_step(logits, [Row(for_a_run(draws), processors, 9, recent, top=3)]).read()
            assert not isinstance(picked, Exception), (value, picked)
            assert math.isfinite(picked.logprob), value
            assert name != "temp" or draws is sampler or picked.token in dict(picked.top), value
    assert all(name in message and "expected" in message for message in refused)
    assert taken or name in ("repetition_penalty", "seed") or name.endswith(("size", "keep", "top_k"))


def test_words_for_off(tmp_path: Path) -> None:
    """Both are mlx-lm's and vLLM's: one refused the first, the other the second."""
    for options in ({"top_k": -1}, {"repetition_penalty": 0}, {"top_k": -1, "repetition_penalty": 0.0}):
        assert (
            SamplingOptions(temp=0.5, seed=1, **options).filled()
            == SamplingOptions(temp=0.5, seed=1).filled()
        )
        assert not any(map(SamplingOptions(**options).changes, options))
        assert _read(tmp_path, **options) == {name: NEUTRAL[name] for name in options}
        model = {"temp": 0.7, "top_k": 5, "repetition_penalty": 1.3}
        assert all(
            getattr(SamplingOptions(**options).filled(model), name) == NEUTRAL[name] for name in options
        )
    assert make_sampler(1.0, top_k=-1, seed=1) == make_sampler(1.0, seed=1)
    assert (
        make_logits_processors(repetition_penalty=0)
        == theirs.make_logits_processors(repetition_penalty=0)
        == []
    )


def test_each_option_has_one_definition() -> None:
    """The flags are the fields, with their defaults; mlx-lm's functions have the same names."""
    wanted = {option.name: option for option in fields(SamplingOptions)}
    names = {*signature(theirs.make_sampler).parameters, *signature(theirs.make_logits_processors).parameters}
    assert wanted.keys() - {"seed"} == names - {"xtc_special_tokens"}
    for command in (generate, chat):
        flags = signature(command).parameters
        assert wanted.keys() <= flags.keys()
        assert all(flags[name].default == wanted[name].default for name in wanted.keys() - {"logit_bias"})


def _read(folder: Path, given: tuple[str, ...] = (), **settings: Any) -> dict[str, float]:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return read_model_sampling(folder, given)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 3, "max_new_tokens": 20, "temperature": None}, {}),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"temp": 0.7, "top_p": 0.8, "top_k": 20}),
        ({"do_sample": True, "top_p": 0.8, "min_p": 0.05}, {"temp": 1.0, "top_p": 0.8, "min_p": 0.05}),
        (
            {"do_sample": True, "temperature": 1e-6, "repetition_penalty": 1.05},
            {"temp": 0, "repetition_penalty": 1.05},
        ),
        (
            {"do_sample": False, "temperature": 0.7, "repetition_penalty": 2},
            {"temp": 0, "repetition_penalty": 2},
        ),
        ({"temperature": 1, "top_k": 0}, {"temp": 1, "top_k": 0}),
    ],
)
def test_what_a_file_says(tmp_path: Path, settings: dict[str, Any], expected: dict[str, float]) -> None:
    assert _read(tmp_path, **settings) == expected


def test_the_names_are_transformers_own(tmp_path: Path) -> None:
    settings = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2}
    assert read_model_sampling(tmp_path) == {}  # no file says nothing
    GenerationConfig(do_sample=True, **settings).save_pretrained(tmp_path)
    assert sorted(read_model_sampling(tmp_path).values()) == sorted(settings.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"temperature": "hot"},
            "temperature is 'hot'; expected 0, or from 0.001 on, at most .*; an option of yours overrides it",
        ),
        ({"do_sample": "yes"}, "do_sample is 'yes'; expected true or false"),
    ],
)
def test_a_mistake_in_it_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _read(tmp_path, **settings)
    # A value that is overridden is not looked at.
    assert _read(tmp_path, ("temp",), temperature="hot", do_sample=True, top_p=0.5) == {"top_p": 0.5}


def test_a_file_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / "generation_config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ModelError, match="a link out of the model folder"):
        read_model_sampling(folder)


def test_a_top_k_of_the_whole_vocabulary_is_none(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 50}')
    for vocab_size, expected in ((None, 50), (51, 50), (50, 0)):
        assert read_model_sampling(tmp_path, vocab_size=vocab_size)["top_k"] == expected
