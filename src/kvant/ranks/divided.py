"""The division of a model over ranks by their memory, and the loading of each rank's shard."""

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
    # Context of a step on rank 0, which delays Ctrl-C until the other ranks have their step.
    uninterrupted: Callable[[], AbstractContextManager[object]]
    parallel: str  # "pipeline" or "tensor"
    layers: Sequence[range]  # of each rank, in a pipeline
    total: int  # bytes of this rank's plan, like the next two
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
        """Load this rank's shard of the model; on rank 0 return a model that all ranks compute."""
        group = join_group(self.guard)
        model: LanguageModel
        if self.parallel == "tensor":
            model = load_tensor(folder, group, progress, adapter)
        elif not is_bridged_folder(folder):
            model = load_stage(folder, group, self.layers[group.rank], progress, adapter)
        else:
            from kvant.ranks.bridged_stage import load_bridged_stage  # here, because it imports mlx-lm

            model = load_bridged_stage(folder, group, self.layers[group.rank], progress, adapter)
        self.guard.begin()
        return model if self.guard.rank else Lead(model, group, self.guard, self.uninterrupted)

    def describe(self, model: LanguageModel) -> list[str]:
        """Return a line with the number of ranks, and rank 0's traffic in the last step."""
        assert isinstance(model, Lead)
        traffic = model.step_traffic
        size = model.ranks.size
        exchanged = f"{traffic.sums} sums, {traffic.messages} messages, {format_bytes(traffic.bytes)}"
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

    ``plan``: called on rank 0 with all machines. ``uninterrupted``: as in :class:`Divided`.
    """
    adapter = flags["adapter_path"]
    identity = identify(folder, None if adapter is None else find_adapter(adapter))
    facts = {"the model's digest": identity.model, "the tokenizer's digest": identity.tokenizer}
    facts |= {"the device": machine.device}
    guard.agree(facts | {f"--{name.replace('_', '-')}": repr(value) for name, value in flags.items()})
    machines = gather_machines(guard, machine)
    if guard.rank:
        layout = guard.receive()
        layers = [range(*each) for each in layout["layers"]]
        return Divided(guard, uninterrupted, layout["parallel"], layers, *layout["bytes"][guard.rank])
    made = plan(machines)
    layers = list(made.layers or ())
    planned = [(each.total, each.arrays, each.scratch) for each in made.plans]
    guard.tell(
        {"parallel": made.parallel, "layers": [(each.start, each.stop) for each in layers], "bytes": planned}
    )
    return Divided(guard, uninterrupted, made.parallel, layers, *planned[0], made)


def gather_machines(guard: Guard, machine: Machine) -> list[Machine]:
    """Gather the ranks' machines on rank 0. Ranks on one computer get equal fractions of its memory."""
    shares_memory = machine.device == "cpu" or sys.platform == "darwin"  # other GPUs have their own
    computer = platform.node() if shares_memory else f"{platform.node()} {guard.rank}"
    gathered = guard.gather([computer, asdict(machine)])
    counts = Counter(computer for computer, _ in gathered)
    machines = []
    for computer, each in gathered:
        limited = Machine(**each)
        count = counts[computer]
        if count > 1:
            source = f"{limited.limit_source}, divided by {count} ranks"
            limited = replace(limited, limit_bytes=limited.limit_bytes // count, limit_source=source)
        machines.append(limited)
    return machines
