"""A model that a server offers: its names, its planned memory, how to load it, and whether it is loaded."""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from kvant.server.metrics import Metrics
from kvant.server.service import Service, model_names
from kvant.server.settings import Settings

DEFAULT_CONTEXT = 4096  # tokens, until the model is loaded


@dataclass(eq=False, slots=True)
class ServedModel:
    """A model that a server offers, loaded or not."""

    names: tuple[str, ...]  # the first one is in answers
    aliases: tuple[str, ...]  # further names
    patterns: tuple[str, ...]  # of further names, such as ``claude-*``
    load: Callable[[Metrics], Service]
    # bytes by name from :func:`kvant.plan.memory.as_record`; empty if not planned before loading
    planned: Mapping[str, int]
    context: int  # the maximum tokens of a prompt and its answer
    # Only the registry changes the following fields.
    service: Service | None = field(default=None, init=False)  # None: not loaded
    users: int = field(default=0, init=False)  # requests that use it or wait for it to load
    loading: "asyncio.Task[None] | None" = field(default=None, init=False)
    loaded_at: float = field(default=-math.inf, init=False)  # by time.monotonic()
    used_at: float = field(default=-math.inf, init=False)  # when the last request ended
    is_stopping: bool = field(default=False, init=False)  # unload it when its requests have ended
    failure: tuple[float, str] | None = field(default=None, init=False)  # when loading failed, and why
    timer: asyncio.TimerHandle | None = field(default=None, init=False)  # unloads it at the end of keep_alive

    @property
    def name(self) -> str:
        """Return the name that is in answers."""
        return self.names[0]

    @property
    def idle_since(self) -> float:
        """Return when its last request ended or it was loaded, by time.monotonic()."""
        return max(self.used_at, self.loaded_at)

    @property
    def planned_bytes(self) -> int:
        """Return the memory that the model needs, as planned."""
        return self.planned.get("total", 0)

    def cancel_timer(self) -> None:
        """Do not unload the model at the end of keep_alive."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def matches(self, name: str) -> bool:
        """Return whether a name fits one of the patterns."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


def served_model(
    settings: Settings,
    load: Callable[[Metrics], Service],
    planned: Mapping[str, int] | None = None,
    context: int = DEFAULT_CONTEXT,
) -> ServedModel:
    """Return a model, not loaded, with the names in its settings."""
    patterns = tuple(alias for alias in settings.aliases if {"*", "?", "["} & {*alias})
    return ServedModel(
        names=model_names(settings.model),
        aliases=tuple(alias for alias in settings.aliases if alias not in patterns),
        patterns=patterns,
        load=load,
        planned=planned or {},
        context=context,
    )
