"""What fits a machine. Every command that runs a model uses :func:`plan_run`, like ``kvant plan``."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import get_args

from kvant import blas
from kvant.cache.options import CacheOptions
from kvant.errors import ModelError
from kvant.machine import Machine
from kvant.operators.quantization import QUANT_BITS
from kvant.plan.memory import AnyCheckpoint, MemoryPlan, Settings
from kvant.plan.planner import LongestContext, longest_context, plan
from kvant.plan.ranks import Parallel, RankPlan, RankPlanner
from kvant.plan.stored import Checkpoint

CHECKPOINTS = 2  # for each of several sequences
TURNS = 6  # for a conversation
TURNS_OF_TAILS = 2  # for a conversation that otherwise would only feed a tail's tokens again


def plan_run(
    checkpoint: AnyCheckpoint,
    settings: Settings,
    tokens: int | None,
    machine: Machine,
    split_pairs: Sequence[int] | None = None,
) -> MemoryPlan:
    """Plan a run on one machine, whether it fits or not.

    ``tokens``: None: the longest context that fits, or one token if none does. ``split_pairs`` and errors: as
    in :func:`kvant.plan.plan`.
    """
    if tokens is None:
        tokens = max(1, longest_context(checkpoint, machine, settings, split_pairs).tokens)
    return plan(
        checkpoint, max_kv_size=tokens, settings=settings, device=machine.device, split_pairs=split_pairs
    )


def plan_ranks(
    checkpoint: AnyCheckpoint,
    settings: Settings,
    tokens: int | None,
    machines: Sequence[Machine],
    parallel: Parallel | None = None,
) -> RankPlan:
    """Plan a run on several machines, whether it fits or not; ``tokens`` as in :func:`plan_run`.

    ``parallel``: None: a pipeline, unless only tensor parallel fits.
    """
    made: list[RankPlan] = []
    refused: list[ModelError] = []
    for kind in get_args(Parallel) if parallel is None else (parallel,):
        try:
            planner = RankPlanner(checkpoint, machines, kind, settings)
            made.append(planner.plan(max(1, planner.longest().tokens) if tokens is None else tokens))
        except ModelError as error:
            refused.append(error)
            continue
        if made[-1].fits:
            return made[-1]
    if not made:
        raise refused[0]
    return made[0]


def longest_by_bits(
    settings: Settings, longest: Callable[[Settings], LongestContext]
) -> dict[int, LongestContext]:
    """Return the longest contexts by the cache's bits (0: no quantization), without unsupported bits."""
    contexts = {}
    for bits in QUANT_BITS:
        with suppress(ValueError):
            contexts[bits] = longest(replace(settings, cache=settings.cache.at(bits)))
    return contexts


def sequences_that_fit(planned: Callable[[int], tuple[MemoryPlan, Machine]], most: int) -> int:
    """Return how many sequences, at most ``most``, fit at once; ``planned`` plans a number of them."""

    def missing(count: int) -> int:
        made, machine = planned(count)
        return made.total - machine.limit_bytes

    return most if missing(most) <= 0 else bisect_right(range(1, most), 0, key=missing)


def unpacked(checkpoint: AnyCheckpoint, settings: Settings) -> tuple[AnyCheckpoint, Settings]:
    """Return the model, and the settings' draft model, with quantized matrices as floats."""
    draft = settings.draft_model
    if draft is not None:
        settings = replace(settings, draft_model=replace(draft, checkpoint=_unpacked(draft.checkpoint)))
    return _unpacked(checkpoint), settings


def unpacked_if_roomy(
    checkpoint: AnyCheckpoint, settings: Settings, tokens: int | None, machine: Machine
) -> tuple[AnyCheckpoint, Settings]:
    """Apply :func:`unpacked` on a CPU with OpenBLAS if the same run then takes at most half of its memory."""
    floats = unpacked(checkpoint, settings)
    if machine.device != "cpu" or floats == (checkpoint, settings) or blas.sgemv() is None:
        return checkpoint, settings
    tokens = plan_run(checkpoint, settings, tokens, machine).max_kv_size
    fits = plan_run(*floats, tokens, machine).total <= machine.limit_bytes // 2
    return floats if fits else (checkpoint, settings)


def needs_checkpoints(checkpoint: AnyCheckpoint, cache: CacheOptions) -> bool:
    """Return whether windows, states or exact tails make sequences go back only to checkpoints."""
    return checkpoint.moves_on or cache.any_tail


def default_checkpoints(checkpoint: AnyCheckpoint, cache: CacheOptions, sequences: int | None) -> int:
    """Return how many checkpoints a pool of ``sequences``, or a conversation (None), has by default."""
    if not needs_checkpoints(checkpoint, cache):
        return 0
    if sequences is not None:
        return CHECKPOINTS * sequences
    return TURNS if checkpoint.moves_on else TURNS_OF_TAILS


def _unpacked(checkpoint: AnyCheckpoint) -> AnyCheckpoint:
    return checkpoint.unpack() if isinstance(checkpoint, Checkpoint) and checkpoint.is_packed else checkpoint
