"""A conversation's cache as a pool of one sequence: what a scheduler needs of either."""

import sys
from collections.abc import Sequence
from typing import Any

from kvant.cache.model import ModelCache
from kvant.cache.pages import PAGE_SIZE


class SingleSequence:
    """The sequence that a cache holds. It stays there when it is released."""

    def __init__(self, cache: ModelCache) -> None:
        self.cache = cache

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.cache.offset

    @property
    def ids(self) -> list[int]:
        """Ids of its tokens."""
        return self.cache.ids[0]

    @property
    def max_tokens(self) -> int:
        """Tokens that it can have."""
        return self.cache.max_seq_len or sys.maxsize

    def can_trim_to(self, num_tokens: int) -> bool:
        """Whether it can go back to its first ``num_tokens`` tokens, exactly."""
        return self.cache.can_trim_to(num_tokens)

    def trim_to(self, num_tokens: int) -> None:
        """Forget what it has past its first ``num_tokens`` tokens."""
        self.cache.trim_to(num_tokens)

    def share_prefix(self, upto: int | None = None, *, last_page: bool = False) -> None:
        """Do nothing: the next sequence begins with what this one leaves."""

    def release(self) -> None:
        """Do nothing: the cache is its owner's."""


class SinglePool:
    """A cache in the place of a :class:`kvant.cache.pool.Pool`; a sequence begins with what the cache has of it."""

    attends_apart = True
    has_windows = False  # pages that are shared have none here
    page_size = PAGE_SIZE
    max_sequences = num_pages = num_free = 1

    def __init__(self, cache: ModelCache, prefill_step_size: int) -> None:
        """``prefill_step_size``: new tokens in a step, at most."""
        self.cache, self.layers, self.divided = cache, cache.layers, cache.divided
        self.prefill_step_size = prefill_step_size
        self.max_seq_len = cache.max_seq_len or sys.maxsize

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.cache.nbytes

    def takes_back(self, most: int) -> int:
        """How many of ``most`` tokens of a step can be taken back."""
        return self.cache.takes_back(most)

    def held(self, prompt: Sequence[int]) -> int:
        """Tokens of the cache, if the prompt begins with them all."""
        return self.cache.offset if list(prompt[: self.cache.offset]) == self.cache.ids[0] else 0

    def pages_needed(self, max_tokens: int) -> int:
        """Give the one page."""
        return 1

    def sequence(
        self, max_tokens: int, prompt: Sequence[int] = (), *, salt: bytes = b"", whole_pages: bool = True
    ) -> SingleSequence:
        """Open the sequence: the cache goes back to what it has in common with ``prompt``, less the last token."""
        self.cache.keep_common(prompt)
        return SingleSequence(self.cache)

    def batch(self, sequences: Sequence[Any], rows: int | None = None) -> ModelCache:
        """The cache of a step."""
        return self.cache
