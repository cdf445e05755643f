"""A step of sampling for a batch: every row with its own request's sampler, processors and key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.engine.draw import Sampler, SeededSampler, draw_after, draw_keys, greedy, rows_of, with_rows
from kvant.engine.processors import KINDS, Bias, LogitsProcessor, process_rows


@dataclass(slots=True)
class Row:
    """What a request brings to a step.

    Attributes:
        sampler: of :func:`kvant.engine.draw.for_a_run`.
        processors: applied to the logits in order.
        position: tokens before the one to be sampled.
        tokens: these tokens, ids of the vocabulary; only looked at where there are processors.
    """

    sampler: Sampler
    processors: Sequence[LogitsProcessor]
    position: int
    tokens: Sequence[int]


def sample_rows(
    logits: mx.array, rows: Sequence[Row], failed: dict[int, Exception] | None = None
) -> tuple[mx.array, mx.array]:
    """One step of sampling for all rows: bit for bit what :func:`kvant.engine.draw.sample` gives for each alone.

    Args:
        logits: (R, vocab) with R >= B; those behind the B rows are ignored.
        rows: B requests.
        failed: takes the error of each row whose own sampler or processor fails, by the row's number. The other rows
            are sampled; that row's token means nothing. None: the first error is raised.

    Returns:
        The tokens (B,) and their log-probabilities (B, vocab), not evaluated.

    Raises:
        ValueError: an option that the vocabulary is too small for; a sampler or processor returned something else than
            a token or logits.
        Exception: whatever a request's own functions raise.
    """
    vocab_size = logits.shape[-1]
    samplers: list[Sampler] = []
    processors: list[Sequence[LogitsProcessor]] = []
    for number, row in enumerate(rows):
        sampler, own = row.sampler, row.processors
        try:
            if isinstance(sampler, SeededSampler):
                sampler.check(vocab_size)
            for processor in own:
                if type(processor) is Bias:
                    processor.check(vocab_size)
        except ValueError as error:
            if failed is None:
                raise
            failed[number] = error
            sampler, own = greedy, ()
        if not isinstance(sampler, SeededSampler) and sampler is not greedy:
            sampler = _Foreign(sampler, (1,), number, failed)
        samplers.append(sampler)
        processors.append([p if type(p) in KINDS else _Foreign(p, (1, vocab_size), number, failed) for p in own])
    logits = logits[: len(rows)].astype(mx.float32)
    if processed := [number for number, own in enumerate(processors) if own]:
        tokens = [rows[number].tokens for number in processed]
        changed = process_rows(rows_of(logits, processed), tokens, [processors[number] for number in processed])
        logits = with_rows(logits, processed, changed)
    seeded = [number for number, sampler in enumerate(samplers) if isinstance(sampler, SeededSampler)]
    keys = draw_keys([samplers[number] for number in seeded], [rows[number].position for number in seeded])
    return draw_after(logits, samplers, keys)


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A request's own sampler or processor. An error goes to its row alone."""

    function: Callable[..., mx.array]
    shape: tuple[int, ...]  # of the result
    row: int
    failed: dict[int, Exception] | None

    def __call__(self, *arguments: mx.array) -> mx.array:
        if self.failed is None or self.row not in self.failed:
            try:
                result = self.function(*arguments)
                if result.shape != self.shape:
                    raise ValueError(f"{self.function!r} returned the shape {result.shape}; expected {self.shape}")
            except Exception as error:
                if self.failed is None:
                    raise
                self.failed[self.row] = error
            else:
                return result
        return mx.zeros(self.shape, arguments[-1].dtype if len(self.shape) > 1 else mx.uint32)
