"""An engine in this process: a model over several ranks, which a worker of its own could not be a part of."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvant.errors import BenchError, KvantError, one_line
from kvant.models import LanguageModel
from kvant.ranks.group import Ranks
from kvant.tools.bench.adapters import Kvant, Tokens
from kvant.tools.bench.engines import EngineSpec
from kvant.tools.bench.worker import LocalEngine, Taken


@dataclass(frozen=True, slots=True)
class OverRanks:
    """A loaded model, as rank 0 has it.

    Attributes:
        model: tells the other ranks each step.
        ranks: count what is sent.
        parallel: "pipeline" or "tensor".
    """

    model: LanguageModel
    ranks: Ranks
    parallel: str


class Counted(Kvant):
    """kvant's model, with what rank 0 sends in the decode steps."""

    def __init__(self, spec: EngineSpec, over: OverRanks, prefill_step_size: int) -> None:
        super().__init__(spec, over.model, prefill_step_size)
        self._over = over
        self.sent: dict[str, Any] = {}  # by the attributes of a Sent, but for those of the run

    def tokens(self, prompt: Sequence[int], max_tokens: int, answer: Sequence[int] | None = None) -> Tokens:
        """As kvant's. Whenever a token is handed over, the step after it is built and counted."""
        before: dict[str, int] = {}
        for number, token in enumerate(super().tokens(prompt, max_tokens, answer)):
            counts = asdict(self._over.ranks.traffic)
            before = before or counts
            counts = {name: count - before[name] for name, count in counts.items()}
            self.sent = {"ranks": self._over.ranks.size, "parallel": self._over.parallel, "steps": number, **counts}
            yield token


class Here:
    """One engine without a process of its own; it has the methods of a :class:`Worker`."""

    def __init__(self, spec: EngineSpec, over: OverRanks, prefill_step_size: int) -> None:
        self._label = spec.label
        self._adapter = Counted(spec, over, prefill_step_size)
        self._engine = LocalEngine(self._adapter)
        self._taken: Taken = []

    def ask(self, command: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """Do a command and return its answer; a BenchError for what a library raises."""
        if kind == "ready":
            return self._engine.describe()
        self._taken = []
        try:
            figures = self._engine.run(dict(command), self._taken)
        except KvantError:
            raise
        except Exception as error:  # of a library, or of a device
            raise BenchError(f"engine {self._label}: {one_line(error)}") from error
        sent = self._adapter.sent
        return {"latencies_ms": [ms for _, ms in self._taken], **figures} | ({"sent": sent} if sent["steps"] else {})

    def interrupt(self) -> list[float]:
        """The latencies of the tokens so far of the run that was interrupted, in milliseconds."""
        return [ms for _, ms in self._taken]

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Nothing to check: an answer of this process is sound."""
        yield

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *error: object) -> None:
        """There is nothing to end."""
