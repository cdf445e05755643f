"""``kvant plan`` of several machines: what each takes, and which ways to divide the model fit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from kvant.cli import terminal
from kvant.cli.fitting import describe_layers, ranks_for, what_fits_ranks
from kvant.cli.options import PARALLEL, KvSize
from kvant.errors import ModelError
from kvant.machine import Machine
from kvant.sizes import format_bytes
from kvant.tools.plan import (
    BridgedCheckpoint,
    Checkpoint,
    LongestContext,
    Parallel,
    RankPlan,
    RankPlanner,
    Settings,
)
from kvant.tools.plan.plan import as_record, settings_record
from kvant.tools.plan.scratch import FLOAT32

BITS = (0, 8, 4)  # of a cache whose longest context is told; 0 is the compute dtype's 16 or 32
ACROSS = 5  # ranks that are side by side in a terminal of 80 columns; of more each has a line
Longest = Mapping[Parallel, Mapping[int, LongestContext] | str]  # by bits; or why the model cannot be divided so


def plan_machines(
    model: str,
    checkpoint: Checkpoint | BridgedCheckpoint,
    settings: Settings,
    max_kv_size: KvSize,
    machines: Sequence[Machine],
    parallel: Parallel | None = None,
    *,
    names: Sequence[str] = (),
    note: str = "",
    as_json: bool = False,
) -> bool:
    """Print what each machine takes. Returns whether it fits.

    Args:
        model: its name, for people.
        checkpoint, settings, max_kv_size, machines, parallel: as :func:`kvant.cli.fitting.ranks_for` has them.
        names: of the machines, where they have any.
        note: on the machines, for people.
        as_json: print one JSON object instead of tables.

    Raises:
        ContextError, ModelError, BadValueError: as :func:`kvant.cli.fitting.ranks_for`.
    """
    made = ranks_for(checkpoint, settings, max_kv_size, machines, parallel)
    longest = {kind: _longest(checkpoint, settings, machines, kind) for kind in PARALLEL}
    if as_json:
        print(json.dumps(_record(model, checkpoint, made, longest, names), indent=2))
    else:
        _print_tables(model, checkpoint, made, longest, names, note, asked=parallel is not None)
    return made.fits


def float_bits(checkpoint: Checkpoint | BridgedCheckpoint, machine: Machine) -> int:
    """Of a number as it is computed with, and of a cache that is not quantized."""
    return 8 * (FLOAT32 if machine.device == "cpu" else checkpoint.float_bytes)


def describe_weights(checkpoint: Checkpoint | BridgedCheckpoint, machine: Machine) -> str:
    """How weights are stored, in words."""
    if isinstance(checkpoint, BridgedCheckpoint):
        return checkpoint.described.format(float_bits(checkpoint, machine))
    quantization = checkpoint.config.quantization
    head = "tied" if checkpoint.tied else "untied"
    if quantization is not None and not quantization.has_biases:
        return f"{quantization.mode}, {head}"
    if quantization is not None:
        return f"{quantization.bits} bits, groups of {quantization.group_size}, {head}"
    return f"{float_bits(checkpoint, machine)} bits, {head}"


def _longest(
    checkpoint: Checkpoint | BridgedCheckpoint, settings: Settings, machines: Sequence[Machine], parallel: Parallel
) -> Mapping[int, LongestContext] | str:
    try:
        return {
            bits: RankPlanner(checkpoint, machines, parallel, replace(settings, kv_bits=bits)).longest()
            for bits in BITS
        }
    except ModelError as error:
        return str(error)


def _record(
    model: str,
    checkpoint: Checkpoint | BridgedCheckpoint,
    made: RankPlan,
    longest: Longest,
    names: Sequence[str],
) -> dict[str, Any]:
    first = made.plans[0]
    bits_of_floats = float_bits(checkpoint, made.machines[0])
    return {
        "model": model,
        "context": checkpoint.config.max_position_embeddings,
        "max_kv_size": first.max_kv_size,
        **settings_record(first.settings),
        "parallel": made.parallel,
        "fits": made.fits,
        "ranks": [
            {
                "rank": rank,
                **({"host": names[rank]} if names else {}),
                **({} if made.layers is None else {"layers": [made.layers[rank].start, made.layers[rank].stop]}),
                "bytes": as_record(plan),
                "machine": asdict(machine),
                "fits": plan.total <= machine.limit_bytes,
                "longest_context": found.tokens,
            }
            for rank, (plan, machine, found) in enumerate(zip(made.plans, made.machines, made.longest(), strict=True))
        ],
        "longest_context": {
            kind: {"refused": found}
            if isinstance(found, str)
            else [{"bits": bits or bits_of_floats, **asdict(each)} for bits, each in found.items()]
            for kind, found in longest.items()
        },
    }


def _print_tables(
    model: str,
    checkpoint: Checkpoint | BridgedCheckpoint,
    made: RankPlan,
    longest: Longest,
    names: Sequence[str],
    note: str,
    *,
    asked: bool,
) -> None:
    first, settings = made.plans[0], made.plans[0].settings
    bits_of_floats = float_bits(checkpoint, made.machines[0])
    devices = {machine.device.upper() for machine in made.machines}
    kind = f"{devices.pop()}s" if len(devices) == 1 else "machines"
    chosen = "" if asked or not made.fits else ", which fits"
    console = terminal.console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{model} on {len(made.plans)} {kind}, --parallel {made.parallel}{chosen}")
    console.print(_columns(made, names))
    count, bits = settings.sequences, settings.kv_bits or bits_of_floats
    reserved = f"{first.max_kv_size} tokens at {bits} bits"
    reserved = reserved if count is None else f"{count} sequences of {reserved}"
    console.print(f"weights of {describe_weights(checkpoint, made.machines[0])}; {reserved}")
    sources = ", ".join(dict.fromkeys(machine.limit_source for machine in made.machines))
    console.print(f"limit: {sources}{f'; {note}' if note else ''}")
    rank = made.fullest
    spare = made.machines[rank].limit_bytes - made.plans[rank].total
    if made.fits:
        console.print(f"fits; rank {rank} is the fullest, with {format_bytes(spare)} to spare")
    else:
        ways = what_fits_ranks(checkpoint, made, weights_flag="--weight-bits")
        console.print(f"does not fit: {format_bytes(-spare)} too much on rank {rank}; {ways}")
    console.print("longest context that fits" + ("" if count is None else f", each of {count} sequences") + ":")
    rows = [["", *(f"{bits or bits_of_floats} bits" for bits in BITS)]]
    refused = []
    for parallel, found in longest.items():
        if isinstance(found, str):
            refused.append(f"  {parallel}: {found}")
        else:
            rows.append([f"  {parallel}", *(f"{each.tokens or 'none'}" for each in found.values())])
    console.print("\n".join([_aligned(rows, left={0}), *refused]))


def _columns(made: RankPlan, names: Sequence[str]) -> str:
    """The parts of each rank's memory."""
    plans, layers = made.plans, made.layers
    parts = ["weights", "cache", *(["state"] if plans[0].state else []), "scratch"]
    rows = {"": [f"rank {rank}" for rank in range(len(plans))]}
    rows |= {"host": list(names)} if names else {}
    rows |= {} if layers is None else {"layers": [describe_layers(own) for own in layers]}
    sizes = {name: [getattr(plan, name) for plan in plans] for name in parts}
    # So that the lines add up.
    sizes["loading"] = [plan.arrays - sum(getattr(plan, name) for name in parts) for plan in plans]
    sizes["process"] = [plan.process for plan in plans]
    sizes = {name: counts for name, counts in sizes.items() if name in parts or any(counts)}
    sizes["total"] = [plan.total for plan in plans]
    sizes["limit"] = [machine.limit_bytes for machine in made.machines]
    rows |= {name: [format_bytes(count) for count in counts] for name, counts in sizes.items()}
    rows["longest"] = [f"{found.tokens}" if found.tokens else "none" for found in made.longest()]
    across = [[name, *cells] for name, cells in rows.items()]
    if len(plans) <= ACROSS:
        return _aligned(across, left={0})
    down = [list(row) for row in zip(*across, strict=True)]
    return _aligned(down, left={0, *(n for n, name in enumerate(down[0]) if name in ("host", "layers"))})


def _aligned(rows: Sequence[Sequence[str]], left: set[int]) -> str:
    """Lines of cells, each as wide as its column; ``left``: columns that begin with their cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
