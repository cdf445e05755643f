"""What the host finds wrong with a kernel: docs/kernels.md says of each kind when."""

from typing import Literal

Kind = Literal[
    "NoCompiler",  # neither clang with AddressSanitizer nor the ziglang package
    "NotOneKernel",  # the call does something besides one kernel
    "CompileFailed",  # not Metal: a missing address space, a double, an unknown function
    "OutOfBounds",
    "WriteToInput",
    "Unreadable",
    "Uninitialised",
    "Race",
    "Divergence",
    "ThreadgroupMemory",
    "Undefined",  # misaligned pointer, shift too far, division by zero, a float no integer holds
    "Hang",
    "WorkerEnded",
]


class HostError(Exception):
    """A mistake in a kernel; the message names its kind, and kernel, thread and line where they are known."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
