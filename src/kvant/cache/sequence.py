"""The sequence that a cache holds: its length, the ids of its tokens, and the step that is not yet committed."""

from collections.abc import Collection, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from kvant.cache.identity import Identity
from kvant.operators.rotary import Rotary
from kvant.threads import Turn


@dataclass(frozen=True, slots=True)
class TrimLimit:
    """A layer can forget at most ``tokens`` tokens once a sequence has held more than ``rows``."""

    rows: int
    tokens: int


class CachedSequence:
    """A sequence. One layer alone has its own; the layers of a model share one.

    A step writes its tokens behind those that the sequence has. They count from :meth:`commit` on. A step that fails,
    is interrupted or is abandoned is never committed, and the next one overwrites what it wrote.

    Attributes:
        turn: held by the thread that computes through the cache.
        step: token ids (1, S) of the step begun last; None once it is committed, or after a trim or a reset.
        shared: whether the layers of a model share this. A layer then leaves the commit to the model.
        limits: how far its layers can go back.
        values: what layers of one kind compute once a step, such as a window's mask; forgotten with the step.
        length: committed tokens; the position of the next one.
        ahead: of these, the last ones that are computed and not handed out yet.
        written: the most tokens that it has had since it was empty, whether they count or not.
        identity: of the model whose tokens they are; None: not known.
        rotary: how the model turns keys; None: not known.
        layout: what a bridged model expects in its cache, as JSON; "": a decoder's.
        divided: other ranks hold a part of the tokens' keys and values.
        made_for: the config of the model that made the cache, which needs no other check; None: not known.
    """

    def __init__(self, *, shared: bool = False, limits: Collection[TrimLimit] = ()) -> None:
        """``limits``: of all layers."""
        self.turn = Turn()
        self.step: mx.array | None = None
        self.shared = shared
        self.limits = frozenset(limits)
        self.values: dict[Hashable, mx.array] = {}
        self.length = self.written = self.ahead = 0
        self.identity: Identity | None = None
        self.rotary: Rotary | None = None
        self.layout = ""
        self.divided = False
        self.made_for: object = None
        self._ids: list[int] = []
        self._trimmed: tuple[int, int, set[int]] | None = None

    @property
    def ids(self) -> list[int]:
        """Ids of the committed tokens; empty for a layer alone, which is given none."""
        return self._ids[: self.length]

    def commit(self, num_tokens: int, ids: Sequence[int] = ()) -> None:
        """Count ``num_tokens`` more tokens; the first of ``ids`` are theirs."""
        # The length last: an interruption before leaves ids that are past it and not looked at.
        self._ids[self.length :] = ids[:num_tokens]
        self.written = max(self.written, self.length + num_tokens)
        self.length += num_tokens
        self.step = self._trimmed = None
        self.values.clear()

    def wrote(self, end: int) -> None:
        """Note that a window's rows hold tokens up to ``end``, whether they count later or not."""
        self.written = max(self.written, end)

    def trim(self, num_tokens: int, layer: int | None = None) -> int:
        """Forget the last tokens, or all there are.

        A cache with windows goes back a few tokens, or to nothing: see :meth:`can_return`. mlx-lm trims a cache layer
        by layer. Those calls count once: if ``layer`` is given, further layers with the same number have the same
        answer, until one comes again.

        Args:
            num_tokens: 0 or more.
            layer: which layer is trimmed.

        Returns:
            how many were forgotten.
        """
        check_number(num_tokens)
        with self.turn:
            if layer is not None and self._trimmed is not None:
                number, forgotten, layers = self._trimmed
                if number == num_tokens and layer not in layers:
                    layers.add(layer)
                    return forgotten
            lost = min(num_tokens, self.length)
            if not self.can_return(self.length - lost):
                most = max(0, self.length - self._oldest())
                raise ValueError(
                    f"{lost} tokens are to be forgotten; of {self.length} tokens the cache can forget all, "
                    f"or the last {most}: its windows or states go back no further"
                )
            self.length -= lost
            self.ahead = 0
            self.written = self.written if self.length else 0
            self.step = None
            self._trimmed = None if layer is None else (num_tokens, lost, {layer})
            return lost

    def reset(self) -> None:
        """Forget every token."""
        with self.turn:
            self.length = self.written = self.ahead = 0
            self.step = self._trimmed = None

    def can_return(self, length: int) -> bool:
        """Whether it can go back to ``length`` tokens exactly."""
        return length in (0, self.length) or length >= self._oldest()

    def _oldest(self) -> int:
        """The shortest length, except 0, that it can go back to exactly."""
        return max((self.written - limit.tokens for limit in self.limits if self.written > limit.rows), default=0)

    def restore(self, length: int, written: int, ids: Sequence[int]) -> None:
        """Count tokens that the layers were given otherwise than by a step; ``ids`` are theirs, or nothing."""
        self._ids = list(ids)
        self.step = self._trimmed = None
        self.values.clear()
        self.written, self.length, self.ahead = written, length, 0

    def fork(self) -> Self:
        """A sequence of its own with the same tokens; a step that is not committed is not among them."""
        made = copy(self)
        made.turn, made.values = Turn(), {}
        made.restore(self.length, self.written, self.ids)
        return made


def check_number(num_tokens: int) -> None:
    """Raise a ValueError unless it is a number of tokens."""
    if type(num_tokens) is not int or num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens!r}; expected an int, 0 or more")
