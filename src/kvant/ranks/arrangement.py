"""Where the model of a run is: in this process alone, or divided over ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvant.machine import Machine
    from kvant.models import LanguageModel
    from kvant.models.checkpoint import Progress
    from kvant.plan import MemoryPlan, Settings


class Arrangement(Protocol):
    """What a session asks, alone or on rank 0, instead of how many ranks there are."""

    def plan(self, settings: "Settings", model: "LanguageModel | None" = None) -> "MemoryPlan":
        """Plan this process's memory. A ContextError if the run does not fit into a machine."""

    def plan_with(
        self, settings: "Settings", tokens: int, model: "LanguageModel"
    ) -> "tuple[MemoryPlan, Machine]":
        """Plan other settings, whether they fit or not: the fullest machine's memory, and that machine."""

    def load(self, folder: Path, progress: "Progress | None", adapter: Path | None) -> "LanguageModel":
        """Load the model that this process calls."""

    def describe(self, model: "LanguageModel") -> list[str]:
        """Say in lines what the model exchanges with other machines."""
