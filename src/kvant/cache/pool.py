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
    """The memory of several sequences, and the steps that they take together. ``model.make_pool`` makes it.

    All memory is allocated and touched at once; it never grows. A layer's arrays are those of PMX's dynamic
    batching: values (2, K, T, D') and scales (2, K, T, D/G), cache_mode 1 with pages of 128 rows,
    cache_layout 3, one layer. T is the number of rows of all pages.

    A ``single`` pool is the memory of one conversation. Its only sequence stays open: opening it again goes
    back to the common prefix with the new prompt.
    """

    page_size = PAGE_SIZE
    may_have_sinks: ClassVar[bool] = False  # whether attention may pass learned sinks
    takes_back = True  # whether a step may be committed in part
    layout = ""  # the cache entries that a bridged model expects, as JSON; "" for a decoder

    def __init__(
        self,
        formats: Sequence[LayerFormat],  # of each layer, including its window
        # of each layer; position j is at column j of its bias split's rotation
        transforms: Sequence[KeyTransform],
        *,
        tokens: int,  # of all sequences together, rounded up to whole pages
        sequences: int,  # maximum number of open sequences
        max_seq_len: int,  # maximum number of tokens per sequence
        # maximum number of new tokens of a sequence in one step; a single pool takes any number
        prefill_step_size: int,
        single: bool = False,  # the memory of one conversation, without shared pages
        # maximum number of checkpoints, each with the pages that a window sees and one more
        checkpoints: int = 0,
        make_cache: Callable[[int], Any],  # makes a ModelCache for this many tokens, in the pool's format
        identity: Identity | None = None,  # of the model; None: unknown
        kernels: str | None = None,  # as in CacheOptions; the pool tries the kernel now
        dtype: mx.Dtype = mx.float16,  # of queries
        num_heads: int | None = None,  # H; None: unknown
        # of the whole model if formats are a rank's, because all ranks count the same pages
        windows: Sequence[int | None] = (),
        made_for: object = None,  # the config of the model that made it; None: unknown
        rotary: Rotary | None = None,  # how the model rotates keys; None: unknown
        # Whether each sequence's attention is computed separately. If not, the lengths of other sequences
        # change the rounding of its logits.
        attends_separately: bool = True,
        has_tails: bool = False,  # layers of the whole model may have an exact tail
        states: Sequence[State] = (),  # of a sequence, one per layer that has a state instead of rows
        divided: bool = False,  # other ranks have some of the rows, so sequences cannot be saved or loaded
    ) -> None:
        """Allocate the pool.

        A single pool has as many rows as tokens; layers with a window have few more than the window.
        """
        check_sizes(
            tokens=tokens, sequences=sequences, max_seq_len=max_seq_len, prefill_step_size=prefill_step_size
        )
        check_process()
        layers = [
            PoolLayer(each, transform, *kernel_of(each, kernels, dtype, num_heads, self.may_have_sinks))
            for each, transform in zip(formats, transforms, strict=True)
        ]
        groups: list[LayerGroup] = []
        # In the order of the layers; even if none stores rows, pages count tokens.
        kinds = [(window, "quantized") for window in windows] or [
            (each.window, each.kind) for each in formats
        ]
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
        self.saved: Sequence[PoolLayer | State] = self.layers  # the same, including states
        with_tail = [layer for layer in layers if layer.exact_arrays]
        self.tails: ExactTails | None = None  # the exact tails of its sequences
        if with_tail or (divided and has_tails):
            self.tails = ExactTails(with_tail, sequences, logs=divided and not single)
        self.groups = tuple(groups)  # the layers by the page tables that they share
        self.places = tuple((group, layer) for layer in layers for group in groups if layer in group.layers)
        # The layers that see all tokens, or those with the widest window.
        self.main = max(groups, key=lambda group: math.inf if group.window is None else group.window)
        self.num_pages = self.main.pages.num
        self.has_windows = any(group.window is not None for group in groups)
        self.formats = list(formats)
        # Runs the fused kernel, for the layers that it supports; None: all layers are unfused.
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
        # A single pool's weak references to its open sequence and its step. Strong ones would form a cycle,
        # and only the garbage collector would free the memory.
        self._conversation: Callable[[], PoolSequence | None] = lambda: None
        self._step: Callable[[], PoolBatch | None] = lambda: None
        self._is_torn = False  # whether allocating pages may have been interrupted

    def release(self) -> None:
        """Free the memory. The pool cannot be used afterwards."""
        for layer in self.layers:
            layer.release()

    def describe(self) -> str:
        """Return a line with its size and format."""
        kinds = []
        for group in self.groups:
            seen = "all tokens" if group.window is None else f"the last {group.window}"
            kinds.append(f"{group.pages.num} pages for {len(group.layers)} layers that see {seen}")
        checkpoints = f" and {self.checkpoints} checkpoints" if self.checkpoints else ""
        size = f"{format_bytes(self.nbytes)} at {describe_formats(self.formats)}"
        return f"{size} for {self.max_sequences} sequences{checkpoints}: {', '.join(kinds)}"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all layers and key transforms, and of every sequence's and checkpoint's states.

        Each checkpoint also has an exact tail.
        """
        states = sum(state.nbytes for state in self.states)
        tails = sum(stored_bytes(stored) for layer in self.layers for stored in layer.format.tail_pages(1))
        extra = (self.max_sequences + self.checkpoints) * states + self.checkpoints * tails
        return sum(layer.nbytes for layer in self.layers) + extra

    @property
    def num_free(self) -> int:
        """Return how many of :attr:`num_pages` new sequences could have."""
        return self.main.num_free

    def check_whole(self) -> None:
        """Raise a SnapshotError if other ranks have some of the rows."""
        if self.divided:
            raise SnapshotError(
                "the pool is divided over several ranks: its sequences can be neither saved nor loaded"
            )

    def check_opening(self, max_tokens: int) -> None:
        """Raise an error unless another sequence of this size can be opened."""
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens!r}; expected a positive int")
        if max_tokens > self.max_seq_len:
            raise ContextError(
                f"a sequence of {max_tokens} tokens is asked for; this pool allows at most {self.max_seq_len}"
            )
        if self.num_sequences == self.max_sequences:
            raise ContextError(f"the pool is for {self.max_sequences} sequences; all of them are in use")

    def pages_needed(self, max_tokens: int) -> int:
        """Return how many of :attr:`num_pages` a sequence needs that shares no pages."""
        return self.main.limit(max_tokens)

    def fits(self, max_tokens: int) -> bool:
        """Return whether a sequence of this many tokens can be opened now."""
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
        """Open a sequence with pages for up to ``max_tokens`` tokens. It must be released.

        The sequence of a single pool stays open: opening it again goes back to the common prefix with the
        prompt without its last token, or further back if windows and states require it.

        Args:
            prompt: ids that it will begin with. The sequence starts with those that others have shared,
                except the last one, which must be fed to get logits.
            salt: sequences share pages only with those of the same salt.
            whole_pages: share only whole pages, which takes no copy; if False, also copy the matching rows of
                the next page.
            is_exact: start only where the sequence equals one without shared pages; in a pool with exact
                tails that is at checkpoints.
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
                made.close()  # the sequence's own pages displaced the prefix that it would have started from
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
        """Return how many of the ``length`` stored tokens of a prompt a sequence starts with, and their tail.

        It starts at a checkpoint if there is one shortly before, or if ``is_exact``. Otherwise as many tokens
        are fed again as a tail has. The result is a multiple of ``unit``.
        """
        tail: TailCopy | None = self.main.prefix.checkpoints.last_tail(as_text(prompt[:length], salt))
        if tail is not None and tail.length % unit:
            tail = None
        exact_length = 0 if tail is None else tail.length
        if self.has_windows or self.states:  # these start only at checkpoints, so nothing can be fed again
            hashes, rest = self.prefixes.find(prompt[: exact_length + 1], salt, unit > 1)
            return (exact_length, tail) if exact_length == len(hashes) * PAGE_SIZE + rest else (0, None)
        again = max(0, length - TAIL_WINDOW) // unit * unit
        if is_exact or exact_length > again:
            return exact_length, tail
        if again % PAGE_SIZE < FEWEST_COPIED:
            again -= again % PAGE_SIZE
        return again, None

    @property
    def disk(self) -> PoolDisk | None:
        """Return the disk cache for its pages and states, or None."""
        return self.prefixes.disk

    def use_disk(self, disk: DiskCache, *, is_exact: bool = False) -> None:
        """Write shared prefixes to a disk cache, and let :attr:`prefixes` read it.

        ``is_exact``: read only prefixes computed in chunks of 128 tokens by this MLX on this kind of device.
        """
        self.prefixes.disk = PoolDisk(disk, self, is_exact=is_exact)

    def batch(self, sequences: Sequence[Any], rows: int | None = None) -> PoolBatch:
        """Return the cache for steps of these sequences, at least one, none twice.

        ``rows``: number of rows of the steps' inputs; rows past the sequences are padding. None: no padding.
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
        """Drop a single pool's uncommitted step."""
        step = self._step()
        if step is not None:
            step.end_step()

    @contextmanager
    def handing_out(self) -> Iterator[None]:
        """Guard code that allocates pages; a single pool recovers its free pages after an interruption."""
        conversation = self._conversation()
        if self._is_torn and conversation is not None:
            for group, table in zip(self.groups, conversation.tables, strict=True):
                group.pages.hold_only(table.pages)
        self._is_torn = True
        yield
        self._is_torn = False

    def shared_with(self, ids: Sequence[int]) -> int:
        """Return the length of a single pool's sequence if a text begins with all its tokens, or else 0."""
        conversation = self._conversation()
        stored_ids = [] if conversation is None else conversation.ids
        return len(stored_ids) if list(ids[: len(stored_ids)]) == stored_ids else 0
