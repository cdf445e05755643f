"""What a cache needs of the fused kernel is run once when it is made; what does not run is not used."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from support.fused_path import host_kernel
from support.metal_host import host_pytest_skip

from kvant.bridge.layers import BridgedChunkCache, BridgedKVCache, BridgedWindowCache
from kvant.cache import QuantizedKVCache, WindowKVCache
from kvant.models.checkpoint import load_decoder
from kvant.operators import dispatch, probe
from kvant.operators.bias_split import BiasSplit
from kvant.operators.kernels import attend, launch
from kvant.operators.kernels.attend import MAX_NEW_TOKENS, threadgroup_shape
from kvant.operators.rotary import Rotary

pytestmark = host_pytest_skip

Launch = tuple[str, dict[str, Any]]


class Launches(list[Launch]):
    """The name of every launch, with its template, its sizes and whether MLX calls an input small.

    ``fails`` says which of them raises what.
    """

    fails: Callable[[str, dict[str, Any]], BaseException | None] = staticmethod(lambda name, template: None)

    def __call__(
        self,
        name: str,
        backend: str,
        inputs: Sequence[mx.array],
        *,
        template: dict[str, Any],
        outputs: Any,
        **sizes: Any,
    ) -> list[mx.array]:
        """A launch that computes nothing."""
        given = dict(zip(launch.INPUTS[name], inputs, strict=True))
        seen = {f"{each} small": x.size < 8 for each, x in given.items()}
        seen |= {f"{each} dtype": x.dtype for each, x in given.items()}
        self.append((name, {**template, **sizes, **seen}))
        if (error := self.fails(name, template)) is not None:
            raise error
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    def of(self, name: str, *constants: str) -> set[Any]:
        """What the templates of a kernel's launches have at some constants."""
        return {tuple(template[constant] for constant in constants) for own, template in self if own == name}


@pytest.fixture
def launched(checked_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """A GPU whose launches are recorded, in a process that has tried nothing."""
    seen = Launches()
    monkeypatch.setattr(dispatch, "probe_failure", probe.probe_failure)
    monkeypatch.setattr(attend, "launch", seen)
    return seen


def test_every_shape_of_a_threadgroup_is_tried(launched: Launches) -> None:
    shapes = {heads: {threadgroup_shape(heads * S, 0, "metal", 64)[3] for S in range(1, 9)} for heads in (1, 7)}
    assert QuantizedKVCache(4, 2, 64, num_heads=14).backend == "metal"
    assert launched.of("attend", "QUERIES") == {(queries,) for queries in shapes[7]}
    launched.clear()
    QuantizedKVCache(4, 2, 64)  # any heads
    assert launched.of("attend", "QUERIES") == {(queries,) for queries in shapes[1]} == {(1,), (2,), (4,)}
    assert launched.of("attend", "threads") >= {(32 * 4,), (32 * attend.MAX_QUERY_GROUPS,)}
    assert launched.of("combine", "threads") == {(32 * attend.COMBINE_SIMDGROUPS,)}


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 64), (0, 32)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_it_is_tried_in_the_format_of_the_cache(launched: Launches, bits: int, group: int, dtype: mx.Dtype) -> None:
    QuantizedKVCache(4, 2, 128, quant_bit=bits, quant_group=group, dtype=dtype, num_heads=8, scale_dtype=mx.float32)
    assert launched.of("attend", "DIM", "T", "BITS", "MASK") == {(128, dtype, bits, False)}
    appended = {(dtype, mx.float32, bits, group)} if bits else set()
    assert launched.of("append", "T", "SCALE", "BITS", "GROUP") == appended


def test_a_ring_and_a_bias_split_are_tried_too(launched: Launches) -> None:
    split = BiasSplit(mx.zeros((2, 2, 3)), (1, 5, 9), mx.zeros((2, 3, 0)), mx.zeros((2, 64)))
    cache = WindowKVCache(64, 2, 64, window=8, bias_split=split, rotary=Rotary.plain(64, 1e4), num_heads=8)
    assert cache.backend == "metal"
    assert launched.of("attend", "MASK", "WINDOW") == {(False, True)}
    assert launched.of("attend", "BIAS", "pairs small", "key_bias small") == {(attend.BIAS_WEIGHTS, True, False)}
    assert launched.of("combine", "value_bias small") == {(False,)}


def test_a_pool_is_tried_as_its_steps_are(launched: Launches) -> None:
    """They hand on no small array, however few sequences and pages there are."""
    use = probe.KernelUse(64, 64, mx.float16, 8, 32, heads=4, paged=True)
    assert probe.probe_failure(use, "metal") is None
    small = launched.of("attend", "PAGE", "offset small", "first small", "pages small")
    assert small == {(128, False, False, False)}


def test_a_bridged_layer_may_have_sinks(launched: Launches) -> None:
    """In the dtype of its queries; with them and without."""
    tried = {(mx.float32, False), (mx.bfloat16, False)}
    BridgedKVCache(64, 2, 64, dtype=mx.bfloat16)
    assert launched.of("combine", "sinks dtype", "sinks small") == tried
    launched.clear()
    BridgedWindowCache(64, 2, 64, window=8, dtype=mx.bfloat16)
    assert launched.of("combine", "sinks dtype", "sinks small") == tried
    assert launched.of("attend", "WINDOW") == {(True,)}
    launched.clear()
    QuantizedKVCache(64, 2, 64, dtype=mx.bfloat16)
    assert launched.of("combine", "sinks dtype") == {(mx.float32,)}


def test_chunks_have_a_mask(launched: Launches) -> None:
    cache = BridgedChunkCache(64, 2, 64, window=8)
    assert cache.backend == "metal"
    assert launched.of("attend", "MASK", "mask small", "WINDOW") == {(True, False, False)}


def test_widths_of_their_own_and_further_options(launched: Launches) -> None:
    use = probe.KernelUse(192, 128, mx.bfloat16, 4, 32, heads=2, options=(("window", 8), ("keep", 2), ("softcap", 3.0)))
    assert str(use) == "heads of 192 with values of 128, 4 bits g32, bfloat16, window, keep, softcap"
    assert probe.probe_failure(use, "metal") is None
    assert launched.of("attend", "DIM", "VALUE_DIM", "WINDOW", "SOFTCAP") == {(192, 128, True, True)}


def test_layers_that_are_alike_are_tried_once(
    launched: Launches, make_checkpoint: Callable[..., tuple[Path, nn.Module]]
) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    model = load_decoder(make_checkpoint(num_hidden_layers=24, **sizes)[0])
    cache = model.make_cache(16, bias_split=False)
    assert all(layer.backend for layer in cache)
    once = MAX_NEW_TOKENS
    assert [name for name, _ in launched].count("attend") == once
    model.make_cache(32, bias_split=False)
    assert [name for name, _ in launched].count("attend") == once
    model.make_cache(32, bias_split=False, quant_bit=4)
    assert [name for name, _ in launched].count("attend") == 2 * once


def _too_large(name: str, template: dict[str, Any]) -> BaseException | None:
    if name == "attend" and template["QUERIES"] == 2 and template["BITS"]:
        return ValueError(
            "Thread group size (256) is greater than  the maximum allowed\nthreads per threadgroup (224)."
        )
    return None


SAID = (
    "the fused kernel does not run here: heads of 64, 8 bits g32, float16, 2 queries of a kv head: "
    r"Thread group size \(256\) is greater than the maximum allowed threads per threadgroup \(224\)\."
)


def test_one_that_does_not_run_is_told_of_once(launched: Launches) -> None:
    launched.fails = _too_large
    with pytest.warns(RuntimeWarning, match=f"^{SAID}; attention is computed by the unfused operator") as caught:
        caches = [QuantizedKVCache(4, 2, 64, quant_bit=bits) for bits in (8, 8, 4, 0)]
    assert len(caught) == 1
    assert [cache.backend for cache in caches] == [None, None, None, "metal"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert QuantizedKVCache(4, 2, 64, num_heads=14).backend == "metal"  # it never has two
    query, key = mx.ones((1, 6, 1, 64)), mx.ones((1, 2, 1, 64))
    assert mx.allclose(caches[0].attend(query, key, key), query, atol=1e-2).item()


@pytest.mark.parametrize("by_argument", [True, False])
def test_one_that_is_asked_for_and_does_not_run_is_an_error(
    launched: Launches, monkeypatch: pytest.MonkeyPatch, by_argument: bool
) -> None:
    launched.fails = _too_large
    if not by_argument:
        monkeypatch.setenv(dispatch.VARIABLE, "fused")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=SAID.replace("does", "is asked for, but does")):
            QuantizedKVCache(4, 2, 64, kernels="fused" if by_argument else None)


def test_an_append_that_does_not_run(launched: Launches) -> None:
    launched.fails = lambda name, template: RuntimeError("") if name == "append" else None
    with pytest.warns(RuntimeWarning, match="heads of 64, 8 bits g32, float16, 1 queries of a kv head: RuntimeError;"):
        assert QuantizedKVCache(4, 2, 64).backend is None
    assert QuantizedKVCache(4, 2, 64, quant_bit=0).backend == "metal"


def test_an_interruption_is_not_remembered(launched: Launches) -> None:
    launched.fails = lambda name, template: KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        QuantizedKVCache(4, 2, 64)
    launched.fails = lambda name, template: None
    assert QuantizedKVCache(4, 2, 64).backend == "metal"


def test_what_is_not_fused_is_not_tried(launched: Launches) -> None:
    assert QuantizedKVCache(4, 2, 64, kernels="unfused").backend is None
    assert QuantizedKVCache(4, 2, 48, quant_group=16).backend is None  # a width that the kernel does not take
    assert not launched


@pytest.mark.parametrize("paged", [False, True])
def test_the_kernel_itself_runs_on_the_host(checked_gpu: None, monkeypatch: pytest.MonkeyPatch, paged: bool) -> None:
    """What is launched is a call that the kernel takes, and reads and writes nothing outside of its arrays."""
    monkeypatch.setattr(launch, "_kernel", host_kernel)
    for name, few in (("ROWS", 128), ("KV_HEADS", 1), ("MAX_NEW_TOKENS", 1)):
        monkeypatch.setattr(probe, name, few)
    use = probe.KernelUse(64, 64, mx.float16, 8, 32, heads=4, pairs=2, mask=not paged, paged=paged)
    assert probe.probe_failure(use, "metal") is None
