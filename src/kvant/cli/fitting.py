"""Plans held against a machine, and what to say where one does not fit."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from kvant.cli.options import AUTO, BadValueError, KvSize
from kvant.errors import ContextError, ModelError
from kvant.sizes import format_bytes
from kvant.tools.machine import Machine
from kvant.tools.plan import BridgedCheckpoint, Checkpoint, MemoryPlan, Settings, longest_context, plan

DEFAULT_MAX_KV_SIZE = 4096
LEAST_STEP = 32  # prompt tokens at a time that are worth proposing
WEIGHT_GROUP = 64  # of `kvant convert`


def plan_that_fits(
    checkpoint: Checkpoint | BridgedCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machine: Machine,
    split_pairs: Sequence[int] | None = None,
) -> MemoryPlan:
    """The plan of a run that fits into a machine; ``split_pairs`` as in :func:`kvant.tools.plan.plan`.

    Raises:
        ContextError: more tokens than the model's context, or a plan that does not fit; it says what would.
        BadValueError: a cache format the model cannot have.
    """
    made = plan_for(checkpoint, settings, max_kv_size, machine, split_pairs)
    if made.total > machine.limit_bytes:
        raise ContextError(f"{describe(made, machine)}; {what_fits(checkpoint, made, machine, split_pairs)}")
    return made


def plan_for(
    checkpoint: Checkpoint | BridgedCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machine: Machine,
    split_pairs: Sequence[int] | None = None,
) -> MemoryPlan:
    """The plan of a run, whether it fits or not; for "auto", of the longest context that does, or of a single token.

    Raises:
        ContextError, BadValueError: as :func:`plan_that_fits`.
    """
    context = checkpoint.config.max_position_embeddings
    if isinstance(max_kv_size, int) and context is not None and max_kv_size > context:
        raise ContextError(f"--max-kv-size is {max_kv_size}; the model's context is {context} tokens")
    try:
        if max_kv_size == AUTO:
            fitting = longest_context(
                checkpoint, machine.limit_bytes, settings=settings, device=machine.device, split_pairs=split_pairs
            )
            tokens = max(1, fitting.tokens)
        else:
            tokens = max_kv_size or min(DEFAULT_MAX_KV_SIZE, context or DEFAULT_MAX_KV_SIZE)
        return plan(checkpoint, max_kv_size=tokens, settings=settings, device=machine.device, split_pairs=split_pairs)
    except ValueError as error:
        bits, group = settings.kv_bits, settings.kv_group_size
        raise BadValueError(f"--kv-bits {bits} --kv-group-size {group}: {error}") from error


def describe(made: MemoryPlan, machine: Machine) -> str:
    """A plan that does not fit, in a line."""
    parts = {"weights": made.weights, "cache": made.cache, "prefill scratch": made.scratch}
    parts |= {"state": made.state} if made.state else {}
    parts |= {"caches for --prompt-cache-file": made.caches} if made.caches else {}
    if made.loading > sum(parts.values()):
        parts = {"loading the weights": made.loading}
    parts |= {"the process": made.process} if made.process else {}
    listed = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
    count = made.settings.sequences
    tokens = f"{made.max_kv_size} tokens" if count is None else f"{count} sequences of {made.max_kv_size} tokens"
    return (
        f"{tokens} need {format_bytes(made.total)} ({listed}); "
        f"there are {format_bytes(machine.limit_bytes)} ({machine.limit_source})"
    )


def what_fits(
    checkpoint: Checkpoint | BridgedCheckpoint,
    made: MemoryPlan,
    machine: Machine,
    split_pairs: Sequence[int] | None = None,
    *,
    weights_flag: str = "",
) -> str:
    """The flags that would make a plan fit, or that none would.

    Args:
        weights_flag: of the command that can plan with fewer bits of weights, if it can.
    """

    def longest(settings: Settings, of: Checkpoint | BridgedCheckpoint = checkpoint) -> int:
        limit, device = machine.limit_bytes, machine.device
        return longest_context(of, limit, settings=settings, device=device, split_pairs=split_pairs).tokens

    settings = made.settings
    ways = []
    tokens = longest(settings)
    if tokens:
        ways.append(f"--max-kv-size {tokens}")
    fewer = range(1, settings.sequences or 1)
    if count := bisect_right(fewer, -made.max_kv_size, key=lambda n: -longest(replace(settings, sequences=n))):
        ways.append(f"--sequences {count}")
    for bits in (8, 4):
        if bits < (settings.kv_bits or 16) and longest(replace(settings, kv_bits=bits)) >= made.max_kv_size:
            ways.append(f"--kv-bits {bits}")
            break
    small_steps = replace(settings, prefill_step_size=min(settings.prefill_step_size, LEAST_STEP))
    if small_steps != settings and longest(small_steps) >= made.max_kv_size:
        ways.append(f"--prefill-step-size {LEAST_STEP}")
    if ways:
        return f"{' or '.join(ways)} would fit"
    smaller = {"--kv-bits 4": replace(settings, kv_bits=4)}
    smaller[f"--kv-bits 4 --prefill-step-size {LEAST_STEP}"] = replace(small_steps, kv_bits=4)
    for flags, chosen in smaller.items():
        if tokens := longest(chosen):
            return f"{flags} --max-kv-size {min(tokens, made.max_kv_size)} would fit"
    for bits in (8, 4):
        try:
            converted = checkpoint.quantized(bits, WEIGHT_GROUP)
        except ModelError:  # it is quantized already, or mlx-lm's
            break
        for flags, chosen in {"": settings, **smaller}.items():
            if tokens := longest(chosen, converted):
                size = "" if tokens >= made.max_kv_size else f"--max-kv-size {tokens}"
                needed = " ".join(filter(None, [f"{weights_flag} {bits}" if weights_flag else "", flags, size]))
                fits = f"weights of {bits} bits would, with {needed}" if needed else f"weights of {bits} bits would"
                return f"no context fits, whatever the cache; {fits}: `kvant convert --bits {bits}` makes them"
    return "no context fits, whatever the cache: the model needs smaller weights or a larger machine"
