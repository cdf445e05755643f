"""A bridged step as a function of arrays: the same for any offset, and compiled once."""

from typing import Any

import mlx.core as mx
import pytest
from support.bridged import PROMPT
from support.bridged_compiled_runs import BITS, MODELS, REFUSED, SIZES, STEPS
from support.numbers import relative_error
from support.tiny_models import SERVED, build
from support.without_compiler import printed_by

from kvant.bridge import hook, make_model_cache
from kvant.bridge.layers import BridgedKVCache, BridgedWindowCache
from kvant.bridge.traced import TracedLayer
from kvant.cache import CacheOptions
from kvant.operators.kernels.launch import INPUTS


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/support/bridged_compiled_runs.py found."""
    return printed_by("support.bridged_compiled_runs", tmp_path_factory.mktemp("bin"))


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_step_is_the_same_and_does_not_grow(runs: dict[str, Any], name: str) -> None:
    for bits in BITS[name]:
        worst, traces, grown = runs["runs"][f"{name}, {bits} bits"]
        assert worst < (1e-5 if not bits else 2e-2)  # rounding flips a quantized value now and then
        assert sorted(traces) == sorted({*SIZES})
        assert grown < 2**16


@pytest.mark.parametrize("bits", [0, 8])
def test_a_compiled_step_through_the_kernel(runs: dict[str, Any], bits: int) -> None:
    """Windows and sinks, with a stand-in for the kernel: what is seen here is the structure."""
    worst, traces, grown = runs["fused"][f"gpt_oss, {bits} bits"]
    assert worst < (1e-5 if not bits else 2e-2)
    assert sorted(traces) == sorted({*SIZES})
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


@pytest.mark.parametrize(("name", "bits"), [(name, bits) for name, (_, each) in SERVED.items() for bits in each])
def test_through_the_kernel(name: str, bits: int, launches: list[Any]) -> None:
    """The kernel's text, run on the host, with an offset that is an array and no mask. Rows past it hold NaN at 0
    bits."""
    model, _ = build(name, **SERVED[name][0])
    cache = make_model_cache(model, 64, CacheOptions(kv_bits=bits))
    plain = make_model_cache(model, 64, CacheOptions(kv_bits=bits, kernels="unfused"))
    if not bits:
        for layer in cache.layers:
            layer.arrays[0] = mx.full(layer.arrays[0].shape, float("nan"), mx.float32)
    steps = [(PROMPT[:6], False), ([5], True), ([6, 7], True), (PROMPT, False), (PROMPT[:8], True), ([8], True)]
    for tokens, is_static in steps:
        inputs = mx.array([tokens])
        for each in (cache, plain):
            each.begin(inputs)
        expected = model(inputs, cache=plain)
        launches.clear()
        views = cache.compiled_views(mx.array(cache.offset), 64) if is_static else cache
        given = model(inputs, cache=views)
        mx.eval(given, expected, cache.state, plain.state)
        attends = [
            dict(zip(INPUTS["attend"], inputs, strict=True)) for kernel, inputs in launches if kernel == "attend"
        ]
        assert len(attends) == (0 if len(tokens) > 8 else len(model.layers))
        assert all(inputs["mask"].size == 1 for inputs in attends)
        assert relative_error(given, expected) < (2e-2 if bits else 1e-4)
        for each in (cache, plain):
            each.commit()


@pytest.mark.parametrize("kind", ["all", "ring"])
@pytest.mark.parametrize(
    ("mask", "S"),
    [("none", 1), ("own", 1), ("narrow", 1), ("other", 1), ("causal", 4), ("own", 4), ("narrow", 2), ("other", 8)],
)
def test_its_masks_through_the_kernel(kind: str, mask: str, S: int, launches: list[Any]) -> None:
    """Those of the step are a window to the kernel; any other is an array."""
    options: dict[str, Any] = {"kv_bits": 0, "dtype": mx.float32}
    layer = BridgedKVCache(64, 2, 64, **options)
    if kind == "ring":
        layer = BridgedWindowCache(64, 2, 64, window=9, **options)
    query, key, value = (mx.random.normal((1, heads, 30 + S, 64), key=mx.random.key(heads)) for heads in (6, 2, 3))
    value = value[:, :2]
    layer.update_and_fetch(key[:, :, :30], value[:, :, :30])
    view = TracedLayer(layer, mx.array(30), 64, {})
    masks = {"none": None, "causal": "causal", "own": view.make_mask(S), "narrow": view.make_mask(S, window_size=5)}
    rows = view.make_mask(S)
    masks["other"] = rows & (mx.arange(rows.shape[1]) != 3)
    fetched = view.update_and_fetch(key[:, :, 30:], value[:, :, 30:])
    mx.eval(fetched)
    launches.clear()
    options = {"scale": 0.3, "sinks": mx.random.normal((6,))}
    given = hook.attention(query[:, :, 30:], *fetched, cache=view, mask=masks[mask], **options)
    ((_, inputs), _) = launches
    assert (dict(zip(INPUTS["attend"], inputs, strict=True))["mask"].size > 1) is (mask == "other")
    seen = rows if mask in ("none", "causal") else masks[mask]
    expected = mx.fast.scaled_dot_product_attention(query[:, :, 30:], *map(mx.array, fetched), mask=seen, **options)
    assert relative_error(given, expected) < 1e-5


def test_several_tokens_without_a_mask_are_refused() -> None:
    """They would see the rows behind their own, which hold what was never committed."""
    view = TracedLayer(BridgedKVCache(64, 2, 64), mx.array(30), 64, {})
    query, key = mx.zeros((1, 6, 2, 64)), mx.zeros((1, 2, 2, 64))
    fetched = view.update_and_fetch(key, key)
    with pytest.raises(ValueError, match="2 tokens attend without a mask; a compiled step's see nothing past their"):
        hook.attention(query, *fetched, cache=view, scale=0.3, mask=None)
