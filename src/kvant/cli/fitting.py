"""Plans held against a machine, and what to say where one does not fit."""

from collections.abc import Sequence
from dataclasses import replace

from kvant.cli.options import AUTO, BadValueError, KvSize
from kvant.errors import ContextError
from kvant.sizes import format_bytes
from kvant.tools.machine import Machine
from kvant.tools.plan import BridgedCheckpoint, Checkpoint, MemoryPlan, Settings, longest_context, plan

DEFAULT_MAX_KV_SIZE = 4096


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
    parts |= {"a second cache for --n": made.fork} if made.fork else {}
    if made.loading > sum(parts.values()):
        parts = {"loading the weights": made.loading}
    parts |= {"the process": made.process} if made.process else {}
    listed = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
    return (
        f"{made.max_kv_size} tokens need {format_bytes(made.total)} ({listed}); "
        f"there are {format_bytes(machine.limit_bytes)} ({machine.limit_source})"
    )


def what_fits(
    checkpoint: Checkpoint | BridgedCheckpoint,
    made: MemoryPlan,
    machine: Machine,
    split_pairs: Sequence[int] | None = None,
) -> str:
    """The flags that would make a plan fit, or that none would."""

    def longest(bits: int) -> int:
        settings = replace(made.settings, kv_bits=bits)
        return longest_context(
            checkpoint, machine.limit_bytes, settings=settings, device=machine.device, split_pairs=split_pairs
        ).tokens

    ways = []
    tokens = longest(made.settings.kv_bits)
    if tokens:
        ways.append(f"--max-kv-size {tokens}")
    for bits in (8, 4):
        if bits < (made.settings.kv_bits or 16) and longest(bits) >= made.max_kv_size:
            ways.append(f"--kv-bits {bits}")
            break
    if ways:
        return f"{' or '.join(ways)} would fit"
    tokens = longest(4)
    if tokens:
        return f"--kv-bits 4 --max-kv-size {tokens} would fit"
    return "no context fits, whatever the cache: the model needs smaller weights or a larger machine"
