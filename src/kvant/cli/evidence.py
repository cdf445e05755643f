"""``kvant evidence``: measure this machine and a model into one file, or check such a file."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvant.atomic import atomic_file
from kvant.cli import options, terminal
from kvant.cli.bench_options import check_new_file
from kvant.cli.defaults import source_of
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.engine.load import POCKET
from kvant.errors import printable

MAX_LINE = 1000  # characters of a printed line


def evidence(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    *,
    model: options.Model = POCKET,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Measure for at most ten minutes, and write this file."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Say what such a file lacks, and whether it was changed since it was written.",
        ),
    ] = None,
    json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of lines.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Measure this machine into one file, or check such a file.

    The file has every round, so that others can check it: what kvant doctor says; attention, and tokens next
    to mlx-lm's, in turn; memory against its plan; the quality of 8 and 4 bits; the start.
    docs/data/evidence.md is made from such files.
    """
    options.check_kernels()
    if (output is None) == (check is None):
        raise BadValueError("expected one of --output and --check")
    if check is not None:
        if model_argument is not None or source_of(context, "model") == "COMMANDLINE":
            raise BadValueError("--check reads a file; expected no model")
        _check(check, json_object)
        return
    assert output is not None
    check_new_file("--output", output)
    model = options.choose_model(context, model_argument, model)

    from kvant.tools.doctor.diagnosis import diagnose
    from kvant.tools.evidence.check import sealed
    from kvant.tools.evidence.measure import figures, measure_machine

    with LateProgress("trying kernels", quiet=quiet) as progress:
        diagnosis = diagnose(progress.update).as_json()
    del diagnosis["record"]  # it contains a path of the user's
    record = sealed(diagnosis | measure_machine(model, partial(terminal.say, quiet=quiet)))
    with atomic_file(output) as file:
        file.write(json.dumps(record, indent=1).encode() + b"\n")
    lines = [f"{name}: {figure}" for name, figure in figures(record)]
    terminal.show(
        record, [*lines, *(f"left out: {text}" for text in record["left_out"])], as_json=json_object
    )
    if not record["healthy"]:
        raise typer.Exit(1)


def _check(path: Path, as_json: bool) -> None:
    from kvant.tools.evidence.check import left_out, problems, read
    from kvant.tools.evidence.measure import figures

    record = read(path)
    wrong = problems(record)
    missing = left_out(record)
    lines = [f"left out: {text}" for text in missing] + [f"wrong: {text}" for text in wrong]
    if not wrong:
        lines = [*(f"{name}: {figure}" for name, figure in figures(record)), *lines]
        lines.append("the file is unaltered, and its figures follow from its rounds")
    # Text from a stranger's file must not break a line or control the terminal.
    lines = [printable(line, MAX_LINE) for line in lines]
    terminal.show({"left_out": missing, "wrong": wrong}, lines, as_json=as_json)
    if wrong:
        raise typer.Exit(1)
