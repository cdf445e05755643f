"""Plan a run by a command's flags, and say what would fit if the plan does not."""

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
from kvant.sizes import format_bytes, list_bytes

Pairs = Sequence[int] | None  # ``split_pairs`` of :func:`kvant.plan.plan`


def plan_that_fits(
    checkpoint: AnyCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machine: Machine,
    split_pairs: Pairs = None,
) -> MemoryPlan:
    """Plan a run; raise a ContextError if it does not fit into the machine."""
    made = plan_for(checkpoint, settings, max_kv_size, machine, split_pairs)
    if made.total > machine.limit_bytes:
        longest = longest_by_bits(
            settings, lambda changed: longest_context(checkpoint, machine, changed, split_pairs)
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
    """Call :func:`kvant.plan.fitting.plan_run`; errors name the flags."""
    tokens = tokens_asked(checkpoint, max_kv_size)
    with named_format(settings):
        return plan_run(checkpoint, settings, tokens, machine, split_pairs)


def with_weights(
    choice: str | None, checkpoint: AnyCheckpoint, settings: Settings, max_kv_size: KvSize, machine: Machine
) -> tuple[AnyCheckpoint, Settings]:
    """Dequantize the model and the draft model in a plan if --weights says so, or by default if they fit."""
    if choice == "float32" and not isinstance(checkpoint, Checkpoint):
        raise BadValueError(
            "--weights is 'float32'; this model runs as mlx-lm's class, with weights as they are stored"
        )
    if choice == "float32" and machine.device != "cpu":
        raise BadValueError("--weights is 'float32'; a GPU multiplies quantized weights as they are stored")
    if choice == "packed" and isinstance(checkpoint, Checkpoint) and not checkpoint.is_packed:
        raise BadValueError("--weights is 'packed'; this model's weights are not quantized")
    if choice == "float32":
        return unpacked(checkpoint, settings)
    if choice == "packed":
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
    """Plan a run on several machines; raise a ContextError if it does not fit into each of them."""
    made = ranks_for(checkpoint, settings, max_kv_size, machines, parallel)
    if not made.fits:
        rank = made.fullest
        layers = "" if made.layers is None else f" with layers {describe_layers(made.layers[rank])}"
        line = describe(
            made.plans[rank], made.machines[rank], f" on rank {rank} of {len(made.plans)}{layers}"
        )
        longest = longest_by_bits(
            settings, lambda changed: RankPlanner(checkpoint, machines, made.parallel, changed).longest()
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
    """Call :func:`kvant.plan.fitting.plan_ranks`; errors name the flags."""
    tokens = tokens_asked(checkpoint, max_kv_size)
    with named_format(settings):
        return plan_ranks(checkpoint, settings, tokens, machines, parallel)


def tokens_asked(checkpoint: AnyCheckpoint, max_kv_size: KvSize) -> int | None:
    """Return the tokens to reserve, or None for as many as fit; refuse more than the model's context."""
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
    """Return a run's cache options. By default pools and conversations (``talks``) get some checkpoints."""
    is_divided = talks and guard() is not None
    if run.checkpoints is None:
        default = default_checkpoints(checkpoint, run.cache, None if talks else sequences or 0)
        return replace(run.cache, checkpoints=0 if is_divided else default)
    if run.checkpoints and not needs_checkpoints(checkpoint, run.cache):
        raise BadValueError(
            f"--checkpoints is {run.checkpoints}; this model needs none: it has no windows and no states, "
            "and its cache has no exact tail"
        )
    if run.checkpoints and is_divided:
        raise BadValueError(
            f"--checkpoints is {run.checkpoints}; a conversation on several ranks cannot go back"
        )
    return run.cache


def named_format(settings: Settings) -> AbstractContextManager[None]:
    """Turn a ValueError about the cache's format into a BadValueError that begins with its flags."""
    cache = settings.cache
    tuned = None if cache.kv_format is None else f"--kv-format {cache.kv_format.path}"
    group = "" if cache.kv_group_size is None else f" --kv-group-size {cache.kv_group_size}"
    return named(tuned or f"--kv-bits {cache.kv_bits}{group}")


def describe(made: MemoryPlan, machine: Machine, on: str = "") -> str:
    """Describe a plan that does not fit; ``on`` names one of several machines."""
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
    count = made.settings.sequences
    tokens = (
        f"{made.max_kv_size} tokens" if count is None else f"{count} sequences of {made.max_kv_size} tokens"
    )
    return (
        f"{tokens} need {format_bytes(made.total)}{on} ({list_bytes(parts)}); "
        f"there are {format_bytes(machine.limit_bytes)} ({machine.limit_source})"
    )


def describe_layers(layers: range) -> str:
    return f"{layers.start}" if len(layers) == 1 else f"{layers.start} to {layers.stop - 1}"


def what_fits(made: MemoryPlan, longest: Mapping[int, LongestContext]) -> str:
    """Return the flags that would make a plan fit, if any; ``longest`` is by bits of the cache."""
    tokens = {bits or 16: one.tokens for bits, one in longest.items()}
    bits_now = made.settings.cache.kv_bits or 16
    ways = [f"--max-kv-size {tokens[bits_now]}"] if tokens[bits_now] else []
    enough = (bits for bits, fits in tokens.items() if bits < bits_now and fits >= made.max_kv_size)
    ways += [f"--kv-bits {bits}" for bits in enough][:1]
    if not ways and bits_now > 4 and tokens.get(4):
        ways = [f"--kv-bits 4 --max-kv-size {tokens[4]}"]
    if ways:
        return f"{' or '.join(ways)} would fit"
    return (
        "no context fits, whatever the cache: "
        "the model needs smaller weights (`kvant convert`) or more memory"
    )
