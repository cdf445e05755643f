"""The memory of a model on several machines: what each rank takes, and which layers or heads it has."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvant.errors import ModelError
from kvant.machine import Device, Machine
from kvant.models.share import shares
from kvant.tools.plan.bridged import BridgedCheckpoint
from kvant.tools.plan.deal import check_layers, deal
from kvant.tools.plan.plan import (
    LongestContext,
    MemoryPlan,
    Run,
    RunBytes,
    Settings,
    longest,
    longest_context,
    planner,
    process_bytes,
    run_bytes,
)
from kvant.tools.plan.stored import Checkpoint, Loading

Parallel = Literal["pipeline", "tensor"]
AnyCheckpoint = Checkpoint | BridgedCheckpoint


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The memory of a run on several machines, by rank.

    Attributes:
        parallel: "pipeline": each rank has layers of the model, one after the other. "tensor": each has heads and
            features of every layer.
        machines: of the ranks.
        parts: what each rank has of the model.
        plans: what each rank takes.
        layers: of a pipeline, those of each rank; None: tensor parallel.
    """

    parallel: Parallel
    machines: Sequence[Machine]
    parts: Sequence[AnyCheckpoint]
    plans: Sequence[MemoryPlan]
    layers: list[range] | None

    @property
    def fits(self) -> bool:
        """Whether every rank's plan fits into its machine."""
        return all(made.total <= machine.limit_bytes for made, machine in zip(self.plans, self.machines, strict=True))

    @property
    def fullest(self) -> int:
        """The rank that uses the largest part of its machine's limit."""
        uses = [
            made.total / max(1, machine.limit_bytes) for made, machine in zip(self.plans, self.machines, strict=True)
        ]
        return uses.index(max(uses))

    def longest(self) -> list[LongestContext]:
        """Of each rank, the longest context that fits into its machine with what it has of the model."""
        return [
            longest_context(part, machine.limit_bytes, settings=made.settings, device=machine.device)
            for part, made, machine in zip(self.parts, self.plans, self.machines, strict=True)
        ]


class RankPlanner:
    """Plans one model on the same machines for any number of tokens; what does not depend on them is added up once.

    Args:
        checkpoint: of the whole model.
        machines: of the ranks, rank 0's first.
        parallel: how the model is divided.
        settings: of the run.
        like: a planner that differs in its machines alone; what it has added up is used again.

    Raises:
        ModelError: a model that cannot be divided so.
        ValueError: a cache format that it cannot have.
    """

    def __init__(
        self,
        checkpoint: AnyCheckpoint,
        machines: Sequence[Machine],
        parallel: Parallel,
        settings: Settings | None = None,
        *,
        like: "RankPlanner | None" = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._machines = list(machines)
        self._parallel = parallel
        self._settings = settings or Settings()
        self._parts: list[AnyCheckpoint] = []
        self._stages: dict[Device, _Stages] = {} if like is None else like._stages
        if parallel == "tensor":
            self._parts = tensor_parts(checkpoint, len(machines))
            self._planners = [
                planner(part, self._settings, machine.device)
                for part, machine in zip(self._parts, machines, strict=True)
            ]
            return
        check_layers(checkpoint.num_layers, len(machines))
        for device in {machine.device for machine in machines} - self._stages.keys():
            self._stages[device] = _Stages(checkpoint, self._settings, device)

    def plan(self, tokens: int) -> RankPlan:
        """The plan of so many tokens reserved."""
        if self._parallel == "tensor":
            made = [planned(tokens) for planned in self._planners]
            return RankPlan("tensor", self._machines, self._parts, made, None)
        layers = self._deal(tokens)
        parts = [self._checkpoint.stage(rank, own) for rank, own in enumerate(layers)]
        made = [
            planner(part, self._settings, machine.device)(tokens)
            for part, machine in zip(parts, self._machines, strict=True)
        ]
        return RankPlan("pipeline", self._machines, parts, made, layers)

    def longest(self) -> LongestContext:
        """The longest context that fits; the layers of a pipeline are dealt out anew for each."""
        return longest(self._checkpoint.config.max_position_embeddings, self._fits)

    def _fits(self, tokens: int) -> bool:
        limits = [machine.limit_bytes for machine in self._machines]
        if self._parallel == "tensor":
            return all(plan(tokens).total <= limit for plan, limit in zip(self._planners, limits, strict=True))
        if min(stages.least(tokens) for stages in self._stages.values()) > sum(limits):
            return False  # without looking at any deal
        layers = self._deal(tokens)
        return all(self._used(tokens, rank, own.start, own.stop) <= limits[rank] for rank, own in enumerate(layers))

    def _deal(self, tokens: int) -> list[range]:
        limits = [machine.limit_bytes for machine in self._machines]
        return deal(self._checkpoint.num_layers, limits, partial(self._used, tokens))

    def _used(self, tokens: int, rank: int, first: int, last: int) -> int:
        return self._stages[self._machines[rank].device].used(first, last, tokens)


class _Stages:
    """The bytes of any stage of a pipeline: those that begin with layer 0 are rank 0's.

    Weights are added up from layers. A run takes as much as that of any stage with as many layers of each kind.
    """

    def __init__(self, checkpoint: AnyCheckpoint, settings: Settings, device: Device) -> None:
        self._checkpoint, self._settings = checkpoint, settings
        self._on_cpu = on_cpu = device == "cpu"
        count = checkpoint.num_layers
        ends = checkpoint.stage(0, range(0)).loading(on_cpu=on_cpu)
        each = [checkpoint.stage(1, range(n, n + 1)).loading(on_cpu=on_cpu) for n in range(count)]
        names = [checkpoint.layer_kind(n) for n in range(count)]
        kinds = [names.index(name) for name in names]
        self._loading: dict[tuple[int, int], Loading] = {}
        self._kinds: dict[tuple[int, int], tuple[int, ...]] = {}
        for first in range(count):
            loading = Loading() if first else ends
            number = [0] * (max(kinds) + 1)
            for layer in range(first, count):
                loading = loading.then(each[layer])
                number[kinds[layer]] += 1
                self._loading[first, layer + 1] = loading
                self._kinds[first, layer + 1] = (int(first > 0), *number)
        self._process = [process_bytes(checkpoint.stage(rank, range(1))) if on_cpu else 0 for rank in (0, 1)]
        self._runs: dict[tuple[int, ...], Run] = {}
        self._needed: dict[tuple[int, tuple[int, ...]], RunBytes] = {}

    def least(self, tokens: int) -> int:
        """Weights and caches of all layers: ranks together take no less."""
        first, last = 0, self._checkpoint.num_layers
        needed = self._run(first, last, tokens)
        return self._loading[first, last].held + needed.total - needed.scratch

    def used(self, first: int, last: int, tokens: int) -> int:
        """All that the rank with these layers takes, as its :class:`MemoryPlan` says."""
        loading, rank = self._loading[first, last], int(first > 0)
        return max(loading.held + self._run(first, last, tokens).total, loading.peak) + self._process[rank]

    def _run(self, first: int, last: int, tokens: int) -> RunBytes:
        key = self._kinds[first, last]
        if (tokens, key) not in self._needed:
            if key not in self._runs:
                part = self._checkpoint.stage(key[0], range(first, last))
                self._runs[key] = run_bytes(part, self._settings, on_cpu=self._on_cpu)
            self._needed[tokens, key] = self._runs[key](tokens)
        return self._needed[tokens, key]


def tensor_parts(checkpoint: AnyCheckpoint, ranks: int) -> list[AnyCheckpoint]:
    """What each rank has where heads and features are divided.

    Raises:
        ModelError: the model cannot be divided so.
    """
    if isinstance(checkpoint, BridgedCheckpoint):
        raise ModelError(
            f"{checkpoint.config.model_type} is mlx-lm's model: its tensors are not divided; --parallel pipeline works"
        )
    return [checkpoint.share(share) for share in shares(checkpoint.config, ranks)]
