"""Which way attention is computed: by the fused kernel, or by the unfused operator, which runs on every device."""

import os
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Literal

import mlx.core as mx

Backend = Literal["metal", "cuda"]
KERNELS = ("unfused", "fused")
VARIABLE = "KVANT_KERNELS"


@dataclass(frozen=True, slots=True)
class Choice:
    """A path and why it is the one.

    Attributes:
        backend: what runs the fused kernel; None: the unfused operator is used.
        forced: "fused" was asked for.
        failed: the kernel failed its self-check.
        reason: for people.
    """

    backend: Backend | None
    reason: str
    forced: bool = False
    failed: bool = False


def resolve(kernels: str | None = None, unsupported_reason: str | None = None) -> Backend | None:
    """What runs the fused kernel here and now; None: the unfused operator is to be used.

    ``kernels``, or without it the environment variable KVANT_KERNELS, forces one; otherwise it is the kernel on a GPU
    where it has passed its self-check, which runs at the first call. Where it fails, that is a RuntimeWarning, once.

    Args:
        kernels: "unfused", "fused" or None.
        unsupported_reason: from ``kernels.attend.unsupported_reason``; None: the kernel supports the call.

    Raises:
        ValueError: another word than "unfused" or "fused"; "fused" where there is no GPU to run it, or does not
            support the call.
        RuntimeError: "fused" where the kernel failed its self-check.
    """
    choice = choose(kernels)
    if choice.failed:
        _warn(choice.reason)
    if unsupported_reason is None or choice.backend is None:
        return choice.backend
    if choice.forced:
        raise ValueError(f"the fused kernel is asked for, but does not take {unsupported_reason}")
    return None


def choose(kernels: str | None = None, name: str = "kernels") -> Choice:
    """:func:`resolve` with its reason, and without the warning; ``name`` is the argument's for messages."""
    wanted, asked = kernels, f"{name} is {kernels!r}"
    if wanted is None:
        wanted = os.environ.get(VARIABLE) or None
        asked = f"{VARIABLE} is {wanted!r}"
    if wanted is not None and (not isinstance(wanted, str) or wanted not in KERNELS):
        raise ValueError(f"{asked}; expected {' or '.join(map(repr, KERNELS))}")
    if wanted == "unfused":
        return Choice(None, asked)
    backend = gpu_backend()
    if backend is None:
        reason = "MLX's default device is no GPU with Metal or CUDA, which the fused kernel runs on"
        if wanted is not None:
            raise ValueError(f"{asked}; {reason}")
        return Choice(None, reason)
    failure = self_check_failure(backend)
    if failure is None:
        return Choice(backend, f"it passed its self-check on this GPU, with {backend}", forced=wanted is not None)
    reason = f"the fused kernel failed its self-check with {backend}: {failure}"
    if wanted is not None:
        raise RuntimeError(f"{asked}; {reason}")
    return Choice(None, reason, failed=True)


def gpu_backend() -> Backend | None:
    """What MLX runs kernels with on its default device; None: that is a CPU."""
    if mx.default_device().type != mx.gpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


@cache
def self_check_failure(backend: Backend) -> str | None:
    """What went wrong in the self-check, which runs once a process; None: nothing."""
    from kvant.operators.kernels.check import self_check  # it holds the kernel against the operator, which imports this

    return self_check(backend)


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"{reason}; attention is computed by the unfused operator instead. `kvant doctor` says more; "
        f"{VARIABLE}=unfused leaves the kernel alone, without this warning",
        RuntimeWarning,
        stacklevel=3,
    )
