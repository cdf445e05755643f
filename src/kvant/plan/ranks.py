"""The memory of a model on several machines, and the layers or heads of each rank."""

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
    parts: Sequence[AnyCheckpoint]  # each rank's shard of the model
    plans: Sequence[MemoryPlan]
    layers: list[range] | None  # of a pipeline; None: tensor parallel

    @property
    def fits(self) -> bool:
        return all(
            made.total <= machine.limit_bytes for made, machine in zip(self.plans, self.machines, strict=True)
        )

    @property
    def fullest(self) -> int:
        """Return the rank that uses the largest fraction of its machine's limit."""
        limits = [max(1, machine.limit_bytes) for machine in self.machines]
        return max(range(len(limits)), key=lambda rank: self.plans[rank].total / limits[rank])

    def again(self, settings: Settings, tokens: int) -> tuple[MemoryPlan, Machine]:
        """Plan other settings for the same shards; return the fullest machine's memory, and that machine."""
        planned = [
            (plan(share, max_kv_size=tokens, settings=settings, device=machine.device), machine)
            for share, machine in zip(self.parts, self.machines, strict=True)
        ]
        return max(planned, key=lambda one: one[0].total / max(1, one[1].limit_bytes))

    def longest(self) -> list[LongestContext]:
        """Return the longest context that fits each rank's machine with its shard."""
        return [
            longest_context(share, machine, made.settings)
            for share, made, machine in zip(self.parts, self.plans, self.machines, strict=True)
        ]


class RankPlanner:
    """Plans one model on the same machines, rank 0's first, for any number of tokens.

    Raises a ModelError if the model cannot be divided like this, and a ValueError for an unsupported cache.
    """

    def __init__(
        self,
        checkpoint: AnyCheckpoint,
        machines: Sequence[Machine],
        parallel: Parallel,
        settings: Settings = DEFAULT_SETTINGS,
    ) -> None:
        self._checkpoint = checkpoint
        self._machines = list(machines)
        self._settings = settings
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
        parts = [self._checkpoint.stage(rank, each) for rank, each in enumerate(layers)]
        made = [planned(tokens) for planned in self._planners_of(parts)]
        return RankPlan("pipeline", self._machines, parts, made, layers)

    def longest(self) -> LongestContext:
        """Return the longest context that fits; every length deals a pipeline's layers again."""
        return longest(self._checkpoint.config.max_position_embeddings, lambda tokens: self.plan(tokens).fits)

    def _planners_of(self, parts: Sequence[AnyCheckpoint]) -> list[Callable[[int], MemoryPlan]]:
        machines = zip(parts, self._machines, strict=True)
        return [planner(share, self._settings, machine.device) for share, machine in machines]


def _stage_bytes(
    checkpoint: AnyCheckpoint, settings: Settings, device: Device
) -> Callable[[int, int, int], int]:
    """Return a function from (first layer, end, tokens) to the bytes of that stage of a pipeline.

    A stage that begins with layer 0 is rank 0's. Weights are summed over layers. A run takes as much as that
    of any stage with equally many layers of each kind.
    """
    on_cpu = device == "cpu"
    layers = range(checkpoint.num_layers)
    # An adapter is whole on every rank.
    bare = replace(checkpoint, adapter_bytes=0) if isinstance(checkpoint, Checkpoint) else checkpoint
    ends = bare.stage(0, range(0)).loading(on_cpu=on_cpu)
    each = [bare.stage(1, range(n, n + 1)).loading(on_cpu=on_cpu) for n in layers]
    adapter = checkpoint.stage(0, range(0)).loading(on_cpu=on_cpu).resident - ends.resident
    names = [checkpoint.layer_kind(n) for n in layers]
    process = [process_bytes(checkpoint.stage(rank, range(1))) if on_cpu else 0 for rank in (0, 1)]
    stages: dict[tuple[int, int], tuple[Loading, Needs]] = {}
    runs: dict[Any, Needs] = {}  # by whether it is rank 0, and the number of layers of each kind
    for first in layers:
        loading = Loading() if first else ends
        counts = Counter[Any]()
        for layer in layers[first:]:
            loading = loading.then(each[layer])
            counts[names[layer]] += 1
            kinds = first > 0, frozenset(counts.items())
            if kinds not in runs:
                stage = checkpoint.stage(int(first > 0), range(first, layer + 1))
                runs[kinds] = cache(needs(stage, settings, on_cpu=on_cpu))
            stages[first, layer + 1] = loading, runs[kinds]

    def used(first: int, last: int, tokens: int) -> int:
        loading, run = stages[first, last]
        return max(loading.resident + run(tokens).total, loading.peak) + adapter + process[int(first > 0)]

    return used


def deal(layers: int, limits: Sequence[int], used: Callable[[int, int, int], int]) -> list[range]:
    """Return the layers of each rank, contiguous in the order of ranks, at least one each.

    It minimizes the largest used fraction of a rank's limit, over all deals and with exact numbers. Among
    equal deals the last rank gets the most layers, and the ranks before it follow the same rule. ``limits``
    and ``used``, of (rank, first layer, end), are bytes.
    """
    if layers < len(limits):
        raise ModelError(f"{layers} layers cannot be dealt out to {len(limits)} ranks: each needs one")
    limits = [max(1, limit) for limit in limits]
    # By the number of layers dealt: the largest fraction, the first layer of the last rank, and the same
    # for the ranks before it.
    best: dict[int, tuple[int, int, Any]] = {0: (0, 0, None)}
    for rank, limit in enumerate(limits):
        after = len(limits) - 1 - rank
        scale = lcm(*limits) // limit  # fractions with a common denominator
        best = {
            last: min(
                (max(before[0], scale * used(rank, first, last)), first, before)
                for first, before in best.items()
                if first < last
            )
            for last in (range(rank + 1, layers - after + 1) if after else [layers])
        }
    bounds = [layers]
    choice = best[layers]
    while choice[2] is not None:
        bounds.insert(0, choice[1])
        choice = choice[2]
    return [range(*each) for each in pairwise(bounds)]
