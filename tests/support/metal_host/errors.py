"""What the host finds wrong with a kernel."""


class HostError(Exception):
    """A mistake in a kernel; the message names its kind, and kernel, thread and line where they are known."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
