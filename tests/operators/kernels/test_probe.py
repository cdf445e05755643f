"""A cache's own instances of the kernel are tried when it is made; one that fails is not used, and told of
once.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from support.bridged import alone
from support.counts import half
from support.metal_host import host_pytest_skip
from support.operator_cases import OUTPUT_TOLERANCE

from kvant.cache import QuantizedKVCache
from kvant.cache.layer_format import DTYPE_NAMES, LayerFormat, stored_dtype
from kvant.cache.layer_group import kernel_of
from kvant.models.checkpoint import load_decoder
from kvant.operators import dispatch, probe
from kvant.operators.bias_split import BiasSplit
from kvant.operators.kernels import attend, launch
from kvant.operators.kernels.attend import threadgroup_shape
from kvant.operators.kernels.launch import Backend
from kvant.operators.probe import KernelUse
from kvant.operators.quantization import quantized_dtype

pytestmark = host_pytest_skip


class Launches(list[tuple[str, dict[str, Any]]]):
    """The name of every launch, with its template, its sizes, dtypes and whether MLX calls an input small.

    ``fails`` says which of them raises what.
    """

    fails: Callable[[str, dict[str, Any]], BaseException | None] = staticmethod(lambda name, template: None)

    def __call__(
        self,
        name: str,
        backend: str,
        inputs: Sequence[mx.array],
        *,
        template: Any,
        outputs: Any,
        **sizes: Any,
    ) -> list[mx.array]:
        seen: dict[str, Any] = {**template, **sizes}
        for each, x in zip(launch.INPUTS[name], inputs, strict=True):
            seen |= {f"{each} small": x.size < 8, f"{each} dtype": x.dtype}
        self.append((name, seen))
        if (error := self.fails(name, template)) is not None:
            raise error
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    def of(self, name: str, *constants: str) -> set[Any]:
        return {tuple(seen[constant] for constant in constants) for own, seen in self if own == name}


def _backend(
    bits: int = 8,
    group: int = 32,
    *,
    dim: int = 64,
    dtype: mx.Dtype = mx.float16,
    scale: str = "F16",
    window: int | None = None,
    kind: str = "quantized",
    heads: int | None = None,
    sinks: bool = False,
    kernels: str | None = None,
    tail: str = "",
) -> str | None:
    """What runs the kernel for a layer of 2 kv heads."""
    stored = stored_dtype(bits) if bits else DTYPE_NAMES[dtype]
    own = LayerFormat(
        kind,
        2,
        dim,
        dim,
        bits,
        group if bits else 0,
        stored,
        scale if bits else "",
        window=window,
        tail_dtype=tail,
    )
    return kernel_of(own, kernels, dtype, heads, sinks)[1]


@pytest.fixture
def tried(checked_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has tried nothing, on a GPU that is the host."""
    monkeypatch.setattr(dispatch, "probe_failure", probe.probe_failure)


@pytest.fixture
def launched(tried: None, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The launches, which compute nothing; nobody looks at the numbers."""
    seen = Launches()
    monkeypatch.setattr(attend, "launch", seen)
    monkeypatch.setattr(probe, "TOLERANCE", dict.fromkeys(probe.TOLERANCE, 1e9))
    monkeypatch.setattr(probe, "MAX_STEPS_OFF", 1e9)
    monkeypatch.setattr(probe, "MAX_SHARE_OFF", 1.0)
    return seen


@pytest.fixture
def small(tried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and heads: the host takes its time."""
    for name, few in (("ROWS", 128), ("KV_HEADS", 2), ("MAX_NEW_TOKENS", 2)):
        monkeypatch.setattr(probe, name, few)


def test_every_shape_of_a_threadgroup_is_tried(launched: Launches) -> None:
    shapes = {
        heads: {threadgroup_shape(heads * S, 0, "metal", 64)[3] for S in range(1, 9)} for heads in (1, 7)
    }
    assert _backend(heads=14) == "metal"
    assert launched.of("attend", "QUERIES") == {(queries,) for queries in shapes[7]}
    launched.clear()
    _backend()  # any heads
    assert launched.of("attend", "QUERIES") == {(queries,) for queries in shapes[1]} == {(1,), (2,), (4,)}
    assert launched.of("attend", "threads") >= {(32 * 4,), (32 * attend.MAX_QUERY_GROUPS,)}
    assert launched.of("combine", "threads") == {(32 * attend.COMBINE_SIMDGROUPS,)}


@pytest.mark.parametrize(("backend", "bits", "sinks"), half(["metal", "cuda"], [8, 0], [False, True]))
def test_the_trials_make_every_instance_of_1_to_8_tokens(
    launched: Launches, backend: Backend, bits: int, sinks: bool
) -> None:
    """And every number of simdgroups that share rows, and of their threads the most."""
    for heads, dim in ((1, 64), (2, 256), (4, 128), (6, 128), (7, 64), (8, 64), (16, 96), (71, 64), (2, 512)):
        tail = mx.bfloat16 if bits and heads in (4, 7) else None
        use = KernelUse(dim, dim, mx.bfloat16, bits, 32, heads=heads, sinks=sinks, tail_dtype=tail)
        launched.clear()
        assert probe.probe_failure(use, backend) is None
        shapes = [threadgroup_shape(heads * S, 0, backend, dim) for S in range(1, 9)]
        assert launched.of("attend", "QUERIES") == {(shape[3],) for shape in shapes}
        most = max(groups * simdgroups for _, groups, simdgroups, _ in shapes)
        assert max(launched.of("attend", "threads")) == (32 * most,)
        assert len([name for name, _ in launched if name == "attend"]) <= (6 if tail is None else 12)
        made = {
            (name, *((key, seen[key]) for key in sorted(seen) if key not in ("grid", "threads")))
            for name, seen in launched
        }
        assert probe.num_instances(use, backend, probe.probe_calls(use, backend)) == len(made)


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 64), (0, 32)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_it_is_tried_in_the_format_of_the_cache(
    launched: Launches, bits: int, group: int, dtype: mx.Dtype
) -> None:
    _backend(bits, group, dim=128, dtype=dtype, heads=8, scale="F32")
    assert launched.of("attend", "DIM", "T", "BITS", "MASK") == {(128, dtype, bits, False)}
    appended = {(dtype, mx.float32, bits, group)} if bits else set()
    assert launched.of("append", "T", "SCALE", "BITS", "GROUP") == appended


def test_an_exact_tail_is_tried_too(launched: Launches) -> None:
    for bits, tail in ((8, ""), (4, "F16"), (4, "BF16")):
        launched.clear()
        assert _backend(bits, tail=tail, heads=8) == "metal"
        dtype = {"": None, "F16": mx.float16, "BF16": mx.bfloat16}[tail]
        exact = {(0, 2, dtype)} if tail else set()
        found = launched.of("attend", "BITS", "TAIL", "C")
        assert found == {(bits, int(bool(tail)), quantized_dtype(bits)), *exact}
        assert launched.of("combine", "TAIL", "tail_sums small") == {(bool(tail), not tail)}
        assert launched.of("attend", "spans small") == {(not tail,)}


def test_windows_pages_bias_splits_and_sinks_are_tried_too(launched: Launches) -> None:
    split = BiasSplit(mx.zeros((2, 2, 3)), (1, 5, 9), mx.zeros((2, 3, 64)), mx.zeros((2, 64)))
    assert QuantizedKVCache(64, 2, 64, window=8, bias_split=split).layer.backend == "metal"
    assert launched.of("attend", "MASK", "WINDOW") == {(False, True)}
    assert launched.of("attend", "BIAS", "pairs small", "key_bias small") == {
        (attend.BIAS_WEIGHTS, True, False)
    }
    assert launched.of("combine", "value_bias small") == {(False,)}
    # no small array is handed on, however few sequences and pages there are
    small = launched.of("attend", "PAGE", "offset small", "first small", "pages small")
    assert small == {(128, False, False, False)}
    layers = (({}, False, False), ({"window": 8}, True, False), ({"window": 8, "chunk": 8}, False, True))
    for seen, window, mask in layers:
        launched.clear()  # a bridged layer may have sinks, in the dtype of its queries
        alone(64, **seen, dtype=mx.bfloat16)
        assert launched.of("attend", "WINDOW", "MASK") == {(window, mask)}
        assert launched.of("combine", "sinks dtype", "sinks small") == {
            (mx.float32, False),
            (mx.bfloat16, False),
        }
    launched.clear()
    _backend(dtype=mx.bfloat16)
    assert launched.of("combine", "sinks dtype", "sinks small") == {(mx.float32, False)}


def test_layers_that_are_alike_are_tried_once(
    launched: Launches, make_checkpoint: Callable[..., tuple[Path, nn.Module]]
) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    model = load_decoder(make_checkpoint(num_hidden_layers=24, **sizes)[0])
    for rows in (16, 32):
        assert {layer.backend for layer in model.make_cache(rows, bias_split=False).pool.layers} == {"metal"}
        # 2 queries of a simdgroup; 4 of one, with 4, 2 and 1 simdgroups that share rows
        assert [name for name, _ in launched].count("attend") == 4


def test_what_is_not_fused_is_not_tried(launched: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _backend(kernels="unfused") is None
    assert _backend(8, 16, dim=48) is None  # a width that the kernel does not take
    monkeypatch.setenv(dispatch.VARIABLE, "unfused")
    assert _backend() is None
    assert not launched


def _too_large(name: str, template: dict[str, Any]) -> BaseException | None:
    if name == "attend" and template["QUERIES"] == 2 and template["BITS"]:
        return ValueError("Thread group size (256) is greater than  the maximum\nallowed (224).")
    return None


SAID = (
    "the fused kernel fails here: heads of 64, 8 bits g32, float16, 2 queries of a kv head: "
    r"Thread group size \(256\) is greater than the maximum allowed \(224\)\."
)


def test_one_that_does_not_run_is_told_of_once(launched: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is asked for is an error."""
    launched.fails = _too_large
    with pytest.warns(
        RuntimeWarning, match=f"^{SAID}; attention is computed by the unfused operator"
    ) as caught:
        caches = [QuantizedKVCache(4, 2, 64, kv_bits=bits) for bits in (8, 8, 4, 0)]
    assert len(caught) == 1
    assert [cache.layer.backend for cache in caches] == [None, None, None, "metal"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _backend(heads=14) == "metal"  # it never has two
    query, key = mx.ones((1, 6, 1, 64)), mx.ones((1, 2, 1, 64))
    assert mx.allclose(caches[0].multi_head_cache_attention(query, key, key), query, atol=1e-2).item()
    for word in ("fused", None):
        with pytest.raises(RuntimeError, match=SAID.replace("fails", "is asked for, but fails")):
            QuantizedKVCache(4, 2, 64, kernels=word)
        monkeypatch.setenv(dispatch.VARIABLE, "fused")


def test_an_interruption_is_not_remembered(launched: Launches) -> None:
    launched.fails = lambda name, template: KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        _backend()
    launched.fails = lambda name, template: None
    assert _backend() == "metal"


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="here it would run")
def test_a_gpu_that_cannot_run_it_is_told_of(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's own launch on a machine without the back end stands for a kernel that does not compile."""
    monkeypatch.setattr(dispatch, "probe_failure", probe.probe_failure)
    with pytest.warns(RuntimeWarning, match="fails here: .*No Metal back-end"):
        assert _backend() is None


PLAIN = KernelUse(64, 64, mx.float16, 8, 32, heads=2)
USES = {
    "plain": PLAIN,
    "4 bits": replace(PLAIN, quant_bit=4, dtype=mx.bfloat16),
    "floats": replace(PLAIN, quant_bit=0, dtype=mx.float32, cache_dtype=mx.float16),
    "bias split": replace(PLAIN, pairs=3),
    "sinks": replace(PLAIN, sinks=True),
    "window": replace(PLAIN, pairs=2, window=40),
    "a large window": replace(PLAIN, window=4096),
    "mask": replace(PLAIN, mask=True),
    "no pages": replace(PLAIN, pairs=3, paged=False),
    "ALiBi": replace(PLAIN, paged=False, is_alibi=True),
    "two widths": replace(PLAIN, value_dim=128),
    "8 and 4 bits": replace(PLAIN, value_bit=4),
    "an exact tail": replace(PLAIN, quant_bit=4, tail_dtype=mx.float16),
    "an exact tail, window, bias split": replace(
        PLAIN, quant_bit=4, value_bit=8, tail_dtype=mx.bfloat16, dtype=mx.bfloat16, window=120, pairs=2
    ),
    "an exact tail, bias split": replace(PLAIN, quant_bit=4, tail_dtype=mx.float16, pairs=3),
    "an exact tail, two widths": replace(PLAIN, value_dim=128, tail_dtype=mx.float16, sinks=True),
    "two widths, 4 and 8 bits": replace(PLAIN, value_dim=128, quant_bit=4, value_bit=8, pairs=3),
}
Change = Callable[[mx.array], mx.array]


def _plus(by: Any) -> Change:
    return lambda x: x + mx.array(by, x.dtype)


def _times(by: Any) -> Change:
    return lambda x: x * mx.array(by, x.dtype)


def _rolled(x: mx.array) -> mx.array:
    return mx.roll(x, 1, axis=-1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", USES)
def test_the_kernel_itself_is_right_on_the_host(name: str) -> None:
    """What is launched is a call that the kernel takes, and reads and writes nothing outside of its
    arrays.
    """
    assert probe.probe_failure(USES[name], "metal") is None


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("use", "name", "change"),
    [
        ("plain", "offset", _plus(1)),  # a token too many
        ("plain", "numbers", _times([1.1, 1.0])),  # the scale of scores
        ("plain", "pages", lambda x: x[:, ::-1]),
        ("plain", "first", _plus(1)),
        ("window", "settings", _plus([0, 1, 0, 0])),  # a token too many
        ("bias split", "rotation", _rolled),
        ("no pages", "offset", _plus(1)),
        ("no pages", "rotation", _rolled),
        ("bias split", "value_bias", _plus(1)),
        ("sinks", "sinks", _plus(1)),
        ("mask", "mask", _rolled),
        ("ALiBi", "slopes", _times(1.05)),
        ("an exact tail", "spans", _plus([1, 0, 0, 0])),
        ("an exact tail", "spans", _plus([0, 5, 0, 0])),
        ("an exact tail", "spans", _plus([0, 0, 1, 0])),
        ("an exact tail", "tail_sums", _times(1.05)),
        ("an exact tail", "tail_partial", _times(1.05)),
        ("an exact tail", "tail_max_scores", _plus(0.1)),
        ("plain", "combine", _times(1.02)),
        ("plain", "combine", _times(float("nan"))),
        ("plain", "append", lambda x: x ^ 0x02020202),
        ("8 and 4 bits", "append", lambda x: x ^ 0x02020202),
    ],
)
def test_a_kernel_that_does_something_else_is_found_out(
    monkeypatch: pytest.MonkeyPatch, use: str, name: str, change: Change
) -> None:
    """It is given another input, by name, or its own first output is another."""
    run = attend.launch

    def changed(kernel: str, backend: str, inputs: list[mx.array], **rest: Any) -> list[mx.array]:
        given = zip(launch.INPUTS[kernel], inputs, strict=True)
        first, *others = run(kernel, backend, [change(x) if own == name else x for own, x in given], **rest)
        return [change(first) if kernel == name else first, *others]

    monkeypatch.setattr(attend, "launch", changed)
    said = "stored values are off by up to" if name == "append" else "the output is off by"
    assert said in str(probe.probe_failure(USES[use], "metal"))


def test_it_allows_what_the_project_does() -> None:
    assert {
        str(dtype).removeprefix("mlx.core."): x for dtype, x in probe.TOLERANCE.items()
    } == OUTPUT_TOLERANCE
