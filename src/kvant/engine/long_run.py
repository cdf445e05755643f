"""A run that goes on when the context is full."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from kvant.engine.drafting.choice import DraftCounts
from kvant.engine.run import FinishReason, Run


class LongRun:
    """Several runs, one after another, that are one request: each begins where the context of the last was full.

    It has what :func:`kvant.engine.generate.responses` uses of a :class:`Run`.

    Attributes:
        prompt: token ids that the first run fed.
        generated: token ids that were handed out, by all runs.
        finish_reason: as a run's; "context" only where there is no further run.
    """

    def __init__(self, first: Run, following: Callable[[Sequence[int]], Callable[[], Run] | None]) -> None:
        """``following``: called with all generated tokens when the context is full. It returns what makes the next run,
        which is called when a further token is asked for; None: there is no further run.
        """
        self.prompt = first.prompt
        self.generated: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._run = first
        self._before: DraftCounts | None = None  # of runs that have ended
        self._following = following
        self._next: Callable[[], Run] | None = None

    @property
    def from_draft(self) -> bool:
        """Whether the token handed out last was drafted."""
        return self._run.from_draft

    @property
    def drafts(self) -> DraftCounts | None:
        """What drafts did, for all runs; None: there are none."""
        return self._run.drafts if self._before is None or self._run.drafts is None else self._before + self._run.drafts

    def __iter__(self) -> "LongRun":
        return self

    def __next__(self) -> tuple[int, mx.array]:
        """The next token and its log-probabilities (vocab,)."""
        if self.finish_reason:
            raise StopIteration
        if self._next is not None:
            self._before = self.drafts
            self._run, self._next = self._next(), None
        token, logprobs = next(self._run)
        self.generated.append(token)
        if self._run.finish_reason == "context":
            self._next = self._following(self.generated)
        self.finish_reason = None if self._next is not None else self._run.finish_reason
        return token, logprobs

    def stop(self) -> None:
        """End it after the token that was handed out last."""
        self.finish_reason = "stop"
        self._run.stop()
