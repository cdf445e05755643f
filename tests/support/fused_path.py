"""A machine whose GPU is this host: the fused kernel's Metal text runs under tests/support/metal_host."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from kvant.operators import dispatch
from kvant.operators.cached_attention import read_tokens
from kvant.operators.compiled_attention import attend_live_tokens
from kvant.operators.kernels import attend, launch
from kvant.operators.quantization import quantize
from support.metal_host import on_host
from support.metal_host.run import FORWARD

METAL_KERNEL = launch._kernel


@cache
def host_kernel(name: str, backend: str) -> Callable[..., list[mx.array]]:
    """Run once, threads in order: whether the order matters is the kernel's own tests' affair."""
    return on_host(METAL_KERNEL(name, backend), orders=(FORWARD,))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU with Metal, in a process that has not looked at it yet and has no wish of its own."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "gpu_backend", lambda: "metal")
    _forget()
    yield
    _forget()


@pytest.fixture
def checked_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same; its kernel runs on the host and has passed its self-check."""
    monkeypatch.setattr(launch, "_kernel", host_kernel)
    monkeypatch.setattr(dispatch, "self_check_failure", lambda backend: None)


@pytest.fixture
def launches(checked_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[mx.array]]]:
    """Every launch's name and inputs."""
    seen: list[tuple[str, list[mx.array]]] = []
    run = attend.launch

    def recorded(name: str, backend: str, inputs: Sequence[mx.array], **rest: Any) -> list[mx.array]:
        seen.append((name, list(inputs)))
        return run(name, backend, inputs, **rest)

    monkeypatch.setattr(attend, "launch", recorded)
    return seen


def unfused_launch(
    name: str, backend: str, inputs: Sequence[mx.array], *, template: dict[str, Any], outputs: Sequence[Any], **_: Any
) -> list[mx.array]:
    """The kernels' results for one new token without a mask, in MLX's operations: these can be part of a graph.

    MLX makes no graph with a Metal kernel where there is no Metal. All is put into the first split.
    """
    if name == "append":
        options = {"quant_bit": template["BITS"], "quant_group": template["GROUP"], "scale_dtype": template["SCALE"]}
        quantized, scales = quantize(mx.stack(list(inputs), axis=1), **options)
        return [mx.view(quantized, mx.uint32)[None], scales[None]]
    given = dict(zip(launch.INPUTS[name], inputs, strict=True))
    if name == "combine":
        output, value_bias = given["partial"][..., 0, :], given["value_bias"]
        output = output + mx.repeat(value_bias, output.shape[1] // value_bias.shape[0], axis=0)[:, None]
        return [output.astype(template["T"])]
    query, cache = given["query"], given["cache"]
    assert query.shape[2] == 1
    assert not any(template[name] for name in ("PAGE", "BIAS", "ALIBI", "MASK", "WINDOW", "SOFTCAP"))
    bits, max_tokens = template["BITS"], cache.shape[4]
    keys, values = read_tokens(
        max_tokens,
        cache,
        given["scale"] if bits else None,
        quant_bit=bits,
        dtype=query.dtype,
    )
    output = attend_live_tokens(query, keys, values, mx.arange(max_tokens) <= given["offset"])
    shape, dtype = outputs[0]
    partial = mx.concatenate(
        [output[..., None, :].astype(dtype), mx.zeros((*shape[:3], shape[3] - 1, shape[4]))], axis=3
    )
    return [partial, mx.ones(outputs[1][0]), mx.zeros(outputs[2][0])]


def _forget() -> None:
    for kept in (dispatch.self_check_failure, dispatch._warn):
        getattr(kept, "cache_clear", lambda: None)()
