"""Ranks other than 0 take a command's options, and then do what rank 0 says."""

from kvant.cli import ranks
from kvant.cli.options import RunOptions
from kvant.cli.parts import arrange, loader
from kvant.cli.session import bound_memory, prepare, wire
from kvant.engine.load import find_adapter, find_model
from kvant.ranks.follow import follow as compute


def follow(run: RunOptions, *, bounded: bool = False) -> None:
    """Load a part of the model, compute what rank 0 tells, and exit as it does; on rank 0 do nothing.

    If ``bounded``, MLX is held to the plan, as on rank 0.
    """
    guard = ranks.guard()
    if guard is None or not guard.rank:
        return
    folder = find_model(run.model)
    checkpoint, settings, machine = prepare(run, folder)
    arranged = arrange(run.shared, folder, checkpoint, settings, None, machine)
    if run.wired:
        wire(arranged.total)
    if bounded:
        bound_memory(arranged.arrays, arranged.scratch)
    adapter = None if run.adapter_path is None else find_adapter(run.adapter_path)
    compute(loader(arranged)(folder, None, adapter), guard)
