"""The memory of a pool, and what its sequences have in common."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from kvant.cache.identity import Identity
from kvant.cache.layer_format import SLACK, LayerFormat, State, describe_formats, stored_bytes
from kvant.cache.paged_layers import PagedLayers, PoolLayer, kernel_of, window_pages
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.errors import ContextError, SnapshotError
from kvant.operators.front import Front
from kvant.operators.rotary import Rotary
from kvant.sizes import format_bytes
from kvant.threads import Turn, check_process


class PoolState:
    """What the sequences of a pool have in common. All memory is allocated, and touched, at once; it never
    grows.

    A layer's arrays are those of PMX's dynamic batching: values (2, K, T, D') and scales (2, K, T, D/G),
    cache_mode 1 with pages of 128 rows, cache_layout 3, one layer. T is as many rows as all pages have.
    """

    page_size = PAGE_SIZE
    may_have_sinks: ClassVar[bool] = False  # whether attention may be given learned sinks
    # Whether the attention of each sequence is computed for it alone. If not, its logits change by rounding
    # with the lengths of the others, in steps of as many rows too.
    attends_apart = True
    states: Sequence[State] = ()  # what a sequence has of each layer that has a state in place of rows
    disk: Any = None  # a PoolDisk, where its pages and states are written, and read from; None: nowhere
    divided = False  # other ranks hold a part of the rows: a sequence takes no cache and gives none
    takes_back = True  # a step of a sequence may be committed in part, one of several sequences too
    made_for: object = None  # the config of the model that made it; None: not known
    rotary: Rotary | None = None  # how the model turns keys; None: not known
    layout = ""  # what a bridged model expects in its cache, as JSON; "": a decoder's

    def __init__(
        self,
        formats: Sequence[LayerFormat],  # of each layer, with its window
        fronts: Sequence[Front],  # of each layer; position j is at column j of its bias split's rotation
        *,
        tokens: int,  # of all sequences together; whole pages are made of them
        sequences: int,  # that can be open at once
        max_seq_len: int,  # tokens that a sequence can have
        prefill_step_size: int | None,  # new tokens of a sequence in one step, at most; None: any number
        # ends of texts that are kept, each in the pages that a window sees and one more
        checkpoints: int = 0,
        make_cache: Callable[[int], Any],  # makes a ModelCache for so many tokens, in the pool's format
        identity: Identity | None = None,  # of the model whose tokens it holds; None: not known
        kernels: str | None = None,  # as of CacheOptions; what the pool needs of the kernel runs once now
        dtype: mx.Dtype = mx.float16,  # of queries
        num_heads: int | None = None,  # H; None: not known
        # of the whole model, where formats are a rank's: pages count for all
        windows: Sequence[int | None] = (),
    ) -> None:
        """Allocate the pool.

        Without a ``prefill_step_size`` it is for one sequence, which shares no pages: it has as many rows as
        it has tokens, and of a window few more than are seen.
        """
        sizes = {"tokens": tokens, "sequences": sequences, "max_seq_len": max_seq_len}
        step_size = 1 if prefill_step_size is None else prefill_step_size
        check_sizes(**sizes, prefill_step_size=step_size)
        check_process()
        layers = [
            PoolLayer(own, front, *kernel_of(own, kernels, dtype, num_heads, self.may_have_sinks))
            for own, front in zip(formats, fronts, strict=True)
        ]
        parts = []
        # In the order of the layers; where none keeps rows, pages still count tokens.
        kinds = [(window, "quantized") for window in windows] or [(own.window, own.kind) for own in formats]
        for window, kind in dict.fromkeys(kinds) or [(None, "")]:
            of_part = [
                layer for layer in layers if (layer.format.window, layer.format.kind) == (window, kind)
            ]
            num_pages, rows = _size(window, tokens, sequences, prefill_step_size, checkpoints)
            for layer in of_part:
                layer.allocate(rows)
            parts.append(PagedLayers(window, of_part, num_pages, prefill_step_size or SLACK + 1, checkpoints))
        self.turn = Turn()  # held by the thread that computes through the pool
        self.layers = tuple(layers)  # of the model, in order
        self.saved: Sequence[PoolLayer | State] = self.layers  # the same, with its states among them
        self.parts = tuple(parts)  # the layers by the page tables that they share
        self.places = tuple((part, layer) for layer in layers for part in parts if layer in part.layers)
        # The layers that see all tokens; where all have a window, those with the widest.
        self.main = max(parts, key=lambda part: math.inf if part.window is None else part.window)
        self.num_pages = self.main.pages.num
        self.has_windows = any(part.window is not None for part in parts)  # pages move along with a sequence
        self.formats = list(formats)
        # Runs the fused kernel, for the layers that it takes; None: every layer is unfused.
        self.backend = next((layer.backend for layer in layers if layer.backend is not None), None)
        self.max_sequences, self.num_sequences = sequences, 0  # that can be open at once, and that are
        self.max_seq_len, self.checkpoints = max_seq_len, checkpoints
        self.alone = prefill_step_size is None  # it is for one sequence, which shares no pages
        self.prefill_step_size = prefill_step_size or sys.maxsize
        self.make_cache, self.identity = make_cache, identity

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
    def nbytes(self) -> int:
        """Bytes of all layers with their fronts, and of states: of every sequence and checkpoint."""
        states = sum(state.nbytes for state in self.states)
        return sum(layer.nbytes for layer in self.layers) + (self.max_sequences + self.checkpoints) * states

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


def _size(
    window: int | None, tokens: int, sequences: int, step_size: int | None, checkpoints: int
) -> tuple[int, int]:
    """Pages and rows of a layer: as many as the sequences can use of those that the tokens take, and
    checkpoints'.
    """
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
