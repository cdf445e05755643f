"""The arrangement of a run's model: in one process, or divided over ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvant.machine import Machine
    from kvant.models import LanguageModel
    from kvant.models.checkpoint import Progress
    from kvant.plan import MemoryPlan, Settings


class Arrangement(Protocol):
    """A session's interface to the model, for one process or rank 0 of several."""

    def plan(self, settings: "Settings", model: "LanguageModel | None" = None) -> "MemoryPlan":
        """Plan this process's memory; raise a ContextError if the run does not fit a machine."""

    def plan_with(
        self, settings: "Settings", tokens: int, model: "LanguageModel"
    ) -> "tuple[MemoryPlan, Machine]":
        """Plan other settings, even if they do not fit; return the fullest machine's plan and the machine."""

    def load(self, folder: Path, progress: "Progress | None", adapter: Path | None) -> "LanguageModel":
        """Load the model that this process calls."""

    def describe(self, model: "LanguageModel") -> list[str]:
        """Return lines that describe what the model exchanges with other machines."""
