"""What MLX holds while it runs a list of operations, from the sizes of their results alone."""

from dataclasses import dataclass, field
from operator import itemgetter


@dataclass(slots=True)
class Buffer:
    """One allocation: its bytes, and the places on the tape where it is made and where it is last read."""

    size: int
    made: float
    read: float


@dataclass(slots=True)
class Tape:
    """Operations in the order MLX queues them.

    MLX's CPU back end allocates a result when its operation is queued and frees it when the last one that reads it has
    run, and it queues ahead: ten tasks of ten entries each (mlx/transforms.cpp, mlx/backend/cpu/encoder.h). An
    operation is two entries, its kernel and what keeps its inputs alive until then; one that only makes a view is one.

    Attributes:
        ahead: entries that are queued before the first of them has run.
    """

    ahead: float
    now: float = 0
    buffers: list[Buffer] = field(default_factory=list)

    def make(self, size: float, *inputs: Buffer, entries: float = 2) -> Buffer:
        """An operation with a result of ``size`` bytes of its own."""
        buffer = Buffer(round(size), self.now, self.now)
        self.buffers.append(buffer)
        self.read(buffer, *inputs, entries=entries)
        return buffer

    def read(self, *inputs: Buffer, entries: float = 2) -> None:
        """Operations that make a view, write into an input's buffer, or have results too small to count."""
        self.now += entries
        for buffer in inputs:
            buffer.read = self.now

    def peak(self) -> int:
        """The most bytes held at once."""
        changes = [(b.made, b.size) for b in self.buffers]
        changes += [(b.read + self.ahead, -b.size) for b in self.buffers]
        most = held = 0
        for _, change in sorted(changes, key=itemgetter(0)):
            held += change
            most = max(most, held)
        return most
