"""The compiled decode step: which steps it takes, and what it leaves where it fails."""

import gc
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.without_compiler import run_module

import kvant.engine.run as running
from kvant.cache import CompiledCacheView, FullKVCache, ModelCache, QuantizedKVCache, WindowKVCache
from kvant.engine.draw import greedy
from kvant.engine.run import Run, prefill
from kvant.engine.step import STEP_SIZES, CompiledStep, bucket_size, step_size
from kvant.errors import ContextError
from kvant.models import Decoder
from kvant.operators.bias_split import BiasSplit
from kvant.operators.rotary import Rotary


def test_compiled(tmp_path: Path) -> None:
    """tests/support/compiled_steps.py has the cases."""
    done = run_module("pytest", tmp_path, "-n", "0", "--no-header", "support/compiled_steps.py")
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-2000:]
    assert " passed" in done.stdout


def test_sizes() -> None:
    assert [step_size(tokens) for tokens in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]
    buckets = {1: 256, 256: 256, 257: 512, 1024: 1024, 1025: 1280, 2048: 2048, 2049: 2560, 4097: 5120}
    assert {rows: bucket_size(rows, 10_000) for rows in buckets} == buckets
    for rows in range(1, 5000):
        assert rows <= bucket_size(rows, 1 << 20) <= max(256, rows * 1.25 + 256)
    assert bucket_size(300, 300) == 300
    assert bucket_size(10, 100) == 100


def test_a_step_is_taken_where_its_padding_has_room(pocket: tuple[Decoder, Any]) -> None:
    """Nothing is written past the reservation."""
    model, _ = pocket
    cache = model.make_cache(8)
    prefill(model, [1, 2, 3], cache)
    step = CompiledStep(model, cache, greedy, processed=False, most_tokens=8)
    assert [step.takes(count) for count in (1, 2, 3, 4, 5, 8, 9)] == [True] * 4 + [False] * 3
    assert not CompiledStep(model, cache, greedy, processed=False).takes(2)
    with pytest.raises(ContextError, match="8 more tokens do not fit: 3 of the 8"):
        step([4, 5, 6, 7, 8])
    with pytest.raises(ValueError, match="9 tokens; a compiled step takes up to 8"):
        step([4] * 9)
    assert cache.step is None
    prefill(model, [1, 2, 3, 4, 5], cache)
    with pytest.raises(ContextError, match="1 more tokens do not fit: 8 of the 8"):
        step(mx.array([5]))
    assert cache[0].offset == 8
    assert step.compilations == 0


def test_a_small_slack_takes_fewer_tokens(pocket: tuple[Decoder, Any]) -> None:
    """More would overwrite rows that the first of them needs."""
    layer = WindowKVCache(64, 1, 16, window=8, slack=3, kv_group_size=16)
    assert [pocket[0].can_compile(ModelCache([layer]), size) for size in STEP_SIZES] == [True, True, True, False]


def test_a_window_with_a_bias_split_is_not_compiled(pocket: tuple[Decoder, Any]) -> None:
    """The angles of its new token are made in Python."""
    rotary = Rotary.plain(16, 1e4)
    split = BiasSplit(mx.zeros((1, 2, 1)), (0,), mx.zeros((2, 1, 0)), mx.zeros((1, 16)))
    for bias_split, can in ((split, False), (None, True)):
        layer = WindowKVCache(64, 1, 16, window=8, kv_group_size=16, bias_split=bias_split, rotary=rotary)
        assert pocket[0].can_compile(ModelCache([layer])) is can


def test_half_precision_stays_half(pocket: tuple[Decoder, Any]) -> None:
    cache = QuantizedKVCache(8, 2, 64, dtype=mx.float16)
    rows = [mx.random.normal((1, heads, 1, 64)).astype(mx.float16) for heads in (4, 2, 2)]
    output = CompiledCacheView(cache, mx.array(3), 8).attend(*rows)
    assert output.dtype == mx.float16
    assert mx.isfinite(output).all().item()


def test_a_cache_that_grows_is_refused(pocket: tuple[Decoder, Any]) -> None:
    model, _ = pocket
    cache = [FullKVCache() for _ in model.layers]
    with pytest.raises(ValueError, match="compiled is True; the model's step through this cache is not"):
        Run(model, [1, 2, 3], cache, max_tokens=2, compiled=True)


def test_on_a_cpu_the_step_is_not_compiled(pocket: tuple[Decoder, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pocket
    made = []
    monkeypatch.setattr(running, "CompiledStep", lambda *a, **k: made.append(a) or CompiledStep(*a, **k))
    cache = model.make_cache(16)
    list(Run(model, [1, 2, 3], cache, max_tokens=4))
    assert bool(made) == (mx.default_device().type == mx.gpu)


def test_a_step_does_not_keep_its_cache_alive(pocket: tuple[Decoder, Any]) -> None:
    """MLX's compiled functions don't take part in garbage collection: a cycle through one would never be freed."""
    model, _ = pocket
    cache = model.make_cache(64)
    layer = weakref.ref(cache[0])
    step = CompiledStep(model, cache, greedy, processed=False)
    del cache, step
    gc.collect()
    assert layer() is None


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_trace_that_is_broken_off_leaves_cache_and_random_state(
    pocket: tuple[Decoder, Any], monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """MLX left placeholders in both: every later step, and every random number of the process, was an error."""
    model, _ = pocket
    cache = model.make_cache(8)
    logits = prefill(model, [1, 2, 3], cache, step_size=512)
    mx.random.seed(2**40 + 7)
    mx.eval(logits, mx.random.uniform())
    expected = mx.random.uniform(key=mx.random.split(mx.random.state[0])[1]).item()

    def interrupt(self: Decoder, hidden: mx.array) -> mx.array:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", interrupt)
        with pytest.raises(KeyboardInterrupt):
            CompiledStep(model, cache, greedy, processed=False)([4] * num_tokens)
    assert mx.random.uniform().item() == expected
    assert {layer.offset for layer in cache} == {3}
    again = model.make_cache(8)
    prefill(model, [1, 2, 3], again, step_size=512)
    rows = [prefill(model, [4, 5], layers, step_size=512) for layers in (cache, again)]
    assert mx.array_equal(*rows).item()
