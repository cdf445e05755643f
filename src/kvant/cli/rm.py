"""``kvant rm``: remove a pulled or imported model."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvant import weights
from kvant.cli import interrupts, options
from kvant.cli.options import BadValueError
from kvant.cli.pull import check_name
from kvant.cli.terminal import say
from kvant.engine.load import POCKET
from kvant.errors import WeightsError
from kvant.sizes import format_bytes
from kvant.weights.imported import find_imported, remove_imported, size_of

DECLINED = 1


def rm(
    context: typer.Context,
    model_argument: options.PulledArgument = None,
    *,
    model: options.Pulled = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model that was pulled or imported.

    Files that another model needs are not removed. The command says how many bytes it freed.
    """
    model = options.choose_model(context, model_argument, model)
    if not model:
        raise BadValueError("no model; `kvant models` lists those that were pulled")
    if model == POCKET:
        raise WeightsError(f"'{POCKET}' is built into kvant; it cannot be removed")
    if model.startswith(("/", ".", "~")) or Path(model).is_dir():
        raise WeightsError(f"{model!r} is a folder; kvant removes only what it pulled or imported")
    folder = find_imported(model)
    if folder is not None:
        size = size_of(folder)
        _ask(f"{model}, {format_bytes(size)}", yes)
        with interrupts.patient():
            remove_imported(folder)
        say(f"{model}: removed, {size} bytes are free ({format_bytes(size)})")
        return
    check_name(model)
    removal = weights.removal(model)
    names = " and ".join(removal.references)
    freed = format_bytes(removal.bytes)
    _ask(f"{names}, {freed}", yes)
    with interrupts.patient():
        removal.run()
    say(f"{names}: removed, {removal.bytes} bytes are free ({freed})")


def _ask(what: str, yes: bool) -> None:
    """Ask whether to remove a model, unless ``yes``; exit if the answer is no."""
    if not yes:
        if not sys.stdin.isatty():
            raise BadValueError(f"{what}: cannot ask without a terminal; --yes removes it")
        print(f"remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("nothing was removed")
            raise typer.Exit(DECLINED)
