"""``kvant plan``: plan a run's memory and whether a machine has it, before weights are read or downloaded."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvant.cli import options, terminal
from kvant.cli import ranks as processes
from kvant.cli.fitting import plan_for, ranks_for, with_checkpoints, with_weights
from kvant.cli.options import BadValueError, RunOptions, Without
from kvant.cli.plan_table import plan_lines, plan_record, ranks_lines, ranks_record
from kvant.engine.load import POCKET, find_adapter, find_model
from kvant.errors import ArgumentError, ModelError
from kvant.machine import Device, Machine, default_device, machine_with, this_machine
from kvant.plan import (
    AnyCheckpoint,
    DraftModel,
    LongestContext,
    Parallel,
    RankPlanner,
    Settings,
    longest_context,
    read_facts,
    read_folder,
)
from kvant.plan.fitting import longest_by_bits
from kvant.ranks.divided import gather_machines
from kvant.ranks.launcher import read_hosts
from kvant.tools.convert.weight_format import WeightFormat

MAX_RANKS = 256
DOES_NOT_FIT = 1
NOT_OF_A_PLAN = Without([
    "preset", "max_tokens", "stop", "extra_eos_token", "ignore_eos", "system_prompt", "chat_template_config",
    "kernels", "num_draft_tokens", "wired", "raw", "quiet",
])  # fmt: skip


@options.with_options
def plan(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    *,
    run: Annotated[RunOptions, NOT_OF_A_PLAN],
    sequences: Annotated[
        int | None,
        typer.Option(
            help="Plan a pool for this many sequences at once, each of at most --max-kv-size tokens."
        ),
    ] = None,
    weight_bits: Annotated[
        int | None,
        typer.Option(help="Plan as if float weights had been converted to this many bits (`kvant convert`)."),
    ] = None,
    weight_group_size: Annotated[
        int | None, typer.Option(help="Weights that share one scale, with --weight-bits; default: 64.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Plan for a model on the cpu or the gpu; default: the device that MLX uses here."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE[,SIZE..]",
            help="Plan for a machine with this much memory, such as 8GB, instead of this one; with "
            "--device gpu for a Mac, whose GPU may use about 2/3 of it. For several machines "
            "give one size, or one for each.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Plan for this many machines, each like this one or as --memory says.")
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Plan for the machines of MLX's host file, as --ranks does."),
    ] = None,
    remote: Annotated[
        bool,
        typer.Option(
            "--remote",
            help="Ask the hub for config.json and the sizes of the files, so that the model need not "
            "be downloaded.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Say which memory a run takes, and whether it fits.

    The command reads only config.json and file sizes. Exit code 0: it fits; 1: it does not.
    """
    model = options.choose_model(context, model_argument, run.model)
    draft_model = run.draft_model
    options.check_counts(sequences=sequences)
    reserved = options.kv_size(run.max_kv_size)
    weight_format = _weight_format(weight_bits, weight_group_size)
    kind = options.check_parallel(run.parallel)
    sizes = [] if memory is None else [_size(text) for text in memory.split(",")]
    running = _running_ranks(
        {"--ranks": ranks, "--hostfile": hostfile, "--memory": memory, "--device": device}
    )
    names = [] if hostfile is None else read_hosts(Path(hostfile))
    count = len(running) or _count(ranks, names, sizes, kind)
    machines = running or [_machine(device, size) for size in sizes] or [_machine(device, None)]
    has_head = run.draft == "mtp"
    if has_head and count is not None:
        raise BadValueError("--draft is mtp; several ranks draft from prompt and answer alone")
    checkpoint = _checkpoint(model, remote, head=has_head)
    if weight_format is not None:
        checkpoint = checkpoint.quantized(weight_format.bits, weight_format.group_size)
    if run.adapter_path is not None:
        checkpoint = checkpoint.adapted(find_adapter(run.adapter_path))
    settings = Settings(
        with_checkpoints(run, checkpoint, sequences), run.prefill_step_size, sequences=sequences
    )
    if draft_model is not None:
        if count is not None:
            raise BadValueError(
                f"--draft-model is {draft_model!r:.80}; several ranks draft only from prompt and answer"
            )
        settings = replace(settings, draft_model=DraftModel(_checkpoint(draft_model, remote)))
    if count is not None:
        if run.weights == "float32":
            raise BadValueError("--weights is 'float32'; on several ranks weights stay as they are stored")
        machines *= count if len(machines) == 1 else 1
        note = (
            ""
            if sizes or running
            else "all machines are assumed to be like this one; --memory says what they have"
        )
        made = ranks_for(checkpoint, settings, reserved, machines, kind)
        of_ranks = {
            kind: _longest_of_ranks(checkpoint, settings, machines, kind) for kind in options.PARALLEL
        }
        record = ranks_record(model, checkpoint, made, of_ranks, names)
        fits = made.fits
        lines = ranks_lines(model, checkpoint, made, of_ranks, names, note)
    else:
        machine = machines[0]
        checkpoint, settings = with_weights(run.weights, checkpoint, settings, reserved, machine)
        single = plan_for(checkpoint, settings, reserved, machine)
        longest = longest_by_bits(settings, lambda chosen: longest_context(checkpoint, machine, chosen))
        record = plan_record(model, checkpoint, single, machine, longest)
        fits = single.total <= machine.limit_bytes
        record |= {} if draft_model is None else {"draft_model": draft_model}
        lines = plan_lines(model, checkpoint, single, machine, longest)
    terminal.show(record, lines, as_json=as_json)
    if not fits:
        raise typer.Exit(DOES_NOT_FIT)


def _longest_of_ranks(
    checkpoint: AnyCheckpoint, settings: Settings, machines: Sequence[Machine], parallel: Parallel
) -> dict[int, LongestContext] | str:
    """Return the longest context by bits, or why the model cannot be divided like this."""
    try:
        return longest_by_bits(
            settings, lambda changed: RankPlanner(checkpoint, machines, parallel, changed).longest()
        )
    except ModelError as error:
        return str(error)


def _running_ranks(flags: Mapping[str, object]) -> list[Machine]:
    """Return, on rank 0, the machines of the ranks that run this command; empty for a single process."""
    guard = processes.guard()
    if guard is None:
        return []
    for flag, value in flags.items():
        if value is not None:
            raise BadValueError(f"{flag} is {value!r}; the running ranks report their own machines")
    machines = gather_machines(guard, this_machine())
    guard.wait_for_first()
    return machines


def _weight_format(bits: int | None, group_size: int | None) -> WeightFormat | None:
    """Return the format to which weights would be converted, or None."""
    if bits is None:
        if group_size is not None:
            raise BadValueError(
                f"--weight-group-size is {group_size}, but without --weight-bits nothing is converted"
            )
        return None
    try:
        if bits == 0:
            raise ArgumentError("bits", "is 0; expected bits of a quantized weight")
        return WeightFormat.choose(bits, group_size)
    except ArgumentError as error:
        raise BadValueError(error.worded(lambda name: options.flag(f"weight_{name}"))) from error


def _count(
    ranks: int | None, names: Sequence[str], sizes: Sequence[int], parallel: Parallel | None
) -> int | None:
    """Return the number of machines, or None for one machine."""
    if ranks is not None and names:
        raise BadValueError(f"--ranks is {ranks}, and --hostfile names the machines; expected one of the two")
    if ranks is not None and not 2 <= ranks <= MAX_RANKS:
        raise BadValueError(f"--ranks is {ranks}; expected 2 to {MAX_RANKS}")
    count = ranks or len(names) or len(sizes)
    if count < 2:
        if names:
            raise BadValueError("--hostfile names one machine; expected at least 2")
        if parallel is not None:
            raise BadValueError(f"--parallel {parallel} divides a model among ranks; --ranks says how many")
        return None
    if len(sizes) not in (0, 1, count):
        raise BadValueError(
            f"--memory has {len(sizes)} sizes for {count} machines; expected one, or one for each"
        )
    return count


def _machine(device: str | None, memory: int | None) -> Machine:
    if device not in (None, "cpu", "gpu"):
        raise BadValueError(f"--device is {device!r}; expected cpu or gpu")
    chosen: Device = default_device() if device is None else "cpu" if device == "cpu" else "gpu"
    if memory is not None:
        return machine_with(memory, chosen)
    try:
        return this_machine(chosen)
    except ValueError as error:
        raise BadValueError(f"--device gpu: {error}; --memory sets the memory of another machine") from error


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT])i?B?", text, re.ASCII | re.IGNORECASE)
    powers = {"M": 20, "G": 30, "T": 40}
    size = int(float(match[1]) * 2 ** powers[match[2].upper()]) if match else 0
    if not 0 < size < 2**50:
        raise BadValueError(f"--memory is {text[:80]!r}; expected a size such as 8GB, 16GiB or 512MB")
    return size


def _checkpoint(model: str, remote: bool, *, head: bool = False) -> AnyCheckpoint:
    """Read what is known of a model: from a folder, from the hub, or about a listed name.

    ``head``: include the head for drafts, which only a folder's tensors show.
    """
    from kvant import weights
    from kvant.weights.known import packaged_models

    if remote:
        if head:
            raise BadValueError("--draft is mtp; expected it without --remote: the tensors tell the head")
        if model == POCKET:
            raise BadValueError(f"--remote asks the hub, and '{POCKET}' is built into kvant")
        if model in packaged_models():
            raise BadValueError(
                f"--remote asks the hub, and {model} comes in a Python package; leave --remote out"
            )
        from kvant.cli.pull import check_name

        check_name(model)
        raw, sizes = weights.remote_facts(model)
        return read_facts(raw, _tensor_bytes(sizes))
    try:
        folder = find_model(model)
    except ModelError:
        if head:
            raise
        packaged = packaged_models().get(model)
        if packaged is not None:
            return read_facts(packaged.config, packaged.tensor_bytes)
        known = weights.known_models().get(model)
        if known is None:
            raise
        return read_facts(known.config, _tensor_bytes({file.name: file.bytes for file in known.files}))
    return read_folder(folder, head=head)


def _tensor_bytes(sizes: Mapping[str, int | None]) -> int | None:
    """Return the bytes of the safetensors files, or None if some are unknown."""
    tensors = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    if "model.safetensors" in tensors:
        return tensors["model.safetensors"]
    known = [size for size in tensors.values() if size is not None]
    return sum(known) if known and len(known) == len(tensors) else None
