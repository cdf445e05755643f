"""``kvant convert``: quantize a model folder."""

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
        str | None,
        typer.Argument(
            metavar="SOURCE", help="The model to convert.", autocompletion=options.complete_models
        ),
    ] = None,
    dest: Annotated[
        str | None, typer.Argument(metavar="DEST", help="The folder to write: a new one, or an empty one.")
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"{options.MODEL_HELP}; instead of SOURCE.", autocompletion=options.complete_models
        ),
    ] = None,
    hf_path: Annotated[
        str | None, typer.Option(help="Another name of SOURCE, as in mlx_lm.convert; needs -q.")
    ] = None,
    mlx_path: Annotated[
        str | None, typer.Option(help="Another name of DEST, as in mlx_lm.convert; needs -q.")
    ] = None,
    quantize: Annotated[
        bool, typer.Option("--quantize", "-q", help="Quantize, as in mlx_lm.convert; kvant does by default.")
    ] = False,
    bits: Annotated[
        int | None,
        typer.Option(
            "--bits",
            "--q-bits",
            help="Bits of a weight: 2, 3, 4, 5, 6 or 8; 0 only changes --dtype; default: 4.",
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size", "--q-group-size", help="Weights that share one scale: 32, 64 or 128; default: 64."
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            "--q-mode",
            help="affine, mxfp4, mxfp8 or nvfp4; all but affine fix bits and group size; default: affine.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float16, bfloat16 or float32 for what stays in floating point; default: as stored."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no statistics and no progress.")] = False,
) -> None:
    """Quantize a model folder, or change its dtype."""
    source, dest = _folders(source, dest, model=model, hf_path=hf_path, mlx_path=mlx_path)
    if (hf_path or mlx_path) and not quantize and bits is None:
        flag = "--hf-path" if hf_path else "--mlx-path"
        raise BadValueError(
            f"{flag} is mlx_lm.convert's, which does not quantize without -q; expected -q, or --bits 0 and "
            "--dtype"
        )
    if quantize and bits == 0:
        raise BadValueError("--bits is 0, which does not quantize; expected no --quantize (-q) with it")
    options.check_text(source=source, dest=dest)
    chosen = WeightFormat.choose(bits, group_size, mode or "affine", dtype)
    if not dest:
        raise BadValueError("DEST is empty; expected a folder's path")
    folder = find_model(source)
    target = Path(dest)
    for leftover in remove_leftovers(target):
        say(f"{leftover}: removed; an interrupted convert had left it", quiet)
    signal.signal(signal.SIGTERM, interrupts.leave)  # leave nothing half-written, like Ctrl-C
    with interrupts.patient(), LateProgress("converting", quiet=quiet) as progress:
        done = convert_folder(folder, target, chosen, progress.update)
    sizes = f"{format_bytes(done.source_bytes)} became {format_bytes(done.bytes)}"
    say(f"{dest}: {sizes}, {done.bits_per_weight:.2f} bits a weight", quiet)
    if done.unquantized:
        which = done.unquantized[0] + (
            f" and {len(done.unquantized) - 1} more" if len(done.unquantized) > 1 else ""
        )
        say(f"not quantized, groups of {chosen.group_size} do not divide the width: {which}", quiet)


def _folders(
    source: str | None, dest: str | None, *, model: str | None, hf_path: str | None, mlx_path: str | None
) -> tuple[str, str]:
    """Return the model and the folder to write, from arguments or flags."""
    if model is not None and hf_path is not None:
        raise BadValueError(f"the model is given twice, with --model {model} and with --hf-path {hf_path}")
    arguments = [value for value in (source, dest) if value is not None]
    named = model if hf_path is None else hf_path
    if named is not None:
        if len(arguments) + (mlx_path is not None) > 1:
            flag = "--model" if hf_path is None else "--hf-path"
            raise BadValueError(
                f"the model is given twice, as the argument {arguments[0]!r} and with {flag} {named}"
            )
        arguments.insert(0, named)
    if mlx_path is not None:
        if len(arguments) > 1:
            raise BadValueError(
                f"DEST is given twice, as the argument {arguments[1]!r} and with --mlx-path {mlx_path}"
            )
        arguments.append(mlx_path)
    if len(arguments) < 2:
        missing = "DEST" if mlx_path is None else "SOURCE"
        raise BadValueError(f"no {missing}; expected SOURCE and DEST, or --model SOURCE and DEST")
    return arguments[0], arguments[1]
