"""The memory of a model on several machines: what each rank takes, and which layers or heads it has."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import lcm
from typing import Any, Literal

from kvant.errors import ModelError
from kvant.machine import Device, Machine
from kvant.plan.bridged import BridgedCheckpoint
from kvant.plan.memory import DEFAULT_SETTINGS, AnyCheckpoint, MemoryPlan, Settings
from kvant.plan.needs import Needs, needs
from kvant.plan.planner import LongestContext, longest, longest_context, plan, planner, process_bytes
from kvant.plan.stored import Checkpoint, Loading
from kvant.ranks.shares import shares

# "pipeline": each rank has layers of the model, one after the other. "tensor": heads and features of every
# layer.
Parallel = Literal["pipeline", "tensor"]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The memory of a run on several machines, by rank."""

    parallel: Parallel
    machines: Sequence[Machine]
    parts: Sequence[AnyCheckpoint]  # of the model
    plans: Sequence[MemoryPlan]
    layers: list[range] | None  # of a pipeline; None: tensor parallel

    @property
    def fits(self) -> bool:
        return all(
            made.total <= machine.limit_bytes for made, machine in zip(self.plans, self.machines, strict=True)
        )

    @property
    def fullest(self) -> int:
        """The rank that uses the largest part of its machine's limit."""
        limits = [max(1, machine.limit_bytes) for machine in self.machines]
        return max(range(len(limits)), key=lambda rank: self.plans[rank].total / limits[rank])

    def again(self, settings: Settings, tokens: int) -> tuple[MemoryPlan, Machine]:
        """Plan other settings with the model divided as it is: the fullest machine's memory, and that
        machine.
        """
        planned = [
            (plan(part, max_kv_size=tokens, settings=settings, device=machine.device), machine)
            for part, machine in zip(self.parts, self.machines, strict=True)
        ]
        return max(planned, key=lambda one: one[0].total / max(1, one[1].limit_bytes))

    def longest(self) -> list[LongestContext]:
        """Of each rank, the longest context that fits into its machine with what it has of the model."""
        return [
            longest_context(part, machine, made.settings)
            for part, made, machine in zip(self.parts, self.plans, self.machines, strict=True)
        ]


class RankPlanner:
    """Plans one model on the same machines, rank 0's first, for any number of tokens.

    A ModelError if it cannot be divided so, a ValueError for a cache format that it cannot have.
    """

    def __init__(
        self,
        checkpoint: AnyCheckpoint,
        machines: Sequence[Machine],
        parallel: Parallel,
        settings: Settings = DEFAULT_SETTINGS,
    ) -> None:
        self._checkpoint, self._machines, self._settings = checkpoint, list(machines), settings
        self._shares: list[AnyCheckpoint] = []
        self._stages: dict[Device, Callable[[int, int, int], int]] = {}
        if parallel == "tensor":
            if isinstance(checkpoint, BridgedCheckpoint):
                kind = checkpoint.config.model_type
                raise ModelError(
                    f"{kind} is mlx-lm's model: its tensors are not divided; --parallel pipeline works"
                )
            self._shares = [checkpoint.share(share) for share in shares(checkpoint.config, len(machines))]
            self._planners = self._planners_of(self._shares)
            return
        devices = {machine.device for machine in machines}
        self._stages = {device: _stage_bytes(checkpoint, settings, device) for device in devices}

    def plan(self, tokens: int) -> RankPlan:
        if self._shares:
            made = [planned(tokens) for planned in self._planners]
            return RankPlan("tensor", self._machines, self._shares, made, None)

        def used(rank: int, first: int, last: int) -> int:
            return self._stages[self._machines[rank].device](first, last, tokens)

        layers = deal(self._checkpoint.num_layers, [machine.limit_bytes for machine in self._machines], used)
        parts = [self._checkpoint.stage(rank, own) for rank, own in enumerate(layers)]
        made = [planned(tokens) for planned in self._planners_of(parts)]
        return RankPlan("pipeline", self._machines, parts, made, layers)

    def longest(self) -> LongestContext:
        """The longest context that fits; the layers of a pipeline are dealt out anew for each."""
        return longest(self._checkpoint.config.max_position_embeddings, lambda tokens: self.plan(tokens).fits)

    def _planners_of(self, parts: Sequence[AnyCheckpoint]) -> list[Callable[[int], MemoryPlan]]:
        machines = zip(parts, self._machines, strict=True)
        return [planner(part, self._settings, machine.device) for part, machine in machines]


def _stage_bytes(
    checkpoint: AnyCheckpoint, settings: Settings, device: Device
) -> Callable[[int, int, int], int]:
    """(first layer, last layer and 1, tokens) -> bytes of that stage of a pipeline. One that begins with 0 is
    rank 0's.

    Weights are added up from layers. A run takes as much as that of any stage with as many layers of each
    kind.
    """
    on_cpu, layers = device == "cpu", range(checkpoint.num_layers)
    # An adapter is whole on every rank.
    bare = replace(checkpoint, adapter_bytes=0) if isinstance(checkpoint, Checkpoint) else checkpoint
    ends = bare.stage(0, range(0)).loading(on_cpu=on_cpu)
    each = [bare.stage(1, range(n, n + 1)).loading(on_cpu=on_cpu) for n in layers]
    adapter = checkpoint.stage(0, range(0)).loading(on_cpu=on_cpu).resident - ends.resident
    names = [checkpoint.layer_kind(n) for n in layers]
    process = [process_bytes(checkpoint.stage(rank, range(1))) if on_cpu else 0 for rank in (0, 1)]
    stages: dict[tuple[int, int], tuple[Loading, Needs]] = {}
    runs: dict[Any, Needs] = {}  # by rank 0 or not, and the number of layers of each kind
    for first in layers:
        loading, counts = Loading() if first else ends, Counter[Any]()
        for layer in layers[first:]:
            loading = loading.then(each[layer])
            counts[names[layer]] += 1
            kinds = first > 0, frozenset(counts.items())
            if kinds not in runs:
                part = checkpoint.stage(int(first > 0), range(first, layer + 1))
                runs[kinds] = cache(needs(part, settings, on_cpu=on_cpu))
            stages[first, layer + 1] = loading, runs[kinds]

    def used(first: int, last: int, tokens: int) -> int:
        loading, run = stages[first, last]
        return max(loading.resident + run(tokens).total, loading.peak) + adapter + process[int(first > 0)]

    return used


def deal(layers: int, limits: Sequence[int], used: Callable[[int, int, int], int]) -> list[range]:
    """The layers of each rank, contiguous in the order of ranks, at least one each.

    The largest part of a rank's limit that is used is the smallest of all such deals. Of equal ones the last
    rank has the most layers, and those before are dealt out by the same rule. Every deal is looked at, in
    exact numbers. ``limits`` and ``used``, of (rank, first layer, last layer and 1), are bytes.
    """
    if layers < len(limits):
        raise ModelError(f"{layers} layers cannot be dealt out to {len(limits)} ranks: each needs one")
    limits = [max(1, limit) for limit in limits]
    # By the layers dealt out: the largest fraction, where the last rank begins, and the same of the ranks
    # before it.
    best: dict[int, tuple[int, int, Any]] = {0: (0, 0, None)}
    for rank, limit in enumerate(limits):
        after, scale = len(limits) - 1 - rank, lcm(*limits) // limit  # fractions, with one denominator
        best = {
            last: min(
                (max(before[0], scale * used(rank, first, last)), first, before)
                for first, before in best.items()
                if first < last
            )
            for last in (range(rank + 1, layers - after + 1) if after else [layers])
        }
    bounds, found = [layers], best[layers]
    while found[2] is not None:
        bounds.insert(0, found[1])
        found = found[2]
    return [range(*each) for each in pairwise(bounds)]
