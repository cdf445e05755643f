"""Checkpoints: places in texts that later texts go on from, where layers have windows or states."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvant.cache.layer_format import Arrays

if TYPE_CHECKING:
    from kvant.cache.exact_tail import TailCopy

NO_TEXT = 32  # bytes of the text without tokens, its salt's digest
ID_BYTES = 8  # of a token in a text
TAIL = 32  # bytes that are compared first


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The end of a text, and what is kept there.

    Attributes:
        text: its salt and tokens as bytes: :func:`kvant.cache.prefix.as_text`.
        asked: bytes of it up to the last checkpoint in the prompt; an answer follows. All, once a prompt went
            on there.
        is_head: prompts of other conversations are likely to begin with the text, such as a system prompt.
        states: of the layers that have one in place of rows; None: there is no such layer.
        pages: digests of the pages that the next token sees through a window.
        rows: in place of pages, copies of the rows that it sees there, of each layer: a single pool has no
            pages for them.
        tail: the exact rows; None: there are none.
        used: the number of the last text that began with this one.
    """

    text: bytes
    asked: int
    is_head: bool = False
    states: list[Arrays] | None = None
    pages: frozenset[bytes] = field(default_factory=frozenset)
    rows: Mapping[Any, Sequence[mx.array]] = field(default_factory=dict)
    tail: "TailCopy | None" = None
    used: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return (len(self.text) - NO_TEXT) // ID_BYTES


class Checkpoints:
    """The checkpoints of an index by the digests of their texts, or those of a single pool's sequence.

    If there are too many, the one with the lowest score is dropped. The score is the product of the tokens
    that would be read again without the checkpoint, from the nearest one before it, and of the texts that
    could use it, its own and those of the checkpoints behind it; divided by its age, the number of texts
    since one began with it.

    The score is 0 if a later prompt supersedes the checkpoint: if the prompt went on from it, or from the
    question whose answer it ends. Only a head is never superseded. So superseded checkpoints go first, the
    least recently used of them before the others, and the end of a shared head goes last.

    An answer's end does not supersede its question's: the next prompt may write the answer in another way.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[bytes, Checkpoint] = {}
        self._texts = 0  # that were noted by use

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def __bool__(self) -> bool:
        return bool(self._kept)

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that is kept."""
        found: list[Sequence[mx.array | None]] = []
        for own in self._kept.values():
            found += [*own.rows.values(), *(own.states or ())]
            found += [] if own.tail is None else [own.tail.rows]
        return [array for arrays in found for array in arrays if array is not None]

    def at(self, length: int) -> Checkpoint | None:
        """Return the checkpoint after so many tokens of a sequence; None: there is none."""
        return next((own for own in self._kept.values() if own.num_tokens == length), None)

    def last_before(self, length: int) -> int:
        """Return the greatest length of a sequence's checkpoint below ``length``; 0 if there is none."""
        return max((own.num_tokens for own in self._kept.values() if own.num_tokens < length), default=0)

    def drop_after(self, length: int) -> None:
        """Drop a sequence's checkpoints behind ``length``."""
        self._kept = {key: own for key, own in self._kept.items() if own.num_tokens <= length}

    def states(self, digest: bytes) -> list[Arrays] | None:
        """Return the states after a text; None if they are not kept."""
        return self._kept[digest].states if digest in self._kept else None

    def last_tail(self, text: bytes) -> "TailCopy | None":
        """Return the exact rows at the last checkpoint in a text that has any; None: none has."""
        found = [
            own
            for own in self._kept.values()
            if own.tail is not None and _begins(text, own.text, len(own.text))
        ]
        return max(found, key=lambda own: len(own.text)).tail if found else None

    def pages_needed(self) -> set[bytes]:
        """Return the digests of the pages that they need."""
        return {digest for own in self._kept.values() for digest in own.pages}

    def keep(self, digest: bytes, made: Checkpoint) -> list[bytes]:
        """Keep one more, and return the digests of those that were dropped for it.

        The end of an answer may be dropped at once; a place in a prompt is not.
        """
        self._kept[digest] = made
        made.used = self._texts
        dropped = []
        while len(self._kept) > self._most:
            is_answer = made.asked < len(made.text)
            others = [each for each in self._kept if each != digest or is_answer]
            dropped.append(self.drop_lowest(others or [digest]))
        return dropped

    def use(self, text: bytes, *, by_prompt: bool = False) -> list[bytes]:
        """Note a text that is there again, and return the digests of those that it begins with.

        ``by_prompt``: a prompt goes on from its end.
        """
        self._texts += 1
        used = {digest: own for digest, own in self._kept.items() if _begins(text, own.text, len(own.text))}
        for own in used.values():
            own.used = self._texts
            if by_prompt:
                own.asked = len(own.text)
        return list(used)

    def drop(self, digest: bytes) -> None:
        """Drop those that end with a page or need it."""
        for own in [own for own, kept in self._kept.items() if own == digest or digest in kept.pages]:
            del self._kept[own]

    def drop_lowest(self, digests: Collection[bytes]) -> bytes:
        """Drop the one of these that has the lowest score, and return its digest."""
        lowest = min(digests, key=lambda digest: self._score(self._kept[digest]))
        del self._kept[lowest]
        return lowest

    def needing(self, pages: Collection[bytes]) -> list[bytes]:
        """Return the digests of those that need one of these pages."""
        return [digest for digest, own in self._kept.items() if not own.pages.isdisjoint(pages)]

    def _score(self, own: Checkpoint) -> tuple[float, int, int]:
        """Return the score, and what decides between equal ones: the last use, then the length."""
        kept = self._kept.values()
        length = len(own.text)
        is_superseded = any(
            each.asked > own.asked and _begins(each.text, own.text, own.asked) for each in kept
        )
        if is_superseded and not own.is_head:
            return 0.0, own.used, length
        before = [
            len(each.text)
            for each in kept
            if each is not own and _begins(own.text, each.text, len(each.text))
        ]
        saved = length - max(before, default=NO_TEXT)
        texts = sum(_begins(each.text, own.text, length) for each in kept)
        return saved * texts / (1 + self._texts - own.used), own.used, length


def _begins(text: bytes, other: bytes, length: int) -> bool:
    """Return whether a text begins with so many bytes of another one."""
    # Most texts share a long head, so that they differ near the end.
    return text[length - TAIL : length] == other[length - TAIL : length] and text.startswith(other[:length])
