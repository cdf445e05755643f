"""Checkpoints: places from which later texts can continue although layers have windows or states."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvant.cache.layer_format import Arrays

if TYPE_CHECKING:
    from kvant.cache.exact_tail import TailCopy

NO_TEXT = 32  # bytes of a text without tokens: the digest of its salt
ID_BYTES = 8  # per token of a text
TAIL = 32  # bytes to compare first


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The end of a text, and what is stored there to continue it.

    Attributes:
        text: its salt and tokens as bytes: :func:`kvant.cache.prefix.as_text`.
        asked: how many of its bytes go up to the last checkpoint in the prompt, before the answer; all bytes
            once a later prompt has continued the text.
        is_head: prompts of other conversations are likely to begin with the text, such as a system prompt.
        states: of the layers that have a state instead of rows; None: no such layers.
        pages: digests of the pages that the next token sees through a window.
        rows: copies of the rows that the next token sees in each layer, instead of pages, which a single pool
            has no room for.
        tail: the exact rows; None: no exact tail.
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
        """Return the number of tokens of the text."""
        return (len(self.text) - NO_TEXT) // ID_BYTES


class Checkpoints:
    """The checkpoints of a prefix index, by the digests of their texts, or of a single pool's sequence.

    If there are too many, the one with the lowest score is dropped. The score is the number of tokens that
    would be read again without the checkpoint, from the nearest one before it, times the number of texts that
    could use it (its own and those of later checkpoints), divided by the number of texts since one last began
    with it.

    The score is 0 if a later prompt supersedes the checkpoint, because the prompt continues it, or continues
    the question whose answer the checkpoint ends. Heads are never superseded. So superseded checkpoints go
    first, least recently used first, and the end of a shared head goes last.

    The end of an answer does not supersede that of its question: the next prompt may render the answer
    differently.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_digest: dict[bytes, Checkpoint] = {}
        self._texts = 0  # counted by use

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._by_digest

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    @property
    def arrays(self) -> list[mx.array]:
        """Return all stored arrays."""
        groups: list[Sequence[mx.array | None]] = []
        for checkpoint in self._by_digest.values():
            groups += [*checkpoint.rows.values(), *(checkpoint.states or ())]
            groups += [] if checkpoint.tail is None else [checkpoint.tail.rows]
        return [array for arrays in groups for array in arrays if array is not None]

    def at(self, length: int) -> Checkpoint | None:
        """Return a sequence's checkpoint after ``length`` tokens, or None."""
        return next((each for each in self._by_digest.values() if each.num_tokens == length), None)

    def last_before(self, length: int) -> int:
        """Return the length of a sequence's last checkpoint below ``length``, or 0."""
        lengths = [each.num_tokens for each in self._by_digest.values()]
        return max((each for each in lengths if each < length), default=0)

    def drop_after(self, length: int) -> None:
        """Drop a sequence's checkpoints past ``length``."""
        self._by_digest = {key: each for key, each in self._by_digest.items() if each.num_tokens <= length}

    def states(self, digest: bytes) -> list[Arrays] | None:
        """Return the states stored after a text, or None."""
        return self._by_digest[digest].states if digest in self._by_digest else None

    def last_tail(self, text: bytes) -> "TailCopy | None":
        """Return the exact rows of the last checkpoint in a text that has any, or None."""
        candidates = [
            each
            for each in self._by_digest.values()
            if each.tail is not None and _begins(text, each.text, len(each.text))
        ]
        return max(candidates, key=lambda each: len(each.text)).tail if candidates else None

    def pages_needed(self) -> set[bytes]:
        """Return the digests of all pages that checkpoints need."""
        return {digest for each in self._by_digest.values() for digest in each.pages}

    def keep(self, digest: bytes, made: Checkpoint) -> list[bytes]:
        """Add a checkpoint, and return the digests of those dropped for it.

        It may be dropped itself if it ends an answer, but not if it is in a prompt.
        """
        self._by_digest[digest] = made
        made.used = self._texts
        dropped = []
        while len(self._by_digest) > self._most:
            is_answer = made.asked < len(made.text)
            others = [each for each in self._by_digest if each != digest or is_answer]
            dropped.append(self.drop_lowest(others or [digest]))
        return dropped

    def use(self, text: bytes, *, by_prompt: bool = False) -> list[bytes]:
        """Note that a text was used, and return the digests of the checkpoints that it begins with.

        ``by_prompt``: a prompt continues the text.
        """
        self._texts += 1
        used = []
        for digest, each in self._by_digest.items():
            if _begins(text, each.text, len(each.text)):
                used.append(digest)
                each.used = self._texts
                if by_prompt:
                    each.asked = len(each.text)
        return used

    def drop(self, digest: bytes) -> None:
        """Drop the checkpoints that end with a page or need it."""
        self._by_digest = {
            key: each for key, each in self._by_digest.items() if key != digest and digest not in each.pages
        }

    def drop_lowest(self, digests: Collection[bytes]) -> bytes:
        """Drop the checkpoint with the lowest score among these, and return its digest."""
        lowest = min(digests, key=lambda digest: self._score(self._by_digest[digest]))
        del self._by_digest[lowest]
        return lowest

    def needing(self, pages: Collection[bytes]) -> list[bytes]:
        """Return the digests of the checkpoints that need one of these pages."""
        return [digest for digest, each in self._by_digest.items() if not each.pages.isdisjoint(pages)]

    def _score(self, scored: Checkpoint) -> tuple[float, int, int]:
        """Return the score, and the tie breakers: the last use, then the length."""
        checkpoints = self._by_digest.values()
        length = len(scored.text)
        later = [each for each in checkpoints if each.asked > scored.asked]
        is_superseded = any(_begins(each.text, scored.text, scored.asked) for each in later)
        if is_superseded and not scored.is_head:
            return 0.0, scored.used, length
        before = [
            len(each.text)
            for each in checkpoints
            if each is not scored and _begins(scored.text, each.text, len(each.text))
        ]
        saved = length - max(before, default=NO_TEXT)
        texts = sum(_begins(each.text, scored.text, length) for each in checkpoints)
        return saved * texts / (1 + self._texts - scored.used), scored.used, length


def _begins(text: bytes, other: bytes, length: int) -> bool:
    """Return whether a text begins with the first ``length`` bytes of another one."""
    # Most texts share a long head and differ near the end, so compare that first.
    return text[length - TAIL : length] == other[length - TAIL : length] and text.startswith(other[:length])
