"""The ranks of a run, and their communication over MLX's backend."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvant.errors import RanksError, one_line
from kvant.ranks.guard import Guard

CONNECT_S = 20.0  # for MLX's own joining, once every rank has come


@dataclass(slots=True)
class Traffic:
    """A rank's traffic in a step."""

    sums: int = 0  # collectives that add or gather
    messages: int = 0  # arrays sent to, or received from, one other rank
    bytes: int = 0  # of the arrays in both


@dataclass(slots=True)
class Ranks:
    """This process's connection to the other ranks. Rank 0 reads input and prints.

    MLX matches collectives only by order: every rank must call the same ones, and evaluate each step before
    the next one begins.
    """

    group: mx.distributed.Group
    # counted while a step is built; the caller resets it
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def all_sum(self, x: mx.array) -> mx.array:
        """Return the sum of the ranks' arrays, on all ranks."""
        self.traffic.sums += 1
        self.traffic.bytes += x.nbytes
        return mx.distributed.all_sum(x, group=self.group)

    def all_max(self, x: mx.array) -> mx.array:
        """Return the elementwise maximum of the ranks' arrays, on all ranks."""
        self.traffic.sums += 1
        self.traffic.bytes += x.nbytes
        return mx.distributed.all_max(x, group=self.group)

    def all_gather(self, x: mx.array) -> mx.array:
        """Return the ranks' arrays, of one shape, joined along the first axis, on all ranks."""
        self.traffic.sums += 1
        self.traffic.bytes += x.nbytes * self.size
        return mx.distributed.all_gather(x, group=self.group)

    def send(self, x: mx.array, to: int) -> mx.array:
        """Return the array itself, which is sent to a neighbour in the ring when it is evaluated."""
        self.traffic.messages += 1
        self.traffic.bytes += x.nbytes
        return mx.distributed.send(x, to, group=self.group)

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, sender: int) -> mx.array:
        """Receive an array from a neighbour in the ring."""
        self.traffic.messages += 1
        received = mx.distributed.recv(shape, dtype, sender, group=self.group)
        self.traffic.bytes += received.nbytes
        return received


def connect(backend: str) -> Ranks:
    """Join MLX's group, which waits for all ranks."""
    try:
        return Ranks(mx.distributed.init(strict=True, backend=backend))
    except (RuntimeError, ValueError) as error:
        raise RanksError(
            f"MLX's distributed back end {backend!r} does not start: {one_line(error)}"
        ) from error


def join_group(guard: Guard) -> Ranks:
    """Join MLX's group of all the guard's ranks, which must call this together, once."""
    guard.agree({})  # MLX does not wait long, so first wait for all ranks
    with guard.within(CONNECT_S, f"joining MLX's {guard.backend}"):
        ranks = connect(guard.backend)
        guard.agree({})
    return ranks
