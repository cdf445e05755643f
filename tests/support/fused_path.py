"""A machine whose GPU is this host: the fused kernel's Metal text runs under tests/support/metal_host."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from kvant.operators import dispatch, kernel_record, paged_kernel
from kvant.operators.kernels import attend, launch
from kvant.operators.quantization import FITTED_BITS, quantize, quantize_fitted
from support import attend_stand_in
from support.metal_host import on_host
from support.metal_host.run import FORWARD

METAL_KERNEL = launch._kernel


@cache
def host_kernel(name: str, backend: str) -> Callable[..., list[mx.array]]:
    """Run once, threads in order: whether the order matters is the kernel's own tests' affair."""
    return on_host(METAL_KERNEL(name, backend), orders=(FORWARD,))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A GPU with Metal that nobody looked at yet, in a process that has no wish of its own.

    What a cache needs of the kernel is not tried when it is made: tests/operators/kernels/test_probe.py does.
    """
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "gpu_backend", lambda: "metal")
    monkeypatch.setattr(dispatch, "probe_failure", lambda use, backend: None)
    monkeypatch.setattr(dispatch, "say", None)
    monkeypatch.setattr(dispatch, "_tried", set())
    monkeypatch.setattr(dispatch, "_warned", False)
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(kernel_record, "user_cache", lambda: folder)
    begin_process()


def begin_process() -> None:
    """From now on it is a process that knows of the GPU what is recorded."""
    dispatch._tried.clear()
    dispatch._warned = False
    kernel_record._findings.cache_clear()
    kernel_record.device_key.cache_clear()


@pytest.fixture
def checked_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same; its kernel runs on the host."""
    monkeypatch.setattr(launch, "_kernel", host_kernel)


@pytest.fixture
def launches(checked_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[mx.array]]]:
    seen: list[tuple[str, list[mx.array]]] = []
    run = attend.launch

    def recorded(name: str, backend: str, inputs: Sequence[mx.array], **rest: Any) -> list[mx.array]:
        seen.append((name, list(inputs)))
        return run(name, backend, inputs, **rest)

    monkeypatch.setattr(attend, "launch", recorded)
    return seen


@pytest.fixture
def fused_calls(gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of each query that the kernel is given, on a GPU whose kernels are MLX's operations."""
    seen: list[tuple[int, ...]] = []

    def recorded(query: mx.array, *arguments: Any, **options: Any) -> mx.array:
        seen.append(query.shape)
        if (pages := options["pages"]) is not None:
            first, (_, _, offset) = options["first"], arguments
            assert (options.get("is_causal", True), options.get("mask")) == (True, None)
            assert offset.shape == first.shape == (max(8, len(query)),)
            assert (len(pages), pages.shape[1] >= 8) == (len(query), True)
            assert pages.dtype == first.dtype == offset.dtype == mx.int32
        return attend_stand_in.attend(query, *arguments, **options)

    monkeypatch.setattr(paged_kernel, "attend", recorded)
    monkeypatch.setattr(attend, "launch", unfused_append)
    return seen


def unfused_append(
    name: str, backend: str, inputs: Sequence[mx.array], *, template: dict[str, Any], **_: Any
) -> list[mx.array]:
    """The append's results."""
    assert name == "append"
    key, value = inputs
    bits, group, dtype = (template["BITS"], template["VALUE_BITS"]), template["GROUP"], template["SCALE"]
    quantized, scales = quantized_sides(key, value, bits, group, dtype, fit=template["FIT"])
    return [mx.view(quantized, mx.uint32)[None], scales[None]]


def quantized_sides(
    key: mx.array, value: mx.array, bits: Sequence[int], group: int, scale_dtype: mx.Dtype, *, fit: bool
) -> tuple[mx.array, mx.array]:
    """Keys and values (B, K, S, D), each quantized alone: (B, 2, K, S, last), or side by side (B, 1, K, S,
    both).
    """

    def one(x: mx.array, own: int) -> tuple[mx.array, mx.array]:
        if fit and own == FITTED_BITS:
            return quantize_fitted(x, group, scale_dtype)
        return quantize(x, quant_bit=own, quant_group=group, scale_dtype=scale_dtype)

    pairs = list(zip(one(key, bits[0]), one(value, bits[1]), strict=True))
    if key.shape == value.shape and bits[0] == bits[1]:
        quantized, scales = (mx.stack(list(pair), axis=1) for pair in pairs)
    else:
        if bits[0] != bits[1]:
            pairs[0] = mx.view(pairs[0][0], mx.uint8), mx.view(pairs[0][1], mx.uint8)
        quantized, scales = (mx.concatenate(list(pair), axis=-1)[:, None] for pair in pairs)
    return quantized, scales
