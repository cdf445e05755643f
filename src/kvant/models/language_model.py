"""The interface of models, kvant's :class:`kvant.models.Decoder` and mlx-lm's, to the rest of kvant."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.cache.identity import Identity
from kvant.cache.kv_format import KVFormat
from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions
from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch
from kvant.models.inputs import Cached, Offset


class LanguageModelConfig(Protocol):
    """The facts of a model that are needed after it is loaded."""

    @property
    def model_type(self) -> str:
        """Return the architecture's name in config.json."""

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens that the model knows; ids are 0 to vocab_size - 1."""

    @property
    def max_position_embeddings(self) -> int | None:
        """Return the context limit in tokens; None: unknown, so only a cache's reservation limits it."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the end-of-text tokens of the model's folder."""


class CacheMaker(Protocol):
    """Makes a model's caches: from keywords for users, from a CacheOptions inside kvant."""

    def make_cache(
        self,
        max_seq_len: int | None = None,
        *,
        kv_bits: int | None = None,
        kv_group_size: int | None = None,
        bias_split: bool = True,
        kernels: str | None = None,
        checkpoints: int = 0,
        kv_format: KVFormat | str | Path | None = None,
        kv_tail: bool | None = None,
    ) -> ModelCache:
        """Reserve a cache for a sequence.

        Args:
            max_seq_len: the number of tokens to reserve; None, as mlx-lm passes: the model's context, but at
                most 4,096 tokens.
            kv_bits, kv_group_size, bias_split, kernels, checkpoints, kv_format, kv_tail: see
                :meth:`kvant.cache.CacheOptions.from_keywords`. The default is 8 bits in groups of 32; with
                0 bits, keys and values keep the compute dtype.

        Raises:
            ValueError: a size is below 1, the number of bits is not supported, the group does not divide the
                head dimension, or a forced kernel cannot be used.
            RuntimeError: a forced kernel fails when it is tried on this device.
            ContextError: the cache does not fit this machine's memory; nothing was allocated.
        """
        options = CacheOptions.from_keywords(
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            bias_split=bias_split,
            kernels=kernels,
            checkpoints=checkpoints,
            kv_format=kv_format,
            kv_tail=kv_tail,
        )
        return self.reserve_cache(max_seq_len, options)

    def reserve_cache(self, max_seq_len: int | None, options: CacheOptions) -> ModelCache:
        """Reserve a cache with these options; see :meth:`make_cache`."""


class LanguageModel(CacheMaker, Protocol):
    """A model that computes logits from token ids, with a cache. B batch, S new tokens.

    Attributes:
        identity: digests of the model's files, stored with its caches; None: unknown.
        divided: whether other ranks have some of its caches, which then cannot be saved, loaded or forked.
    """

    identity: Identity | None
    divided: bool

    @property
    def config(self) -> LanguageModelConfig:
        """Return the model's facts."""

    @property
    def dtype(self) -> mx.Dtype:
        """Return the dtype of activations."""

    @property
    def embedding_size(self) -> int | None:
        """Return the width of embeddings that it accepts instead of ids; None: it accepts none."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the loaded weights."""

    @property
    def nbytes_read(self) -> int:
        """Return the bytes of the weights that a step of one token reads."""

    @property
    def arrays(self) -> list[mx.array]:
        """Return every weight array."""

    @property
    def computes_at_once(self) -> bool:
        """Return whether a step is computed while its graph is built, so that lookahead gains nothing."""

    @property
    def feeds_last_token_separately(self) -> bool:
        """Return whether to feed a prompt's last token in a separate step.

        This is for models that always compute the logits of every position, of which only the last is needed.
        """

    def __call__(self, inputs: mx.array, offset: Offset = None, cache: Cached = None) -> mx.array:
        """Return the logits (B, S, vocab) of (B, S) ids and commit the step.

        See :meth:`kvant.models.cached_model.CachedModel.__call__`.
        """

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        """Begin a step of (B, S) ids without logits; return arrays whose evaluation computes it.

        As in the following methods, the caller commits the step, and ids are not checked.
        """

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        """Begin a step of (B, S) ids; return the logits (B, vocab) of the last position, not evaluated."""

    def every_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        """Begin a step of (B, S) ids; return the logits (B, S, vocab) of every position, not evaluated."""

    def every_hidden_state(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        """Begin a step of (B, S) ids; return the input (B, S, hidden) of the output head, not evaluated.

        Raises:
            ModelError: the output head of an mlx-lm model is not found.
        """

    def check_cache(self, cache: Sequence[KVCache]) -> ModelCache:
        """Return the cache after checking it. A list of its layers or a prompt cache file is accepted too.

        Raises:
            ValueError: the cache is another model's.
            SnapshotError: the file is another model's.
        """

    def make_pool(
        self,
        tokens: int,
        *,
        sequences: int,
        max_seq_len: int | None = None,
        prefill_step_size: int = 512,
        options: CacheOptions = DEFAULT_OPTIONS,
    ) -> Pool:
        """Reserve a pool for many sequences.

        Args:
            tokens: the capacity for all sequences, in whole pages of 128 tokens. Sequences share only
                full pages.
            sequences: the maximum number of open sequences.
            max_seq_len: the maximum length of a sequence in tokens; None: the pool's capacity, but at most
                the model's context.
            prefill_step_size: the maximum number of new tokens of a sequence in a step.
            options: the storage format; with 0 bits, keys and values keep the compute dtype.

        Raises:
            ModelError: the model supports only one sequence at a time; nothing was reserved.
            ValueError: a size is below 1, the model does not support the format, or a forced kernel cannot be
                used.
            RuntimeError: a forced kernel fails when it is tried on this device.
            ContextError: the pool does not fit this machine's memory; nothing was allocated.
        """


def context_limit(model: LanguageModel, reserved: int | None) -> int | None:
    """Return the smaller of the model's context and a reservation, in tokens; None: there is no limit."""
    limits = [limit for limit in (model.config.max_position_embeddings, reserved) if limit is not None]
    return min(limits, default=None)
