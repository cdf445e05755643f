"""Choose between the fused attention kernel and the unfused operator, which runs on every device."""

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import mlx.core as mx

from kvant.operators import kernel_record
from kvant.operators.kernel_record import RIGHT
from kvant.operators.kernels.launch import Backend
from kvant.operators.probe import KernelUse, probe_failure

KERNELS = ("unfused", "fused")
VARIABLE = "KVANT_KERNELS"
CHECKING = "checking the fused kernel on this GPU; later starts find the result in {}"

# Called before a process's first trial, which takes a while. Commands print the message.
say: Callable[[str], None] | None = None
_tried: set[tuple[KernelUse, Backend]] = set()  # by this process
_warned = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen path, and the reason."""

    backend: Backend | None  # runs the fused kernel. None: the unfused operator is used
    reason: str  # for people
    forced: bool = False  # the user asked for "fused"


def resolve(
    kernels: str | None = None, unsupported_reason: str | None = None, uses: Iterable[KernelUse] = ()
) -> Backend | None:
    """Return the backend that runs the fused kernel, or None to use the unfused operator.

    ``kernels`` forces one, or else the environment variable KVANT_KERNELS. Without either, the kernel runs on
    a GPU if it reproduces the unfused operator's numbers for every use. The first failure of a process is
    reported as a RuntimeWarning.

    Args:
        kernels: "unfused", "fused" or None.
        unsupported_reason: from ``kernels.attend.unsupported_reason``; None if the kernel supports the call.
        uses: how a cache will call the kernel. Uses without a record are tried now; "fused" also retries
            those recorded as failed.

    Raises:
        ValueError: ``kernels`` is unknown, or "fused" without a GPU or for an unsupported call.
        RuntimeError: "fused" is forced and the kernel fails.
    """
    choice = choose(kernels)
    if choice.backend is None:
        return None
    if unsupported_reason is not None:
        if choice.forced:
            raise ValueError(f"the fused kernel is asked for, but does not take {unsupported_reason}")
        return None
    for use in uses:
        if (problem := _finding(use, choice.backend, choice.forced)) != RIGHT:
            if choice.forced:
                raise RuntimeError(f"the fused kernel is asked for, but fails here: {problem}")
            _warn_once(f"the fused kernel fails here: {problem}")
            return None
    return choice.backend


def _finding(use: KernelUse, backend: Backend, forced: bool) -> str:
    """Return ``RIGHT`` or the kernel's defect, from the record or, if needed, from a trial now."""
    known = kernel_record.lookup(use, backend)
    if known is None or (forced and known != RIGHT and (use, backend) not in _tried):
        if say is not None and not _tried:
            say(CHECKING.format(kernel_record.path()))
        known = probe_failure(use, backend) or RIGHT
        _tried.add((use, backend))
        kernel_record.keep({use: known}, backend)
    return known


def choose(kernels: str | None = None, name: str = "kernels") -> Choice:
    """Combine the user's wish and what the device supports; messages call the argument ``name``.

    Raises:
        ValueError: as :func:`resolve`.
    """
    kernel = kernels
    setting = f"{name} is {kernels!r}"
    if kernel is None:
        kernel = os.environ.get(VARIABLE) or None
        setting = f"{VARIABLE} is {kernel!r}"
    if kernel is not None and (not isinstance(kernel, str) or kernel not in KERNELS):
        raise ValueError(f"{setting}; expected {' or '.join(map(repr, KERNELS))}")
    if kernel == "unfused":
        return Choice(None, setting)
    backend = gpu_backend()
    if backend is not None:
        reason = f"a GPU with {backend}; each cache tries the kernel when it is made, as it will call it"
        return Choice(backend, reason, forced=kernel is not None)
    reason = "MLX's default device is not a GPU with Metal or CUDA, which the fused kernel needs"
    if kernel is not None:
        raise ValueError(f"{setting}; {reason}")
    return Choice(None, reason)


def gpu_backend() -> Backend | None:
    """Return the backend of MLX's default device, or None if that is a CPU."""
    if mx.default_device().type != mx.gpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{reason}; attention is computed by the unfused operator instead. `kvant doctor` tries again "
            f"and says more; {VARIABLE}=unfused disables the kernel and this warning",
            RuntimeWarning,
            stacklevel=3,
        )
