"""What the host finds wrong with a kernel.

HostError
├── NoCompiler         neither clang with AddressSanitizer nor the ziglang package
├── NotOneKernel       the call does something besides one kernel
├── CompileFailed      not Metal: a missing address space, a double, an unknown function
├── OutOfBounds        an access outside every buffer and array
├── WriteToInput       a store into an input, its const cast away
├── Unreadable         a read of an element the caller said must not be read
├── Uninitialised      a read of what no thread has written
├── Race               two accesses to one byte that no barrier orders; outputs that depend on the threads' order
├── Divergence         a barrier or simdgroup operation that not all threads reach
├── ThreadgroupMemory  more than Metal's 32 KiB
├── Undefined          misaligned pointer, shift too far, division by zero, a float no integer holds
└── Hang               no end within the time limit
"""

# ruff: noqa: N818  the names say what is wrong, which is always an error


class HostError(Exception):
    """A mistake in a kernel; the message names kernel, thread and line where they are known."""


class NoCompiler(HostError): ...


class NotOneKernel(HostError): ...


class CompileFailed(HostError): ...


class OutOfBounds(HostError): ...


class WriteToInput(HostError): ...


class Unreadable(HostError): ...


class Uninitialised(HostError): ...


class Race(HostError): ...


class Divergence(HostError): ...


class ThreadgroupMemory(HostError): ...


class Undefined(HostError): ...


class Hang(HostError): ...


BY_NAME = {kind.__name__: kind for kind in HostError.__subclasses__()}
