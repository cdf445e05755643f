"""What the host finds wrong with a kernel."""


class HostError(Exception):
    """A mistake in a kernel; the message names its kind, and kernel, thread and line where they are known.

    Kinds are those of docs/kernels.md, and NoCompiler; NotOneKernel (the call does something else besides);
    CompileFailed; Undefined (misaligned pointer, shift too far, division by zero, a float no integer holds); Hang;
    WorkerEnded.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
