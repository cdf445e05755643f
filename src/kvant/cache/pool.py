"""One reservation for the keys and values of all layers, in pages of 128 rows, and the sequences in it."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import ref

import mlx.core as mx

from kvant.cache.disk import DiskCache
from kvant.cache.exact_tail import ExactTails, TailCopy
from kvant.cache.identity import Identity
from kvant.cache.layer_format import LayerFormat, State, describe_formats, stored_bytes
from kvant.cache.layer_group import LayerGroup, PageTable, PoolLayer, kernel_of
from kvant.cache.pages import PAGE_SIZE
from kvant.cache.pool_batch import PoolBatch
from kvant.cache.pool_disk import PoolDisk
from kvant.cache.pool_sequence import PoolSequence, close
from kvant.cache.pool_size import check_sizes, pages_and_rows, pool_bytes, single_rows, single_sizes
from kvant.cache.prefix import as_text, digests, root
from kvant.cache.prefix_search import FEWEST_COPIED, PrefixSearch
from kvant.cache.window_layer_group import WindowLayerGroup
from kvant.errors import ContextError, SnapshotError
from kvant.operators.exact_rows import TAIL_WINDOW
from kvant.operators.key_transform import KeyTransform
from kvant.operators.rotary import Rotary
from kvant.sizes import format_bytes
from kvant.threads import ComputeLock, check_process

__all__ = ["Pool", "PoolSequence", "check_sizes", "pool_bytes", "single_rows", "single_sizes"]


class Pool:
    """Sequences of one memory, and the steps that they take together. ``model.make_pool`` makes it.

    All memory is allocated, and touched, at once; it never grows. A layer's arrays are those of PMX's dynamic
    batching: values (2, K, T, D') and scales (2, K, T, D/G), cache_mode 1 with pages of 128 rows,
    cache_layout 3, one layer. T is as many rows as all pages have.

    A ``single`` pool is the memory of one conversation. It has one sequence, which stays open: opening it
    again goes back to what it has in common with the new prompt.
    """

    page_size = PAGE_SIZE
    may_have_sinks: ClassVar[bool] = False  # whether attention may be given learned sinks
    takes_back = True  # a step may be committed in part, a step of several sequences too
    layout = ""  # what a bridged model expects in its cache, as JSON; "": a decoder's

    def __init__(
        self,
        formats: Sequence[LayerFormat],  # of each layer, with its window
        # of each layer; position j is at column j of its bias split's rotation
        transforms: Sequence[KeyTransform],
        *,
        tokens: int,  # of all sequences together; whole pages are made of them
        sequences: int,  # that can be open at once
        max_seq_len: int,  # tokens that a sequence can have
        # new tokens of a sequence in one step, at most; a single pool takes any number
        prefill_step_size: int,
        single: bool = False,  # it is the memory of one conversation, and shares no pages
        # ends of texts that are kept, each in the pages that a window sees and one more
        checkpoints: int = 0,
        make_cache: Callable[[int], Any],  # makes a ModelCache for so many tokens, in the pool's format
        identity: Identity | None = None,  # of the model whose tokens it holds; None: not known
        kernels: str | None = None,  # as of CacheOptions; what the pool needs of the kernel runs once now
        dtype: mx.Dtype = mx.float16,  # of queries
        num_heads: int | None = None,  # H; None: not known
        # of the whole model, where formats are a rank's: pages count for all
        windows: Sequence[int | None] = (),
        made_for: object = None,  # the config of the model that made it; None: not known
        rotary: Rotary | None = None,  # how the model rotates keys; None: not known
        # Whether each sequence's attention is computed by itself. If not, the lengths of the others change
        # the rounding of its logits.
        attends_separately: bool = True,
        has_tails: bool = False,  # layers of the whole model may have an exact tail
        states: Sequence[State] = (),  # of a sequence, one of each layer that has it in place of rows
        divided: bool = False,  # other ranks hold some of the rows: sequences can be neither saved nor loaded
    ) -> None:
        """Allocate the pool.

        A single pool has as many rows as tokens; through a window, few more than are seen.
        """
        check_sizes(
            tokens=tokens, sequences=sequences, max_seq_len=max_seq_len, prefill_step_size=prefill_step_size
        )
        check_process()
        layers = [
            PoolLayer(own, transform, *kernel_of(own, kernels, dtype, num_heads, self.may_have_sinks))
            for own, transform in zip(formats, transforms, strict=True)
        ]
        groups: list[LayerGroup] = []
        # In the order of the layers; where none keeps rows, pages still count tokens.
        kinds = [(window, "quantized") for window in windows] or [(own.window, own.kind) for own in formats]
        for window, kind in dict.fromkeys(kinds) or [(None, "")]:
            of_group = [
                layer for layer in layers if (layer.format.window, layer.format.kind) == (window, kind)
            ]
            num_pages, rows = pages_and_rows(
                window, tokens, sequences, prefill_step_size, checkpoints, single=single
            )
            for layer in of_group:
                layer.allocate(rows, sequences)
            logs_copies = divided and not single  # the other ranks copy the same pages
            if window is None:
                groups.append(LayerGroup(of_group, num_pages, checkpoints, logs_copies=logs_copies))
            else:
                groups.append(
                    WindowLayerGroup(
                        window, of_group, num_pages, prefill_step_size, checkpoints, logs_copies=logs_copies
                    )
                )
        self.lock = ComputeLock()  # held by the thread that computes through the pool
        self.layers = tuple(layers)  # of the model, in order
        self.saved: Sequence[PoolLayer | State] = self.layers  # the same, with its states among them
        with_tail = [layer for layer in layers if layer.exact_arrays]
        # The exact tails of its sequences; None: no layer has any.
        self.tails: ExactTails | None = None
        if with_tail or (divided and has_tails):
            self.tails = ExactTails(with_tail, sequences, logs=divided and not single)
        self.groups = tuple(groups)  # the layers by the page tables that they share
        self.places = tuple((group, layer) for layer in layers for group in groups if layer in group.layers)
        # The layers that see all tokens; where all have a window, those with the widest.
        self.main = max(groups, key=lambda group: math.inf if group.window is None else group.window)
        self.num_pages = self.main.pages.num
        # Whether pages move along with a sequence.
        self.has_windows = any(group.window is not None for group in groups)
        self.formats = list(formats)
        # Runs the fused kernel, for the layers that it takes; None: every layer is unfused.
        self.backend = next((layer.backend for layer in layers if layer.backend is not None), None)
        self.max_sequences = sequences  # that can be open at once
        self.num_sequences = 0  # that are open
        self.max_seq_len = max_seq_len
        self.checkpoints = 0 if single and divided else checkpoints
        self.single = single
        self.prefill_step_size = sys.maxsize if single else prefill_step_size
        self.make_cache = make_cache
        self.identity = identity
        self.made_for = made_for
        self.rotary = rotary
        self.attends_separately = attends_separately
        self.states = states
        self.divided = divided
        self.prefixes = PrefixSearch(self.groups, self.main, states, self.lock)
        # Weak references of a single pool to its open sequence and its step. Strong ones would form a cycle,
        # and only the garbage collector would free the memory.
        self._conversation: Callable[[], PoolSequence | None] = lambda: None
        self._step: Callable[[], PoolBatch | None] = lambda: None
        self._is_torn = False  # an interruption may have come while pages were handed out

    def release(self) -> None:
        """Give the memory back. The pool cannot be used after it."""
        for layer in self.layers:
            layer.release()

    def describe(self) -> str:
        """Its size and format, in a line."""
        kinds = []
        for group in self.groups:
            seen = "all tokens" if group.window is None else f"the last {group.window}"
            kinds.append(f"{group.pages.num} pages for {len(group.layers)} layers that see {seen}")
        kept = f" and {self.checkpoints} checkpoints" if self.checkpoints else ""
        size = f"{format_bytes(self.nbytes)} at {describe_formats(self.formats)}"
        return f"{size} for {self.max_sequences} sequences{kept}: {', '.join(kinds)}"

    @property
    def nbytes(self) -> int:
        """Bytes of all layers with their key transforms, and of states: of every sequence and checkpoint.

        A checkpoint has an exact tail of its own too.
        """
        states = sum(state.nbytes for state in self.states)
        tails = sum(stored_bytes(own) for layer in self.layers for own in layer.format.tail_pages(1))
        kept = (self.max_sequences + self.checkpoints) * states + self.checkpoints * tails
        return sum(layer.nbytes for layer in self.layers) + kept

    @property
    def num_free(self) -> int:
        """Of :attr:`num_pages` those that new sequences could have."""
        return self.main.num_free

    def check_whole(self) -> None:
        """Refuse what needs all rows."""
        if self.divided:
            raise SnapshotError(
                "the pool is divided over several ranks: its sequences take no cache and give none"
            )

    def check_opening(self, max_tokens: int) -> None:
        """Refuse a sequence that the pool is not made for, or one too many."""
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens!r}; expected a positive int")
        if max_tokens > self.max_seq_len:
            raise ContextError(
                f"a sequence of {max_tokens} tokens is asked for; one of this pool has at most "
                f"{self.max_seq_len}"
            )
        if self.num_sequences == self.max_sequences:
            raise ContextError(f"the pool is for {self.max_sequences} sequences; all of them are in use")

    def pages_needed(self, max_tokens: int) -> int:
        """Pages, of :attr:`num_pages`, for a sequence of so many tokens that shares none."""
        return self.main.limit(max_tokens)

    def fits(self, max_tokens: int) -> bool:
        """Whether a sequence of so many tokens can be opened now."""
        free = all(group.limit(max_tokens) <= group.num_free for group in self.groups)
        return free and max_tokens <= self.max_seq_len and self.num_sequences < self.max_sequences

    def sequence(
        self,
        max_tokens: int,
        prompt: Sequence[int] = (),
        *,
        salt: bytes = b"",
        whole_pages: bool = True,
        is_exact: bool = False,
    ) -> PoolSequence:
        """Open a sequence, with pages for ``max_tokens`` tokens, the most that it will have. It must be
        released.

        Args:
            prompt: ids that it will begin with. As many as others have shared are there at once, and at least
                one less than given: one has to be fed for there to be logits.
            salt: sequences share pages only with those of the same one.
            whole_pages: only whole pages are shared, which takes no copy. Else the rows of a page that begins
                alike are copied as well.
            is_exact: it begins only where it is what it would be without the others: of a pool with exact
                tails at checkpoints.

        The sequence of a single pool stays open: opened again, it goes back to what it has in common with the
        prompt less its last token, or as far before that as its windows and states allow.
        """
        if (conversation := self._conversation()) is not None:
            conversation.keep_common(prompt)
            if self.prefixes.read_into(conversation, prompt):
                conversation.go_back(conversation.length)
            return conversation
        with self.lock:
            self.check_opening(max_tokens)
            if len(prompt) > max_tokens:
                raise ContextError(
                    f"the prompt has {len(prompt)} tokens; max_tokens of its sequence is {max_tokens}"
                )
            page_hashes, rest = self.prefixes.find(prompt, salt, whole_pages)
            tail: TailCopy | None = None
            if self.tails is not None and (page_hashes or rest):
                length, tail = self._length_with_tail(
                    prompt,
                    len(page_hashes) * PAGE_SIZE + rest,
                    salt,
                    unit=PAGE_SIZE if whole_pages else 1,
                    is_exact=is_exact,
                )
                page_hashes = page_hashes[: length // PAGE_SIZE]
                rest = length % PAGE_SIZE
            tables: list[PageTable] = []
            try:
                for group in self.groups:
                    group.prefix.use(page_hashes)
                    tables.append(group.open(page_hashes, max_tokens, rest))
                length = len(page_hashes) * PAGE_SIZE
                if rest:
                    before = page_hashes[-1] if page_hashes else root(salt)
                    behind = prompt[length : length + rest]
                    groups = zip(self.groups, tables, strict=True)
                    length += min(
                        [group.copy_alike(table, length, before, behind) for group, table in groups]
                    )
            except BaseException:
                close(self, tables)
                raise
            made = PoolSequence(self, tables, max_tokens, prompt[:length], salt)
            states = None
            if self.states and length:
                states = self.main.prefix.checkpoints.states(digests(made.ids, salt, last_page=True)[-1])
            groups = zip(self.groups, tables, strict=True)
            if (states is None and self.states and length) or any(
                t.first > group.first_seen(length) for group, t in groups
            ):
                made.close()  # what it would go on from went where pages were needed for the sequence itself
                return self.sequence(max_tokens, salt=salt)
            if states is not None:
                made.states = states
            if tail is not None and tail.length == length:
                made.take_tail(tail)
            for group in self.groups if length and self.checkpoints else ():
                group.prefix.use_checkpoints(as_text(made.ids, salt), by_prompt=True)
            if self.single:
                self._conversation = ref(made)
            return made

    def _length_with_tail(
        self, prompt: Sequence[int], length: int, salt: bytes, *, unit: int, is_exact: bool
    ) -> tuple[int, TailCopy | None]:
        """Return with how many of the first ``length`` tokens of a prompt, which are stored, a sequence
        begins, and the exact rows of these.

        They are those up to a checkpoint, if it is not far before, or if the sequence has to be exactly what
        it would be without the others. Else as many tokens are fed again as a tail has. ``unit``: it is a
        multiple.
        """
        tail: TailCopy | None = self.main.prefix.checkpoints.last_tail(as_text(prompt[:length], salt))
        if tail is not None and tail.length % unit:
            tail = None
        kept = 0 if tail is None else tail.length
        if self.has_windows or self.states:  # nothing can be fed again: they begin at checkpoints alone
            hashes, rest = self.prefixes.find(prompt[: kept + 1], salt, unit > 1)
            return (kept, tail) if kept == len(hashes) * PAGE_SIZE + rest else (0, None)
        again = max(0, length - TAIL_WINDOW) // unit * unit
        if is_exact or kept > again:
            return kept, tail
        if again % PAGE_SIZE < FEWEST_COPIED:
            again -= again % PAGE_SIZE
        return again, None

    @property
    def disk(self) -> PoolDisk | None:
        """Where its pages and states are written, and read from; None: nowhere."""
        return self.prefixes.disk

    def use_disk(self, disk: DiskCache, *, is_exact: bool = False) -> None:
        """Write what its sequences share to a disk cache, and let :attr:`prefixes` read it.

        ``is_exact``: only what chunks of 128 tokens computed is read, with this MLX on this kind of device.
        """
        self.prefixes.disk = PoolDisk(disk, self, is_exact=is_exact)

    def batch(self, sequences: Sequence[Any], rows: int | None = None) -> PoolBatch:
        """The cache of steps in which sequences of this pool take part, at least one, none twice.

        ``rows``: sequences that the steps' inputs have, those past the given ones as padding; None: no
            padding.
        """
        step = self._step()
        if step is not None and tuple(sequences) == step.sequences:
            return step
        step = self._new_batch(sequences, rows)
        if self.single:
            self._step = ref(step)
        return step

    def _new_batch(self, sequences: Sequence[PoolSequence], rows: int | None) -> PoolBatch:
        return PoolBatch(self, sequences, rows)

    def drop_step(self) -> None:
        """Drop a step of a single pool that was begun and not committed."""
        step = self._step()
        if step is not None:
            step.end_step()

    @contextmanager
    def handing_out(self) -> Iterator[None]:
        """Hand out pages within. If that was interrupted, a single pool finds the free ones again here."""
        conversation = self._conversation()
        if self._is_torn and conversation is not None:
            for group, table in zip(self.groups, conversation.tables, strict=True):
                group.pages.hold_only(table.pages)
        self._is_torn = True
        yield
        self._is_torn = False

    def shared_with(self, ids: Sequence[int]) -> int:
        """Return how many tokens a single pool's sequence holds if a text begins with all of them, else 0."""
        conversation = self._conversation()
        held = [] if conversation is None else conversation.ids
        return len(held) if list(ids[: len(held)]) == held else 0
