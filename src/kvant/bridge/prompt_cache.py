"""Prompt caches for mlx-lm's own loops: each layer counts for itself, in kvant's memory."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList
from mlx_lm.models.cache import KVCache as MlxLmKVCache

from kvant.bridge import hook
from kvant.bridge.cache import check_format, entries_bytes
from kvant.bridge.layers import BridgedLayer, Mask, StepRows
from kvant.bridge.pool import BridgedPool, formats_of
from kvant.bridge.probe import Attention, Leaf, Model, State, Unused, probe
from kvant.cache import ModelCache
from kvant.cache.model import NotSaved
from kvant.cache.options import CacheOptions
from kvant.cache.pool import sizes_alone
from kvant.models.caches import check_memory


class PromptCacheLayer:
    """A layer's keys and values as mlx-lm's loops use a cache: every append counts at once.

    A step of :class:`kvant.bridge.layers.BridgedLayer` begins with its mask or its tokens.
    """

    def __init__(self, cache: ModelCache, others: list["PromptCacheLayer"], masks: "_Masks") -> None:
        """For a cache of one layer.

        Args:
            others: all layers of the model, this one too: none goes back further than all of them can.
            masks: that the layers made in this step; a model gives one layer's mask to another.
        """
        self._cache, self._others, self._masks = cache, others, masks
        self._step: BridgedLayer | None = None
        others.append(self)

    @property
    def offset(self) -> int:
        """Tokens so far; the position of the next one."""
        return self._cache.offset

    @property
    def start_position(self) -> int:
        """The first token that the next step's queries may see."""
        return self._cache.pool.parts[0].first_read(self.offset)

    @property
    def arrays(self) -> list[mx.array]:
        """Its arrays."""
        return self._cache.pool.layers[0].arrays

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return self._cache.nbytes

    @property
    def state(self) -> list[object]:
        """For mlx-lm, which evaluates it."""
        return [NotSaved(), *self.arrays, *self._cache.waiting]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (1, K, S, D) keys and (1, K, S, Dv) values; see :class:`kvant.bridge.layers.BridgedLayer`."""
        tokens = keys.shape[2]
        step, self._step = self._begun(tokens), None
        fetched = step.update_and_fetch(keys, values)
        self._step = step
        self._cache.held.commit([0] * tokens)  # what waits is written before the next step
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What was fetched last, for layers that share it."""
        if self._step is None:
            raise RuntimeError("keys and values are asked for, and none were fetched in this step")
        return self._step.keys_and_values()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask of N new tokens: "causal", None or a boolean array."""
        return self._begun(N).make_mask(N, return_array, window_size)

    def maybe_trim_front(self) -> None:
        """Do nothing, as :meth:`BridgedLayer.maybe_trim_front`."""

    @property
    def keys(self) -> mx.array:
        """The array that keys are in. A model may put it back, made to depend on others that are to be computed."""
        return self.arrays[0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.arrays[0] = array

    @property
    def values(self) -> mx.array:
        """An array that is computed when the last append is."""
        return self.arrays[-1]

    @values.setter
    def values(self, array: mx.array) -> None:
        self._begun(1).values = array

    def size(self) -> int:
        """Tokens so far."""
        return self.offset

    def empty(self) -> bool:
        """Whether it has no token."""
        return not self.offset

    def is_trimmable(self) -> bool:
        """Whether the last token can be forgotten, by all layers."""
        return self._can_trim_to(max(0, self.offset - 1))

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens, or all there are. Returns how many were forgotten."""
        length = max(0, self.offset - num_tokens)
        for other in self._others:
            if not other._cache.can_trim_to(length):
                other._cache.trim(other.offset - length)  # which says why not
        self._step = None
        return self._cache.trim(num_tokens)

    def _can_trim_to(self, length: int) -> bool:
        return all(other._cache.can_trim_to(length) for other in self._others)

    def _begun(self, tokens: int) -> BridgedLayer:
        """The step of so many tokens, begun."""
        step = self._step
        if step is None or step.has_fetched or step.new_tokens != tokens:
            cache = self._cache
            cache.begin(mx.zeros((1, tokens), mx.int32))
            (part,), (layer,) = cache.pool.parts, cache.pool.layers
            rows = StepRows.of(cache, part, tokens)
            rows.masks_of_one = self._masks.at(cache.offset, tokens)
            step = self._step = BridgedLayer(cache, part, layer, rows, cache.offset)
        return step


def make_prompt_cache(model: Model, max_kv_size: int, *, kv_bits: int = 8, kv_group_size: int = 32) -> list[Any]:
    """A prompt cache for mlx-lm's own loops that is reserved now, quantized, and never grows.

    ``mlx_lm.generate(model, tokenizer, prompt, prompt_cache=kvant.make_prompt_cache(model, 4096))``

    The states of linear and convolution layers stay mlx-lm's own. Attention to the cache's tokens is computed by kvant
    where that is faster; every other call stays mlx-lm's.

    Args:
        model: any of mlx-lm's.
        max_kv_size: tokens it can hold. More are a ContextError.
        kv_bits: 8, 4, or 0 for no quantization.
        kv_group_size: elements that share a scale. Where it does not divide a head's width, their greatest common
            divisor is used.

    Returns:
        a cache for each place where the model's ``make_cache`` has one.

    Raises:
        ContextError: more than this machine's memory; nothing was allocated.
        ValueError: an argument out of range, or a model with a kind of cache that kvant has nothing for.
    """
    if hasattr(model, "check_cache") or not (hasattr(model, "layers") or hasattr(model, "make_cache")):
        raise ValueError(
            f"model is a {type(model).__name__}; expected mlx-lm's own. A model of kvant.load has make_cache"
        )
    options = CacheOptions(kv_bits, kv_group_size)
    check_format({"max_kv_size": max_kv_size}, options)
    found = probe(model)
    check_memory(max_kv_size, entries_bytes(found, max_kv_size, options).total)
    hook.install()
    layers: list[PromptCacheLayer] = []
    masks = _Masks()

    def one(leaf: Leaf) -> Any:
        if isinstance(leaf, Unused):
            return MlxLmKVCache()
        if isinstance(leaf, State):
            return ArraysCache(len(leaf.shapes))
        return PromptCacheLayer(_cache_of(leaf, max_kv_size, options), layers, masks)

    return [CacheList(*map(one, entry)) if isinstance(entry, tuple) else one(entry) for entry in found]


class _Masks:
    """The masks that the layers of a model made in the step that was begun last."""

    def __init__(self) -> None:
        self._step: tuple[int, int] | None = None
        self._made: dict[tuple[int | None, int], mx.array] = {}

    def at(self, offset: int, tokens: int) -> dict[tuple[int | None, int], mx.array]:
        """Those of a step of so many tokens at this position."""
        if self._step != (offset, tokens):
            self._step, self._made = (offset, tokens), {}
        return self._made


def _cache_of(leaf: Attention, max_kv_size: int, options: CacheOptions) -> ModelCache:
    """A cache of one layer."""
    formats = formats_of([leaf], max_kv_size, options)
    pool = BridgedPool([leaf], formats, **sizes_alone(max_kv_size), make_cache=ModelCache, dtype=leaf.dtype)
    return ModelCache(pool)
