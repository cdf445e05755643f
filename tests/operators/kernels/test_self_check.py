"""The self-check on first use: a right kernel is used, one that is wrong or does not compile is told of once."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from support.counts import count
from support.fused_path import host_kernel
from support.metal_host import host_pytest_skip
from support.operator_cases import OUTPUT_TOLERANCE

from kvant.cache import QuantizedKVCache
from kvant.operators import kernel_case, self_check
from kvant.operators.kernel_case import KernelCase
from kvant.operators.kernels import attend, launch
from kvant.operators.kernels.attend import unsupported_reason
from kvant.operators.kernels.queries import CHOICES

pytestmark = host_pytest_skip

Change = Callable[[str, list[mx.array], list[mx.array]], list[mx.array]]


def test_unfused_does_not_look_at_the_kernel(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "launch", _never)
    assert QuantizedKVCache(4, 2, 64, kernels="unfused").backend is None
    monkeypatch.setenv("KVANT_KERNELS", "unfused")
    assert QuantizedKVCache(4, 2, 64).backend is None


def test_a_kernel_that_is_right_is_checked_once_and_used(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_kernel", host_kernel)
    assert QuantizedKVCache(4, 2, 64).backend == "metal"
    monkeypatch.setattr(attend, "launch", _never)
    assert QuantizedKVCache(4, 2, 64).backend == "metal"


def test_a_gpu_that_cannot_run_it_is_told_of_once(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's own launch on a machine without the back end stands for a kernel that does not compile."""
    if mx.default_device().type == mx.gpu:
        pytest.skip("here it would run")
    cache = _warned("failed its self-check with metal: 301.*: .*No Metal back-end")
    query, key = mx.ones((1, 4, 1, 64)), mx.ones((1, 2, 1, 64))
    assert mx.allclose(cache.attend(query, key, key), query, atol=1e-2).item()
    with pytest.raises(RuntimeError, match="kernels is 'fused'; the fused kernel failed its self-check"):
        QuantizedKVCache(4, 2, 64, kernels="fused")
    monkeypatch.setenv("KVANT_KERNELS", "fused")
    with pytest.raises(RuntimeError, match="KVANT_KERNELS is 'fused'; the fused kernel failed"):
        QuantizedKVCache(4, 2, 64)


def _wrong_output(name: str, inputs: list[mx.array], results: list[mx.array]) -> list[mx.array]:
    return [results[0] * 1.02] if name == "combine" else results


def _wrong_quantized(name: str, inputs: list[mx.array], results: list[mx.array]) -> list[mx.array]:
    return [results[0] ^ 0x02020202, results[1]] if name == "append" else results


def _nan(name: str, inputs: list[mx.array], results: list[mx.array]) -> list[mx.array]:
    return [results[0] * float("nan")] if name == "combine" else results


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (_wrong_output, "the output is off by 0.0"),
        (_wrong_quantized, "stored values are off by up to"),
        (_nan, "the output is off by nan"),
    ],
)
def test_a_mismatch_is_told_of_once(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Change,
    said: str,
) -> None:
    monkeypatch.setattr(launch, "_kernel", host_kernel)
    _changed(monkeypatch, wrong)
    _warned(said)


def test_a_token_too_many_is_a_mismatch(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_kernel", host_kernel)
    run = attend.launch

    def late(name: str, backend: str, inputs: list[mx.array], **rest: Any) -> list[mx.array]:
        if name == "attend":
            inputs[3] = inputs[3] + 1
        return run(name, backend, inputs, **rest)

    monkeypatch.setattr(attend, "launch", late)
    _warned("the output is off by ")


def test_the_check_allows_what_the_project_does() -> None:
    assert {str(dtype).removeprefix("mlx.core."): x for dtype, x in self_check.TOLERANCE.items()} == OUTPUT_TOLERANCE


def test_random_cases_are_taken_and_vary() -> None:
    cases = list(kernel_case.random_cases(100, 1))
    assert cases == list(kernel_case.random_cases(100, 1)) != list(kernel_case.random_cases(100, 2))
    for case in [*cases, *self_check.SELF_CHECK]:
        shape = (case.B, case.H, case.S, case.D)
        form = {"quant_bit": case.quant_bit, "quant_group": case.quant_group, "value_dim": case.value_dim}
        assert unsupported_reason(shape, **form) is None
        assert 0 <= min(case.offsets) <= case.offset
        if case.is_ring:  # what the first new token sees is still there when the last one is written
            assert case.window is not None
            assert case.max_seq_len >= case.keep + case.window + case.S - 1
    assert any(len(set(case.offsets)) > 1 for case in cases)
    counts = {"D": 7, "quant_bit": 3, "dtype": 3, "K": 4, "quant_group": 5, "keep": 2}
    flags = ("is_alibi", "is_paged", "is_ring", "has_mask", "has_sinks", "softcap", "score_scale", "has_unfused")
    for field, number in {**counts, **dict.fromkeys(flags, 2)}.items():
        assert len({getattr(case, field) for case in cases}) == number, field
    assert any(case.is_paged and case.window and case.first(0) for case in cases)


def test_the_self_check_covers_every_kind_with_few_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instance takes 70 ms or so where it is compiled for the first time."""
    cases = self_check.SELF_CHECK
    assert {case.D for case in cases} == {64, 128, 256, 512}  # every number of lanes, and two chunks of a lane
    assert {case.quant_bit for case in cases} == {8, 4, 0}
    assert {case.dtype for case in cases} == set(self_check.TOLERANCE)
    assert {1, 8} <= {case.S for case in cases}
    for flag in ("shorter", "is_ring", "keep", "is_paged", "has_sinks", "softcap", "is_alibi", "has_mask", "pairs"):
        assert any(getattr(case, flag) for case in cases), flag
    assert any(case.is_paged and case.first(0) > 0 for case in cases)
    shapes = {
        (backend, number): {
            attend.threadgroup_shape(case.H // case.K * case.S, len(case.pairs or ()), backend, case.D, number)
            for case in cases
        }
        for backend, numbers in CHOICES.items()
        for number in numbers
    }
    for (_, number), found in shapes.items():
        assert any(tiles > 1 for tiles, _, _, _ in found)
        assert any(groups > 1 for _, groups, _, _ in found)
        assert {2, number} <= {queries for _, _, _, queries in found}
    for default in (("metal", 4), ("cuda", 8)):  # one group, several queries; tests of half as many have several groups
        assert any(groups == 1 and queries > 1 and sharers == 4 for _, groups, sharers, queries in shapes[default])

    def nothing(name: str, backend: str) -> Callable[..., list[mx.array]]:
        def run(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            return [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]

        return run

    monkeypatch.setattr(launch, "_kernel", nothing)
    for backend in ("metal", "cuda"):
        monkeypatch.setattr(launch, "instances", set())
        for case in cases:
            self_check.Trial(case).run(backend)
        assert Counter(name for name, *_ in launch.instances) == {"attend": 4, "combine": 4, "append": 2}


def _small(case: KernelCase) -> KernelCase:
    """Few queries: the host takes its time."""
    return replace(case, S=1, H=4) if case.is_paged else case


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("is_paged", {"pages": lambda x: x[:, ::-1]}),
        ("is_paged", {"first": lambda x: x + 1, "offset": lambda x: x + 2}),
        ("is_paged", {"sinks": lambda x: x + 1}),
        ("is_ring", {"settings": lambda x: x + mx.array([0, 1, 0, 0, 0, 0])}),  # the window
        ("is_ring", {"settings": lambda x: x - mx.array([0, 0, 1, 0, 0, 0])}),  # the first tokens
        ("is_ring", {"numbers": lambda x: x * mx.array([1.0, 1.5])}),  # the cap
        ("is_ring", {"numbers": lambda x: x * mx.array([1.1, 1.0])}),  # the scale
        ("has_mask", {"mask": lambda x: mx.roll(x, 1, axis=-1)}),
        ("is_alibi", {"slopes": lambda x: x * 1.01}),
        ("pairs", {"rotation": lambda x: mx.roll(x, 1, axis=-1)}),
    ],
)
def test_every_option_counts(
    checked_gpu: None, monkeypatch: pytest.MonkeyPatch, kind: str, wrong: dict[str, Callable[[mx.array], mx.array]]
) -> None:
    """A kernel that is given something else is found out by the self-check's case of that kind."""
    case = next(_small(case) for case in self_check.SELF_CHECK if getattr(case, kind))
    assert self_check.Trial(case).agreement("metal").problem is None
    run = attend.launch

    def changed(name: str, backend: str, inputs: list[mx.array], **rest: Any) -> list[mx.array]:
        names = launch.INPUTS[name]
        inputs = [wrong[n](x) if n in wrong else x for n, x in zip(names, inputs, strict=True)]
        return run(name, backend, inputs, **rest)

    monkeypatch.setattr(attend, "launch", changed)
    assert "the output is off by" in str(self_check.Trial(case).agreement("metal").problem)


def _few(seed: int) -> list[KernelCase]:
    """Small random cases that together have every option."""
    wanted = {
        "is_paged",
        "is_ring",
        "value_dim",
        "has_mask",
        "has_sinks",
        "softcap",
        "score_scale",
        "pairs",
        "is_alibi",
    }
    chosen = []
    for case in kernel_case.random_cases(2000, seed):
        new = {flag for flag in wanted if getattr(case, flag)}
        work = case.B * case.H * case.S * min(case.offset, case.max_seq_len)
        if work < 3000 and max(case.D, case.value_dim or 0) <= 128 and len(new) > (len(wanted) > 3):
            wanted -= new
            chosen.append(case)
    assert not wanted
    return chosen


@pytest.mark.parametrize("case", [case for seed in range(count(1, 20)) for case in _few(seed)], ids=str)
def test_random_cases_agree_on_the_host(checked_gpu: None, case: KernelCase) -> None:
    found = self_check.Trial(case).agreement("metal")
    assert found.problem is None
    assert found.error <= found.tolerance


def test_a_query_that_sees_nothing_and_a_bias_split_without_pairs_agree(checked_gpu: None) -> None:
    """Zeros are expected then, as the kernel gives them; the values' bias needs no pairs."""
    small = replace(self_check.SELF_CHECK[3], pairs=(), B=1, offset=3, max_seq_len=8)
    trial = self_check.Trial(small)
    assert trial.agreement("metal").problem is None
    trial.mask = mx.full(trial.mask.shape, -mx.inf)
    assert trial.agreement("metal").problem is None
    assert not trial.run("metal").any().item()


def _never(*arguments: Any, **options: Any) -> list[mx.array]:
    raise AssertionError("the kernel was launched")


def _changed(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    run = attend.launch

    def changed(name: str, backend: str, inputs: list[mx.array], **rest: Any) -> list[mx.array]:
        return change(name, inputs, run(name, backend, inputs, **rest))

    monkeypatch.setattr(attend, "launch", changed)


def _warned(said: str) -> QuantizedKVCache:
    """A cache made twice: the first time with one warning, the second with none; attention is unfused."""
    with pytest.warns(RuntimeWarning, match=said) as caught:
        cache = QuantizedKVCache(4, 2, 64)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert QuantizedKVCache(4, 2, 64).backend is None
    assert cache.backend is None
    return cache
