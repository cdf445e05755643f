"""What every model does with a cache: make it, check it, and run a step. B batch, S new tokens."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.cache.identity import Identity
from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions, check_cache_options
from kvant.cache.pool import Pool, check_sizes, single_sizes
from kvant.cache.pool_batch import PoolBatch
from kvant.cache.prompt_file import PromptCacheFile
from kvant.models.caches import DEFAULT_RESERVATION, longest_sequence
from kvant.models.inputs import Cached, Offset, check_ids, check_offset
from kvant.models.language_model import CacheMaker, LanguageModelConfig
from kvant.threads import check_process


class CachedModel(CacheMaker, ABC):
    """The part of a :class:`kvant.models.LanguageModel` that does not depend on who computes its layers."""

    divided = False  # other ranks hold a part of the model, and of its caches
    config: LanguageModelConfig

    def __init__(self, config: LanguageModelConfig, dtype: mx.Dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.identity: Identity | None = None

    def __call__(self, inputs: mx.array, offset: Offset = None, cache: Cached = None) -> mx.array:
        """Return the logits of every position, and commit the step.

        Args:
            inputs: (B, S) token ids: S new tokens of each of B sequences.
            offset: tokens already in the cache: an int if all sequences have as many, or an integer array
                (B,). It can only confirm the cache's own count, which None takes.
            cache: from :meth:`make_cache`, or a batch of a pool from :meth:`make_pool`, appended to; None:
                plain causal attention, nothing kept.

        Returns:
            (B, S, vocab) in the compute dtype.

        Raises:
            ValueError: an offset that disagrees with the cache, a cache of another model, ids that are not
                (B, S) or not in the vocabulary.
            ContextError: more tokens than the cache has room for.
            RuntimeError: another thread uses the cache, or this process was forked from one that had loaded a
                model.
        """
        check_process()
        check_ids(inputs, self.config.vocab_size)
        if cache is None:
            check_offset(offset, (0,) * inputs.shape[0])
            return self.logits(self._outputs(inputs, None))
        batch = self._batch(cache)
        with batch.lock:
            check_offset(offset, batch.lengths)
            outputs = self._outputs(inputs, batch)
            if threading.active_count() > 1:  # computed while no other thread may write to the cache
                mx.eval(outputs)
            batch.commit()
        return self.logits(outputs)

    @abstractmethod
    def _outputs(self, inputs: mx.array, cache: PoolBatch | None) -> mx.array:
        """Begin a step of (B, S) ids. Return what :meth:`logits` reads of every position, not evaluated.

        The step is left for ``cache.commit``, and ids are not checked: one outside the vocabulary would be
        read out of bounds. Without a cache the tokens attend to each other only.
        """

    @abstractmethod
    def logits(self, hidden_states: mx.array) -> mx.array:
        """Return the logits of positions, given the model's last hidden states, or its logits if its class
        computes both together.
        """

    def every_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self.logits(self._outputs(inputs, cache))

    def every_hidden_state(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self._outputs(inputs, cache)

    def _batch(self, cache: Sequence[KVCache] | PoolBatch) -> PoolBatch:
        return cache if isinstance(cache, PoolBatch) else self.check_cache(cache).batch

    def check_cache(self, cache: Sequence[KVCache]) -> ModelCache:
        if isinstance(cache, PromptCacheFile):
            cache = cache.loaded(self.reserve_cache)
        if not isinstance(cache, Sequence):
            raise ValueError(f"the cache is a {type(cache).__name__}; expected what model.make_cache returns")
        checked = ModelCache.of(cache)
        self.check_pool(checked.pool)
        theirs = checked.pool.identity
        if None not in (theirs, self.identity) and theirs != self.identity:
            raise ValueError("the cache holds tokens of another model")
        return checked

    @abstractmethod
    def check_pool(self, pool: Pool) -> None:
        """Raise a ValueError unless a pool, or that of a cache, is for a model with the same layers."""

    def reserve_cache(self, max_seq_len: int | None, options: CacheOptions) -> ModelCache:
        return ModelCache(self._reserved(max_seq_len, options))

    def _reserved(self, max_seq_len: int | None, options: CacheOptions) -> Pool:
        """Reserve the pool of one conversation; ``max_seq_len`` is as in :meth:`make_cache`."""
        if max_seq_len is None:
            context = self.config.max_position_embeddings
            max_seq_len = min(context or DEFAULT_RESERVATION, DEFAULT_RESERVATION)
        check_sizes(max_seq_len=max_seq_len)
        return self._checked_pool(single_sizes(max_seq_len), options)

    def make_pool(
        self,
        tokens: int,
        *,
        sequences: int,
        max_seq_len: int | None = None,
        prefill_step_size: int = 512,
        options: CacheOptions = DEFAULT_OPTIONS,
    ) -> Pool:
        sizes = {"tokens": tokens, "sequences": sequences, "prefill_step_size": prefill_step_size}
        check_sizes(**sizes)
        max_seq_len = longest_sequence(self.config, tokens, max_seq_len)
        check_sizes(max_seq_len=max_seq_len)
        return self._checked_pool({**sizes, "max_seq_len": max_seq_len, "single": False}, options)

    def _checked_pool(self, sizes: Mapping[str, Any], options: CacheOptions) -> Pool:
        check_process()
        check_cache_options(options)
        return self._new_pool(
            sizes,
            options,
            make_cache=partial(self.reserve_cache, options=options),
            identity=self.identity,
            made_for=self.config,
            divided=self.divided,
        )

    @abstractmethod
    def _new_pool(self, sizes: Mapping[str, Any], options: CacheOptions, **further: Any) -> Pool:
        """Reserve a pool of these sizes. ``further``: the arguments of :class:`Pool` that do not depend on
        the model's layers.
        """
