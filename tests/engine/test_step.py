"""The compiled decode step: compiled once a row bucket, the same tokens, no growth, no copy."""

import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest
from support import compiled_runs, compiled_steps
from support.without_compiler import printed_by

import kvant.engine.run as running
from kvant.cache import CompiledCacheView, FullKVCache, ModelCache, QuantizedKVCache, WindowKVCache
from kvant.engine.draw import greedy
from kvant.engine.run import Run, prefill
from kvant.engine.step import STEP_SIZES, CompiledStep, bucket_size, step_size
from kvant.errors import ContextError
from kvant.models import Decoder
from kvant.operators.bias_split import BiasSplit
from kvant.operators.rotary import Rotary


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/support/compiled_runs.py found."""
    return printed_by("support.compiled_runs", tmp_path_factory.mktemp("bin"))


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_tokens_are_compiled_once_a_bucket_and_are_the_same(runs: dict[str, Any], bits: int) -> None:
    same, compilations, grown = runs[f"{bits} bits"]
    assert same
    first = len(compiled_runs.LONG_PROMPT) + 1
    last = first + compiled_runs.TOKENS[bits] - 2  # the longest past of a step
    assert compilations == len({bucket_size(length, 2048) for length in range(first, last + 1)}) >= 2
    assert grown < 2**16


@pytest.mark.parametrize("bits", ["8", "4", "0"])
def test_through_the_fused_kernel_it_is_compiled_once(runs: dict[str, Any], bits: str) -> None:
    """From 231 rows to 299 or more, with a stand-in for the kernel: what is seen here is the structure."""
    same, compilations, grown = runs["fused"][bits]
    assert same
    assert compilations == 1
    assert grown < 2**16


@pytest.mark.parametrize("path", ["windowed", "fused windowed"])
def test_windows_are_compiled_too(runs: dict[str, Any], path: str) -> None:
    same, compilations, grown, other = runs[path]
    assert same
    assert other  # than without windows
    assert compilations == 1
    assert grown < 2**16


@pytest.mark.parametrize(
    ("kernels", "cache"),
    [("several", cache) for cache in ("8 bits", "4 bits", "0 bits", "windowed")]
    + [("several fused", cache) for cache in ("8 bits", "windowed")],
)
def test_steps_of_several_tokens_are_the_same(runs: dict[str, Any], kernels: str, cache: str) -> None:
    """Of 1 to 8 tokens, of which the first half is committed: what is behind it, padding too, is written over."""
    found = runs[kernels][cache]
    # Rounding flips a quantized value now and then: a step that is not compiled takes its tokens one by one on a CPU.
    assert found["worst"] < {"4 bits": 2e-2, "8 bits": 1e-3}.get(cache, 1e-5)
    assert found["differ"] < (1e-2 if cache == "4 bits" else 1e-3)
    assert found["ids"]
    assert found["compilations"] == [len(STEP_SIZES)] * 2
    assert found["drawn"] == [True] * len(compiled_steps.SIZES)  # every row as alone, with its own position's key


def test_a_window_knows_that_padding_was_written(runs: dict[str, Any]) -> None:
    """The last step had 7 tokens, 4 committed. Padded to 8 it overwrote one row more of those that a trim needs."""
    assert runs["several"]["windowed"]["trims"] == [True, True, True, False]


def test_a_step_that_is_discarded_leaves_the_cache(runs: dict[str, Any]) -> None:
    """The arrays are those from before it, and the next step writes into them: no copy of a cache of 36 MB."""
    found = runs["discarded"]
    assert found["tokens"] == [True] * 4
    assert found["rows"]
    assert found["peak"] < 2**21 < found["cache"] / 8


@pytest.mark.parametrize("run", ["seeded", "processed", "full", "fused", "not compiled"])
def test_drafts_are_verified_compiled(runs: dict[str, Any], run: str) -> None:
    """The text of a compiled run without drafts. Near the end of a reservation 8 tokens have no room."""
    found = runs["drafted"][run]
    assert found["same"]
    assert found["held"]
    assert found["compilations"] in ([0] if run == "not compiled" else [3, 4])
    assert found["steps"] < 0.6
    assert found["peak"] < 2**21  # of 36 MB: where a draft replaces a step that was built, nothing is copied


def test_a_drafted_run_may_be_interrupted_while_a_step_is_traced(runs: dict[str, Any]) -> None:
    assert runs["drafted"]["interrupted"] == [True] * 2


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, None)])
def test_step_sizes(num_tokens: int, size: int | None) -> None:
    assert step_size(num_tokens) == size


def test_a_step_is_taken_where_its_padding_has_room(pocket: tuple[Decoder, Any]) -> None:
    model, _ = pocket
    cache = model.make_cache(8)
    prefill(model, [1, 2, 3], cache)
    step = CompiledStep(model, cache, greedy, processed=False, most_tokens=8)
    assert [step.takes(count) for count in (1, 2, 3, 4, 5, 8, 9)] == [True] * 4 + [False] * 3
    with pytest.raises(ContextError, match="8 more tokens do not fit: 3 of the 8 reserved tokens are used"):
        step([4, 5, 6, 7, 8])
    assert cache.step is None
    with pytest.raises(ValueError, match="9 tokens; a compiled step takes up to 8"):
        step([4] * 9)
    assert not CompiledStep(model, cache, greedy, processed=False).takes(2)
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


def test_the_cache_is_not_copied_however_much_is_reserved(runs: dict[str, Any]) -> None:
    small, large = runs["peaks"]
    assert large < 4 * 2**20  # of 140 MB
    assert large - small < 2**20


def test_a_seed_reproduces_and_samples_vary(runs: dict[str, Any]) -> None:
    first, again, eager, other, _, other_eager = runs["seeds"]
    assert first == again == eager
    assert other == other_eager
    assert first != other
    assert len(set(first)) > 10


def test_a_seed_of_ones_own_draws_the_same_compiled(runs: dict[str, Any]) -> None:
    """Its key is an input of the step: one compilation, and every token another key."""
    texts = []
    for eager, *ways in runs["seeded"]:
        assert ways == [[eager, 1]] * 2  # at once, and with a processor
        assert len(set(eager)) > 10
        texts.append(eager)
    assert texts[0] != texts[1]


def test_processors_and_python_samplers_work_uncompiled(runs: dict[str, Any]) -> None:
    compiled, eager = runs["processed"]
    assert compiled == eager
    tokens, calls, compilations, samples = runs["stateful"]
    assert calls == 40  # every token, not once a trace
    assert len(set(tokens)) > 2
    assert compilations == 1
    assert not samples


def test_buckets() -> None:
    assert [bucket_size(rows, 10_000) for rows in (1, 256, 257, 1024, 1025, 2048, 2049, 4097)] == [
        256,
        256,
        512,
        1024,
        1280,
        2048,
        2560,
        5120,
    ]
    for rows in range(1, 5000):
        assert rows <= bucket_size(rows, 1 << 20) <= max(256, rows * 1.25 + 256)
    assert bucket_size(300, 300) == 300
    assert bucket_size(10, 100) == 100


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


def test_nothing_is_written_past_the_reservation(pocket: tuple[Decoder, Any]) -> None:
    model, _ = pocket
    cache = model.make_cache(4)
    prefill(model, [1, 2, 3, 4], cache, step_size=512)
    with pytest.raises(ContextError, match="1 more tokens do not fit: 4 of the 4 reserved tokens"):
        CompiledStep(model, cache, greedy, processed=False)(mx.array([5]))
    assert cache[0].offset == 4


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
