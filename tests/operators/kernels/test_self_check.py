"""The self-check on first use: a right kernel is used, one that is wrong or does not compile is told of once."""

import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from support.fused_path import host_kernel
from support.metal_host import host_pytest_skip
from support.operator_cases import OUTPUT_TOLERANCE

from kvant.cache import QuantizedKVCache
from kvant.operators import self_check
from kvant.operators.kernels import attend, launch
from kvant.operators.kernels.attend import unsupported_reason

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
    cases = list(self_check.random_cases(60, 1))
    assert cases == list(self_check.random_cases(60, 1)) != list(self_check.random_cases(60, 2))
    for case in [*cases, *self_check.SELF_CHECK]:
        shape = (case.B, case.H, case.S, case.D)
        assert unsupported_reason(shape, quant_bit=case.quant_bit, quant_group=case.quant_group) is None
        assert 0 <= min(case.offsets) <= case.offset <= case.max_seq_len - case.S
    assert any(len(set(case.offsets)) > 1 for case in cases)
    assert any(len(set(case.offsets)) > 1 for case in self_check.SELF_CHECK)
    for field, count in {"D": 7, "quant_bit": 3, "dtype": 3, "is_alibi": 2, "K": 4, "quant_group": 5}.items():
        assert len({getattr(case, field) for case in cases}) == count


@pytest.mark.parametrize("seed", range(3))
def test_random_cases_agree_on_the_host(checked_gpu: None, seed: int) -> None:
    small = (c for c in self_check.random_cases(200, seed) if c.B * c.K * c.offset < 500 and c.D <= 128)
    found = self_check.Trial(next(small)).agreement("metal")
    assert found.problem is None
    assert found.error <= found.tolerance


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
