"""The arrays of a pool's layers, and the page tables of sequences."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from kvant.cache.layer_format import DTYPES, LayerFormat
from kvant.cache.pages import PAGE_SIZE, Pages, pages_for
from kvant.cache.prefix import PrefixIndex
from kvant.errors import ContextError
from kvant.operators.dispatch import resolve
from kvant.operators.kernels.launch import Backend
from kvant.operators.key_transform import KeyTransform
from kvant.operators.probe import KernelUse


@dataclass(slots=True)
class PageTable:
    """The pages of one sequence in the layers that share them, in the order of positions.

    Attributes:
        first: the first position whose row is still stored; 0 unless pages move.
        pages: the first one contains position ``first``.
        limit: the most pages that it may have at once.
        moves: whether its pages follow the window; if not, they store all tokens.
    """

    first: int
    pages: list[int]
    limit: int
    moves: bool = False

    @property
    def start(self) -> int:
        """Return the position of the first row of the first page."""
        return self.first // PAGE_SIZE * PAGE_SIZE


@dataclass(slots=True, eq=False)
class PoolLayer:
    """A layer's rows.

    Attributes:
        format: the format of its tokens.
        transform: applied to keys before they are stored, and to queries before they attend.
        use: how it calls the fused kernel, if that is used.
        backend: runs the fused kernel for steps of up to 8 new tokens per sequence; None: all steps are
            unfused.
        arrays: values (2, K, T, D') and, if quantized, scales (2, K, T, D/G). Nothing else may reference
            them or a slice of them, or MLX copies the whole array at the next append.
        exact_arrays: one array (2, K, rows, D) of floats for exact tails, or none. The same rule applies.
    """

    format: LayerFormat
    transform: KeyTransform
    use: KernelUse
    backend: Backend | None = None
    arrays: list[mx.array] = field(default_factory=list)
    exact_arrays: list[mx.array] = field(default_factory=list)
    operands: dict[str, Any] = field(init=False)  # bits and group by the operators' names

    def __post_init__(self) -> None:
        self.operands = self.format.operands

    def allocate(self, rows: int, sequences: int) -> None:
        """Allocate and touch the arrays, which never grow, with tails for this many sequences."""
        stored = self.format.arrays(rows).values()
        self.arrays.extend(mx.zeros(shape, DTYPES[dtype]) for dtype, shape in stored)
        tails = self.format.tail_pages(sequences)
        self.exact_arrays.extend(mx.zeros(shape, DTYPES[dtype]) for dtype, shape in tails)
        mx.eval(self.arrays, self.exact_arrays, self.transform.arrays)

    def release(self) -> None:
        """Free the memory."""
        self.arrays.clear()
        self.exact_arrays.clear()

    def watch(self, transform: KeyTransform) -> None:
        """Replace the transform by one that observes queries and keys, before any token is fed."""
        self.transform = transform

    def tables(self) -> dict[str, mx.array]:
        """Return the split-off biases, by their names in a snapshot."""
        split = self.transform.bias_split
        return {} if split is None else {"key_bias": split.key_bias, "value_bias": split.value_bias}

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays and of the key transform."""
        return sum(array.nbytes for array in (*self.arrays, *self.exact_arrays, *self.transform.arrays))


class LayerGroup:
    """Layers that share page tables; in this class, those that see all tokens.

    A new sequence gets all its pages at once if they are free. The missing ones are promised: until the
    sequence writes there, they may store prefixes that no sequence reads. There are never more promises than
    pages, so a promised page is always available.
    :class:`~kvant.cache.window_layer_group.WindowLayerGroup` is for the layers of one window width.

    Attributes:
        window: tokens that a query sees, including its own; None: all.
        in_chunks: whether a query sees its own chunk of ``window`` tokens, as in Llama 4.
        layers: the layers' rows.
        pages: the reference counts of the pages, which all these layers have.
        prefix: the pages that new sequences may share.
        promised: pages that sequences may still request.
        is_fused: whether the fused kernel runs steps of a few tokens.
    """

    window: int | None = None
    in_chunks = False

    def __init__(
        self, layers: Sequence[PoolLayer], num_pages: int, checkpoints: int = 0, *, logs_copies: bool = False
    ) -> None:
        """``checkpoints``: of the prefix index. ``logs_copies``: record copies for :meth:`take_copies`."""
        self.layers = tuple(layers)
        self.pages = Pages(num_pages)
        self.prefix = PrefixIndex(self.pages, checkpoints)
        self.promised = 0
        self._logs_copies = logs_copies
        self._copied: list[tuple[int, int, int]] = []
        self.is_fused = any(layer.backend is not None for layer in layers)

    def limit(self, max_tokens: int) -> int:
        """Return how many pages a sequence may have at once."""
        return pages_for(max_tokens)

    @property
    def num_free(self) -> int:
        """Return how many pages a new sequence could have, including those that only the index references."""
        return self._room

    @property
    def _room(self) -> int:
        """Return how many pages can be allocated now."""
        return self.pages.num_free + self.prefix.num_idle - self.promised

    def first_seen(self, length: int) -> int:
        """Return the first position that the query at position ``length`` sees."""
        return 0

    def first_read(self, length: int) -> int:
        """Return the first position to read for the query at position ``length``."""
        return self.first_seen(length)

    def seen(self, page_hashes: Sequence[bytes], rest: int = 0) -> Sequence[bytes]:
        """Return the hashes of those pages of a text that the token ``rest`` tokens after them sees."""
        return page_hashes[self.first_seen(len(page_hashes) * PAGE_SIZE + rest) // PAGE_SIZE :]

    def oldest_length(self, table: PageTable) -> int:
        """Return the shortest length above 0 that a table has the rows to go back to."""
        return 0

    def take_in(
        self, digest: bytes, before: bytes, ids: Sequence[int], layer_rows: Sequence[mx.array]
    ) -> bool:
        """Put a page with these :meth:`page_rows` into the index; return whether there was room."""
        if self._room < 1:
            return False
        (page,) = self._take(1)
        self.put_page(page, layer_rows)
        self.prefix.put(digest, page, before, ids)
        self.pages.release([page])
        return True

    def open(self, page_hashes: Sequence[bytes], max_tokens: int, rest: int = 0) -> PageTable:
        """Return a table for ``max_tokens`` tokens that shares the pages with these hashes.

        ``rest``: tokens after them that will be copied.
        """
        seen = self.seen(page_hashes, rest)
        table = self._table(max_tokens, (len(page_hashes) - len(seen)) * PAGE_SIZE, self.prefix.hold(seen))
        return self._reserve(table, max_tokens)

    def fork(self, table: PageTable, length: int, max_tokens: int) -> PageTable:
        """Return a table that shares whole pages with another, for a sequence of the same ``length`` tokens.

        A partial last page is copied at once, because both sequences will write there.
        """
        whole = (length - table.start) // PAGE_SIZE
        rest = length % PAGE_SIZE
        self.pages.share(table.pages[:whole])
        made = self._reserve(self._table(max_tokens, table.first, table.pages[:whole]), max_tokens)
        if rest:
            self._extend(made, length)
            self.copy(table.pages[whole], made.pages[whole], rest)
        return made

    def copy_alike(self, table: PageTable, length: int, before: bytes, ids: Sequence[int]) -> int:
        """Copy rows after the first ``length`` tokens (whole pages) from a page that begins with ``ids``.

        ``before``: the hash of the text so far. Returns how many of the tokens ``ids`` were copied.
        """
        page, count = self.prefix.most_alike(before, ids)
        if count:
            self._extend(table, length + count)
            self.copy(page, table.pages[(length - table.start) // PAGE_SIZE], count)
        return count

    def close(self, table: PageTable) -> None:
        """Release a table's pages."""
        self.promised -= self._missing(table)
        self.pages.release(table.pages)
        table.pages = []
        table.limit = 0

    def go_back(self, table: PageTable, length: int) -> None:
        """Shorten a table to ``length`` tokens; here nothing to do, as new tokens overwrite later rows."""

    def begin_at(self, table: PageTable, first: int, length: int) -> None:
        """Allocate pages of an empty table for ``length`` tokens; rows from ``first`` on will be written."""
        if first:
            raise ValueError(
                f"tokens before {first} are forgotten; a cache without a window needs all of them"
            )
        self.make_room([table], [0], length)

    def must_defer(self, table: PageTable, length: int, new_tokens: int) -> bool:
        """Return whether new tokens would overwrite rows that they, or tokens in their place, see."""
        return False

    def advance(self, table: PageTable, start: int, end: int) -> None:
        """Allocate pages for positions ``start`` to ``end``."""
        self._extend(table, end)

    def make_room(self, tables: Sequence[PageTable], lengths: Sequence[int], new_tokens: int) -> None:
        """Give each table unshared pages for new tokens after ``lengths``; copy shared pages."""
        for table, length in zip(tables, lengths, strict=True):
            self.advance(table, length, length + new_tokens)
        if not self.pages.num_shared:
            return
        written = [
            (table, number, max(0, length - table.start - number * PAGE_SIZE))
            for table, length in zip(tables, lengths, strict=True)
            for number in range(
                (length - table.start) // PAGE_SIZE, pages_for(length + new_tokens - table.start)
            )
        ]
        counts = Counter(table.pages[number] for table, number, _ in written)
        shared = [page for page in counts if self.pages.refcount(page) > 1]
        if not shared:
            return
        if self._copies(counts, shared) > self._room:
            for page in shared:  # a page that is only shared with the index becomes unshared
                self.prefix.forget(page)
        if (needed := self._copies(counts, shared)) > self._room:
            raise ContextError(
                f"{needed} shared pages need a copy to be written; {self._room} of {self.pages.num} pages "
                f"are free"
            )
        for table, number, rows in written:
            page = table.pages[number]
            if self.pages.refcount(page) > 1:
                (fresh,) = self._take(1)
                if rows:
                    self.copy(page, fresh, rows)
                table.pages[number] = fresh
                self.pages.release([page])

    def _table(self, max_tokens: int, first: int = 0, pages: Sequence[int] = ()) -> PageTable:
        return PageTable(first, [*pages], self.limit(max_tokens))

    def _extend(self, table: PageTable, end: int) -> None:
        """Allocate the missing pages of positions up to ``end``."""
        missing = max(0, pages_for(end - table.start) - len(table.pages))
        table.pages += self._take(missing)
        self.promised -= missing

    def _missing(self, table: PageTable) -> int:
        """Return how many pages are promised to a table."""
        return table.limit - len(table.pages)

    def _reserve(self, table: PageTable, max_tokens: int) -> PageTable:
        """Promise a new table its pages, and allocate those that are free."""
        self._promise(table, max_tokens)
        self._extend(
            table, table.start + min(len(table.pages) + self.pages.num_free, table.limit) * PAGE_SIZE
        )
        return table

    def _promise(self, table: PageTable, max_tokens: int) -> None:
        """Promise a new table its pages; if there are too few, release those that it has, and raise."""
        needed = self._missing(table)
        if needed > self.num_free:
            free = self.num_free
            self.pages.release(table.pages)
            raise ContextError(
                f"{max_tokens} tokens need {needed} more pages of {PAGE_SIZE}; {free} of {self.pages.num} "
                f"are free"
            )
        self.promised += needed

    def _take(self, count: int) -> list[int]:
        if count > self.pages.num_free:
            self.prefix.give_up(count - self.pages.num_free)
        return self.pages.allocate(count)

    def _copies(self, counts: Counter[int], shared: Sequence[int]) -> int:
        """Return how many pages writers of shared pages need: the last user of a page keeps it."""
        return sum(min(counts[page], self.pages.refcount(page) - 1) for page in shared)

    def copy(self, page: int, to: int, rows: int) -> None:
        """Copy the first rows of a page to another one, in all layers."""
        if self._logs_copies:
            self._copied.append((page, to, rows))
        layer_rows = self.page_rows(page, rows)
        mx.eval(layer_rows)  # before the write: MLX would copy the whole array for it
        self.put_page(to, layer_rows)

    def take_copies(self) -> list[tuple[int, int, int]]:
        """Return (from page, to page, rows) of each copy since the last call, if copies are recorded."""
        copied = self._copied
        self._copied = []
        return copied

    def page_rows(self, page: int, rows: int) -> list[mx.array]:
        """Return copies of the first rows of a page, for each array of each layer."""
        first = page * PAGE_SIZE
        return [
            mx.contiguous(array[:, :, first : first + rows])
            for layer in self.layers
            for array in layer.arrays
        ]

    def put_page(self, page: int, layer_rows: Sequence[mx.array]) -> None:
        """Write the result of :meth:`page_rows` to a page."""
        first = page * PAGE_SIZE
        arrays = [array for layer in self.layers for array in layer.arrays]
        for array, rows in zip(arrays, layer_rows, strict=True):
            array[:, :, first : first + rows.shape[2]] = rows


def kernel_of(
    layer: LayerFormat, kernels: str | None, dtype: mx.Dtype, num_heads: int | None, may_have_sinks: bool
) -> tuple[KernelUse, Backend | None]:
    """Return how a layer calls the fused kernel, and its backend or None. Arguments are those of Pool."""
    use = KernelUse(
        layer.head_dim,
        layer.value_head_dim,
        dtype,
        layer.kv_bits,
        layer.kv_group_size,
        DTYPES[layer.scale_dtype or "F16"],
        None if num_heads is None else num_heads // layer.num_kv_heads,
        None if layer.split_pairs is None else len(layer.split_pairs),
        mask=layer.kind == "chunks",  # the model passes one
        sinks=may_have_sinks,
        window=None if layer.kind == "chunks" else layer.window,
        value_bit=layer.value_bits,
        tail_dtype=DTYPES[layer.tail_dtype] if layer.tail_dtype else None,
    )
    return use, resolve(kernels, use.unsupported_reason, [use])
