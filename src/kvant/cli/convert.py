"""``kvant convert``: a model folder to a quantized one."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvant.cli import options
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.engine.convert import convert_folder
from kvant.engine.load import find_model
from kvant.engine.new_folder import remove_leftovers
from kvant.engine.weight_format import WeightFormat
from kvant.sizes import format_bytes


def convert(
    source: Annotated[str, typer.Argument(help="What to convert, named as for --model; floating-point weights.")],
    dest: Annotated[str, typer.Argument(help="The folder to write: a new one, or an empty one.")],
    *,
    bits: Annotated[
        int | None, typer.Option(help="Bits of a weight: 2, 3, 4, 5, 6 or 8; 0 only changes --dtype; default: 4.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share one scale: 32, 64 or 128; default: 64.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="affine, mxfp4, mxfp8 or nvfp4; all but affine fix bits and group size.")
    ] = "affine",
    dtype: Annotated[
        str | None,
        typer.Option(help="Of what stays in floating point: float16, bfloat16 or float32; default: as it is stored."),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Quantize a model folder, or change its dtype, with mlx-lm's converter."""
    options.check_text(source=source, dest=dest)
    try:
        chosen = WeightFormat.choose(bits, group_size, mode, dtype)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise BadValueError(f"--{name.replace('_', '-')} {rest}") from error
    if not dest:
        raise BadValueError("DEST is empty; expected a folder's path")
    folder = find_model(source)
    _remove_leftovers(Path(dest), quiet)
    with _terminable(), LateProgress("converting", quiet=quiet) as progress:
        done = convert_folder(folder, Path(dest), chosen, progress.update)
    if quiet:
        return
    print(
        f"{dest}: {format_bytes(done.source_bytes)} became {format_bytes(done.bytes)}, "
        f"{done.bits_per_weight:.2f} bits a weight",
        file=sys.stderr,
    )
    if done.unquantized:
        more = f" and {len(done.unquantized) - 1} more" if len(done.unquantized) > 1 else ""
        print(
            f"not quantized, groups of {chosen.group_size} do not divide the width: {done.unquantized[0]}{more}",
            file=sys.stderr,
        )


def _remove_leftovers(dest: Path, quiet: bool) -> None:
    for part in remove_leftovers(dest):
        if not quiet:
            print(f"{part}: removed; a convert that was killed had left it", file=sys.stderr)


@contextmanager
def _terminable() -> Iterator[None]:
    """End at SIGTERM as at Ctrl-C, so that nothing half-written is left."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
