"""kvant.make_prompt_cache in mlx-lm's own loops: mlx-lm's tokens, and memory that is reserved once."""

import copy
from collections.abc import Callable
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache
from support import oracle
from support.bridged import KINDS, LONG, PROMPT, bridged, feed, layers_of
from support.counts import at_widths, count
from support.numbers import peak_bytes, relative_error
from support.tiny_models import build

from kvant.bridge.pool import BridgedCache
from kvant.bridge.prompt_cache import make_prompt_cache
from kvant.cache.kv_format import KVFormat, LayerChoice
from kvant.errors import ContextError


def _tokens(model: nn.Module, cache: list[Any] | None, count: int = 12) -> tuple[list[int], mx.array]:
    """Greedy tokens of mlx-lm's loop, which feeds the prompt 13 at a time, and their log-probabilities."""
    steps = list(
        generate_step(mx.array(PROMPT), model, max_tokens=count, prompt_cache=cache, prefill_step_size=13)
    )
    return [token for token, _ in steps], mx.stack([logprobs for _, logprobs in steps])


def _addresses(cache: list[Any]) -> list[int]:
    mx.synchronize()
    return [
        np.asarray(memoryview(array)).ctypes.data
        for layer in layers_of(cache)
        for array in layer.layer.arrays
    ]


def test_values_have_bits_of_their_own() -> None:
    """mlx-lm's model gets the keys and values that the bytes stand for, of a prompt and of a token behind
    it.
    """
    tuned = KVFormat("", (LayerChoice(8, 16, value_bits=4), LayerChoice(4, 16, value_bits=8)))
    for layer, own in zip(
        kvant.make_prompt_cache(build("qwen3")[0], 44, kv_format=tuned, kv_tail=False),
        tuned.layers,
        strict=True,
    ):
        shape, fetched = layer.layer.format, []
        given = mx.random.normal((2, 1, shape.num_kv_heads, 21, shape.head_dim), key=mx.random.key(0))
        for part in (slice(0, 20), slice(20, 21)):
            fetched = layer.update_and_fetch(*given[..., part, :])
        for x, bits, found in zip(np.array(given), (own.kv_bits, own.value_bits), fetched, strict=True):
            spec = oracle.Spec(scale_dtype="float16", quant_bit=bits, quant_group=16)
            expected = oracle.floats(*oracle.quantize(x, spec, fit=bits == 4), bits, 16)
            assert np.abs(np.array(found) - expected).max() < (1e-2 if bits == 4 else 1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_mlx_lms_loop_gives_mlx_lms_tokens(name: str) -> None:
    model, _ = build(name)
    expected, logprobs = _tokens(model, None)
    wrong = {}
    for bits in (0, 8, 4):
        cache = kvant.make_prompt_cache(model, 44, kv_bits=bits, kv_group_size=16, kv_tail=False)
        assert len(cache) == len(mlx_lm_cache.make_prompt_cache(model))
        reserved = [layer.nbytes for layer in layers_of(cache)]
        given, given_logprobs = _tokens(model, cache)
        assert [layer.nbytes for layer in layers_of(cache)] == reserved
        assert {layer.offset for layer in layers_of(cache)} == {len(PROMPT) + 12}
        wrong[bits] = relative_error(given_logprobs[0], logprobs[0])
        if not bits:
            assert given == expected
            assert relative_error(given_logprobs, logprobs) < 1e-5
    assert wrong[0] < wrong[8] < wrong[4]
    assert wrong[8] < 0.2


@pytest.mark.parametrize(("name", "bits"), at_widths(KINDS))
def test_tokens_are_written_in_place(name: str, bits: int) -> None:
    model, _ = build(name)
    cache = kvant.make_prompt_cache(model, 400, kv_bits=bits)
    feed(model, cache, LONG[:140])
    before = _addresses(cache)
    for token in PROMPT:
        feed(model, cache, [token])
    assert _addresses(cache) == before
    kept = [layer.layer.arrays[0][..., :1] for layer in layers_of(cache)]
    feed(model, cache, [1])
    assert _addresses(cache) != before  # whoever holds a slice has the buffers copied
    del kept


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "deepseek_v3"])
def test_mlx_lms_drafts(name: str) -> None:
    """Rejected drafts are trimmed, also where windows have wrapped: there mlx-lm's own cache is not."""
    model, _ = build(name)
    draft, _ = build("llama")
    tokens = count(12, 24)
    for bits in (0, 8):
        plain, _ = _tokens(model, kvant.make_prompt_cache(model, 80, kv_bits=bits), tokens)
        cache = [*kvant.make_prompt_cache(model, 80, kv_bits=bits), *kvant.make_prompt_cache(draft, 80)]
        options = {"num_draft_tokens": 3, "max_tokens": tokens, "prompt_cache": cache}
        steps = list(speculative_generate_step(mx.array(PROMPT), model, draft, **options))
        assert not all(from_draft for _, _, from_draft in steps)
        assert [token for token, _, _ in steps] == plain


@pytest.mark.parametrize(
    ("name", "bits"), at_widths(["qwen3", "gemma3_text", "llama4", "gemma3n", "deepseek_v3"])
)
def test_trimmed_tokens_do_not_matter(name: str, bits: int) -> None:
    """Beside test_snapshot_bridged, which trims caches of kvant's loop."""
    model, _ = build(name)
    used, fresh = (kvant.make_prompt_cache(model, 600, kv_bits=bits) for _ in range(2))
    for cache in (used, fresh):
        feed(model, cache, LONG[:400])
        feed(model, cache, PROMPT)
    for token in (90, 91, 92):
        feed(model, used, [token])
    assert can_trim_prompt_cache(used)
    assert trim_prompt_cache(used, 3) == 3
    for tokens in ([5], [6, 7, 8], [9]):
        assert mx.array_equal(*(feed(model, cache, tokens) for cache in (used, fresh)))


@pytest.mark.parametrize(("name", "most"), [("gemma3_text", 37), ("qwen3_next", 0)])
def test_a_trim_that_one_layer_cannot_do_is_refused_by_all(name: str, most: int) -> None:
    """Windows of 8, or states, beside layers that keep everything."""
    model, _ = build(name)
    cache = kvant.make_prompt_cache(model, 300)
    feed(model, cache, LONG[:299])  # of a window they wait, and any of them can be forgotten
    feed(model, cache, LONG[299:300])
    for layer in layers_of(cache):
        with pytest.raises(
            ValueError, match=f"{most + 1} of 300 tokens.* no further than to {300 - most} tokens"
        ):
            layer.trim(most + 1)
    assert {layer.offset for layer in layers_of(cache)} == {300}
    assert can_trim_prompt_cache(cache) == (most > 0)
    if most:
        assert trim_prompt_cache(cache, most) == most
        assert not can_trim_prompt_cache(cache)
        feed(model, cache, [1])
        assert trim_prompt_cache(cache, 300) == 301 - most


def test_a_copy_has_a_life_of_its_own() -> None:
    """mlx-lm's server copies caches."""
    model, _ = build("gpt_oss")
    cache, fresh = (kvant.make_prompt_cache(model, 64) for _ in range(2))
    for each in (cache, fresh):
        feed(model, each, PROMPT)
    copied = copy.deepcopy(cache)
    feed(model, cache, [80, 81, 82])
    assert mx.array_equal(*(feed(model, c, [5]) for c in (copied, fresh)))
    assert cache[0].offset == 33


def test_mlx_lms_prefill_leaves_the_buffers_alone() -> None:
    """It evaluates ``state`` after every chunk: a ring whose tokens wait is not copied, and nothing is
    lost.
    """
    model, _ = build("gemma3_text")
    cache, plain = kvant.make_prompt_cache(model, 2000, kv_bits=0), mlx_lm_cache.make_prompt_cache(model)
    for start in range(0, 600, 60):
        tokens = LONG[start : start + 60]
        assert relative_error(*(feed(model, one, tokens) for one in (cache, plain))) < 1e-5
    assert peak_bytes(lambda: [feed(model, cache, [token]) for token in range(5)]) < cache[-1].nbytes


class _Odd:
    def make_cache(self) -> list[Any]:
        return [mlx_lm_cache.KVCache(), mlx_lm_cache.ConcatenateKVCache()]


def test_what_is_refused() -> None:
    model, own = build("qwen3")[0], bridged("qwen3")
    cache = kvant.make_prompt_cache(model, 8)
    feed(model, cache, PROMPT[:6])
    with pytest.raises(ContextError, match="3 more tokens do not fit: 6 of the 8 reserved tokens are used"):
        model(mx.array([[1, 2, 3]]), cache=cache)
    assert {layer.offset for layer in cache} == {6}
    assert isinstance(kvant.make_prompt_cache(own, 8), BridgedCache)
    bad: list[tuple[Callable[..., Any], Any, int, dict[str, int], str]] = [
        (kvant.make_prompt_cache, model, 0, {}, "max_kv_size is 0"),
        (
            kvant.make_prompt_cache,
            model,
            8,
            {"kv_group_size": 7},
            "kv_group_size is 7; expected a multiple of 8",
        ),
        (kvant.make_prompt_cache, model, 2**45, {}, "a cache of 35184372088832 tokens needs"),
        (kvant.make_prompt_cache, "a folder", 8, {}, "model is a str; expected mlx-lm's own"),
        (kvant.make_prompt_cache, _Odd(), 8, {}, "the cache of layer 1 is a ConcatenateKVCache"),
        (make_prompt_cache, own, 8, {}, "model is a BridgedModel; expected mlx-lm's own"),
    ]
    for make, given, size, options, message in bad:
        with pytest.raises((ValueError, ContextError), match=message):
            make(given, size, **options)
    layers = layers_of(kvant.make_prompt_cache(model, 8, kv_group_size=48))
    assert {layer.layer.format.kv_group_size for layer in layers} == {16}  # which divides heads of 32
