"""A bridged step as a function of arrays: the same for any offset, and compiled once."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from support.bridged_compiled_runs import BITS, MODELS, REFUSED, STEPS
from support.numbers import relative_error
from support.tiny_models import build
from support.without_compiler import printed_by

from kvant.bridge import make_model_cache

PROMPT = [(7 + 31 * i) % 97 for i in range(30)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/support/bridged_compiled_runs.py found."""
    return printed_by("support.bridged_compiled_runs", tmp_path_factory.mktemp("bin"))


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_step_is_the_same_and_does_not_grow(runs: dict[str, Any], name: str) -> None:
    for bits in BITS[name]:
        worst, traces, grown = runs["runs"][f"{name}, {bits} bits"]
        assert worst < (1e-5 if not bits else 2e-2)  # rounding flips a quantized value now and then
        assert traces == 1
        assert grown < 2**16


def test_a_step_that_would_be_another_one_is_not_compiled(runs: dict[str, Any]) -> None:
    assert runs["refused"] == dict.fromkeys(REFUSED, False)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_kvants_loop_compiles_a_bridged_step(runs: dict[str, Any], name: str) -> None:
    (tokens, compiled), (expected, not_compiled) = runs["generated"][name]
    assert tokens == expected
    assert len(set(tokens)) > 3
    assert (compiled, not_compiled) == (True, False)


def test_kvants_loop_says_so_where_a_step_cannot_be_compiled(runs: dict[str, Any]) -> None:
    refused, (tokens, compiled) = runs["refused to generate"]
    assert refused == "compiled is True; the model's step through this cache is not the same for every token"
    assert not compiled
    assert len(tokens) == STEPS


@pytest.fixture
def _without_compilation() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("_without_compilation")
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_through_the_kernel(window: int | None, bits: int, launches: list[Any]) -> None:
    """The kernel's text, run on the host, with an offset that is an array. Rows past it hold NaN at 0 bits."""
    mx.random.seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "rms_norm_eps": 1e-5, "head_dim": 64}
    kinds = ["full_attention", "sliding_attention" if window else "full_attention"]
    args = llama.ModelArgs(
        model_type="llama",
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        layer_types=kinds,
        sliding_window=window,
        **shape,
    )
    model = llama.Model(args)
    cache = make_model_cache(model, 64, quant_bit=bits)
    plain = make_model_cache(model, 64, quant_bit=bits, kernels="unfused")
    if not bits and window is None:
        for layer in cache.layers:
            layer.arrays[0] = mx.full(layer.arrays[0].shape, float("nan"), mx.float32)
    for tokens in (PROMPT, *([token] for token in PROMPT[:12])):
        inputs = mx.array([tokens])
        for each in (cache, plain):
            each.begin(inputs)
        expected = model(inputs, cache=plain)[:, -1]
        launches.clear()
        views = cache if len(tokens) > 1 else cache.compiled_views(mx.array(cache.offset), 64)
        given = model(inputs, cache=views)[:, -1]
        mx.eval(given, expected, cache.state, plain.state)
        of_a_layer = [*(["append"] if bits else []), "attend", "combine"]
        assert [name for name, _ in launches] == ([] if len(tokens) > 1 else 2 * of_a_layer)
        assert relative_error(given, expected) < 1e-4
        for each in (cache, plain):
            each.commit()


@pytest.mark.usefixtures("_without_compilation")
def test_it_is_a_step_of_one_token() -> None:
    model, _ = build("qwen3")
    cache = make_model_cache(model, 64)
    with pytest.raises(ValueError, match="a mask of 2 tokens is asked for; a compiled step has one"):
        model(mx.array([[1, 2]]), cache=cache.compiled_views(mx.array(0), 64))
