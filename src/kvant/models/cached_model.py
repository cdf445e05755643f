"""Make and check a model's caches, and run a step with one. B batch, S new tokens."""

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
    """The methods of a :class:`kvant.models.LanguageModel` that kvant's and mlx-lm's models share."""

    divided = False  # whether other ranks have some of the model and of its caches
    config: LanguageModelConfig

    def __init__(self, config: LanguageModelConfig, dtype: mx.Dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.identity: Identity | None = None

    def __call__(self, inputs: mx.array, offset: Offset = None, cache: Cached = None) -> mx.array:
        """Return the logits of every position and commit the step.

        Args:
            inputs: (B, S) token ids, S new tokens of each of B sequences.
            offset: the number of tokens in the cache: an int for all sequences, or an integer array (B,). It
                must equal the cache's count, which None stands for.
            cache: from :meth:`make_cache`, or a batch of a pool from :meth:`make_pool`; the step is appended.
                None: causal attention without a cache.

        Returns:
            (B, S, vocab) in the compute dtype.

        Raises:
            ValueError: the offset is not the cache's, the cache is another model's, or the ids are not (B, S)
                or not in the vocabulary.
            ContextError: more tokens than the cache has room for.
            RuntimeError: another thread is using the cache, or this process was forked after a model was
                loaded.
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
            if threading.active_count() > 1:  # compute before other threads may write to the cache
                mx.eval(outputs)
            batch.commit()
        return self.logits(outputs)

    @abstractmethod
    def _outputs(self, inputs: mx.array, cache: PoolBatch | None) -> mx.array:
        """Begin a step of (B, S) ids; return the input of :meth:`logits` for every position, not evaluated.

        The caller commits the step. Ids are not checked: one outside the vocabulary would read out of bounds.
        Without a cache, tokens attend only to each other.
        """

    @abstractmethod
    def logits(self, hidden_states: mx.array) -> mx.array:
        """Return logits from what :meth:`_outputs` returns: hidden states, or already logits."""

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
            raise ValueError(
                f"the cache is a {type(cache).__name__}; expected the result of model.make_cache"
            )
        checked = ModelCache.of(cache)
        self.check_pool(checked.pool)
        theirs = checked.pool.identity
        if None not in (theirs, self.identity) and theirs != self.identity:
            raise ValueError("the cache has tokens of another model")
        return checked

    @abstractmethod
    def check_pool(self, pool: Pool) -> None:
        """Raise a ValueError unless a pool is for a model with the same layers."""

    def reserve_cache(self, max_seq_len: int | None, options: CacheOptions) -> ModelCache:
        return ModelCache(self._reserved(max_seq_len, options))

    def _reserved(self, max_seq_len: int | None, options: CacheOptions) -> Pool:
        """Reserve a pool for one conversation; see :meth:`make_cache` for ``max_seq_len``."""
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
        """Reserve a pool. ``further``: arguments of :class:`Pool` that do not depend on the layers."""
