"""The hook on mlx-lm's attention: what it takes, what it leaves, and the fused kernel under mlx-lm's
models.
"""

from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import architectures as table
import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from support import attend_stand_in
from support.bridged import LONG, OWN_ATTENTION, PROMPT, alone, feed, make_model_cache
from support.counts import count
from support.numbers import normal, peak_bytes, relative_error
from support.tiny_models import SERVED, build

from kvant.bridge import hook
from kvant.bridge.layers import BridgedLayer
from kvant.bridge.probe import Attention, leaves_of, probe
from kvant.cache import CacheOptions
from kvant.operators import dispatch, paged_kernel
from kvant.operators.kernels import attend, launch


def _fetched(layer: BridgedLayer, tokens: int) -> tuple[mx.array, mx.array]:
    return layer.update_and_fetch(normal(1, 1, 2, tokens, 64), normal(2, 1, 2, tokens, 64))


def test_nothing_is_held() -> None:
    layer = alone(16)
    key, value = _fetched(layer, 4)
    assert hook.owner_of(key, value) is layer
    before = len(hook._fetched)
    del key, value
    assert len(hook._fetched) == before - 1
    key, value = _fetched(layer, 4)
    del layer
    assert hook.owner_of(key, value) is None


def _check(layer: BridgedLayer, query: mx.array, fetched: tuple[mx.array, mx.array], **options: Any) -> None:
    """The hook's attention is mlx-lm's to the same dequantized tokens."""
    given = hook.attention(query, *fetched, cache=layer, **options)
    assert (
        relative_error(given, mx.fast.scaled_dot_product_attention(query, *map(mx.array, fetched), **options))
        < 1e-5
    )


# bits, widths of keys and values, group: also those of Phi-2, MiMo and Gemma 4
FORMATS = [(0, (64, 64), 32), (8, (64, 64), 32), (4, (64, 64), 32)]
FORMATS += [(4, (80, 80), 16), (8, (192, 128), 32), (0, (512, 512), 32)]


@pytest.mark.parametrize("through", ["unfused", "fused"])
@pytest.mark.parametrize(("bits", "widths", "group"), FORMATS)
@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "added", "window"])
def test_attention_is_mlx_lms(
    bits: int, widths: tuple[int, int], group: int, mask: str, through: str, request: pytest.FixtureRequest
) -> None:
    """Any scale and mask, with sinks and without; fused: by the kernel's text, run on the host."""
    launches: list[Any] = request.getfixturevalue("launches") if through == "fused" else []
    D, Dv = widths
    for new in (1, 5) if through == "unfused" else (3,):
        layer = alone(64, widths, kv_bits=bits, kv_group_size=group)
        for tokens in (20, new):
            seen: Any = layer.make_mask(tokens, window_size=9)
            fetched = layer.update_and_fetch(normal(1, 1, 2, tokens, D), normal(2, 1, 2, tokens, Dv))
            mx.eval(fetched)
        masks: dict[str, Any] = {
            "none": None,
            "causal": "causal",
            "boolean": (normal(4, new, 20 + new) > 0) | (mx.arange(20 + new) == 3),
            "added": normal(5, 1, 6, new, 20 + new),
            "window": seen,
        }
        for sinks in (None, normal(6, 6)):
            launches.clear()
            _check(layer, normal(3, 1, 6, new, D) / 4, fetched, scale=0.3, mask=masks[mask], sinks=sinks)
            if through == "fused":
                ((_, inputs), _) = launches
                assert (_input(inputs, "mask").size > 1) is (mask in ("boolean", "added"))


def test_another_layer_s_mask_is_an_array(launches: list[Any]) -> None:
    """It may have columns for other tokens: those of a window at another position, or all 9 of a layer
    without one.
    """
    other = alone(64, window=9)
    _fetched(other, 40)
    for layer, held, columns in (
        (alone(64, window=9), 42, 43),
        (alone(64), 8, 9),
        (alone(300, window=9), 170, 43),
    ):
        _fetched(layer, held)
        mask = other.make_mask(1, window_size=5)
        fetched = _fetched(layer, 1)
        launches.clear()
        _check(layer, normal(3, 1, 6, 1, 64), fetched, scale=0.125, mask=mask)
        ((_, inputs), _) = launches
        assert _input(inputs, "mask").size == columns


def test_pages_that_move_need_no_other_instance(checked_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would be compiled in the middle of a text."""
    layer, run, instances = alone(400, window=9), attend.launch, set()

    def recorded(name: str, *given: Any, template: dict[str, Any], **rest: Any) -> list[mx.array]:
        if name == "attend":
            instances.add(tuple(template.items()))
        return run(name, *given, template=template, **rest)

    monkeypatch.setattr(attend, "launch", recorded)
    mx.eval(_fetched(layer, 138))
    for _ in range(30):
        mask = layer.make_mask(1, window_size=9)
        mx.eval(
            hook.attention(normal(3, 1, 6, 1, 64), *_fetched(layer, 1), cache=layer, scale=0.125, mask=mask)
        )
    assert len(instances) == 1


def test_tokens_that_wait_are_read_where_they_are(launches: list[Any]) -> None:
    """The last query alone, after more tokens than its pages have room for: they are not in its rows yet."""
    layer = alone(512, window=9)
    _fetched(layer, 30)
    fetched = _fetched(layer, 300)
    assert layer._cache.batch.deferred.arrays
    tokens = fetched[0].shape[2]
    _check(layer, normal(3, 1, 6, 1, 64), fetched, scale=0.125, mask=(mx.arange(tokens) >= tokens - 9)[None])


def _input(inputs: list[mx.array], name: str) -> mx.array:
    return dict(zip(launch.INPUTS["attend"], inputs, strict=True))[name]


@pytest.mark.parametrize(
    ("name", "bits"), [(name, bits) for name, (_, each) in SERVED.items() for bits in each]
)
def test_the_kernel_serves_architectures(name: str, bits: int, launches: list[Any]) -> None:
    """Every layer's attention of up to 8 new tokens, without a mask: against mlx-lm's model with its own
    cache, and the unfused operator where tokens are quantized or forgotten.
    """
    model, _ = build(name, **SERVED[name][0])
    fused, unfused = (
        make_model_cache(model, 400, CacheOptions(kv_bits=bits, kernels=kernels))
        for kernels in ("fused", "unfused")
    )
    theirs = mlx_lm_cache.make_prompt_cache(model)
    for tokens in (PROMPT[:6], [5], LONG[:170], [6, 7, 8, 9, 10], None, [3]):
        if tokens is None:
            assert fused.trim(4) == unfused.trim(4) == 4
            theirs = None
            continue
        launches.clear()
        logits = [feed(model, cache, tokens) for cache in (fused, unfused)]
        attends = [inputs for kernel, inputs in launches if kernel == "attend"]
        # At 4 bits the exact tail takes a launch of its own.
        calls = len(model.layers) * (2 if bits == 4 else 1)
        assert len(attends) == (calls if len(tokens) <= 8 else 0)
        assert any(kernel == "append" for kernel, _ in launches) == (bits > 0 and len(tokens) <= 8)
        assert all(_input(inputs, "mask").size == 1 for inputs in attends)
        # rounding flips a quantized value now and then
        assert relative_error(*logits) < (2e-2 if bits else 1e-4)
        if not bits and theirs is not None:
            assert relative_error(logits[0], model(mx.array([tokens]), cache=theirs)) < 1e-4


# Masks that the models make: of chunks, and of selected blocks.
OWN_MASKS = {"llama4", "minimax_m3_vl"}
# Attention of their own, or none at all.
UNSEEN = OWN_ATTENTION | {"gemma2", "mamba", "mamba2", "rwkv7"}
# Windows of layers that keep all tokens; rings and shared layers; rings alone; a mask one wider than mlx-lm's
# ring.
SOME = ["mistral3", "gemma3n", "recurrent_gemma", "plamo3", "qwen3_next", "gemma2", *sorted(OWN_MASKS)]


@pytest.mark.parametrize("name", count(SOME, table.measured()))
def test_which_masks_reach_the_kernel(name: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []

    def attend_anything(*arrays: Any, **options: Any) -> mx.array:
        masks.append(options.get("mask"))
        return attend_stand_in.attend(*arrays, **options)

    monkeypatch.setattr(paged_kernel, "attend", attend_anything)
    monkeypatch.setattr(attend, "HEAD_DIMS", range(1, 1025))
    monkeypatch.setattr(dispatch, "probe_failure", lambda *_: None)
    model, _ = build(name)
    fused, unfused = (
        make_model_cache(model, 64, CacheOptions(kv_bits=0, kernels=kernels)) for kernels in (None, "unfused")
    )
    for tokens in (PROMPT, [5], [6, 7, 8], [9]):
        assert (
            relative_error(*(table.finite(feed(model, cache, tokens)) for cache in (fused, unfused))) < 1e-4
        )
    assert bool(masks) is (name not in UNSEEN)
    assert any(mask is not None for mask in masks) is (name in OWN_MASKS)


# Some layers of the last two have selected blocks.
OWN_SCORES = OWN_ATTENTION | {"gemma2", "minimax_m3_vl", "phi3small"}


@pytest.mark.parametrize("name", count([*SOME, "deepseek_v3", "mimo_v2_flash"], table.measured()))
def test_which_layers_attend_through_mlx_lms_function(name: str) -> None:
    """The plan counts whole score matrices of the others."""
    model, config = build(name)
    leaves = [leaf for leaf in leaves_of(probe(model)) if isinstance(leaf, Attention)]
    assert any(not leaf.query_heads for leaf in leaves) is (name in OWN_SCORES)
    text = config.get("text_config", config)
    # by layer
    if isinstance(heads := text.get("num_attention_heads"), int) and name not in {"laguna", "step3p5"}:
        assert {leaf.query_heads for leaf in leaves} <= {0, heads}


def test_a_mask_is_known_in_mlx_lms_loop_too(launches: list[Any]) -> None:
    """There every layer counts for itself, and one makes the mask of all."""
    model, _ = build("gpt_oss", **SERVED["gpt_oss"][0])
    cache, theirs = kvant.make_prompt_cache(model, 64, kv_bits=0), mlx_lm_cache.make_prompt_cache(model)
    for tokens in (PROMPT, [5], [6, 7]):
        launches.clear()
        assert relative_error(*(feed(model, each, tokens) for each in (cache, theirs))) < 1e-4
        assert all(_input(inputs, "mask").size == 1 for kernel, inputs in launches if kernel == "attend")
    assert launches


@pytest.mark.parametrize("bits", [0, 8])
def test_the_kernel_serves_chunks(bits: int, launches: list[Any]) -> None:
    """A mask of the model's begins with the chunk, and the pages before it."""
    caches = [alone(600, chunk=32, kv_bits=bits, kernels=kernels) for kernels in (None, "unfused")]
    for seed, new in enumerate((40, 1, 7, 1, 20, 1, 3, 8, 1, 30, 1, 100, 1, 3, 300, 1, 4)):
        key, value, query = (normal(10 * seed + i, 1, heads, new, 64) for i, heads in enumerate((2, 2, 6)))
        offset, start = caches[0].offset, caches[0].start_position
        token, position = mx.arange(start, offset + new), mx.arange(offset, offset + new)[:, None]
        mask = (token // 32 == position // 32) & (token <= position)
        launches.clear()
        outputs = []
        for cache in caches:
            fetched = cache.update_and_fetch(key, value)
            assert fetched[0].shape[2] == offset + new - start
            outputs.append(hook.attention(query, *fetched, cache=cache, scale=0.125, mask=mask))
            mx.eval(outputs[-1], cache.state)
            del fetched
        assert relative_error(*outputs) < 1e-4
        assert any(name == "attend" for name, _ in launches) == (new <= 8)


def test_rows_that_the_kernel_serves_are_not_computed(launches: list[Any]) -> None:
    layer = alone(4096)
    mx.eval(_fetched(layer, 4000)[0].shape, layer.layer.arrays)
    key, value = _fetched(layer, 1)
    query = normal(3, 1, 6, 1, 64)
    mx.eval(query)

    def attended() -> mx.array:
        return hook.attention(query, key, value, cache=layer, scale=0.125, mask=None)

    used, given = peak_bytes(lambda: mx.eval(attended())), attended()
    assert launches[-1][0] == "combine"
    assert used < key.nbytes / 2
    expected = mx.fast.scaled_dot_product_attention(query, mx.array(key), mx.array(value), scale=0.125)
    assert relative_error(given, expected) < 1e-5


def test_a_prefill_makes_no_score_matrix() -> None:
    """Queries are taken in blocks on a CPU."""
    layer = alone(8192)
    _fetched(layer, 7680)
    key, value = _fetched(layer, 512)
    query = normal(3, 1, 8, 512, 64)
    mx.eval(query, layer.layer.arrays)
    used = peak_bytes(
        lambda: mx.eval(hook.attention(query, key, value, cache=layer, scale=0.1, mask="causal"))
    )
    assert key.nbytes < used < 8 * 512 * 8192 * 4 / 2  # the bytes of one score matrix
    assert layer.nbytes == 2 * 2 * 8192 * (64 + 2 * 2)
