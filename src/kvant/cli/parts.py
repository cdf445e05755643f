"""A model divided over ranks: how, by their memory, and what loads each one's part."""

import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvant.cli import interrupts, ranks
from kvant.cli.fitting import ranks_that_fit
from kvant.cli.options import KvSize
from kvant.engine.load import LoadModel, find_adapter, is_bridged_folder
from kvant.errors import ModelError
from kvant.machine import Machine
from kvant.models import LanguageModel
from kvant.models.checkpoint import Progress
from kvant.models.identity import identify
from kvant.sizes import format_bytes
from kvant.tools.plan import BridgedCheckpoint, Checkpoint, MemoryPlan, RankPlan, Settings, plan


@dataclass(frozen=True, slots=True)
class Arranged:
    """How a model is divided.

    Attributes:
        parallel: "pipeline" or "tensor".
        layers: of each rank, in a pipeline.
        total, arrays, scratch: bytes of this rank's plan, as of :class:`kvant.tools.plan.MemoryPlan`.
        plan: of every rank's memory; known to rank 0.
    """

    parallel: str
    layers: Sequence[range]
    total: int
    arrays: int
    scratch: int
    plan: RankPlan | None = None

    @property
    def own(self) -> MemoryPlan:
        """Rank 0's memory."""
        assert self.plan is not None
        return self.plan.plans[0]

    def plan_with(self, settings: Settings, tokens: int) -> tuple[MemoryPlan, Machine]:
        """The memory of other settings with the model divided as it is: of the fullest machine, and that one."""
        assert self.plan is not None
        machines = self.plan.machines
        plans = [
            plan(part, max_kv_size=tokens, settings=settings, device=machine.device)
            for part, machine in zip(self.plan.parts, machines, strict=True)
        ]
        return max(zip(plans, machines, strict=True), key=lambda one: one[0].total / max(1, one[1].limit_bytes))

    def describe(self, model: LanguageModel) -> str:
        """The ranks, and what rank 0 exchanged with the others in the last step, in a line."""
        from kvant.ranks.lead import Lead

        assert isinstance(model, Lead)
        found, size = model.step_traffic, model.ranks.size
        exchanged = f"{found.sums} sums, {found.messages} messages, {format_bytes(found.bytes)}"
        return f"ranks: {size}, {self.parallel}; {exchanged} in the last step"


def arrange(
    options: Mapping[str, Any],
    folder: Path,
    checkpoint: Checkpoint | BridgedCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machine: Machine,
) -> Arranged:
    """Compare the ranks' models and options, and divide the model by their memory. Every rank calls it.

    Args:
        options: the command's, that are to be the same on all ranks, by the names of its flags.
        folder, checkpoint: of the model.
        settings, max_kv_size, machine: as in :func:`kvant.cli.fitting.plan_that_fits`.

    Raises:
        RanksError: they differ.
        ContextError: no division fits; the error has the numbers.
    """
    guard = ranks.guard()
    assert guard is not None
    adapter = options["adapter_path"]
    identity = identify(folder, None if adapter is None else find_adapter(adapter))
    facts = {"the model's digest": identity.model, "the tokenizer's digest": identity.tokenizer}
    facts |= {"the device": machine.device}
    facts |= {f"--{name.replace('_', '-')}": repr(value) for name, value in options.items()}
    guard.agree(facts)
    machines = gather_machines(machine)
    if guard.rank:
        told = guard.receive()
        return Arranged(told["parallel"], [range(*layers) for layers in told["layers"]], *told["bytes"][guard.rank])
    made = ranks_that_fit(checkpoint, settings, max_kv_size, machines, options["parallel"])
    layers = list(made.layers or ())
    planned = [(each.total, each.arrays, each.scratch) for each in made.plans]
    dealt = [(own.start, own.stop) for own in layers]
    guard.tell({"parallel": made.parallel, "layers": dealt, "bytes": planned})
    return Arranged(made.parallel, layers, *planned[0], made)


def gather_machines(machine: Machine) -> list[Machine]:
    """Each rank's machine, on rank 0. Every rank calls it. Ranks of one computer have a part of its memory each."""
    guard = ranks.guard()
    assert guard is not None
    shares_memory = machine.device == "cpu" or sys.platform == "darwin"  # other GPUs have their own
    computer = platform.node() if shares_memory else f"{platform.node()} {guard.rank}"
    found = guard.gather([computer, asdict(machine)])
    counts = Counter(computer for computer, _ in found)
    machines = []
    for computer, each in found:
        own, count = Machine(**each), counts[computer]
        if count > 1:
            source = f"{own.limit_source}, divided by {count} ranks"
            own = replace(own, limit_bytes=own.limit_bytes // count, limit_source=source)
        machines.append(own)
    return machines


def loader(arranged: Arranged) -> LoadModel:
    """What loads this rank's part of the model; on rank 0 a model that all ranks compute."""

    def load(folder: Path, progress: Progress | None, adapter: Path | None) -> LanguageModel:
        guard = ranks.guard()
        assert guard is not None
        part = _load_part(arranged, folder, progress, adapter)
        if guard.rank:
            return part
        from kvant.ranks.lead import Lead

        return Lead(part, ranks.connect(), guard, interrupts.held)

    return load


def _load_part(arranged: Arranged, folder: Path, progress: Progress | None, adapter: Path | None) -> LanguageModel:
    group = ranks.connect()
    bridged = is_bridged_folder(folder)
    if arranged.parallel == "tensor":
        from kvant.ranks.tensor import load_tensor

        return load_tensor(folder, group, progress, adapter)
    own = arranged.layers[group.rank]
    if not bridged:
        from kvant.ranks.stage import load_stage

        return load_stage(folder, group, own, progress, adapter)
    from kvant.ranks.bridged_stage import load_bridged_stage

    if adapter is not None:
        raise ModelError(f"{adapter}: adapters are applied to architectures of kvant's own; this model is mlx-lm's")
    return load_bridged_stage(folder, group, own, progress)
