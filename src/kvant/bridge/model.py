"""A model that mlx-lm's class computes, through kvant's cache. B batch, S new tokens."""

import inspect
import re
import threading
from collections.abc import Collection, Sequence
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from kvant.bridge.config import BridgedConfig
from kvant.bridge.few_rows import multiplies_few_rows
from kvant.bridge.pool import (
    BridgedBatch,
    BridgedCache,
    BridgedPool,
    attends_separately,
    make_model_cache,
    reserve,
)
from kvant.bridge.probe import Attention, Entry, leaves_of, probe
from kvant.cache import KVCache
from kvant.cache.identity import Identity
from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions, check_cache_options
from kvant.cache.pool import check_sizes
from kvant.cache.pool_batch import PoolBatch
from kvant.cache.prompt_file import PromptCacheFile
from kvant.errors import ArgumentError
from kvant.models.caches import default_reservation, longest_sequence
from kvant.models.inputs import Cached, Offset, check_ids, check_offset, check_shape
from kvant.models.language_model import CacheMaker
from kvant.operators.dispatch import resolve
from kvant.threads import check_process


class BridgedModel(CacheMaker):
    """A :class:`kvant.models.LanguageModel`: mlx-lm's model, ``module``."""

    # numbers of mlx-lm's caches whose layers another process computes
    absent_caches: frozenset[int] = frozenset()
    divided = False  # other ranks hold a part of the model, and of its caches
    feeds_last_token_separately = True  # mlx-lm's models give the logits of every position they are given

    def __init__(self, module: Module, config: BridgedConfig, dtype: mx.Dtype) -> None:
        self.module, self.config, self.dtype = module, config, dtype
        self.identity: Identity | None = None

    @cached_property
    def computes_at_once(self) -> bool:
        return multiplies_few_rows(self.module)

    @cached_property
    def has_sinks(self) -> bool:
        """Whether attention has learned sinks: their share of a softmax changes with a constant of all
        scores.
        """
        return any(name.endswith("sinks") for name in parameters(self.module))

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """What mlx-lm's model asks of its caches."""
        return tuple(probe(self.module))

    @cached_property
    def embedding_size(self) -> int | None:
        takes = "input_embeddings" in inspect.signature(type(self.module).__call__).parameters
        size: int | None = getattr(getattr(self.module, "args", None), "hidden_size", None)
        return size if takes else None

    def __call__(self, inputs: mx.array, offset: Offset = None, cache: Cached = None) -> mx.array:
        """Logits of every position; the step is committed. As :meth:`kvant.models.Decoder.__call__`."""
        check_process()
        check_shape(inputs)
        check_ids(inputs, self.config.vocab_size)
        if cache is None:
            check_offset(offset, (0,) * inputs.shape[0])
            return self._logits(inputs, None)
        batch = self._checked(cache)
        check_offset(offset, batch.lengths)
        with batch.lock:
            batch.begin(inputs)
            logits = self._logits(inputs, batch)
            if threading.active_count() > 1:  # computed while no other thread may write to the cache
                mx.eval(logits, batch.state)
            batch.commit()
        return logits

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        begun = self._begun(inputs, cache)
        self._logits(inputs, begun)  # dropped, so that what only logits need is never computed
        return begun.state

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self.every_logits(inputs, cache)[:, -1]

    def every_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self._logits(inputs, self._begun(inputs, cache))

    def check_cache(self, cache: Sequence[KVCache]) -> BridgedCache:
        if isinstance(cache, PromptCacheFile):
            cache = cache.loaded(self.reserve_cache)
        if not isinstance(cache, BridgedCache):
            raise ValueError(f"the cache is a {type(cache).__name__}; expected what model.make_cache returns")
        if cache.pool.entries != self.entries:
            raise ValueError(
                "the cache is for a model with other layers; expected what model.make_cache returns"
            )
        if None not in (cache.pool.identity, self.identity) and cache.pool.identity != self.identity:
            raise ValueError("the cache holds tokens of another model")
        return cache

    def reserve_cache(self, max_seq_len: int | None, options: CacheOptions) -> BridgedCache:
        """See :class:`kvant.models.LanguageModel`. No bias is known apart from mlx-lm's projections: none is
        split.

        A group that does not divide a layer's width becomes their greatest common divisor there.
        """
        check_process()
        self._check_format(options)
        if max_seq_len is None:
            max_seq_len = default_reservation(self.config)
        return make_model_cache(
            self.module,
            max_seq_len,
            options,
            found=self.entries,
            absent=self.absent_caches,
            make_cache=partial(self.reserve_cache, options=options),
            identity=self.identity,
            divided=self.divided,
        )

    def make_pool(
        self,
        tokens: int,
        *,
        sequences: int,
        max_seq_len: int | None = None,
        prefill_step_size: int = 512,
        options: CacheOptions = DEFAULT_OPTIONS,
    ) -> BridgedPool:
        """See :class:`kvant.models.LanguageModel`. The model is tried first, with a small pool: some steps
        long.
        """
        check_process()
        self._check_format(options)
        resolve(options.kernels)  # refuses them before the model is tried
        sizes = {"tokens": tokens, "sequences": sequences, "prefill_step_size": prefill_step_size}
        sizes["max_seq_len"] = longest_sequence(self.config, tokens, max_seq_len)
        check_sizes(**sizes)
        apart = attends_separately(self.module, self.config.model_type, self.entries, self.dtype)
        return reserve(
            self.entries,
            sizes,
            options,
            dtype=self.dtype,
            make_cache=partial(self.reserve_cache, options=options),
            identity=self.identity,
            attends_separately=apart,
            divided=self.divided,
        )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def nbytes_read(self) -> int:
        return bytes_read(self.module, self.config.experts_used)

    @property
    def arrays(self) -> list[mx.array]:
        return list(parameters(self.module).values())

    def _check_format(self, options: CacheOptions) -> None:
        """Refuse what are no options, and a tuned format of another model."""
        check_cache_options(options)
        if options.kv_format is not None:
            options.kv_format.check(self.identity, len(leaves_of(self.entries, Attention)))
            if self.has_sinks and any(layer.center for layer in options.kv_format.layers):
                raise ArgumentError("kv_format", "has a center, which the model's learned sinks would see")

    def _checked(self, cache: Sequence[KVCache] | PoolBatch) -> BridgedBatch:
        if not isinstance(cache, PoolBatch):
            return self.check_cache(cache).batch
        if not isinstance(cache, BridgedBatch) or cache.pool.entries != self.entries:
            raise ValueError(
                "the pool is for a model with other layers; expected what model.make_pool returns"
            )
        return cache

    def _begun(self, inputs: mx.array, cache: PoolBatch) -> BridgedBatch:
        bridged = self._checked(cache)
        bridged.begin(inputs)
        return bridged

    def _logits(self, inputs: mx.array, cache: BridgedBatch | None) -> mx.array:
        if cache is None:
            whole: mx.array = self.module(inputs)
            return whole
        rows = cache.embeddings
        logits: mx.array = self.module(
            inputs, cache=cache.entries, **({} if rows is None else {"input_embeddings": rows})
        )
        # What logits do not need is computed too: it would wait, with all that it is made of, step after
        # step.
        (logits,) = mx.depends([logits], cache.state)
        return logits


def parameters(module: Module) -> dict[str, mx.array]:
    """Every array of a module, and of those in it, by its name."""
    found: Any = tree_flatten(module.parameters())
    return dict(found)


def bytes_read(model: Module, experts_used: int | None, names: Collection[str] | None = None) -> int:
    """Bytes of mlx-lm's model that a step of one token reads: of a table that only embeds next to nothing.

    ``experts_used``: of a layer's experts. ``names``: of the arrays that count. None: all.
    """
    arrays = {name: array for name, array in parameters(model).items() if names is None or name in names}
    total = sum(array.nbytes for array in arrays.values())
    has_head = any(name.endswith("lm_head.weight") for name in arrays)
    for path, module in model.named_modules():
        own = sum(array.nbytes for name, array in parameters(module).items() if f"{path}.{name}" in arrays)
        if isinstance(module, Embedding | QuantizedEmbedding) and has_head:
            total -= own
        elif isinstance(module, SwitchLinear | QuantizedSwitchLinear) and experts_used is not None:
            experts = module.weight.shape[0]
            total -= own * max(0, experts - experts_used) // experts
    return total


def by_layer(module: Module) -> dict[str, dict[str, mx.array]]:
    """:func:`parameters` by the layer they are in, "model.layers.3." for instance; "": in none."""
    layers: dict[str, dict[str, mx.array]] = {}
    for name, array in parameters(module).items():
        number = re.search(r"\.\d+\.", name)
        layers.setdefault(name[: number.end()] if number else "", {})[name] = array
    return layers
