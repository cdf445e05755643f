"""What saving, loading and forking need of the sequences of a cache."""

from collections.abc import Hashable, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from kvant.cache.identity import Identity
from kvant.operators.rotary import Rotary
from kvant.threads import Turn


class SavedSequences:
    """A part of :class:`kvant.cache.sequences.Sequences`.

    Attributes:
        identity: of the model whose tokens they are; None: not known.
        rotary: how the model turns keys; None: not known.
        layout: what a bridged model expects in its cache, as JSON; "": a decoder's.
        unchecked: the snapshot that the tokens come from, where no model has been compared with it; else None.
        speaker: the number of the layer that tells mlx-lm what concerns all of them; None: each does.
        divided: other ranks hold a part of the tokens' keys and values.
    """

    identity: Identity | None = None
    rotary: Rotary | None = None
    layout = ""
    unchecked: Path | None = None
    speaker: int | None = None
    divided = False

    turn: Turn
    step: mx.array | None
    values: dict[Hashable, mx.array]
    _lengths: tuple[int, ...]
    _written: tuple[int, ...]
    _ids: list[list[int]]
    _trimmed: Any

    @property
    def written(self) -> tuple[int, ...]:
        """The most tokens that each has had since it was empty, whether they count or not."""
        return self._written

    def restore(self, lengths: tuple[int, ...], written: tuple[int, ...], ids: Sequence[Sequence[int]]) -> None:
        """Count tokens that the layers were given otherwise than by a step; ``ids`` are theirs, or nothing."""
        self._ids = [list(own) for own in ids] or [[] for _ in lengths]
        self.step = self._trimmed = None
        self.values.clear()
        self._written, self._lengths = written, lengths

    def fork(self) -> Self:
        """Sequences of their own with the same tokens; a step that is not committed is not among them."""
        made = copy(self)
        made.turn, made.values = Turn(), {}
        made.restore(self._lengths, self._written, self._ids)
        return made
