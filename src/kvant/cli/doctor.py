"""``kvant doctor``: what this machine is, which way attention goes on it, and whether the fused kernel is right."""

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.cli import options, terminal
from kvant.cli.progress import LateProgress
from kvant.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from kvant.tools.doctor import Diagnosis


def doctor(
    *,
    json_object: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Say what kvant runs on, which way each operator goes and why, and check the fused kernel where a GPU is.

    The kernel's results are held against the unfused operator's; a mismatch is exit code 1.
    """
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


def _print(found: "Diagnosis") -> None:

    console = terminal.console()

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for text in _machine(found):
        line(text)
    console.print(_paths(found))
    if found.kernels:
        console.print(_kernels(found))
        wrong = [result for result in found.kernels if result.problem is not None]
        for result in wrong:
            line(f"wrong: {result.case}: {result.problem}")
        line(f"kernel against unfused operator: {len(found.kernels) - len(wrong)} of {len(found.kernels)} cases agree")
    ahead = found.look_ahead
    if ahead is not None:
        faster = "before" if ahead.faster else "after"
        line(
            f"look-ahead, pocket: {ahead.after_ms:.2f} ms a token with the next step queued after it (kvant's way), "
            f"{ahead.before_ms:.2f} before it: {faster} is faster here"
        )
    if found.problem is not None:
        line(f"wrong: generation failed: {found.problem}")
    for text in found.unchecked:
        line(f"not checked here: {text}")


def _machine(found: "Diagnosis") -> list[str]:
    machine = found.machine
    memory = format_bytes(machine.memory_bytes)
    if machine.gpu_memory_bytes is not None:
        memory += f", {format_bytes(machine.gpu_memory_bytes)} for the GPU"
    return [
        ", ".join(f"{name} {number}" for name, number in machine.versions.items()),
        f"Python {machine.python}, {machine.system}",
        f"device: {machine.device} ({machine.kind}), {machine.cores} cores",
        f"memory: {memory}",
        f"BLAS: {machine.blas}",
        f"compiler: {machine.compiler}",
    ]


def _paths(found: "Diagnosis") -> "Table":
    table = _table("operator", "path", "why")
    for path in found.paths:
        table.add_row(path.operator, path.path, path.reason)
    return table


def _kernels(found: "Diagnosis") -> "Table":
    table = _table("kernel against unfused", "error", "allowed", "ms", "unfused ms")
    for column in table.columns[1:]:
        column.justify = "right"
    for result in found.kernels:
        table.add_row(
            result.case,
            _shown(result.error, ".1e"),
            _shown(result.tolerance, ".1e"),
            _shown(result.fused_ms, ".3f"),
            _shown(result.unfused_ms, ".3f"),
        )
    return table


def _table(*columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _shown(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)
