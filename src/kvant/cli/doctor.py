"""``kvant doctor``: describe the machine and operators, and check the fused kernel."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Union

import typer

from kvant.cli import options, ranks, terminal
from kvant.cli.progress import LateProgress
from kvant.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from kvant.tools.doctor.diagnosis import Diagnosis
    from kvant.tools.doctor.ranks import RankDiagnosis

RANKS_DEADLINE_S = 120.0  # two ranks over the loopback take one second


def doctor(
    *,
    json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Describe this machine, and check the fused kernel on a GPU.

    The command also says which path each operator takes and why. The kernel's results are compared with
    attention on the CPU. A mismatch exits with code 1.

    Under `kvant launch` it measures the connections between the ranks and checks a sum instead.
    """
    result: Diagnosis | RankDiagnosis
    parts: Iterable[str | Table]
    guard = ranks.guard()
    if guard is not None:
        from kvant.ranks.group import join_group
        from kvant.tools.doctor.ranks import check_ranks

        group = join_group(guard)
        with guard.within(RANKS_DEADLINE_S, "checking the ranks"):
            result = check_ranks(group)
        guard.wait_for_first()
        parts = _group_parts(result)
    else:
        options.check_kernels()
        from kvant.tools.doctor.diagnosis import diagnose

        with LateProgress("trying kernels", quiet=quiet) as progress:
            result = diagnose(progress.update)
        parts = _parts(result)
    terminal.show(result.as_json(), parts, as_json=json_object)
    if not result.healthy:
        raise typer.Exit(1)


def _group_parts(diagnosis: "RankDiagnosis") -> Iterator[Union[str, "Table"]]:
    rows = []
    for each in diagnosis.ranks:
        device = f"{each.environment.device}, {each.environment.cores} cores"
        mlx = each.environment.versions["mlx"]
        rows.append((str(each.rank), each.host, device, format_bytes(each.memory_bytes), mlx))
    yield terminal.table(("rank", "machine", "device", "memory", "MLX"), rows)
    for each in diagnosis.ranks:
        if each.round_trip_ms is not None:
            other = (each.rank + 1) % len(diagnosis.ranks)
            yield f"4 bytes from rank {each.rank} to rank {other} and back: {each.round_trip_ms:.3f} ms"
    speed = diagnosis.sum_bytes / diagnosis.sum_ms / 1e6
    yield f"sum of {format_bytes(diagnosis.sum_bytes)}: {diagnosis.sum_ms:.1f} ms, {speed:.2f} GB/s"
    for text in diagnosis.problems:
        yield f"wrong: {text}"
    yield f"the {len(diagnosis.ranks)} ranks {'agree' if diagnosis.healthy else 'do not agree'}"


def _parts(diagnosis: "Diagnosis") -> Iterator[Union[str, "Table"]]:
    environment = diagnosis.environment
    machine = diagnosis.machine
    yield ", ".join(f"{name} {number}" for name, number in environment.versions.items())
    yield environment.system
    yield f"device: {environment.device}, {environment.cores} cores"
    memory = format_bytes(machine.memory_bytes)
    limit = format_bytes(machine.limit_bytes)
    yield f"memory: {memory}, usable {limit} ({machine.limit_source})"
    yield f"BLAS: {environment.blas}"
    yield f"compiler: {diagnosis.compiler}"
    if (speed := diagnosis.memory_speed) is not None:
        read = (
            f"one row of float32 matrices reads {speed.row_gb_s:.1f} GB/s "
            f"(MLX's product {speed.mlx_row_gb_s:.1f})"
        )
        yield f"memory speed: {read}; a copy reads and writes {speed.copy_gb_s:.1f} GB/s"
    paths = ((each.operator, each.path, each.reason) for each in diagnosis.paths)
    yield terminal.table(("operator", "path", "why"), paths)
    against = "kernel against attention on the CPU"
    if diagnosis.kernels:
        numbers = (
            (
                r.case,
                _shown(r.error, ".1e"),
                _shown(r.tolerance, ".1e"),
                _shown(r.fused_ms),
                _shown(r.unfused_ms),
            )
            for r in diagnosis.kernels
        )
        yield terminal.table((against, "error", "allowed", "ms", "unfused ms"), numbers)
        wrong = [
            f"wrong: {result.case}: {result.problem}"
            for result in diagnosis.kernels
            if result.problem is not None
        ]
        yield from wrong
        yield f"{against}: {len(diagnosis.kernels) - len(wrong)} of {len(diagnosis.kernels)} agree"
    if diagnosis.uses:
        wrong = [
            f"wrong: the kernel does not run: {use.problem}"
            for use in diagnosis.uses
            if use.problem is not None
        ]
        yield from wrong
        total = len(diagnosis.uses)
        yield f"kernel as caches use it: {total - len(wrong)} of {total} formats run"
    if diagnosis.start is not None:
        start = diagnosis.start
        cold = f"{start.cold_instances} instances, {start.cold_ms:.0f} ms"
        warm = f"{start.warm_instances} instances, {start.warm_ms:.0f} ms"
        yield (
            f"start of {start.use}: {cold} when the kernel is tried, {warm} later, "
            "until a draft or a batch asks"
        )
    if diagnosis.record is not None:
        yield f"record: {diagnosis.record}"
    for text in diagnosis.unchecked:
        yield f"not checked here: {text}"
    for text in diagnosis.to_do or ["nothing"]:
        yield f"to do: {text}"


def _shown(number: float | None, form: str = ".3f") -> str:
    return "-" if number is None else format(number, form)
