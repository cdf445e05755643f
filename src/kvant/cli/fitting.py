"""What a plan is made of by a command's flags, and what to say if it does not fit."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from kvant.cache import CacheOptions
from kvant.cli.options import AUTO, BadValueError, KvSize, RunOptions, named
from kvant.cli.ranks import guard
from kvant.errors import ContextError
from kvant.machine import Machine
from kvant.models.caches import DEFAULT_RESERVATION
from kvant.plan import (
    AnyCheckpoint,
    Checkpoint,
    LongestContext,
    MemoryPlan,
    Parallel,
    RankPlan,
    RankPlanner,
    Settings,
    longest_context,
)
from kvant.plan.fitting import (
    default_checkpoints,
    longest_by_bits,
    needs_checkpoints,
    plan_ranks,
    plan_run,
    unpacked,
    unpacked_if_roomy,
)
from kvant.sizes import format_bytes

Pairs = Sequence[int] | None  # ``split_pairs`` of :func:`kvant.plan.plan`


def plan_that_fits(
    checkpoint: AnyCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machine: Machine,
    split_pairs: Pairs = None,
) -> MemoryPlan:
    """The plan of a run, which is refused with a ContextError if it does not fit into the machine."""
    made = plan_for(checkpoint, settings, max_kv_size, machine, split_pairs)
    if made.total > machine.limit_bytes:
        longest = longest_by_bits(
            settings, lambda own: longest_context(checkpoint, machine, own, split_pairs)
        )
        raise ContextError(f"{describe(made, machine)}; {what_fits(made, longest)}")
    return made


def plan_for(
    checkpoint: AnyCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machine: Machine,
    split_pairs: Pairs = None,
) -> MemoryPlan:
    """:func:`kvant.plan.fitting.plan_run` by the flags, which an error names."""
    tokens = tokens_asked(checkpoint, max_kv_size)
    with named_format(settings):
        return plan_run(checkpoint, settings, tokens, machine, split_pairs)


def with_weights(
    wanted: str | None, checkpoint: AnyCheckpoint, settings: Settings, max_kv_size: KvSize, machine: Machine
) -> tuple[AnyCheckpoint, Settings]:
    """The model and the draft model of a plan, with their quantized matrices as floats if --weights asks for
    that, or without the flag if there is room.
    """
    if wanted == "float32" and not isinstance(checkpoint, Checkpoint):
        raise BadValueError(
            "--weights is 'float32'; mlx-lm's class computes this model, with weights as they are stored"
        )
    if wanted == "float32" and machine.device != "cpu":
        raise BadValueError("--weights is 'float32'; a GPU multiplies quantized weights as they are stored")
    if wanted == "packed" and isinstance(checkpoint, Checkpoint) and not checkpoint.is_packed:
        raise BadValueError("--weights is 'packed'; this model's weights are not quantized")
    if wanted == "float32":
        return unpacked(checkpoint, settings)
    if wanted == "packed":
        return checkpoint, settings
    tokens = tokens_asked(checkpoint, max_kv_size)
    with named_format(settings):
        return unpacked_if_roomy(checkpoint, settings, tokens, machine)


def ranks_that_fit(
    checkpoint: AnyCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machines: Sequence[Machine],
    parallel: Parallel | None = None,
) -> RankPlan:
    """The plan of a run on several machines, which is refused with a ContextError if it does not fit into
    each.
    """
    made = ranks_for(checkpoint, settings, max_kv_size, machines, parallel)
    if not made.fits:
        rank = made.fullest
        layers = "" if made.layers is None else f" with layers {describe_layers(made.layers[rank])}"
        line = describe(
            made.plans[rank], made.machines[rank], f" on rank {rank} of {len(made.plans)}{layers}"
        )
        longest = longest_by_bits(
            settings, lambda own: RankPlanner(checkpoint, machines, made.parallel, own).longest()
        )
        raise ContextError(f"{line}; {what_fits(made.plans[0], longest)}")
    return made


def ranks_for(
    checkpoint: AnyCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machines: Sequence[Machine],
    parallel: Parallel | None = None,
) -> RankPlan:
    """:func:`kvant.plan.fitting.plan_ranks` by the flags, which an error names."""
    tokens = tokens_asked(checkpoint, max_kv_size)
    with named_format(settings):
        return plan_ranks(checkpoint, settings, tokens, machines, parallel)


def tokens_asked(checkpoint: AnyCheckpoint, max_kv_size: KvSize) -> int | None:
    """The tokens to reserve; None: as many as fit. More than the model's context are refused."""
    context = checkpoint.config.max_position_embeddings
    if isinstance(max_kv_size, int) and context is not None and max_kv_size > context:
        raise ContextError(f"--max-kv-size is {max_kv_size}; the model's context is {context} tokens")
    return (
        None
        if max_kv_size == AUTO
        else max_kv_size or min(DEFAULT_RESERVATION, context or DEFAULT_RESERVATION)
    )


def with_checkpoints(
    run: RunOptions, checkpoint: AnyCheckpoint, sequences: int | None, *, talks: bool = False
) -> CacheOptions:
    """The format of a run's caches; without --checkpoints a pool has some, and a conversation (``talks``)."""
    is_divided = talks and guard() is not None
    if run.checkpoints is None:
        wanted = default_checkpoints(checkpoint, run.cache, None if talks else sequences or 0)
        return replace(run.cache, checkpoints=0 if is_divided else wanted)
    if run.checkpoints and not needs_checkpoints(checkpoint, run.cache):
        raise BadValueError(
            f"--checkpoints is {run.checkpoints}; this model has no windows and no states, and its cache no "
            f"exact tail: others go on from any place"
        )
    if run.checkpoints and is_divided:
        raise BadValueError(
            f"--checkpoints is {run.checkpoints}; a conversation over several ranks goes back to nothing"
        )
    return run.cache


def named_format(settings: Settings) -> AbstractContextManager[None]:
    """A ValueError in the block is of the cache's format: it becomes a BadValueError that begins with its
    flags.
    """
    own = settings.cache
    tuned = None if own.kv_format is None else f"--kv-format {own.kv_format.path}"
    group = "" if own.kv_group_size is None else f" --kv-group-size {own.kv_group_size}"
    return named(tuned or f"--kv-bits {own.kv_bits}{group}")


def describe(made: MemoryPlan, machine: Machine, on: str = "") -> str:
    """A plan that does not fit, in a line; ``on``: which machine, of several."""
    parts = {
        "weights": made.weights,
        "cache": made.cache,
        "prefill scratch": made.scratch,
        "state": made.state,
    }
    parts |= {"the draft model's weights": made.draft_weights, "its cache": made.draft_cache}
    parts |= {"caches for --prompt-cache-file": made.caches}
    if made.loading > sum(parts.values()):
        parts = {"loading the weights": made.loading}
    parts["the process"] = made.process
    listed = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)
    count = made.settings.sequences
    tokens = (
        f"{made.max_kv_size} tokens" if count is None else f"{count} sequences of {made.max_kv_size} tokens"
    )
    return (
        f"{tokens} need {format_bytes(made.total)}{on} ({listed}); "
        f"there are {format_bytes(machine.limit_bytes)} ({machine.limit_source})"
    )


def describe_layers(layers: range) -> str:
    return f"{layers.start}" if len(layers) == 1 else f"{layers.start} to {layers.stop - 1}"


def what_fits(made: MemoryPlan, longest: Mapping[int, LongestContext]) -> str:
    """The flags that would make a plan fit, or that none would; ``longest`` is by bits of the cache."""
    found = {bits or 16: one.tokens for bits, one in longest.items()}
    own = made.settings.cache.kv_bits or 16
    ways = [f"--max-kv-size {found[own]}"] if found[own] else []
    ways += [f"--kv-bits {bits}" for bits, fits in found.items() if bits < own and fits >= made.max_kv_size][
        :1
    ]
    if not ways and own > 4 and found.get(4):
        ways = [f"--kv-bits 4 --max-kv-size {found[4]}"]
    if ways:
        return f"{' or '.join(ways)} would fit"
    return (
        "no context fits, whatever the cache: "
        "the model needs smaller weights (`kvant convert`) or more memory"
    )
