"""The sequences that a cache holds: their lengths, the ids of their tokens, and the step that is not yet committed."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.cache.saved_sequences import SavedSequences
from kvant.threads import Turn


@dataclass(frozen=True, slots=True)
class TrimLimit:
    """How far a layer can go back: once a sequence had more than ``rows`` tokens, ``tokens`` from the most it had."""

    rows: int
    tokens: int


class Sequences(SavedSequences):
    """B sequences. One layer alone has its own; the layers of a model share one.

    A step writes its tokens behind those that a sequence has. They count from :meth:`commit` on. A step that fails, is
    interrupted or is abandoned is never committed, and the next one overwrites what it wrote.

    Attributes:
        turn: held by the thread that computes through the cache.
        step: token ids (B, S) of the step begun last; None once it is committed, or after a trim or a reset.
        shared: whether the layers of a model share this. A layer then leaves the commit to the model.
        limits: how far its layers can go back.
        values: what layers of one kind compute once a step, such as a window's mask; forgotten with the step.
    """

    def __init__(self, batch: int | None, *, shared: bool = False, limits: Collection[TrimLimit] = ()) -> None:
        """``batch``: B; None: as many as the first step has. ``limits``: of all layers."""
        self.turn = Turn()
        self.step: mx.array | None = None
        self.shared = shared
        self._grows = batch is None
        self.limits = frozenset(limits)
        self.values: dict[Hashable, mx.array] = {}
        self._lengths = (0,) * (batch or 1)
        self._written = self._lengths  # the most tokens each has had since it was empty
        self._ids: list[list[int]] = [[] for _ in self._lengths]
        self._trimmed: tuple[int | Sequence[int], int, set[int]] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed tokens of each sequence; the position of its next one."""
        return self._lengths

    @property
    def offset(self) -> int:
        """Committed tokens of the longest sequence."""
        return max(self._lengths)

    @property
    def ids(self) -> list[list[int]]:
        """Ids of the committed tokens, a list for each sequence; empty for a layer alone, which is given none."""
        return [ids[:length] for ids, length in zip(self._ids, self._lengths, strict=True)]

    def take_batch(self, batch: int) -> None:
        """Become ``batch`` sequences, where none has a token yet and the number was left open."""
        if self._grows and not any(self._lengths) and len(self._lengths) != batch:
            self._lengths = self._written = (0,) * batch
            self._ids = [[] for _ in range(batch)]

    def commit(self, num_tokens: int | Sequence[int], ids: Sequence[Sequence[int]] | None = None) -> None:
        """Count ``num_tokens`` more tokens: an int for all sequences, or B ints, one each; ``ids`` are theirs."""
        each = _each(num_tokens, len(self._lengths))
        # The lengths last, at once: an interruption before leaves ids that are past them and not looked at.
        for own, length, count, new in zip(self._ids, self._lengths, each, ids or (), strict=ids is not None):
            own[length:] = new[:count]
        lengths = tuple(length + count for length, count in zip(self._lengths, each, strict=True))
        self._written = tuple(map(max, self._written, lengths))
        self._lengths = lengths
        self.step = self._trimmed = None
        self.values.clear()

    def wrote(self, sequence: int, end: int) -> None:
        """Note that a window's rows hold tokens up to ``end``, whether they count later or not."""
        written = list(self._written)
        written[sequence] = max(written[sequence], end)
        self._written = tuple(written)

    def trim(self, num_tokens: int | Sequence[int], layer: int | None = None) -> int:
        """Forget the last tokens of every sequence, or all it has.

        A cache with windows goes back a few tokens, or to nothing: see :meth:`can_return`. mlx-lm trims a cache layer
        by layer. Those calls count once: where ``layer`` is given, further layers with the same number have the same
        answer, until one comes again.

        Args:
            num_tokens: an int for all sequences, or B ints, one each.
            layer: which layer is trimmed.

        Returns:
            how many were forgotten, of the sequence that lost most.

        Raises:
            ValueError: a number below 0, not one for each sequence, or too many; nothing was forgotten.
            RuntimeError: another thread uses the cache.
        """
        each = _each(num_tokens, len(self._lengths))
        with self.turn:
            if layer is not None and self._trimmed is not None:
                number, forgotten, layers = self._trimmed
                if number == num_tokens and layer not in layers:
                    layers.add(layer)
                    return forgotten
            lost = [min(count, length) for count, length in zip(each, self._lengths, strict=True)]
            lengths = tuple(length - count for length, count in zip(self._lengths, lost, strict=True))
            for b, length in enumerate(lengths):
                if not self.can_return(b, length):
                    most = max(0, self._lengths[b] - self._oldest(b))
                    raise ValueError(
                        f"{lost[b]} tokens are to be forgotten; of {self._lengths[b]} tokens the cache can forget all, "
                        f"or the last {most}: its windows or states go back no further"
                    )
            self._lengths = lengths
            self._written = tuple(w if length else 0 for w, length in zip(self._written, lengths, strict=True))
            self.step = None
            self._trimmed = None if layer is None else (num_tokens, max(lost), {layer})
            return max(lost)

    def reset(self) -> None:
        """Forget every token.

        Raises:
            RuntimeError: another thread uses the cache.
        """
        with self.turn:
            self._lengths = self._written = (0,) * len(self._lengths)
            self.step = self._trimmed = None

    def can_return(self, sequence: int, length: int) -> bool:
        """Whether a sequence can go back to ``length`` tokens exactly."""
        return length in (0, self._lengths[sequence]) or length >= self._oldest(sequence)

    def _oldest(self, sequence: int) -> int:
        """The shortest length, except 0, that a sequence can go back to exactly."""
        written = self._written[sequence]
        return max((written - limit.tokens for limit in self.limits if written > limit.rows), default=0)


def _each(num_tokens: int | Sequence[int], batch: int) -> Sequence[int]:
    each = num_tokens if isinstance(num_tokens, Sequence) else (num_tokens,) * batch
    if any(type(count) is not int or count < 0 for count in each):
        raise ValueError(f"num_tokens is {num_tokens}; expected an int, 0 or more")
    if len(each) != batch:
        raise ValueError(f"num_tokens has {len(each)} numbers; the cache has {batch} sequences")
    return each
