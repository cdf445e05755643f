"""kvant.make_prompt_cache in mlx-lm's own loops: mlx-lm's tokens, and memory that is reserved once."""

import copy
from collections.abc import Iterator
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import generate, stream_generate
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.counts import at_widths, count
from support.numbers import relative_error
from support.tiny_models import build

from kvant.bridge.cache import BridgedCache, make_prompt_cache
from kvant.bridge.config import BridgedConfig
from kvant.bridge.layers import BridgedKVCache
from kvant.bridge.model import BridgedModel
from kvant.errors import ContextError

PROMPT = [(7 + 31 * i) % 97 for i in range(30)]
# append only; windows; sinks; a linear layer's state; latent attention; chunks; shared rows; a state beside keys
MODELS = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v3", "llama4", "gemma3n", "falcon_h1"]
WITH_STATE = ["qwen3_next", "falcon_h1"]


@pytest.fixture(scope="module", autouse=True)
def _without_compilation() -> Iterator[None]:
    """It would call a C++ compiler, the first time."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _tokens(model: nn.Module, cache: list[Any] | None, count: int = 20) -> tuple[list[int], mx.array]:
    """Greedy tokens of mlx-lm's loop, which feeds the prompt 13 at a time, and their log-probabilities."""
    steps = list(generate_step(mx.array(PROMPT), model, max_tokens=count, prompt_cache=cache, prefill_step_size=13))
    return [token for token, _ in steps], mx.stack([logprobs for _, logprobs in steps])


def _layers(cache: list[Any]) -> list[BridgedKVCache]:
    parts = [part for entry in cache for part in getattr(entry, "caches", [entry])]
    return [part for part in parts if isinstance(part, BridgedKVCache)]


def _addresses(cache: list[Any]) -> list[int]:
    mx.synchronize()
    return [np.asarray(memoryview(array)).ctypes.data for layer in _layers(cache) for array in layer.arrays]


@pytest.mark.parametrize("name", MODELS)
def test_mlx_lms_loop_gives_mlx_lms_tokens(name: str) -> None:
    model, _ = build(name)
    expected, logprobs = _tokens(model, None)
    wrong = {}
    for bits in (0, 8, 4):
        cache = kvant.make_prompt_cache(model, 52, kv_bits=bits, kv_group_size=16)
        assert len(cache) == len(mlx_lm_cache.make_prompt_cache(model))
        reserved = [layer.nbytes for layer in _layers(cache)]
        given, given_logprobs = _tokens(model, cache)
        assert [layer.nbytes for layer in _layers(cache)] == reserved
        assert {layer.offset for layer in _layers(cache)} == {len(PROMPT) + 20}
        wrong[bits] = relative_error(given_logprobs[0], logprobs[0])
        if not bits:
            assert given == expected
            assert relative_error(given_logprobs, logprobs) < 1e-5
    assert wrong[0] < wrong[8] < wrong[4]
    assert wrong[8] < 0.2


@pytest.mark.parametrize(("name", "bits"), at_widths(MODELS))
def test_tokens_are_written_in_place(name: str, bits: int) -> None:
    model, _ = build(name)
    cache = kvant.make_prompt_cache(model, 64, kv_bits=bits)
    mx.eval(model(mx.array([PROMPT[:9]]), cache=cache))
    before = _addresses(cache)
    for token in PROMPT:
        mx.eval(model(mx.array([[token]]), cache=cache))
    assert _addresses(cache) == before
    kept = [layer.arrays[0][..., :1] for layer in _layers(cache)]
    mx.eval(model(mx.array([[1]]), cache=cache))
    assert _addresses(cache) != before  # whoever holds a slice has the buffers copied
    del kept


def test_text_is_generated_through_it(pocket: tuple[Any, Any], pocket_mlx_lm: nn.Module) -> None:
    wrapped = TokenizerWrapper(pocket[1])
    options = {"prompt": "Once upon a time", "max_tokens": 25}
    expected = generate(pocket_mlx_lm, wrapped, **options)
    for bits in (0, 8):
        caches = [kvant.make_prompt_cache(pocket_mlx_lm, 64, kv_bits=bits) for _ in range(2)]
        assert generate(pocket_mlx_lm, wrapped, prompt_cache=caches[0], **options) == expected
        pieces = stream_generate(pocket_mlx_lm, wrapped, prompt_cache=caches[1], **options)
        assert "".join(piece.text for piece in pieces) == expected


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "deepseek_v3"])
def test_mlx_lms_drafts(name: str) -> None:
    """Rejected drafts are trimmed, also where windows have wrapped: there mlx-lm's own cache is not."""
    model, _ = build(name)
    draft, _ = build("llama")
    tokens = count(12, 24)
    for bits in (0, 8):
        plain, _ = _tokens(model, kvant.make_prompt_cache(model, 80, kv_bits=bits), tokens)
        cache = [*kvant.make_prompt_cache(model, 80, kv_bits=bits), *kvant.make_prompt_cache(draft, 80)]
        steps = list(
            speculative_generate_step(
                mx.array(PROMPT), model, draft, num_draft_tokens=3, max_tokens=tokens, prompt_cache=cache
            )
        )
        assert not all(from_draft for _, _, from_draft in steps)
        assert [token for token, _, _ in steps] == plain


@pytest.mark.parametrize(("name", "bits"), at_widths(["qwen3", "gemma3_text", "llama4", "deepseek_v3"]))
def test_trimmed_tokens_do_not_matter(name: str, bits: int) -> None:
    model, _ = build(name)
    used, fresh = (kvant.make_prompt_cache(model, 64, kv_bits=bits) for _ in range(2))
    for cache in (used, fresh):
        mx.eval(model(mx.array([PROMPT]), cache=cache))
    for token in (90, 91, 92):
        mx.eval(model(mx.array([[token]]), cache=used))
    assert can_trim_prompt_cache(used)
    assert trim_prompt_cache(used, 3) == 3
    for tokens in ([5], [6, 7, 8], [9]):
        logits = [model(mx.array([tokens]), cache=cache) for cache in (used, fresh)]
        assert mx.array_equal(*logits)


def test_a_trim_that_one_layer_cannot_do_is_refused_by_all() -> None:
    model, _ = build("gemma3_text")  # windows of 8, and layers that keep everything
    cache = kvant.make_prompt_cache(model, 64)
    mx.eval(model(mx.array([PROMPT]), cache=cache))
    for layer in cache:
        with pytest.raises(ValueError, match="of 30 tokens the cache can forget all, or the last 17"):
            layer.trim(18)
    assert {layer.offset for layer in cache} == {30}
    assert trim_prompt_cache(cache, 30) == 30
    mixed, _ = build("qwen3_next")
    cache = kvant.make_prompt_cache(mixed, 64)
    mx.eval(mixed(mx.array([PROMPT]), cache=cache))
    assert not can_trim_prompt_cache(cache)
    with pytest.raises(ValueError, match="of 30 tokens the cache can forget all, or the last 0"):
        _layers(cache)[0].trim(1)


def test_a_copy_has_a_life_of_its_own() -> None:
    """mlx-lm's server copies caches."""
    model, _ = build("gpt_oss")
    cache = kvant.make_prompt_cache(model, 64)
    mx.eval(model(mx.array([PROMPT]), cache=cache))
    copied = copy.deepcopy(cache)
    mx.eval(model(mx.array([[80, 81, 82]]), cache=cache))
    fresh = kvant.make_prompt_cache(model, 64)
    mx.eval(model(mx.array([PROMPT]), cache=fresh))
    assert mx.array_equal(*(model(mx.array([[5]]), cache=c) for c in (copied, fresh)))
    assert cache[0].offset == 33


def test_what_is_refused() -> None:
    model, _ = build("qwen3")
    cache = kvant.make_prompt_cache(model, 8)
    mx.eval(model(mx.array([PROMPT[:6]]), cache=cache))
    with pytest.raises(ContextError, match="3 more tokens do not fit: 6 of the 8 reserved tokens are used"):
        model(mx.array([[1, 2, 3]]), cache=cache)
    assert {layer.offset for layer in cache} == {6}
    for bad, message in (
        ({"max_kv_size": 0}, "max_kv_size is 0; expected at least 1"),
        ({"max_kv_size": 8, "kv_bits": 3}, "kv_bits is 3; expected 8, 4, 0 for no quantization"),
        ({"max_kv_size": 8, "kv_group_size": 0}, "kv_group_size is 0; expected at least 1"),
        ({"max_kv_size": 8, "kv_group_size": 7}, "kv_group_size is 7; expected a multiple of 8"),
        ({"max_kv_size": 2**45}, "a cache of 35184372088832 tokens needs"),
    ):
        with pytest.raises((ValueError, ContextError), match=message):
            kvant.make_prompt_cache(model, **bad)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="model is a str; expected mlx-lm's own"):
        kvant.make_prompt_cache("a folder", 8)
    own = BridgedModel(model, BridgedConfig("qwen3", 97, None), mx.float32)
    assert isinstance(kvant.make_prompt_cache(own, 8), BridgedCache)
    with pytest.raises(ValueError, match="model is a BridgedModel; expected mlx-lm's own"):
        make_prompt_cache(own, 8)  # type: ignore[arg-type]

    class Odd:
        def make_cache(self) -> list[Any]:
            return [mlx_lm_cache.KVCache(), mlx_lm_cache.ConcatenateKVCache()]

    with pytest.raises(ValueError, match="the cache of layer 1 is a ConcatenateKVCache"):
        kvant.make_prompt_cache(Odd(), 8)


def test_a_group_that_does_not_divide_a_width() -> None:
    model, _ = build("qwen3")
    layers = _layers(kvant.make_prompt_cache(model, 8, kv_group_size=48))
    assert {layer.kv_group_size for layer in layers} == {16}  # heads of 32
