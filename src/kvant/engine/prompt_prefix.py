"""The sharing of a prompt's prefix and checkpoints with other requests."""

from collections.abc import Collection, Sequence

from kvant.cache.pool import Pool, PoolSequence
from kvant.cache.prefix_search import FEWEST_COPIED

FETCHED_PAGES = 4  # read from disk in one step
MIN_FETCHES = 8  # steps that may read from disk, in addition to one for each page
CHECKPOINT_DISTANCE = 2048  # tokens at least between checkpoints in the middle of a prompt


class PromptPrefix:
    """A prompt's shared prefix, and the checkpoints that later prompts are likely to continue from."""

    def __init__(
        self,
        ids: Sequence[int],
        shareable_ids: Sequence[int],
        salt: bytes,
        stop_tokens: Collection[int],
        pool: Pool,
        *,
        unit: int,
    ) -> None:
        """
        Args:
            ids: of the whole text, including the tokens of the request's own cache.
            shareable_ids: those that may be shared with others; may be empty.
            salt: texts share only with those of the same salt.
            stop_tokens: the tokens that end a conversation's messages.
            pool: shares the pages.
            unit: checkpoints are at multiples of this many tokens; above 1, only whole pages are shared.
        """
        self.shareable_ids = shareable_ids
        self._ids = ids
        self._salt = salt
        self._pool = pool
        self._unit = unit
        self._whole_pages = unit > 1
        # Chunks end at checkpoints. Heads are checkpoints that other conversations may share.
        self.checkpoints, self._heads = _checkpoints(ids, stop_tokens, pool.checkpoints, unit)
        self._fetches = 0

    def fetch(self, max_tokens: int) -> bool:
        """Read a few pages of the prompt from disk, if a sequence of this many tokens has room.

        Returns whether there is more to read. The number of steps is bounded, even if others displace pages
        in the meantime.
        """
        if self._pool.disk is None or not self._pool.fits(max_tokens):
            return False
        self._fetches += 1
        again = self._pool.prefixes.fetch(
            self.shareable_ids, salt=self._salt, whole_pages=self._whole_pages, most=FETCHED_PAGES
        )
        pages = len(self._ids) // self._pool.page_size * len(self._pool.groups)
        return again and self._fetches <= MIN_FETCHES + pages

    def open_sequence(self, max_tokens: int) -> PoolSequence:
        """Open the sequence for the prompt, starting with the prefix that others have fed."""
        return self._pool.sequence(
            max_tokens,
            self.shareable_ids,
            salt=self._salt,
            whole_pages=self._whole_pages,
            is_exact=self._whole_pages,
        )

    def note_shared(self, sequence: PoolSequence) -> None:
        """Plan a checkpoint where the prompt and a stored text diverge, given the sequence's start."""
        if not self.shareable_ids or self._pool.single or not self._pool.checkpoints:
            return
        start = sequence.length
        head = self._pool.prefixes.num_stored(self.shareable_ids, self._salt) // self._unit * self._unit
        before = max(place for place in (0, start, *self.checkpoints) if place <= head)
        # With exact tails, a sequence must start earlier unless there is a checkpoint at the exact place.
        distance = self._pool.page_size if self._pool.tails is None else FEWEST_COPIED
        if head - before >= distance:
            self.checkpoints = sorted([*self.checkpoints, head])
            self._heads = {*self._heads, head}
        elif head == start and self._pool.has_windows:  # it started where pages happened to exist
            self.share(sequence, last_page=not self._whole_pages, is_head=True)

    @property
    def last_checkpoint(self) -> int:
        """Return the number of tokens up to the last checkpoint in the prompt, or all."""
        return self.checkpoints[-1] if self.checkpoints else len(self._ids)

    def next_checkpoint(self, start: int) -> int:
        """Return the number of tokens up to the first checkpoint after ``start``, or all."""
        return min([len(self._ids), *(place for place in self.checkpoints if start < place)])

    def chunk_fed(self, sequence: PoolSequence, upto: int | None) -> None:
        """Share the tokens fed so far if that cannot wait for the end of the prompt.

        Windows move on, states change, and writing a whole prompt to disk at once would take long.
        ``upto``: how many first tokens may be shared; None: all.
        """
        length = sequence.length
        is_checkpoint = length in self.checkpoints
        if self._pool.has_windows or is_checkpoint or self._pool.disk is not None:
            self.share(
                sequence,
                upto,
                last_page=is_checkpoint and not self._whole_pages,
                mid_prompt=not is_checkpoint,
                is_head=length in self._heads,
            )

    def share(self, sequence: PoolSequence, upto: int | None = None, **options: bool) -> None:
        """Let later requests start with the fed tokens; options as in :meth:`PoolSequence.share_prefix`."""
        sequence.share_prefix(upto, asked=self.last_checkpoint, **options)


def _checkpoints(
    ids: Sequence[int], stop_tokens: Collection[int], count: int, unit: int
) -> tuple[list[int], Collection[int]]:
    """Return the lengths at which later prompts are likely to continue, multiples of ``unit``, and the heads.

    These are the ends of the first message (system prompt and tools) and of the last two: the answer in
    between may be rendered differently the next time. A quarter of the pool's ``count`` checkpoints lie in
    between. A head is the end of a first message that is not the last one.
    """
    if not count:
        return [], ()
    ends = [place for place, token in enumerate(ids, 1) if token in stop_tokens] or [len(ids) - 1]
    distance = CHECKPOINT_DISTANCE * -(-len(ids) // (CHECKPOINT_DISTANCE * max(1, count // 4)))
    between = range(distance, len(ids), distance)
    lengths = {place // unit * unit for place in (*ends[:1], *ends[-2:], *between)}
    heads = {place // unit * unit for place in ends[:-1][:1]}
    return sorted(place for place in lengths if 0 < place < len(ids)), heads
