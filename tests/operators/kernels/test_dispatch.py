"""Which path attention takes, and that both give the same: on a machine whose GPU is stubs or the host's Metal run.

The kernel's own numbers are held against the oracle elsewhere. Nothing here runs on a GPU.
"""

from typing import Any

import mlx.core as mx
import pytest
from support.metal_host import host_pytest_skip
from support.numbers import relative_error

from kvant.cache import CompiledCacheView, QuantizedKVCache
from kvant.engine.run import Run, prefill
from kvant.models import Decoder
from kvant.operators import dispatch, multi_head_cache_attention
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.kernels import launch
from kvant.operators.quantization import quantized_dtype
from kvant.operators.rotary import Rotary

pytestmark = host_pytest_skip


# ---- by device, by word ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "metal", "cuda", "expected"),
    [
        (mx.cpu, True, True, None),
        (mx.gpu, True, False, "metal"),
        (mx.gpu, False, True, "cuda"),
        (mx.gpu, False, False, None),
    ],
)
def test_the_device_decides(
    monkeypatch: pytest.MonkeyPatch, device: mx.DeviceType, metal: bool, cuda: bool, expected: str | None
) -> None:
    monkeypatch.delenv("KVANT_KERNELS", raising=False)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(dispatch, "self_check_failure", lambda backend: None)
    assert dispatch.resolve() == expected
    assert dispatch.resolve("unfused") is None
    if expected is None:
        with pytest.raises(ValueError, match="no GPU"):
            dispatch.resolve("fused")
    else:
        assert dispatch.resolve("fused") == expected


def test_a_word_that_is_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="kernels is 'fast'; expected 'unfused' or 'fused'"):
        QuantizedKVCache(4, 2, 64, kernels="fast")
    monkeypatch.setenv("KVANT_KERNELS", "Fused")
    with pytest.raises(ValueError, match="KVANT_KERNELS is 'Fused'; expected 'unfused' or 'fused'"):
        QuantizedKVCache(4, 2, 64)
    QuantizedKVCache(4, 2, 64, kernels="unfused")  # the argument wins
    monkeypatch.setenv("KVANT_KERNELS", "")
    QuantizedKVCache(4, 2, 64)


@pytest.mark.parametrize("by_argument", [True, False])
def test_a_word_wins_over_the_device(checked_gpu: None, monkeypatch: pytest.MonkeyPatch, by_argument: bool) -> None:
    def made(word: str) -> QuantizedKVCache:
        monkeypatch.setenv("KVANT_KERNELS", "unfused" if by_argument else word)
        return QuantizedKVCache(4, 2, 64, kernels=word if by_argument else None)

    assert made("unfused").backend is None
    assert made("fused").backend == "metal"
    monkeypatch.delenv("KVANT_KERNELS")
    assert QuantizedKVCache(4, 2, 64).backend == "metal"


def test_fused_without_a_gpu_is_an_error(pocket: tuple[Decoder, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pocket
    monkeypatch.setattr(dispatch, "gpu_backend", lambda: None)
    monkeypatch.delenv("KVANT_KERNELS", raising=False)
    assert all(layer.backend is None for layer in model.make_cache(8))
    with pytest.raises(ValueError, match="kernels is 'fused'; MLX's default device is no GPU"):
        model.make_cache(8, kernels="fused")
    call = OperatorCall(8)
    with pytest.raises(ValueError, match="no GPU"):
        call.run("fused")
    call.check_untouched()


# ---- what the kernel does not take -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head_dim": 72, "quant_group": 8}, "head_dim 72"),
        ({"head_dim": 64, "quant_group": 4}, "groups of 4"),
    ],
)
def test_a_format_it_does_not_take(checked_gpu: None, options: dict[str, Any], said: str) -> None:
    cache = QuantizedKVCache(8, 2, **options)
    assert cache.backend is None
    D = options["head_dim"]
    key = mx.random.normal((1, 2, 1, D))
    assert cache.attend(key, key, key).shape == (1, 2, 1, D)
    with pytest.raises(ValueError, match=f"the fused kernel is asked for, but does not take {said}"):
        QuantizedKVCache(8, 2, **options, kernels="fused")


def test_a_prefill_is_unfused(launches: list[Any]) -> None:
    cache = QuantizedKVCache(40, 2, 64, kernels="fused")
    for tokens, fused in ((9, False), (8, True), (1, True)):
        launches.clear()
        query, key = mx.random.normal((1, 4, tokens, 64)), mx.random.normal((1, 2, tokens, 64))
        cache.attend(query, key, key)
        assert [name for name, _ in launches] == (["append", "attend", "combine"] if fused else [])


class OperatorCall:
    """A call of the public operator; positions past the new tokens are NaN where they can be."""

    def __init__(self, bits: int, *, S: int = 2, layout: int = 1, layers: int = 1, B: int = 2, **options: Any) -> None:
        H, K, D, T, max_tokens, max_batch = 6, 2, 64, 37, 50, 3
        self.options = {"is_causal": True, "quant_bit": bits, "quant_group": 16, "num_layer": layers} | options
        self.options |= {"num_heads": H, "num_kv_heads": K, "head_dim": D, "cache_layout": layout}
        shape = (max_batch, layers, 2, max_tokens, K) if layout == 0 else (layers, max_batch, 2, K, max_tokens)
        self.cache, self.scale = mx.zeros((*shape, 32 if bits == 4 else D), quantized_dtype(bits)), None
        if bits:
            self.scale = mx.full((*shape, D // 16), float("nan"), mx.float32)  # whose products PMX rounds to float32
        else:
            self.cache = mx.full((*shape, D), float("nan"), mx.float32)
        past = [mx.random.normal((B, T, K, D), key=mx.random.key(i)) for i in (1, 2)]
        first = self.options | {"is_alibi": False, "kernels": "unfused"}
        multi_head_cache_attention(mx.zeros((B, T, H, D)), *past, 0, self.cache, self.scale, **first)
        self.start = T
        self.new = [mx.random.normal((B, S, heads, D), key=mx.random.key(3 + heads)) for heads in (H, K)]
        self.before = [mx.array(x) for x in (self.cache, self.scale) if x is not None]

    def run(self, kernels: str | None, mask: mx.array | None = None) -> mx.array:
        query, key = self.new
        return multi_head_cache_attention(
            query, key, key + 1, self.start, self.cache, self.scale, mask, **self.options, kernels=kernels
        )

    def check_untouched(self) -> None:
        for before, now in zip(self.before, (self.cache, self.scale), strict=False):
            assert mx.array_equal(before, now, equal_nan=True).item()


@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("extra", ["plain", "alibi", "mask"])
def test_the_operator_is_the_same_either_way(launches: list[Any], bits: int, extra: str) -> None:
    options = {"is_alibi": extra == "alibi"}
    mask = mx.random.normal((1, 6, 2, 45), key=mx.random.key(9)) if extra == "mask" else None
    calls = [OperatorCall(bits, **options) for _ in range(3)]
    unfused = calls[0].run("unfused", mask)
    assert not launches
    for call, kernels in ((calls[1], "fused"), (calls[2], None)):
        assert relative_error(call.run(kernels, mask), unfused) < 1e-5
        assert mx.array_equal(call.cache, calls[0].cache, equal_nan=True).item()
        if bits:
            assert mx.array_equal(call.scale, calls[0].scale, equal_nan=True).item()
        assert [name for name, _ in launches] == [*(["append"] if bits else []), "attend", "combine"]
        launches.clear()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layout": 0}, "cache_layout 0 with num_layer 1"),
        ({"layers": 2}, "cache_layout 1 with num_layer 2"),
        ({"S": 9}, "9 new tokens"),
    ],
)
def test_a_call_it_does_not_take(
    launches: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    said: str,
) -> None:
    call = OperatorCall(8, **options)
    with pytest.raises(ValueError, match=f"does not take {said}"):
        call.run("fused")
    monkeypatch.setenv("KVANT_KERNELS", "fused")
    with pytest.raises(ValueError, match=f"does not take {said}"):
        call.run(None)
    call.check_untouched()
    monkeypatch.delenv("KVANT_KERNELS")
    assert mx.array_equal(call.run(None), OperatorCall(8, **options).run("unfused")).item()
    assert not launches


# ---- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "split"), [(8, True), (8, False), (4, True), (0, True)])
def test_generation_is_the_same_either_way(
    pocket: tuple[Decoder, Any],
    heldout_ids: list[int],
    launches: list[Any],
    bits: int,
    split: bool,
) -> None:
    """A prompt whose last chunk has three tokens, then single ones; eagerly, and by the static form of a step."""
    model, _ = pocket
    prompt = heldout_ids[:100]

    def eager(kernels: str | None) -> list[int]:
        cache = model.make_cache(300, quant_bit=bits, bias_split=split, kernels=kernels)
        tokens = Run(model, prompt, cache, prefill_step_size=97, max_tokens=6, compiled=False)
        return [token for token, _ in tokens]

    def static(tokens: list[int]) -> list[int]:
        cache = model.make_cache(300, quant_bit=bits, bias_split=split)
        prefill(model, prompt, cache, step_size=512)
        found = [tokens[0]]
        for position, token in enumerate(tokens[:-1], start=len(prompt)):
            hidden = model.states(mx.array([[token]]), mx.array(position), cache.compiled_views(mx.array(position), 0))
            found.append(int(mx.argmax(model.logits(hidden[:, -1])).item()))
        return found

    unfused = eager("unfused")
    assert not launches
    assert len(set(unfused)) > 2
    fused = eager(None)
    kinds = 3 if bits else 2
    assert len(launches) == kinds * len(model.layers) * 6  # a chunk and five tokens
    assert fused == unfused
    assert static(unfused) == unfused


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_appends_with_a_bias_split(checked_gpu: None, bits: int) -> None:
    """Both forms of an append against the unfused one, tokens past the offset poisoned, as in test_step.py."""
    H, K, D, pairs = 4, 2, 64, (3, 31)
    split = BiasSplit(
        key_bias=mx.random.normal((K, 2, 2), key=mx.random.key(3)) * 30,
        pairs=pairs,
        rotation=rotation_table(Rotary.plain(D, 1e4), pairs, 20),
        value_bias=mx.random.normal((K, D), key=mx.random.key(4)),
    )
    for offset, S in ((0, 8), (9, 2), (12, 4), (19, 1)):
        caches = [
            QuantizedKVCache(20, K, D, quant_bit=bits, dtype=mx.float32, bias_split=split, kernels=kernels)
            for kernels in ("unfused", "fused", "fused")
        ]
        for cache in caches:
            past = mx.random.normal((1, K, 20, D), key=mx.random.key(1))
            cache.attend(mx.repeat(past, H // K, axis=1), past, past + 1)
            cache.trim(20 - offset)
            cache.arrays[1 if bits else 0][..., offset:, :] = float("nan")
        query = mx.random.normal((1, H, S, D), key=mx.random.key(2))
        key = mx.random.normal((1, K, S, D), key=mx.random.key(5))
        expected, eager = (cache.attend(query, key, key * 2) for cache in caches[:2])
        static = CompiledCacheView(caches[2], mx.array(offset), 0).attend(query, key, key * 2)
        for given, cache in ((eager, caches[1]), (static, caches[2])):
            assert relative_error(given, expected) < 2e-5
            for mine, theirs in zip(cache.arrays, caches[0].arrays, strict=True):
                assert mx.array_equal(mine, theirs, equal_nan=True).item()


def test_the_kernel_is_given_the_cache_itself(launches: list[Any]) -> None:
    """A slice or a view that outlived a step would make MLX copy the whole buffer; small constants are made once."""
    cache = QuantizedKVCache(64, 2, 64)
    seen = []
    for _ in range(3):
        launches.clear()
        query, key = mx.random.normal((1, 4, 1, 64)), mx.random.normal((1, 2, 1, 64))
        mx.eval(cache.attend(query, key, key))
        inputs = dict(zip(launch.INPUTS["attend"], launches[1][1], strict=True))
        assert inputs["cache"] is cache.cache
        assert inputs["scale"] is cache.scale
        seen.append([inputs[name] for name in ("mask", "key_bias", "pairs", "rotation", "slopes")])
    for again in seen[1:]:
        assert all(mine is first for mine, first in zip(again, seen[0], strict=True))
