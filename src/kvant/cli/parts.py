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
from kvant.plan import AnyCheckpoint, MemoryPlan, RankPlan, Settings
from kvant.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Arranged:
    """How a model is divided."""

    parallel: str  # "pipeline" or "tensor"
    layers: Sequence[range]  # of each rank, in a pipeline
    total: int  # bytes of this rank's plan, as the next two
    arrays: int
    scratch: int
    plan: RankPlan | None = None  # of every rank's memory; known to rank 0

    @property
    def own(self) -> MemoryPlan:
        assert self.plan is not None
        return self.plan.plans[0]

    def describe(self, model: LanguageModel) -> str:
        """Say in a line how many ranks there are, and what rank 0 exchanged with them in the last step."""
        from kvant.ranks.lead import Lead

        assert isinstance(model, Lead)
        found, size = model.step_traffic, model.ranks.size
        exchanged = f"{found.sums} sums, {found.messages} messages, {format_bytes(found.bytes)}"
        return f"ranks: {size}, {self.parallel}; {exchanged} in the last step"


def arrange(
    options: Mapping[str, Any],
    folder: Path,
    checkpoint: AnyCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machine: Machine,
) -> Arranged:
    """Compare the ranks' models and ``options``, and divide the model by their memory. Every rank calls
    it.
    """
    guard = ranks.guard()
    assert guard is not None
    adapter = options["adapter_path"]
    identity = identify(folder, None if adapter is None else find_adapter(adapter))
    facts = {"the model's digest": identity.model, "the tokenizer's digest": identity.tokenizer}
    facts |= {"the device": machine.device}
    guard.agree(facts | {f"--{name.replace('_', '-')}": repr(value) for name, value in options.items()})
    machines = gather_machines(machine)
    if guard.rank:
        layout = guard.receive()
        return Arranged(
            layout["parallel"], [range(*layers) for layers in layout["layers"]], *layout["bytes"][guard.rank]
        )
    made = ranks_that_fit(checkpoint, settings, max_kv_size, machines, options["parallel"])
    layers = list(made.layers or ())
    planned = [(each.total, each.arrays, each.scratch) for each in made.plans]
    guard.tell(
        {"parallel": made.parallel, "layers": [(own.start, own.stop) for own in layers], "bytes": planned}
    )
    return Arranged(made.parallel, layers, *planned[0], made)


def gather_machines(machine: Machine) -> list[Machine]:
    """Gather the ranks' machines on rank 0. Ranks of one computer have a part of its memory each."""
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
    """Give what loads this rank's part of the model; on rank 0 a model that all ranks compute."""

    def load(folder: Path, progress: Progress | None, adapter: Path | None) -> LanguageModel:
        guard, group = ranks.guard(), ranks.connect()
        assert guard is not None
        part: LanguageModel
        if arranged.parallel == "tensor":
            from kvant.ranks.tensor import load_tensor

            part = load_tensor(folder, group, progress, adapter)
        elif not is_bridged_folder(folder):
            from kvant.ranks.stage import load_stage

            part = load_stage(folder, group, arranged.layers[group.rank], progress, adapter)
        elif adapter is not None:
            raise ModelError(
                f"{adapter}: adapters are applied to architectures of kvant's own; this model is mlx-lm's"
            )
        else:
            from kvant.ranks.bridged_stage import load_bridged_stage

            part = load_bridged_stage(folder, group, arranged.layers[group.rank], progress)
        guard.begin()
        if guard.rank:
            return part
        from kvant.ranks.lead import Lead

        return Lead(part, group, guard, interrupts.deferred)

    return load
