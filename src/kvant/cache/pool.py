"""One reservation for many sequences: the keys and values of all layers, in pages of 128 rows."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar

import mlx.core as mx

from kvant.cache.disk import DiskCache
from kvant.cache.identity import Identity
from kvant.cache.layer_format import SLACK, LayerFormat, describe_formats, stored_bytes
from kvant.cache.paged_layers import PagedLayers, PageTable, PoolLayer, backend_of, kernel_use, window_pages
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.cache.pool_batch import PoolBatch
from kvant.cache.pool_disk import PoolDisk
from kvant.cache.pool_sequence import PoolSequence, PoolState, close
from kvant.cache.prefix import digests, extended, root
from kvant.errors import ContextError
from kvant.operators.front import Front
from kvant.operators.kernels.launch import Backend
from kvant.sizes import format_bytes
from kvant.threads import check_process

__all__ = ["Pool", "PoolSequence", "check_sizes", "pool_bytes", "rows_alone", "sizes_alone"]

FEWEST_COPIED = 16  # tokens; fewer are fed as fast as they are copied


class Pool(PoolState):
    """All memory is allocated, and touched, when the pool is made; it never grows. ``model.make_pool`` makes it.

    A layer's arrays are those of PMX's dynamic batching: values (2, K, T, D') and scales (2, K, T, D/G), cache_mode 1
    with pages of 128 rows, cache_layout 3, one layer. T is as many rows as all pages have.

    Attributes:
        attends_apart: whether the attention of each sequence is computed for it alone. If not, its logits change by
            rounding with the lengths of the others, in steps of as many rows too.
    """

    attends_apart = True

    page_size = PAGE_SIZE
    may_have_sinks: ClassVar[bool] = False  # whether attention may be given learned sinks

    def __init__(
        self,
        formats: Sequence[LayerFormat],
        fronts: Sequence[Front],
        *,
        tokens: int,
        sequences: int,
        max_seq_len: int,
        prefill_step_size: int | None,
        checkpoints: int = 0,
        make_cache: Callable[[int], Any],
        identity: Identity | None = None,
        kernels: str | None = None,
        dtype: mx.Dtype = mx.float16,
        num_heads: int | None = None,
        windows: Sequence[int | None] = (),
    ) -> None:
        """Allocate the pool.

        Args:
            formats: of each layer, with its window.
            fronts: of each layer; position j is at column j of its bias split's rotation.
            tokens: of all sequences together; whole pages are made of them.
            sequences: that can be open at once.
            max_seq_len: tokens that one can have.
            prefill_step_size: new tokens of one in a step, at most. None: any number. The pool is for one sequence
                then, which shares no pages; it has as many rows as it has tokens, and of a window few more than
                are seen.
            checkpoints: ends of texts whose windows and states are kept for those who go on there, beside what the
                sequences have: of each the pages that a window sees, and one for a part of a page.
            make_cache: makes a :class:`kvant.cache.ModelCache` for so many tokens, in the same format.
            identity: of the model; None: not known.
            kernels: "unfused" or "fused" forces how attention is computed, as in :class:`kvant.cache.QuantizedKVCache`.
                A step of more than 8 new tokens a sequence, as in a prefill, is always unfused. What the pool needs of
                the kernel runs once now.
            dtype: of queries.
            num_heads: H; None: not known.
            windows: of the whole model's layers, where ``formats`` are a rank's alone: pages are counted for all.
        """
        sizes = {"tokens": tokens, "sequences": sequences, "max_seq_len": max_seq_len}
        step_size = 1 if prefill_step_size is None else prefill_step_size
        check_sizes(**sizes, prefill_step_size=step_size)
        check_process()
        uses = [kernel_use(own, dtype, num_heads, self.may_have_sinks) for own in formats]
        layers = [
            PoolLayer(own, front, use, backend_of(use, kernels))
            for own, front, use in zip(formats, fronts, uses, strict=True)
        ]
        parts = []
        # In the order of the layers; where none keeps rows, pages still count tokens.
        kinds = [(window, "quantized") for window in windows] or [(own.window, own.kind) for own in formats]
        for window, kind in dict.fromkeys(kinds) or [(None, "")]:
            of_part = [layer for layer in layers if (layer.format.window, layer.format.kind) == (window, kind)]
            num_pages, rows = _size(window, tokens, sequences, prefill_step_size, checkpoints)
            for layer in of_part:
                layer.allocate(rows)
            parts.append(PagedLayers(window, of_part, num_pages, prefill_step_size or SLACK + 1, checkpoints))
        self.checkpoints = checkpoints
        super().__init__(
            layers,
            parts,
            max_sequences=sequences,
            max_seq_len=max_seq_len,
            prefill_step_size=prefill_step_size,
            make_cache=make_cache,
            identity=identity,
        )

    def release(self) -> None:
        """Give the memory back. The pool cannot be used after it."""
        for layer in self.layers:
            layer.arrays.clear()

    def describe(self) -> str:
        """Its size and format, in a line."""
        kinds = []
        for part in self.parts:
            seen = "all tokens" if part.window is None else f"the last {part.window}"
            kinds.append(f"{part.pages.num} pages for {len(part.layers)} layers that see {seen}")
        kept = f" and {self.checkpoints} checkpoints" if self.checkpoints else ""
        size = f"{format_bytes(self.nbytes)} at {describe_formats(self.formats)}"
        return f"{size} for {self.max_sequences} sequences{kept}: {', '.join(kinds)}"

    @property
    def backend(self) -> Backend | None:
        """Runs the fused kernel, for the layers that it takes; None: every layer is unfused."""
        return next((layer.backend for layer in self.layers if layer.backend is not None), None)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers with their fronts, and of states: of every sequence and checkpoint."""
        states = sum(state.nbytes for state in self.states)
        return sum(layer.nbytes for layer in self.layers) + (self.max_sequences + self.checkpoints) * states

    @property
    def formats(self) -> list[LayerFormat]:
        """How each layer stores tokens."""
        return [layer.format for layer in self.layers]

    @property
    def num_pages(self) -> int:
        """Pages of the layers that see all tokens; where all have a window, of those with the widest."""
        return self.main.pages.num

    @property
    def num_free(self) -> int:
        """Of :attr:`num_pages` those that new sequences could have."""
        return self.main.num_free

    def pages_needed(self, max_tokens: int) -> int:
        """Pages, of :attr:`num_pages`, for a sequence of so many tokens that shares none."""
        return self.main.limit(max_tokens)

    def fits(self, max_tokens: int) -> bool:
        """Whether a sequence of so many tokens can be opened now."""
        free = all(part.limit(max_tokens) <= part.num_free for part in self.parts)
        return free and max_tokens <= self.max_seq_len and self.num_sequences < self.max_sequences

    def sequence(
        self, max_tokens: int, prompt: Sequence[int] = (), *, salt: bytes = b"", whole_pages: bool = True
    ) -> PoolSequence:
        """Open a sequence, with pages for ``max_tokens`` tokens.

        Args:
            max_tokens: the most that it will have.
            prompt: ids that it will begin with. As many as others have shared are there at once, and at least one less
                than given: one has to be fed for there to be logits.
            salt: sequences share pages only with those of the same one.
            whole_pages: only whole pages are shared, which takes no copy. Else the rows of a page that begins alike
                are copied as well.

        Returns:
            a sequence that holds the shared tokens, and must be released.
        """
        with self.turn:
            self.check_opening(max_tokens)
            if len(prompt) > max_tokens:
                raise ContextError(f"the prompt has {len(prompt)} tokens; max_tokens of its sequence is {max_tokens}")
            known = prompt[: max(0, len(prompt) - 1)]
            chain, rest = self._beginning(known, salt, whole_pages)
            tables: list[PageTable] = []
            try:
                for part in self.parts:
                    part.prefix.use(chain)
                    tables.append(part.open(chain, max_tokens))
                length = len(chain) * PAGE_SIZE
                if rest:
                    before, behind = chain[-1] if chain else root(salt), known[length : length + rest]
                    parts = zip(self.parts, tables, strict=True)
                    length += min([part.copy_alike(table, length, before, behind) for part, table in parts])
            except BaseException:
                close(self, tables)
                raise
            made = PoolSequence(self, tables, max_tokens, prompt[:length], salt)
            if self.states and length:
                states = self.main.prefix.states(digests(made.ids, salt, last_page=True)[-1])
                if states is None:  # they went where pages were needed for the sequence itself
                    made.close()
                    return self.sequence(max_tokens, salt=salt)
                made.states = states
            return made

    def use_disk(self, disk: DiskCache, *, is_exact: bool = False) -> None:
        """Write what its sequences share to a disk cache, and let :meth:`fetch` read it.

        Args:
            is_exact: only what chunks of 128 tokens computed is read, with this MLX on this kind of device.
        """
        self.disk = PoolDisk(disk, self, is_exact=is_exact)

    def fetch(self, prompt: Sequence[int], *, salt: bytes = b"", whole_pages: bool = True, most: int) -> bool:
        """Read pages that a prompt begins with from disk, ``most`` of them at most, for :meth:`sequence` to share.

        Returns:
            whether there may be more to read.
        """
        if self.disk is None:
            return False
        with self.turn:
            ids, chain, first = self.on_disk(prompt, salt, whole_pages)
            for part in self.parts:
                part.prefix.use(chain)
            needed = [(part, number) for part in self.parts for number in range(first[part], len(chain))]
            missing = [(part, number) for part, number in needed if chain[number] not in part.prefix]
            for part, number in missing[:most]:
                own, before = ids[number * PAGE_SIZE : (number + 1) * PAGE_SIZE], [root(salt), *chain][number]
                held = self.disk.page(part, chain[number], len(own))
                if held is None:
                    return True  # it is gone by now, and with it some of the beginning
                if not part.take_in(chain[number], before, own, held):
                    return False
            mx.eval([layer.arrays for layer in self.layers])
            if len(missing) > most:
                return True
            if self.states and chain and self.main.prefix.states(chain[-1]) is None:
                if (states := self.disk.states(chain[-1])) is None:
                    return True
                self.main.prefix.keep(chain[-1], states)
            return False

    def on_disk(
        self, prompt: Sequence[int], salt: bytes, whole_pages: bool
    ) -> tuple[Sequence[int], list[bytes], dict[PagedLayers, int]]:
        """The longest beginning of a prompt, less its last token, that there is in pages here and on disk.

        Returns:
            its tokens, the digests of its pages, and of each part the number of the first page that is needed.
        """
        known = prompt[: max(0, len(prompt) - 1)]
        chain, rest = self._beginning(known, salt, whole_pages, self.disk)
        first = {part: len(chain) - len(part.seen(chain)) for part in self.parts}
        length = len(chain) * PAGE_SIZE
        if not (rest and self.states):
            return known[:length], chain, first
        end = extended(chain[-1] if chain else root(salt), known[length : length + rest])
        return known[: length + rest], [*chain, end], first

    def stored_after(self, ids: Sequence[int], salt: bytes) -> list[int]:
        """Tokens that are stored behind a text, of the page that was stored last; none: nothing is."""
        chain = digests(ids, salt)
        return list(self.main.prefix.stored_after(chain[-1] if chain else root(salt))[len(ids) % PAGE_SIZE :])

    def batch(self, sequences: Sequence[Any], rows: int | None = None) -> PoolBatch:
        """The cache of steps in which these sequences take part.

        Args:
            sequences: of this pool, at least one, none twice.
            rows: sequences that the steps' inputs have, those past the given ones as padding; None: no padding.
        """
        return PoolBatch(self, sequences, rows)

    def _beginning(
        self, known: Sequence[int], salt: bytes, whole_pages: bool, disk: PoolDisk | None = None
    ) -> tuple[list[bytes], int]:
        """What the pages of all layers hold of the beginning of a text, and those on ``disk``.

        Returns:
            the digests of its whole pages, and the number of tokens behind them.
        """
        chain = digests(known, salt)
        has = partial(has_page, disk)
        count = len(chain)
        for part in self.parts:
            if part.window is None:
                count = min(count, sum(1 for _ in takewhile(partial(has, part), chain)))
        for pages in range(count, -1, -1):
            before = chain[pages - 1] if pages else root(salt)
            windows = (part for part in self.parts if part.window is not None)
            if all(has(part, digest) for part in windows for digest in part.seen(chain[:pages])):
                rest = self._behind(before, known[pages * PAGE_SIZE : (pages + 1) * PAGE_SIZE], whole_pages, disk)
                if rest is not None:
                    return chain[:pages], rest
        return [], 0

    def _behind(self, before: bytes, ids: Sequence[int], whole_pages: bool, disk: PoolDisk | None) -> int | None:
        """How many of the tokens behind the whole pages of a text can be copied; None: nobody goes on there."""
        if not self.states:
            alike = 0 if whole_pages else self._alike(before, ids)
            return alike if alike >= FEWEST_COPIED else 0
        kept = self.main.prefix.kept_behind(before, ids)
        if disk is None:
            here = (n for n in kept if not n or (not whole_pages and self._alike(before, ids[:n]) == n))
            return next(here, None)
        for count in range(0 if whole_pages else len(ids), -1, -1):
            digest = extended(before, ids[:count]) if count else before
            pages = (has_page(disk, part, digest) for part in self.parts)
            if (count in kept or disk.has_states(digest)) and (not count or all(pages)):
                return count
        return None

    def _alike(self, before: bytes, ids: Sequence[int]) -> int:
        """How many of the tokens behind a text have rows in all layers."""
        return min(part.prefix.most_alike(before, ids)[1] for part in self.parts)


def has_page(disk: PoolDisk | None, part: PagedLayers, digest: bytes) -> bool:
    """Whether the page of some layers at the end of a text is in their index, or on disk."""
    return digest in part.prefix or (disk is not None and disk.has_page(part, digest))


def pool_bytes(
    formats: Sequence[LayerFormat],
    *,
    tokens: int,
    sequences: int,
    max_seq_len: int,
    prefill_step_size: int | None,
    checkpoints: int = 0,
) -> int:
    """:attr:`Pool.nbytes` of a pool with these arguments, which is not made."""
    total = 0
    for own in formats:
        _, rows = _size(own.window, tokens, sequences, prefill_step_size, checkpoints)
        stored = [*own.arrays(rows).values(), *own.tables().values(), *own.front_arrays]
        if own.window is not None and prefill_step_size is None:  # the rows that are kept beside
            stored += list(own.arrays(min(own.window, max_seq_len)).values()) * checkpoints
        if own.split_pairs is not None:
            stored.append(("F32", (2, len(own.split_pairs), max_seq_len)))  # cosines and sines
        total += sum(map(stored_bytes, stored))
    return total


def _size(window: int | None, tokens: int, sequences: int, step_size: int | None, checkpoints: int) -> tuple[int, int]:
    """Pages and rows of a layer: as many as the sequences can use of those that the tokens take, and checkpoints'."""
    num_pages = int(min(pages_for(tokens), sequences * window_pages(window, step_size or SLACK + 1)))
    if step_size is not None:
        num_pages += checkpoints * (1 if window is None else pages_for(window) + 1)
    rows = num_pages * PAGE_SIZE
    return num_pages, rows if step_size else min(rows, tokens)


def check_sizes(**sizes: int) -> None:
    """Raise a ValueError that names the first size that is no positive int."""
    for name, number in sizes.items():
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} is {number!r}; expected a positive int")


def sizes_alone(max_seq_len: int) -> dict[str, Any]:
    """The sizes of a pool for one sequence alone."""
    return {"tokens": max_seq_len, "sequences": 1, "max_seq_len": max_seq_len, "prefill_step_size": None}


def rows_alone(window: int | None, max_seq_len: int) -> int:
    """Rows of a layer in the cache of one sequence of so many tokens."""
    return _size(window, max_seq_len, 1, None, 0)[1]
