"""``kvant import``: convert a GGUF file to a model folder."""

import re
import signal
from pathlib import Path
from typing import Annotated

import typer

from kvant.cli import interrupts, options
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.cli.terminal import say
from kvant.errors import ConvertError, KvantError
from kvant.sizes import format_bytes
from kvant.tools.convert.new_folder import remove_leftovers
from kvant.tools.gguf.check import check_import
from kvant.tools.gguf.importer import CensusRow, import_gguf
from kvant.tools.gguf.ollama import find_ollama
from kvant.weights.imported import place_for
from kvant.weights.reference import OLLAMA

NOT_OF_A_NAME = re.compile(r"[^a-z0-9._-]+")


def import_model(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A GGUF file, or ollama:NAME[:TAG] for a model Ollama downloaded."
        ),
    ],
    *,
    name: Annotated[
        str | None, typer.Option(help="The new model's name; default: the file's, or Ollama's.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder to write instead: a new one, or an empty one."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare the imported model's predictions with those of the file's own values, as float32.",
        ),
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Make a model folder from a GGUF file, and print the folder.

    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4 and floats keep their values exactly. Q4_K and Q5_K have their scales
    rounded to float16. Q6_K is quantized to 8 bits again. Other types are refused.
    """
    options.check_text(source=str(source), name=name)
    if name is not None and output is not None:
        raise BadValueError(
            f"--name {name!r:.40} names a model in kvant's own folder; leave out --output or --name"
        )
    path = source
    default_name = source.stem
    if str(source).startswith(OLLAMA):
        default_name, path = find_ollama(str(source).removeprefix(OLLAMA))
    dest = output
    if dest is None:
        with options.named("--name" if name is not None else "the file's name"):
            valid_name = NOT_OF_A_NAME.sub("-", default_name.lower()).strip("-.")
            dest = place_for(valid_name if name is None else name)
    for leftover in remove_leftovers(dest):
        say(f"{leftover}: removed; an interrupted import had left it", quiet)
    signal.signal(signal.SIGTERM, interrupts.leave)  # leave nothing half-written, like Ctrl-C
    with interrupts.patient(), LateProgress("importing", quiet=quiet) as progress:
        census = import_gguf(path, dest, progress.update)
    before = sum(row.bytes_before for row in census)
    after = sum(row.bytes_after for row in census)
    for row in [*census, CensusRow("all", sum(row.tensors for row in census), "", before, after)]:
        sizes = f"{format_bytes(row.bytes_before)} -> {format_bytes(row.bytes_after)}"
        say(f"{row.kind:6} {row.tensors:5} tensors  {sizes:26} {row.fidelity}".rstrip(), quiet)
    if check:
        try:
            with interrupts.patient(), LateProgress("checking", quiet=quiet) as progress:
                figures = check_import(path, dest, progress.update)
        except KvantError as error:
            raise ConvertError(f"{dest} is imported, but it was not checked: {error}") from error
        say(
            f"KLD of the import from the file's values: {figures.mean_kld_nats:.2g} nats, the same likeliest "
            f"token in {100 * figures.top1:.2f} % of {figures.positions} places",
            quiet,
        )
    print(dest)
