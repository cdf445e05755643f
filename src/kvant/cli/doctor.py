"""``kvant doctor``: the machine, the path of every operator, and a check of the fused kernel."""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.cli import options, ranks, terminal
from kvant.cli.progress import LateProgress
from kvant.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from kvant.tools.doctor import Diagnosis
    from kvant.tools.doctor.ranks import RankDiagnosis


def doctor(
    *,
    json_object: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Describe the machine, say which way each operator goes and why, and check the fused kernel on a GPU.

    The kernel's results are compared with attention on the CPU. A mismatch is exit code 1.

    Under `kvant launch` it measures the connections of the ranks, and checks that they agree, instead.
    """
    if ranks.guard() is not None:
        raise typer.Exit(_check_group(json_object=json_object))
    with suppress(RuntimeError):  # a kernel that failed its self-check is what the diagnosis is about
        options.check_kernels()
    from kvant.tools.doctor import diagnose

    with LateProgress("trying kernels", quiet=quiet) as progress:
        found = diagnose(progress.update)
    if json_object:
        print(json.dumps(found.as_json(), indent=2, allow_nan=False))
    else:
        _print(found)
    if not found.healthy:
        raise typer.Exit(1)


def _check_group(*, json_object: bool) -> int:
    """Whether the ranks reach each other and agree, printed by rank 0. Returns the exit code."""
    from kvant.tools.doctor.ranks import check_ranks

    guard = ranks.guard()
    assert guard is not None
    found = check_ranks(ranks.connect(), guard)
    ranks.wait_for_first()
    assert found is not None
    if json_object:
        print(json.dumps(found.as_json(), indent=2, allow_nan=False))
    else:
        _print_group(found)
    return int(not found.healthy)


def _print_group(found: "RankDiagnosis") -> None:
    console = terminal.console()

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    rows = (
        (
            str(each.rank),
            each.host,
            f"{each.environment.device}, {each.environment.cores} cores",
            format_bytes(each.memory_bytes),
            each.environment.versions["mlx"],
        )
        for each in found.ranks
    )
    console.print(_table(("rank", "machine", "device", "memory", "MLX"), rows))
    for each in found.ranks:
        if each.round_trip_ms is not None:
            other = (each.rank + 1) % len(found.ranks)
            line(f"4 bytes from rank {each.rank} to rank {other} and back: {each.round_trip_ms:.3f} ms")
    line(f"guard: all ranks have answered after {found.guard_ms:.2f} ms")
    for step in found.steps:
        line(
            f"sums of a token of {step.shape}'s shape in tensor mode, {found.dtype}: {step.ms:.2f} ms "
            f"({step.sums} sums, {format_bytes(step.bytes)})"
        )
    line(f"sum of {format_bytes(found.large_bytes)}: {found.large_ms:.1f} ms, {found.large_gb_per_s:.2f} GB/s")
    for text in found.notes:
        line(f"note: {text}")
    for text in found.problems:
        line(f"wrong: {text}")
    line(f"the {len(found.ranks)} ranks {'agree' if found.healthy else 'do not agree'}")


def _print(found: "Diagnosis") -> None:
    console = terminal.console()

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    environment, machine = found.environment, found.machine
    line(", ".join(f"{name} {number}" for name, number in environment.versions.items()))
    line(environment.system)
    line(f"device: {environment.device}, {environment.cores} cores")
    line(
        f"memory: {format_bytes(machine.memory_bytes)}, usable {format_bytes(machine.limit_bytes)} "
        f"({machine.limit_source})"
    )
    line(f"BLAS: {environment.blas}")
    line(f"compiler: {found.compiler}")
    console.print(_table(("operator", "path", "why"), ((p.operator, p.path, p.reason) for p in found.paths)))
    _print_kernel(found, line)
    if found.kernels:
        columns = ("kernel against attention on the CPU", "error", "allowed", "ms", "unfused ms")
        console.print(
            _table(
                columns,
                (
                    (
                        result.case,
                        _shown(result.error, ".1e"),
                        _shown(result.tolerance, ".1e"),
                        _shown(result.fused_ms, ".3f"),
                        _shown(result.unfused_ms, ".3f"),
                    )
                    for result in found.kernels
                ),
            )
        )
        wrong = [result for result in found.kernels if result.problem is not None]
        for result in wrong:
            line(f"wrong: {result.case}: {result.problem}")
        line(f"kernel against attention on the CPU: {len(found.kernels) - len(wrong)} of {len(found.kernels)} agree")
    if found.uses:
        failing = [result for result in found.uses if result.problem is not None]
        for use in failing:
            line(f"wrong: the kernel does not run: {use.problem}")
        line(f"kernel as caches use it: {len(found.uses) - len(failing)} of {len(found.uses)} formats run")
    ahead = found.look_ahead
    if ahead is not None:
        faster = (
            "before it is faster here, and there is nothing to set" if ahead.faster else "kvant's way is faster here"
        )
        line(
            f"look-ahead, pocket: {ahead.after_ms:.2f} ms a token with the next step queued after it (kvant's way), "
            f"{ahead.before_ms:.2f} before it: {faster}"
        )
    if found.problem is not None:
        line(f"wrong: generation failed: {found.problem}")
    for text in found.unchecked:
        line(f"not checked here: {text}")
    for text in found.to_do or ["nothing"]:
        line(f"to do: {text}")


def _print_kernel(found: "Diagnosis", line: Callable[[str], None]) -> None:
    """What the fused kernel takes to compile, and how many queries a simdgroup of it holds."""
    if found.compiling is not None:
        compiled = found.compiling
        line(
            f"kernel, compiled for the self-check: {compiled.instances} instances in {compiled.compile_ms:.0f} ms "
            f"(first run {compiled.first_ms:.0f} ms, again {compiled.again_ms:.0f} ms)"
        )
    if found.queries is None:
        return
    first, second = found.queries.numbers
    for case in found.queries.cases:
        line(f"{case.case}: {first} queries a simdgroup {case.first_ms:.3f} ms, {second} {case.second_ms:.3f} ms")
    if found.queries.ratio is not None:
        line(f"{second} queries a simdgroup take {found.queries.ratio:.2f} of the time of {first}")
    if found.queries.problem is not None:
        line(f"wrong: measuring queries of a simdgroup: {found.queries.problem}")
    line(f"kernel, queries a simdgroup: {found.queries.used}, {found.queries.reason}")


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _shown(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)
