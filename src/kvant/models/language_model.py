"""What the engine, the tools and the commands know of a model: :class:`kvant.models.Decoder`, or a bridged
one.
"""

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
    """The facts of a model that are asked for after it is loaded."""

    @property
    def model_type(self) -> str:
        """The architecture's name in config.json."""

    @property
    def vocab_size(self) -> int:
        """Tokens the model knows: ids are 0 to vocab_size - 1."""

    @property
    def max_position_embeddings(self) -> int | None:
        """The context limit in tokens; None: none is known, and a cache's reservation is the only limit."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-text tokens of the folder."""


class CacheMaker(Protocol):
    """The caches of a model: by keywords for users, with one object of options inside kvant."""

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
        """Reserve a cache for ``max_seq_len`` tokens of a sequence.

        Args:
            max_seq_len: the reservation; None, as mlx-lm calls it: the model's context, at most 4,096 tokens.
            kv_bits, kv_group_size, bias_split, kernels, checkpoints, kv_format, kv_tail: see
                :meth:`kvant.cache.CacheOptions.from_keywords`. The default is 8 bits in groups of 32; at 0
                bits keys and values keep the compute dtype.

        Raises:
            ValueError: a size below 1, an unsupported bit, a group that does not divide the head dimension, a
                kernel forced that cannot be used.
            RuntimeError: a forced kernel that fails on this device when it is tried.
            ContextError: more than this machine's memory; nothing was allocated.
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
        """Reserve a cache stored with these options; see :meth:`make_cache`."""


class LanguageModel(CacheMaker, Protocol):
    """Token ids in, logits out, through a cache. B batch, S new tokens.

    Attributes:
        identity: digests of the files it was loaded from, for the snapshots of its caches; None: not known.
        divided: other ranks hold a part of the caches that it makes: these are not saved, loaded or forked.
    """

    identity: Identity | None
    divided: bool

    @property
    def config(self) -> LanguageModelConfig:
        """Its facts."""

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype activations are computed in."""

    @property
    def embedding_size(self) -> int | None:
        """The width of embeddings that it takes in place of ids; None: it takes none."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held."""

    @property
    def nbytes_read(self) -> int:
        """Bytes of the weights that a step of one token reads."""

    @property
    def arrays(self) -> list[mx.array]:
        """Every weight array."""

    @property
    def computes_at_once(self) -> bool:
        """Whether a step is computed while its graph is built: then nothing is gained by building two at a
        time.
        """

    @property
    def feeds_last_token_separately(self) -> bool:
        """Whether a prompt's last token is to be a step of its own.

        Such a model computes the logits of every position it is given, and only those of the last are read.
        """

    def __call__(self, inputs: mx.array, offset: Offset = None, cache: Cached = None) -> mx.array:
        """Logits (B, S, vocab) of every position of (B, S) ids. The step is committed; see
        :meth:`kvant.models.cached_model.CachedModel.__call__`.
        """

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        """Begin a step of (B, S) ids whose logits nobody reads. Evaluating the arrays computes it.

        As :meth:`next_logits`, the step is left for ``cache.commit``, and ids are not looked at.
        """

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        """Begin a step of (B, S) ids. Returns the logits (B, vocab) of the last position, not evaluated."""

    def every_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        """Begin a step of (B, S) ids. Returns the logits (B, S, vocab) of every position, not evaluated."""

    def every_hidden_state(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        """Begin a step of (B, S) ids. Returns what the output head reads of every position, the normalized
        hidden states (B, S, hidden), not evaluated.

        Raises:
            ModelError: a model of mlx-lm's whose output head is not found.
        """

    def check_cache(self, cache: Sequence[KVCache]) -> ModelCache:
        """The cache, or one made of a list of layers or of a file.

        Raises:
            ValueError: another model's.
            SnapshotError: a file of another model.
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
        """Reserve a pool for many sequences; at 0 bits they keep the compute dtype.

        Args:
            tokens: of all sequences together. Whole pages of 128 are made of them, and a page is one
                sequence's.
            sequences: that can be open at once.
            max_seq_len: tokens that one sequence can have; None: all of the pool's, at most the model's
                context.
            prefill_step_size: new tokens of one sequence in a step, at most.
            options: how they are stored.

        Raises:
            ModelError: the model takes one sequence at a time; nothing was reserved.
            ValueError: a size below 1, a cache format that the model cannot have, a kernel forced that cannot
                be used.
            RuntimeError: a forced kernel that fails on this device when it is tried.
            ContextError: more than this machine's memory; nothing was allocated.
        """


def context_limit(model: LanguageModel, reserved: int | None) -> int | None:
    """Tokens that a sequence can have: of the model's context and a cache's reservation the smaller; None:
    any.
    """
    limits = [limit for limit in (model.config.max_position_embeddings, reserved) if limit is not None]
    return min(limits, default=None)
