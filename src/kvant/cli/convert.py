"""``kvant convert``: a model folder to a quantized one."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from kvant.cli import interrupts, options
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.cli.terminal import say
from kvant.engine.load import find_model
from kvant.sizes import format_bytes
from kvant.tools.convert.convert import convert_folder
from kvant.tools.convert.new_folder import remove_leftovers
from kvant.tools.convert.weight_format import WeightFormat


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The model to convert.", autocompletion=options.complete_models)
    ],
    dest: Annotated[
        str | None, typer.Argument(metavar="DEST", help="The folder to write: a new one, or an empty one.")
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(help=f"{options.MODEL_HELP}; instead of SOURCE.", autocompletion=options.complete_models),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="Bits of a weight: 2, 3, 4, 5, 6 or 8; 0 only changes --dtype; default: 4.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share one scale: 32, 64 or 128; default: 64.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="affine, mxfp4, mxfp8 or nvfp4; all but affine fix bits and group size; default: affine."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float16, bfloat16 or float32 for all that stays in floating point; default: as stored."),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Quantize a model folder, or change its dtype."""
    if model is not None:
        if dest is not None:
            raise BadValueError(f"the model is given twice, as the argument {source!r} and with --model {model}")
        source, dest = model, source
    if dest is None:
        raise BadValueError("no DEST; expected SOURCE and DEST, or --model SOURCE and DEST")
    options.check_text(source=source, dest=dest)
    chosen = WeightFormat.choose(bits, group_size, mode or "affine", dtype)
    if not dest:
        raise BadValueError("DEST is empty; expected a folder's path")
    folder, target = find_model(source), Path(dest)
    for part in remove_leftovers(target):
        say(f"{part}: removed; a convert that was killed had left it", quiet)
    signal.signal(signal.SIGTERM, interrupts.leave)  # as at Ctrl-C, nothing half-written is left
    with interrupts.patient(), LateProgress("converting", quiet=quiet) as progress:
        done = convert_folder(folder, target, chosen, progress.update)
    sizes = f"{format_bytes(done.source_bytes)} became {format_bytes(done.bytes)}"
    say(f"{dest}: {sizes}, {done.bits_per_weight:.2f} bits a weight", quiet)
    if done.unquantized:
        which = done.unquantized[0] + (f" and {len(done.unquantized) - 1} more" if len(done.unquantized) > 1 else "")
        say(f"not quantized, groups of {chosen.group_size} do not divide the width: {which}", quiet)
