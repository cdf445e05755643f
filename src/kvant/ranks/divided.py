"""A model divided over ranks: how, by their memory, and what loads each one's part."""

import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.engine.load import find_adapter, is_bridged_folder
from kvant.machine import Machine
from kvant.models import LanguageModel
from kvant.models.checkpoint import Progress
from kvant.models.identity import identify
from kvant.ranks.group import join_group
from kvant.ranks.guard import Guard
from kvant.ranks.lead import Lead
from kvant.ranks.stage import load_stage
from kvant.ranks.tensor import load_tensor
from kvant.sizes import format_bytes

if TYPE_CHECKING:
    from kvant.plan import MemoryPlan, RankPlan, Settings


@dataclass(frozen=True, slots=True)
class Divided:
    """A model divided over ranks; an :class:`kvant.ranks.arrangement.Arrangement`."""

    guard: Guard
    # A step is computed in it on rank 0; it keeps Ctrl-C until the others have theirs.
    uninterrupted: Callable[[], AbstractContextManager[object]]
    parallel: str  # "pipeline" or "tensor"
    layers: Sequence[range]  # of each rank, in a pipeline
    total: int  # bytes of this rank's plan, as the next two
    arrays: int
    scratch: int
    ranks: "RankPlan | None" = None  # every rank's memory; known to rank 0

    def plan(self, settings: "Settings", model: LanguageModel | None = None) -> "MemoryPlan":
        assert self.ranks is not None
        return self.ranks.plans[0]

    def plan_with(
        self, settings: "Settings", tokens: int, model: LanguageModel
    ) -> "tuple[MemoryPlan, Machine]":
        assert self.ranks is not None
        return self.ranks.again(settings, tokens)

    def load(self, folder: Path, progress: Progress | None, adapter: Path | None) -> LanguageModel:
        """Load this rank's part of the model; on rank 0 a model that all ranks compute."""
        group = join_group(self.guard)
        part: LanguageModel
        if self.parallel == "tensor":
            part = load_tensor(folder, group, progress, adapter)
        elif not is_bridged_folder(folder):
            part = load_stage(folder, group, self.layers[group.rank], progress, adapter)
        else:
            from kvant.ranks.bridged_stage import load_bridged_stage  # not for others: it imports mlx-lm

            part = load_bridged_stage(folder, group, self.layers[group.rank], progress, adapter)
        self.guard.begin()
        return part if self.guard.rank else Lead(part, group, self.guard, self.uninterrupted)

    def describe(self, model: LanguageModel) -> list[str]:
        """Say how many ranks there are, and what rank 0 exchanged with them in the last step."""
        assert isinstance(model, Lead)
        found, size = model.step_traffic, model.ranks.size
        exchanged = f"{found.sums} sums, {found.messages} messages, {format_bytes(found.bytes)}"
        return [f"ranks: {size}, {self.parallel}; {exchanged} in the last step"]


def divide(
    guard: Guard,
    folder: Path,
    flags: Mapping[str, Any],
    machine: Machine,
    plan: "Callable[[Sequence[Machine]], RankPlan]",
    uninterrupted: Callable[[], AbstractContextManager[object]],
) -> Divided:
    """Compare the ranks' models and ``flags``, and divide the model by their memory. Every rank calls it.

    ``plan``: called on rank 0 with the machines of all. ``uninterrupted``: as of :class:`Divided`.
    """
    adapter = flags["adapter_path"]
    identity = identify(folder, None if adapter is None else find_adapter(adapter))
    facts = {"the model's digest": identity.model, "the tokenizer's digest": identity.tokenizer}
    facts |= {"the device": machine.device}
    guard.agree(facts | {f"--{name.replace('_', '-')}": repr(value) for name, value in flags.items()})
    machines = gather_machines(guard, machine)
    if guard.rank:
        layout = guard.receive()
        layers = [range(*own) for own in layout["layers"]]
        return Divided(guard, uninterrupted, layout["parallel"], layers, *layout["bytes"][guard.rank])
    made = plan(machines)
    layers = list(made.layers or ())
    planned = [(each.total, each.arrays, each.scratch) for each in made.plans]
    guard.tell(
        {"parallel": made.parallel, "layers": [(own.start, own.stop) for own in layers], "bytes": planned}
    )
    return Divided(guard, uninterrupted, made.parallel, layers, *planned[0], made)


def gather_machines(guard: Guard, machine: Machine) -> list[Machine]:
    """Gather the ranks' machines on rank 0. Ranks of one computer have a part of its memory each."""
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
