"""Plans held against a machine, and what to say where one does not fit."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvant.cli.options import AUTO, PARALLEL, BadValueError, KvSize
from kvant.errors import ContextError, ModelError
from kvant.machine import Machine
from kvant.sizes import format_bytes
from kvant.tools.plan import (
    BridgedCheckpoint,
    Checkpoint,
    MemoryPlan,
    Parallel,
    RankPlan,
    RankPlanner,
    Settings,
    longest_context,
    plan,
)

MOST_MACHINES = 16  # that are proposed
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
    tokens = _asked(checkpoint, max_kv_size)
    with named_format(settings):
        if tokens is None:
            fitting = longest_context(
                checkpoint, machine.limit_bytes, settings=settings, device=machine.device, split_pairs=split_pairs
            )
            tokens = max(1, fitting.tokens)
        return plan(checkpoint, max_kv_size=tokens, settings=settings, device=machine.device, split_pairs=split_pairs)


def ranks_that_fit(
    checkpoint: Checkpoint | BridgedCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machines: Sequence[Machine],
    parallel: Parallel | None = None,
) -> RankPlan:
    """The plan of a run on several machines that fits into each; arguments as :func:`ranks_for` has them.

    Raises:
        ContextError: more tokens than the model's context, or a plan that does not fit; it says what would.
        ModelError, BadValueError: as :func:`ranks_for`.
    """
    made = ranks_for(checkpoint, settings, max_kv_size, machines, parallel)
    if not made.fits:
        raise ContextError(f"{describe_ranks(made)}; {what_fits_ranks(checkpoint, made)}")
    return made


def ranks_for(
    checkpoint: Checkpoint | BridgedCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machines: Sequence[Machine],
    parallel: Parallel | None = None,
) -> RankPlan:
    """The plan of a run on several machines, whether it fits or not; "auto" as in :func:`plan_for`.

    Args:
        machines: of the ranks, rank 0's first.
        parallel: how the model is divided; None: as a pipeline, unless that does not fit and tensor parallel does.

    Raises:
        ContextError: more tokens than the model's context.
        ModelError: a model that cannot be divided so among these ranks.
        BadValueError: a cache format the model cannot have.
    """
    tokens = _asked(checkpoint, max_kv_size)
    made: list[RankPlan] = []
    refused: list[ModelError] = []
    for kind in PARALLEL if parallel is None else (parallel,):
        try:
            with named_format(settings):
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


def _asked(checkpoint: Checkpoint | BridgedCheckpoint, max_kv_size: KvSize) -> int | None:
    """The tokens to reserve; None: as many as fit.

    Raises:
        ContextError: more than the model's context.
    """
    context = checkpoint.config.max_position_embeddings
    if isinstance(max_kv_size, int) and context is not None and max_kv_size > context:
        raise ContextError(f"--max-kv-size is {max_kv_size}; the model's context is {context} tokens")
    return None if max_kv_size == AUTO else max_kv_size or min(DEFAULT_MAX_KV_SIZE, context or DEFAULT_MAX_KV_SIZE)


@contextmanager
def named_format(settings: Settings) -> Iterator[None]:
    """A ValueError in the block is of the cache's format: it becomes a BadValueError that begins with its flags."""
    try:
        yield
    except ContextError:
        raise
    except ValueError as error:
        raise BadValueError(
            f"--kv-bits {settings.kv_bits} --kv-group-size {settings.kv_group_size}: {error}"
        ) from error


def describe(made: MemoryPlan, machine: Machine, on: str = "") -> str:
    """A plan that does not fit, in a line; ``on``: which machine, of several."""
    parts = {"weights": made.weights, "cache": made.cache, "prefill scratch": made.scratch}
    parts |= {"state": made.state} if made.state else {}
    if made.settings.draft_model is not None:
        parts |= {"the draft model's weights": made.draft_weights, "its cache": made.draft_cache}
    parts |= {"caches for --prompt-cache-file": made.caches} if made.caches else {}
    if made.loading > sum(parts.values()):
        parts = {"loading the weights": made.loading}
    parts |= {"the process": made.process} if made.process else {}
    listed = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
    count = made.settings.sequences
    tokens = f"{made.max_kv_size} tokens" if count is None else f"{count} sequences of {made.max_kv_size} tokens"
    return (
        f"{tokens} need {format_bytes(made.total)}{on} ({listed}); "
        f"there are {format_bytes(machine.limit_bytes)} ({machine.limit_source})"
    )


def describe_ranks(made: RankPlan) -> str:
    """A plan that does not fit, in a line, with the numbers of the rank that lacks most."""
    rank = made.fullest
    layers = "" if made.layers is None else f" with layers {describe_layers(made.layers[rank])}"
    return describe(made.plans[rank], made.machines[rank], f" on rank {rank} of {len(made.plans)}{layers}")


def describe_layers(layers: range) -> str:
    """First and last."""
    return f"{layers.start}" if len(layers) == 1 else f"{layers.start} to {layers.stop - 1}"


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

    def longest(settings: Settings, of: Checkpoint | BridgedCheckpoint) -> int:
        limit, device = machine.limit_bytes, machine.device
        return longest_context(of, limit, settings=settings, device=device, split_pairs=split_pairs).tokens

    return _ways(checkpoint, made, longest, weights_flag, "a larger machine")


def what_fits_ranks(checkpoint: Checkpoint | BridgedCheckpoint, made: RankPlan, *, weights_flag: str = "") -> str:
    """The flags that would make a plan on several machines fit, or that none would; and how many machines would."""

    def longest(settings: Settings, of: Checkpoint | BridgedCheckpoint) -> int:
        return RankPlanner(of, made.machines, made.parallel, settings).longest().tokens

    ways = _ways(checkpoint, made.plans[0], longest, weights_flag, "larger machines")
    return f"{ways}; {_more_machines(checkpoint, made)}"


def _more_machines(checkpoint: Checkpoint | BridgedCheckpoint, made: RankPlan) -> str:
    """The number of machines that the plan would fit into."""
    machines, first = list(made.machines), made.plans[0]
    largest = max(machines, key=lambda machine: machine.limit_bytes)
    like = (
        "such machines"
        if len({*machines}) == 1
        else f"machines, the further ones with {format_bytes(largest.limit_bytes)},"
    )
    least = sum(plan.weights + plan.cache for plan in made.plans)
    planner: RankPlanner | None = None
    while len(machines) < MOST_MACHINES:
        machines.append(largest)
        if sum(machine.limit_bytes for machine in machines) < least:
            continue
        try:
            planner = RankPlanner(checkpoint, machines, made.parallel, first.settings, like=planner)
        except ModelError:  # it cannot be divided among so many
            continue
        if planner.plan(first.max_kv_size).fits:
            return f"{len(machines)} {like} would fit"
    return f"up to {MOST_MACHINES} such machines would not"


def _ways(
    checkpoint: Checkpoint | BridgedCheckpoint,
    made: MemoryPlan,
    longest_of: Callable[[Settings, Checkpoint | BridgedCheckpoint], int],
    weights_flag: str,
    larger: str,
) -> str:
    """See :func:`what_fits`. ``longest_of``: the longest context with settings, of a checkpoint."""

    def longest(settings: Settings, of: Checkpoint | BridgedCheckpoint = checkpoint) -> int:
        return longest_of(settings, of)

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
    alone = replace(settings, draft_model=None)
    if alone != settings and longest(alone) >= made.max_kv_size:
        ways.append("leaving out --draft-model")
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
    return f"no context fits, whatever the cache: the model needs smaller weights or {larger}"
