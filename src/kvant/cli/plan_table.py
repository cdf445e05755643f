"""Show plans as JSON and as tables: one machine's parts one below another, several machines' side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvant.cli.fitting import describe_layers, what_fits
from kvant.machine import Machine
from kvant.plan import (
    AnyCheckpoint,
    BridgedCheckpoint,
    Checkpoint,
    LongestContext,
    MemoryPlan,
    Parallel,
    RankPlan,
)
from kvant.plan.memory import as_record, settings_record
from kvant.sizes import format_bytes

ACROSS = 5  # ranks that fit next to each other in 80 columns; more ranks have a line each
Longest = Mapping[int, LongestContext]  # by bits of the cache; 0 is the compute dtype's 16 or 32
LongestOfRanks = Mapping[Parallel, Longest | str]  # or why the model cannot be divided like this


def plan_record(
    model: str, checkpoint: AnyCheckpoint, made: MemoryPlan, machine: Machine, longest: Longest
) -> dict[str, Any]:
    return {
        **_common(model, checkpoint, made),
        "unpacked": isinstance(checkpoint, Checkpoint) and checkpoint.unpacked,
        "bytes": as_record(made),
        "machine": asdict(machine),
        "fits": made.total <= machine.limit_bytes,
        "longest_context": _by_bits(longest, _float_bits(checkpoint, machine)),
    }


def ranks_record(
    model: str, checkpoint: AnyCheckpoint, made: RankPlan, longest: LongestOfRanks, names: Sequence[str]
) -> dict[str, Any]:
    """Make the JSON record of a plan for several machines; ``names`` are theirs, if they have any."""
    bits = _float_bits(checkpoint, made.machines[0])
    ranks = []
    for rank, (one, machine, context) in enumerate(
        zip(made.plans, made.machines, made.longest(), strict=True)
    ):
        record: dict[str, Any] = {"rank": rank} | ({"host": names[rank]} if names else {})
        if made.layers is not None:
            record["layers"] = [made.layers[rank].start, made.layers[rank].stop]
        record |= {
            "bytes": as_record(one),
            "machine": asdict(machine),
            "fits": one.total <= machine.limit_bytes,
        }
        ranks.append(record | {"longest_context": context.tokens})
    return {
        **_common(model, checkpoint, made.plans[0]),
        "parallel": made.parallel,
        "fits": made.fits,
        "ranks": ranks,
        "longest_context": {
            kind: {"refused": result} if isinstance(result, str) else _by_bits(result, bits)
            for kind, result in longest.items()
        },
    }


def plan_lines(
    model: str, checkpoint: AnyCheckpoint, made: MemoryPlan, machine: Machine, longest: Longest
) -> Iterator[str]:
    settings = made.settings
    floats = _float_bits(checkpoint, machine)
    estimate = ", an estimate" if isinstance(checkpoint, BridgedCheckpoint) or machine.device != "cpu" else ""
    drafted = made.max_kv_size
    if settings.draft_model is not None:
        drafted = min(drafted, settings.draft_model.checkpoint.config.max_position_embeddings or drafted)
    rows = [
        (
            "weights",
            made.weights,
            _describe_weights(checkpoint, machine) + _describe_experts(checkpoint, made),
        ),
        ("cache", made.cache, _describe_cache(made, settings.cache.kv_bits or floats)),
        ("state", made.state, "of linear layers, allocated at the first prefill"),
        ("draft weights", made.draft_weights, ""),
        ("draft cache", made.draft_cache, f"{drafted} tokens, of each sequence"),
        ("prefill scratch", made.scratch, f"{settings.prefill_step_size} tokens at a time{estimate}"),
    ]
    more = made.arrays - sum(count for _, count, _ in rows)  # makes the lines add up
    rows += [
        ("loading", more, "more, before the cache is reserved: a matrix in several forms"),
        ("process", made.process, "interpreter, libraries, tokenizer"),
        ("total", made.total, ""),
        ("limit", machine.limit_bytes, machine.limit_source),
    ]
    cells = [[name, f"{count:,}", format_bytes(count), remark] for name, count, remark in rows if count]
    yield f"{model} on a {machine.device.upper()}"
    yield _aligned([["", "bytes", "", ""], *cells], last_left=True)
    if warning := settings.cache.warning:
        yield f"note: {warning}"
    spare = machine.limit_bytes - made.total
    if spare >= 0:
        yield f"fits, {format_bytes(spare)} to spare"
    else:
        yield f"does not fit: {format_bytes(-spare)} too much; {what_fits(made, longest)}"
    yield f"longest context that fits{_each(made)}:"
    for bits, one in longest.items():
        ended = {"memory": "", "the model's context": ", the model's own"}.get(
            one.ended_by, f", {one.ended_by}"
        )
        yield f"  {bits or floats:2} bits  {f'{one.tokens} tokens{ended}' if one.tokens else 'none'}"


def ranks_lines(
    model: str,
    checkpoint: AnyCheckpoint,
    made: RankPlan,
    longest: LongestOfRanks,
    names: Sequence[str],
    note: str,
) -> Iterator[str]:
    """Return lines that show a plan for several machines, with a ``note`` about them."""
    first = made.plans[0]
    machine = made.machines[0]
    floats = _float_bits(checkpoint, machine)
    yield f"{model} on {len(made.plans)} machines, --parallel {made.parallel}"
    yield _columns(made, names)
    cache = _describe_cache(first, first.settings.cache.kv_bits or floats)
    yield f"weights of {_describe_weights(checkpoint, machine)}; {cache}"
    sources = ", ".join(dict.fromkeys(machine.limit_source for machine in made.machines))
    yield f"limit: {sources}{f'; {note}' if note else ''}"
    rank = made.fullest
    spare = made.machines[rank].limit_bytes - made.plans[rank].total
    divided = {kind: each for kind, each in longest.items() if not isinstance(each, str)}
    if made.fits:
        yield f"fits; rank {rank} is the fullest, with {format_bytes(spare)} to spare"
    else:
        ways = what_fits(first, divided[made.parallel])
        yield f"does not fit: {format_bytes(-spare)} too much on rank {rank}; {ways}"
    yield f"longest context that fits{_each(first)}:"
    heading = ["", *(f"{bits or floats} bits" for bits in next(iter(divided.values())))]
    rows = [
        [f"  {kind}", *(f"{one.tokens or 'none'}" for one in each.values())] for kind, each in divided.items()
    ]
    yield _aligned([heading, *rows])
    yield from (f"  {kind}: {each}" for kind, each in longest.items() if isinstance(each, str))


def _columns(made: RankPlan, names: Sequence[str]) -> str:
    plans = made.plans
    rows = {"": [f"rank {rank}" for rank in range(len(plans))]}
    rows |= {"host": list(names)} if names else {}
    rows |= {} if made.layers is None else {"layers": [describe_layers(layers) for layers in made.layers]}
    sizes = {name: [getattr(one, name) for one in plans] for name in ("weights", "cache", "state", "scratch")}
    sizes["loading"] = [one.arrays - sum(parts) for one, *parts in zip(plans, *sizes.values(), strict=True)]
    sizes |= {name: [getattr(one, name) for one in plans] for name in ("process", "total")}
    sizes["limit"] = [machine.limit_bytes for machine in made.machines]
    rows |= {name: [format_bytes(count) for count in counts] for name, counts in sizes.items() if any(counts)}
    rows["longest"] = [f"{context.tokens or 'none'}" for context in made.longest()]
    across = [[name, *cells] for name, cells in rows.items()]
    return _aligned(across if len(plans) <= ACROSS else [*zip(*across, strict=True)])


def _aligned(rows: Sequence[Sequence[str]], *, last_left: bool = False) -> str:
    """Align cells in columns: to the left in the first one, and if asked the last one, else to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {0, len(widths) - 1} if last_left else {0}
    lines = (
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _common(model: str, checkpoint: AnyCheckpoint, made: MemoryPlan) -> dict[str, Any]:
    context = checkpoint.config.max_position_embeddings
    return {
        "model": model,
        "context": context,
        "max_kv_size": made.max_kv_size,
        **settings_record(made.settings),
    }


def _by_bits(longest: Longest, float_bits: int) -> list[dict[str, Any]]:
    return [{"bits": bits or float_bits, **asdict(one)} for bits, one in longest.items()]


def _float_bits(checkpoint: AnyCheckpoint, machine: Machine) -> int:
    """Return the bits of a number in computations, and in an unquantized cache."""
    return 8 * checkpoint.itemsize(on_cpu=machine.device == "cpu")


def _describe_weights(checkpoint: AnyCheckpoint, machine: Machine) -> str:
    floats = _float_bits(checkpoint, machine)
    if isinstance(checkpoint, BridgedCheckpoint):
        return checkpoint.described.format(floats)
    quantization = checkpoint.config.quantization
    if quantization is None:
        stored = f"{floats} bits"
    elif quantization.has_biases:
        stored = f"{quantization.bits} bits, groups of {quantization.group_size}"
    else:
        stored = quantization.mode
    unpacked = ", unpacked to float32" if checkpoint.unpacked else ""
    return f"{stored}{unpacked}, {'tied' if checkpoint.tied else 'untied'}"


def _describe_experts(checkpoint: AnyCheckpoint, made: MemoryPlan) -> str:
    """Describe the experts that a token reads; all of them are in memory."""
    if isinstance(checkpoint, BridgedCheckpoint):
        used = checkpoint.config.experts_used
        read = "" if used is None else f"{used} experts a layer"
    else:
        experts = checkpoint.config.experts
        read = "" if experts is None else f"{experts.per_token} of {experts.count} experts"
    return f"; a token reads {format_bytes(made.weights_read)}, {read}" if read else ""


def _describe_cache(made: MemoryPlan, bits: int) -> str:
    cache = made.settings.cache
    details = (
        f" in groups of {cache.kv_group_size}"
        if cache.kv_bits and cache.kv_group_size and not cache.kv_format
        else ""
    )
    details += ", with an exact tail" if cache.any_tail else ""
    details += f" and {cache.checkpoints} checkpoints" if cache.checkpoints else ""
    if (count := made.settings.sequences) is None:
        return f"{made.max_kv_size} tokens at {bits} bits{details}"
    one = format_bytes(made.sequence)
    text = f"{count} sequences of {made.max_kv_size} tokens at {bits} bits{details}"
    return f"{text}; one more would add {one}"


def _each(made: MemoryPlan) -> str:
    return "" if made.settings.sequences is None else f", each of {made.settings.sequences} sequences"
