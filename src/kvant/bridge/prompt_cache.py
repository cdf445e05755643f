"""Prompt caches for mlx-lm's own loops: each layer counts for itself, in kvant's memory."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from kvant.bridge.layers import BridgedLayer, Mask, StepRows
from kvant.bridge.pool import pool_needs, reserve
from kvant.bridge.probe import Attention, Model, State, caches_of, leaves_of, probe
from kvant.cache import ModelCache
from kvant.cache.layer_format import DTYPES
from kvant.cache.model import NotSaved
from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions
from kvant.cache.pool import sizes_alone
from kvant.models.caches import check_memory

Masks = dict[tuple[int, int], dict[tuple[int | None, int], mx.array]]  # by position and new tokens of a step


class PromptCacheLayer(BridgedLayer):
    """A layer's keys and values as mlx-lm's loops use a cache: every append counts at once.

    A step begins with its mask or its tokens.
    """

    def __init__(self, cache: ModelCache, every: list[ModelCache], masks: Masks) -> None:
        """For a cache of one layer.

        Args:
            every: those of all layers of the model, this one too: none goes back further than all of them can.
            masks: that the layers made in this step; a model gives one layer's mask to another.
        """
        self._cache, self._every, self._masks = cache, every, masks
        every.append(cache)
        super().__init__(cache.unwritten, cache.pool.parts[0], cache.pool.layers[0], self._begun(1))

    def __deepcopy__(self, memo: dict[int, Any]) -> "PromptCacheLayer":
        """The same layer of a copy of all."""
        every, masks = memo.setdefault(id(self._every), []), memo.setdefault(id(self._masks), {})
        return PromptCacheLayer(self._cache.fork(), every, masks)

    @property
    def arrays(self) -> list[mx.array]:
        """Its arrays."""
        return self._layer.arrays

    @property
    def max_seq_len(self) -> int:
        """The reservation: tokens it can have."""
        return self._cache.max_seq_len

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return self._layer.nbytes

    @property
    def state(self) -> list[object]:
        """For mlx-lm, which evaluates it."""
        return [NotSaved(), *self.arrays, *self._cache.waiting]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (1, K, S, D) keys and (1, K, S, Dv) values; see :class:`BridgedLayer`."""
        self._begin_for(keys.shape[2])
        fetched = super().update_and_fetch(keys, values)
        self._cache.held.commit([0] * keys.shape[2])  # what waits is written before the next step
        return fetched

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask of N new tokens: "causal", None or a boolean array."""
        self._begin_for(N)
        return super().make_mask(N, return_array, window_size)

    @property
    def keys(self) -> mx.array:
        """The array that keys are in. A model may put it back, made to depend on others that are to be computed."""
        return self.arrays[0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.arrays[0] = array

    def size(self) -> int:
        """Tokens so far."""
        return self._cache.offset

    def empty(self) -> bool:
        """Whether it has no token."""
        return not self.size()

    def is_trimmable(self) -> bool:
        """Whether the last token can be forgotten, by all layers."""
        length = max(0, self.size() - 1)
        return all(cache.can_trim_to(length) for cache in self._every)

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens, or all there are. Returns how many were forgotten."""
        length = max(0, self.size() - num_tokens)
        for cache in self._every:
            if not cache.can_trim_to(length):
                cache.trim_to(length)  # which says why not
        forgotten = self._cache.trim(num_tokens)
        self.offset = self.size()
        return forgotten

    def _begin_for(self, tokens: int) -> None:
        """Begin a step of so many tokens, if none was."""
        if self.appended or self._cache.step is None or self._step.new_tokens != tokens:
            self._begin(self._begun(tokens))

    def _begun(self, tokens: int) -> StepRows:
        self._cache.begin(mx.zeros((1, tokens), mx.int32))
        place = self._cache.offset, tokens
        if place not in self._masks:
            self._masks.clear()
        step = StepRows.of(self._cache, self._cache.pool.parts[0], tokens)
        step.masks = self._masks.setdefault(place, step.masks)
        return step


def make_prompt_cache(model: Model, max_kv_size: int, options: CacheOptions = DEFAULT_OPTIONS) -> list[Any]:
    """The caches of a model of mlx-lm's; see :func:`kvant.make_prompt_cache`.

    ``mlx_lm.generate(model, tokenizer, prompt, prompt_cache=kvant.make_prompt_cache(model, 4096))``

    The states of linear and convolution layers stay mlx-lm's own. Attention to the cache's tokens is computed by kvant
    where that is faster; every other call stays mlx-lm's.

    Returns:
        a cache for each place where the model's ``make_cache`` has one.
    """
    if hasattr(model, "check_cache") or not (hasattr(model, "layers") or hasattr(model, "make_cache")):
        raise ValueError(
            f"model is a {type(model).__name__}; expected mlx-lm's own. A model of kvant.load has make_cache"
        )
    found = probe(model)
    check_memory(max_kv_size, sum(pool_needs(found, sizes_alone(max_kv_size), options)))
    states = [leaf for leaf in leaves_of(found) if isinstance(leaf, State)]
    every: list[ModelCache] = []
    masks: Masks = {}

    def one(leaf: Attention | State) -> Any:
        if isinstance(leaf, State):
            return ArraysCache(len(leaf.shapes))

        def made(tokens: int) -> ModelCache:
            # Its pool knows the states too: where there are any, nothing but all can be forgotten.
            sizes, dtype = sizes_alone(tokens), DTYPES[leaf.dtype]
            return ModelCache(reserve([leaf, *states], sizes, options, dtype=dtype, make_cache=made))

        return PromptCacheLayer(made(max_kv_size), every, masks)

    return caches_of(found, one)
