"""Prompt caches for mlx-lm's own loops and batches, in kvant's memory.

R sequences, N new tokens each, possibly padded on the right, H query heads, K kv heads, D head_dim.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakSet, ref

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from kvant.bridge import hook
from kvant.bridge.layers import BridgedLayer, Mask, StepRows, padded_mask
from kvant.bridge.pool import pool_needs, reserve
from kvant.bridge.probe import Attention, Model, caches_of, leaves_of, probe
from kvant.cache import ModelCache
from kvant.cache.layer_format import DTYPES, State
from kvant.cache.model import NotSaved
from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions
from kvant.cache.pool import single_sizes
from kvant.models.caches import check_memory
from kvant.operators.paged_rows import PagedRows

Fetched = tuple[mx.array, mx.array]


def make_prompt_cache(model: Model, max_kv_size: int, options: CacheOptions = DEFAULT_OPTIONS) -> list[Any]:
    """Return caches for a model of mlx-lm; see :func:`kvant.make_prompt_cache`.

    ``mlx_lm.generate(model, tokenizer, prompt, prompt_cache=kvant.make_prompt_cache(model, 4096))``

    The states of linear and convolution layers stay mlx-lm's. kvant computes attention to the cache's tokens
    if that is faster, and mlx-lm everything else.

    Returns:
        one cache for each that the model's ``make_cache`` returns.
    """
    if hasattr(model, "check_cache") or not (hasattr(model, "layers") or hasattr(model, "make_cache")):
        raise ValueError(
            f"model is a {type(model).__name__}; expected mlx-lm's own. A model of kvant.load has make_cache"
        )
    entries = probe(model)
    check_memory(max_kv_size, sum(pool_needs(entries, single_sizes(max_kv_size), options)))
    states = leaves_of(entries, State)
    sequence = SequenceLayers()

    def one(leaf: Attention | State) -> Any:
        if isinstance(leaf, State):
            return ArraysCache(len(leaf.shapes))

        layer_options = options.of_layer(len(sequence.caches))

        def made(tokens: int) -> ModelCache:
            # The pool is passed the states too: with any, only all tokens can be trimmed.
            sizes = single_sizes(tokens)
            dtype = DTYPES[leaf.dtype]
            return ModelCache(reserve([leaf, *states], sizes, layer_options, dtype=dtype, make_cache=made))

        kind = MergedLayer if leaf.chunk is None else PromptCacheLayer
        return kind(made(max_kv_size), sequence)

    return caches_of(entries, one)


@dataclass(eq=False, slots=True, weakref_slot=True)
class SequenceLayers:
    """The state that the layers of one sequence share."""

    # of all layers: a trim must be possible in each of them
    caches: list[ModelCache] = field(default_factory=list)
    # The step's masks by position and new tokens: a model may pass one layer's mask to another layer.
    masks: dict[tuple[int, int], dict[tuple[int | None, int], mx.array]] = field(default_factory=dict)
    # The same for a batch whose first sequence this is, by the positions of all its sequences.
    joint_masks: dict[tuple[tuple[int, ...], ...], dict[int | None, mx.array]] = field(default_factory=dict)
    # Returns the last copy, with the layers copied so far; None: it no longer exists.
    copy: "Callable[[], SequenceLayers | None]" = lambda: None


class PromptCacheLayer(BridgedLayer):
    """A layer's keys and values for mlx-lm's loops, where every append is committed at once.

    A step begins with its mask or its tokens. A copy shares memory until either of the two changes.
    """

    def __init__(
        self, cache: ModelCache, sequence: SequenceLayers, holders: "WeakSet[PromptCacheLayer] | None" = None
    ) -> None:
        """Add a layer to a sequence. ``cache`` has one layer; ``holders``: the copies that share it."""
        self.sequence = sequence
        self._place = len(sequence.caches)
        sequence.caches.append(cache)
        self._holders: WeakSet[PromptCacheLayer] = WeakSet() if holders is None else holders
        self._hold(cache)

    def _hold(self, cache: ModelCache) -> None:
        self._cache = self.sequence.caches[self._place] = cache
        self._holders.add(self)
        group = cache.pool.groups[0]
        none = StepRows(PagedRows(None, [[]], [0], group.window), group.window, (cache.offset,), 0)
        super().__init__(cache.batch.deferred, group, cache.pool.layers[0], none)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PromptCacheLayer":
        """Copy the layer as a part of a copy of all layers."""
        return type(self)(
            self._cache, memo.setdefault(id(self.sequence), SequenceLayers()), holders=self._holders
        )

    def copied(self) -> Self:
        """Copy the layer. Layers that are copied in order become one sequence."""
        sequence = self.sequence.copy()
        if sequence is None or len(sequence.caches) != self._place:
            sequence = SequenceLayers()
            self.sequence.copy = ref(sequence)  # weak: its layers own the reservation
        return type(self)(self._cache, sequence, holders=self._holders)

    def _copy_if_shared(self) -> None:
        """Before a change, stop sharing memory with copies."""
        if len(self._holders) > 1:
            copy = self._cache.fork()  # if this fails, the memory is still shared
            self._holders.discard(self)
            self._holders = WeakSet()
            self._hold(copy)

    @property
    def max_seq_len(self) -> int:
        """Tokens that are reserved."""
        return self._cache.max_seq_len

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return self.layer.nbytes

    @property
    def state(self) -> list[object]:
        """The arrays that mlx-lm evaluates."""
        deferred = self._cache.batch.deferred.arrays
        return [NotSaved(), *self.layer.arrays, *self.layer.exact_arrays, *deferred]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (1, K, S, D) keys and (1, K, S, Dv) values; see :class:`BridgedLayer`."""
        self._copy_if_shared()
        self._begin_for(keys.shape[2])
        fetched = super().update_and_fetch(keys, values)
        self._cache.batch.deferred.commit([keys.shape[2]])
        self._cache.sequence.commit([0] * keys.shape[2])  # deferred writes happen before the next step
        return fetched

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask of N new tokens: "causal", None or a boolean array."""
        self._copy_if_shared()
        self._begin_for(N)
        return super().make_mask(N, return_array, window_size)

    @property
    def keys(self) -> mx.array:
        """The array with the keys. A model may assign it after making it depend on other arrays."""
        return self.layer.arrays[0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.layer.arrays[0] = array

    def size(self) -> int:
        """Return the number of tokens so far."""
        return self._cache.offset

    def empty(self) -> bool:
        """Return whether the cache has no token."""
        return not self.size()

    def is_trimmable(self) -> bool:
        """Return whether all layers can trim a token."""
        length = max(0, self.size() - 1)
        return all(cache.can_trim_to(length) for cache in self.sequence.caches)

    def trim(self, num_tokens: int) -> int:
        """Remove up to ``num_tokens`` last tokens. Return how many were removed."""
        length = max(0, self.size() - num_tokens)
        for cache in self.sequence.caches:
            if not cache.can_trim_to(length):
                cache.trim_to(length)  # raises the reason
        self._copy_if_shared()
        removed = self._cache.trim(num_tokens)
        self.offset = self.size()
        return removed

    def _begin_for(self, tokens: int) -> None:
        """Begin a step of ``tokens`` new tokens unless it has begun."""
        if not self.appended and self._cache.batch.step is not None and self.step.new_tokens == tokens:
            return
        self._cache.batch.begin(mx.zeros((1, tokens), mx.int32))
        place = self._cache.offset, tokens
        masks = self.sequence.masks
        if place not in masks:
            masks.clear()
        step = StepRows.of(self._cache.batch, self.group, tokens)
        step.masks = masks.setdefault(place, step.masks)
        self._begin(step)


class BatchLayer:
    """Replaces mlx-lm's ``BatchKVCache``: sequences join and leave without copying the others.

    As there, a sequence's tokens are right-aligned in fetched arrays (R, K, T, D).
    """

    def __init__(self, rows: Sequence[PromptCacheLayer]) -> None:
        self.rows = [*rows]  # the layer of each sequence
        # tokens of each row that are not padding and still to come; None: no padding
        self._left: list[int] | None = None
        self._fetched: list[Fetched | None] = []  # of each row, in the last step
        self._joint: Fetched | None = None  # the same as one array, if layers share it

    @classmethod
    def merge(cls, layers: Sequence[PromptCacheLayer]) -> "BatchLayer":
        """Return a batch of copies of several sequences' layers."""
        return cls([layer.copied() for layer in layers])

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchLayer":
        made = BatchLayer(copy.deepcopy(self.rows, memo))
        made._left = self._left
        return made

    @property
    def offset(self) -> mx.array:
        """Tokens so far, (R,)."""
        return mx.array([row.size() for row in self.rows])

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return sum(row.nbytes for row in self.rows)

    @property
    def state(self) -> list[object]:
        """The arrays that mlx-lm evaluates."""
        return [row.state for row in self.rows]

    @property
    def keys(self) -> mx.array:
        """The array with a row's keys; see :attr:`PromptCacheLayer.keys`."""
        return self.rows[0].keys

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.rows[0].keys = array

    @property
    def values(self) -> mx.array:
        """An array whose evaluation evaluates the last append of every row."""
        arrays = [row.values for row in self.rows]
        made: mx.array = mx.depends(arrays[:1], arrays[1:])[0]
        return made

    @values.setter
    def values(self, array: mx.array) -> None:
        self.rows[0].values = array

    def size(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return max(row.size() for row in self.rows)

    def empty(self) -> bool:
        """Return whether no sequence has a token."""
        return not self.size()

    def prepare(
        self, *, lengths: Sequence[int], right_padding: object = None, left_padding: object = None
    ) -> None:
        """Set how many of the next tokens of each row are not padding, until :meth:`finalize`."""
        if left_padding is not None:
            raise ValueError(
                "left_padding is given; expected right_padding: kvant's rows do not store padding"
            )
        self._left = [*lengths]

    def finalize(self) -> None:
        """End the padding: all later tokens count."""
        self._left = None

    def filter(self, indices: Any) -> None:
        """Keep the rows with these indices, in this order."""
        order = [int(i) for i in indices]
        self.rows = [self.rows[i] for i in order]
        self._left = None if self._left is None else [self._left[i] for i in order]
        self._fetched = []
        self._joint = None

    def extend(self, other: "BatchLayer") -> None:
        """Append another batch's rows."""
        self.rows += other.rows

    def extract(self, index: int) -> PromptCacheLayer:
        """Return a copy of one sequence's layer."""
        return self.rows[index].copied()

    def is_trimmable(self) -> bool:
        """Return whether every row can trim a token."""
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, num_tokens: int) -> int:
        """Remove the last tokens of every row. Return the most that a row lost."""
        return max(row.trim(num_tokens) for row in self.rows)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return which of the tokens that will be fetched each new one sees: boolean (R, 1, N, T)."""
        counts = self._counts(N)
        lengths = [row.size() for row in self.rows]
        masks = self.rows[0].sequence.joint_masks
        place = (tuple(lengths), tuple(counts), (N,))
        if place not in masks:
            masks.clear()
        # A row whose reservation fits in the window has none; the window hides nothing from it.
        window = window_size or min((row.group.window for row in self.rows if row.group.window), default=None)
        if window not in masks.setdefault(place, {}):
            first = [row.group.first_read(length) for row, length in zip(self.rows, lengths, strict=True)]
            read = zip(lengths, first, counts, strict=True)
            T = max(length + count - start if count else 0 for length, start, count in read)
            masks[place][window] = padded_mask(lengths, first, counts, N, T, window)
        return masks[place][window]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Fetched:
        """Append (R, K, N, D) keys and (R, K, N, Dv) values.

        Returns:
            all read tokens as lazy arrays (R, K, T, D) and (R, K, T, Dv), padded with zeros in front.
        """
        if keys.shape[0] != len(self.rows):
            raise ValueError(f"keys of {keys.shape[0]} sequences; the batch has {len(self.rows)}")
        self._fetched = []  # a reference to the old arrays would make the append copy the rows' memory
        self._joint = None
        counts = self._counts(keys.shape[2])
        for b, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            key = keys[b : b + 1, :, :count]
            value = key if values is keys else values[b : b + 1, :, :count]
            self._fetched.append(row.update_and_fetch(key, value) if count else None)
        if self._left is not None:
            self._left = [left - count for left, count in zip(self._left, counts, strict=True)]
        key, value = (_stacked([each and each[n] for each in self._fetched]) for n in (0, 1))
        fetched = key, key if values is keys else value
        if self.rows[0].layer.format.shared:
            self._joint = fetched
        hook.remember(self, *fetched)
        return fetched

    def keys_and_values(self) -> Fetched:
        """Return what was fetched in this step, for layers that share it."""
        if self._joint is None:
            raise RuntimeError("keys and values are requested before any were fetched in this step")
        return self._joint

    def attend_fetched(
        self, query: mx.array, key: mx.array, value: mx.array, *, mask: Any, **options: Any
    ) -> mx.array | None:
        """Attend from queries (R, H, N, D) to each row's tokens, or return None for an unsupported mask."""
        N = query.shape[2]
        outputs = []
        made = self.rows[0].sequence.joint_masks.values()
        known = [window for masks in made for window, each in masks.items() if each is mask]
        if not known:
            if not isinstance(mask, mx.array) or mask.ndim < 4:
                return None
            mask = mx.broadcast_to(mask, (len(self.rows), *mask.shape[1:]))
        for b, (row, fetched) in enumerate(zip(self.rows, self._fetched, strict=True)):
            if fetched is None:
                outputs.append(mx.zeros((1, *query.shape[1:3], value.shape[3]), query.dtype))
                continue
            count = row.step.new_tokens
            T = fetched[0].shape[2]
            if known:  # the equivalent mask of the row's step
                shown = BridgedLayer.make_mask(row, count, window_size=known[0])
            else:
                shown = mask[b : b + 1, :, :count, mask.shape[3] - T :]
            output = hook.attention(query[b : b + 1, :, :count], *fetched, None, mask=shown, **options)
            outputs.append(mx.pad(output, [(0, 0), (0, 0), (0, N - count), (0, 0)]) if count < N else output)
        return mx.concatenate(outputs)

    def _counts(self, N: int) -> list[int]:
        """Return how many of N new tokens of each row are not padding."""
        return [N] * len(self.rows) if self._left is None else [min(N, max(0, left)) for left in self._left]


class MergedLayer(PromptCacheLayer):
    """A layer that mlx-lm's batches can merge. Layers with chunks cannot: a batch has no mask for them."""

    merge = BatchLayer.merge


def _stacked(each: Sequence[mx.array | None]) -> mx.array:
    """Stack arrays (1, K, up to T, D) to (R, K, T, D), padded with zeros in front; None is all zeros."""
    known = [array for array in each if array is not None]
    T = max(array.shape[2] for array in known)
    empty = known[0][:, :, :0]
    full = [empty if array is None else array for array in each]
    return mx.concatenate([mx.pad(x, [(0, 0), (0, 0), (T - x.shape[2], 0), (0, 0)]) for x in full])
