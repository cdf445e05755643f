"""A layer of a prompt cache for mlx-lm's own loops, which counts for itself, in kvant's memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakSet, ref

import mlx.core as mx

from kvant.bridge.layers import BridgedLayer, Mask, StepRows
from kvant.cache import ModelCache
from kvant.cache.model import NotSaved
from kvant.operators.paged_attention import PagedRows


@dataclass(eq=False, slots=True, weakref_slot=True)
class SequenceLayers:
    """What the layers of one sequence share.

    Attributes:
        caches: of all layers: none goes back further than all of them can.
        masks: that the layers made in this step, by its position and new tokens; a model gives one layer's to another.
        joint_masks: the same of a batch whose first sequence this is, by the positions of all.
        copy: gives the last copy, which has no more layers than were copied so far; None: it is gone.
    """

    caches: list[ModelCache] = field(default_factory=list)
    masks: dict[tuple[int, int], dict[tuple[int | None, int], mx.array]] = field(default_factory=dict)
    joint_masks: dict[tuple[tuple[int, ...], ...], dict[int | None, mx.array]] = field(default_factory=dict)
    copy: "Callable[[], SequenceLayers | None]" = lambda: None


class PromptCacheLayer(BridgedLayer):
    """A layer's keys and values as mlx-lm's loops use a cache: every append counts at once.

    A step begins with its mask or its tokens. A copy shares the memory until one of the two is changed.
    """

    def __init__(
        self, cache: ModelCache, sequence: SequenceLayers, holders: "WeakSet[PromptCacheLayer] | None" = None
    ) -> None:
        """For a cache of one layer.

        Args:
            sequence: it becomes the next layer of.
            holders: the copies that share the cache; None: there are none.
        """
        self.sequence, self._place = sequence, len(sequence.caches)
        sequence.caches.append(cache)
        self._holders: WeakSet[PromptCacheLayer] = WeakSet() if holders is None else holders
        self._hold(cache)

    def _hold(self, cache: ModelCache) -> None:
        self._cache = self.sequence.caches[self._place] = cache
        self._holders.add(self)
        part = cache.pool.parts[0]
        none = StepRows(PagedRows(None, [[]], [0], part.window), part.window, (cache.offset,), 0)
        super().__init__(cache.unwritten, part, cache.pool.layers[0], none)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PromptCacheLayer":
        """The same layer of a copy of all."""
        return type(self)(self._cache, memo.setdefault(id(self.sequence), SequenceLayers()), holders=self._holders)

    def copied(self) -> Self:
        """The same layer of a copy whose layers are made one after the other."""
        sequence = self.sequence.copy()
        if sequence is None or len(sequence.caches) != self._place:
            sequence = SequenceLayers()
            self.sequence.copy = ref(sequence)  # what it reserves goes with it
        return type(self)(self._cache, sequence, holders=self._holders)

    def _own(self) -> None:
        """Have memory of its own, before it is changed."""
        if len(self._holders) > 1:
            copy = self._cache.fork()  # which may fail: then the memory is still shared
            self._holders.discard(self)
            self._holders = WeakSet()
            self._hold(copy)

    @property
    def max_seq_len(self) -> int:
        """The reservation: tokens it can have."""
        return self._cache.max_seq_len

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return self.layer.nbytes

    @property
    def state(self) -> list[object]:
        """For mlx-lm, which evaluates it."""
        return [NotSaved(), *self.layer.arrays, *self._cache.waiting]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (1, K, S, D) keys and (1, K, S, Dv) values; see :class:`BridgedLayer`."""
        self._own()
        self._begin_for(keys.shape[2])
        fetched = super().update_and_fetch(keys, values)
        self._cache.held.commit([0] * keys.shape[2])  # what waits is written before the next step
        return fetched

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask of N new tokens: "causal", None or a boolean array."""
        self._own()
        self._begin_for(N)
        return super().make_mask(N, return_array, window_size)

    def mask_of_step(self, window: int | None) -> Mask:
        """The mask of the step that was begun, whether its tokens were appended or not."""
        return super().make_mask(self.step.new_tokens, False, window)

    def tokens_read(self, new_tokens: int) -> int:
        """How many tokens a step of so many new ones reads, these included."""
        return self._cache.offset + new_tokens - self.part.first_read(self._cache.offset)

    @property
    def keys(self) -> mx.array:
        """The array that keys are in. A model may put it back, made to depend on others that are to be computed."""
        return self.layer.arrays[0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.layer.arrays[0] = array

    def size(self) -> int:
        """Tokens so far."""
        return self._cache.offset

    def empty(self) -> bool:
        """Whether it has no token."""
        return not self.size()

    def is_trimmable(self) -> bool:
        """Whether the last token can be forgotten, by all layers."""
        length = max(0, self.size() - 1)
        return all(cache.can_trim_to(length) for cache in self.sequence.caches)

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens, or all there are. Returns how many were forgotten."""
        length = max(0, self.size() - num_tokens)
        for cache in self.sequence.caches:
            if not cache.can_trim_to(length):
                cache.trim_to(length)  # which says why not
        self._own()
        forgotten = self._cache.trim(num_tokens)
        self.offset = self.size()
        return forgotten

    def _begin_for(self, tokens: int) -> None:
        """Begin a step of so many tokens, if none was."""
        if not self.appended and self._cache.step is not None and self.step.new_tokens == tokens:
            return
        self._cache.begin(mx.zeros((1, tokens), mx.int32))
        place = self._cache.offset, tokens
        masks = self.sequence.masks
        if place not in masks:
            masks.clear()
        step = StepRows.of(self._cache, self.part, tokens)
        step.masks = masks.setdefault(place, step.masks)
        self._begin(step)
