"""How attention is computed: by the fused kernel, or by the unfused operator, which runs on every device."""

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

# told of a process's first trial: it takes a while. Commands print it
say: Callable[[str], None] | None = None
_tried: set[tuple[KernelUse, Backend]] = set()  # in this process
_warned = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The path taken, and why."""

    backend: Backend | None  # runs the fused kernel. None: the unfused operator is used
    reason: str  # for people
    forced: bool = False  # "fused" was asked for


def resolve(
    kernels: str | None = None, unsupported_reason: str | None = None, uses: Iterable[KernelUse] = ()
) -> Backend | None:
    """The backend that runs the fused kernel. None: use the unfused operator.

    ``kernels`` forces one; without it the environment variable KVANT_KERNELS does. Otherwise it is the kernel
    on a GPU if it gives the unfused operator's numbers as it will be used. A process is told of one failure,
    in a RuntimeWarning.

    Args:
        kernels: "unfused", "fused" or None.
        unsupported_reason: from ``kernels.attend.unsupported_reason``. None: the kernel takes the call.
        uses: how a cache will call the kernel. One that is not in the record is tried now; with "fused" also
            one that is recorded as failed.

    Raises:
        ValueError: another word than "unfused" or "fused"; "fused" without a GPU, or for a call that the
            kernel does not take.
        RuntimeError: "fused" if the kernel fails as it will be used.
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
    """``RIGHT``, or why the kernel is not; tried if nothing is recorded, or a failure and nobody tried it
    here.
    """
    known = kernel_record.found(use, backend)
    if known is None or (forced and known != RIGHT and (use, backend) not in _tried):
        if say is not None and not _tried:
            say(CHECKING.format(kernel_record.path()))
        known = probe_failure(use, backend) or RIGHT
        _tried.add((use, backend))
        kernel_record.keep({use: known}, backend)
    return known


def choose(kernels: str | None = None, name: str = "kernels") -> Choice:
    """What is wished for and what the device can have; ``name`` is the argument's for messages.

    Raises:
        ValueError: as :func:`resolve`.
    """
    wanted, asked = kernels, f"{name} is {kernels!r}"
    if wanted is None:
        wanted = os.environ.get(VARIABLE) or None
        asked = f"{VARIABLE} is {wanted!r}"
    if wanted is not None and (not isinstance(wanted, str) or wanted not in KERNELS):
        raise ValueError(f"{asked}; expected {' or '.join(map(repr, KERNELS))}")
    if wanted == "unfused":
        return Choice(None, asked)
    backend = gpu_backend()
    if backend is not None:
        reason = f"a GPU with {backend}; each cache tries the kernel when it is made, as it will call it"
        return Choice(backend, reason, forced=wanted is not None)
    reason = "MLX's default device is no GPU with Metal or CUDA, which the fused kernel runs on"
    if wanted is not None:
        raise ValueError(f"{asked}; {reason}")
    return Choice(None, reason)


def gpu_backend() -> Backend | None:
    """What MLX runs kernels with on its default device. None: it is a CPU."""
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
            f"and says "
            f"more; {VARIABLE}=unfused leaves the kernel alone, without this warning",
            RuntimeWarning,
            stacklevel=3,
        )
