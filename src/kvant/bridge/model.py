"""A model that mlx-lm's class computes with kvant's cache. B batch, S new tokens."""

import inspect
import re
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from kvant.bridge.config import BridgedConfig
from kvant.bridge.few_rows import multiplies_few_rows
from kvant.bridge.head import find_head, inputs_of
from kvant.bridge.pool import BridgedBatch, BridgedCache, BridgedPool, attends_separately, reserve
from kvant.bridge.probe import Attention, Entry, leaves_of, probe
from kvant.cache.layer_format import DTYPES
from kvant.cache.options import CacheOptions
from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch
from kvant.errors import ArgumentError
from kvant.models.cached_model import CachedModel
from kvant.operators.dispatch import resolve


class BridgedModel(CachedModel):
    """A :class:`kvant.models.LanguageModel` around mlx-lm's model, ``module``."""

    # indices of mlx-lm's caches whose layers another process computes
    absent_caches: frozenset[int] = frozenset()
    config: BridgedConfig
    feeds_last_token_separately = True  # mlx-lm's models compute the logits of every position

    def __init__(self, module: Module, config: BridgedConfig, dtype: mx.Dtype) -> None:
        super().__init__(config, dtype)
        self.module = module

    @cached_property
    def computes_at_once(self) -> bool:
        return multiplies_few_rows(self.module)

    @cached_property
    def has_sinks(self) -> bool:
        """Return whether attention has learned sinks, so a constant added to all scores changes it."""
        return any(name.endswith("sinks") for name in parameters(self.module))

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Return the cache layers that mlx-lm's model needs."""
        return tuple(probe(self.module))

    @cached_property
    def embedding_size(self) -> int | None:
        takes = "input_embeddings" in inspect.signature(type(self.module).__call__).parameters
        size: int | None = getattr(getattr(self.module, "args", None), "hidden_size", None)
        return size if takes else None

    def _outputs(self, inputs: mx.array, cache: PoolBatch | None) -> mx.array:
        return self._logits(inputs, None if cache is None else self._begun(inputs, cache))

    def logits(self, hidden_states: mx.array) -> mx.array:
        return hidden_states  # :meth:`_outputs` returns logits already

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        begun = self._begun(inputs, cache)
        self._logits(inputs, begun)  # not used, so what only the logits need is never computed
        return begun.state

    @cached_property
    def _head(self) -> Module:
        return find_head(self.module, self.config.model_type)

    def every_hidden_state(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        begun = self._begun(inputs, cache)
        with inputs_of(self._head) as head_inputs:
            self._logits(inputs, begun)  # not used, so the head is never computed
        states: mx.array = mx.depends(head_inputs[-1:], begun.state)[0]
        return states

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self._outputs(inputs, cache)[:, -1]

    def reserve_cache(self, max_seq_len: int | None, options: CacheOptions) -> BridgedCache:
        """Reserve a cache. No bias is split, because mlx-lm's projections include their biases.

        In a layer whose width the group size does not divide, their greatest common divisor is used.
        """
        pool = cast(BridgedPool, self._reserved(max_seq_len, options))
        return BridgedCache(pool, options.group_size, self.absent_caches)

    def _new_pool(self, sizes: Mapping[str, Any], options: CacheOptions, **further: Any) -> BridgedPool:
        """Reserve a pool. Before one for several sequences, the model is tried with a small pool."""
        attentions = leaves_of(self.entries, Attention)
        if options.kv_format is not None:
            options.kv_format.check(self.identity, len(attentions))
            if self.has_sinks and any(layer.center for layer in options.kv_format.layers):
                raise ArgumentError("kv_format", "has a center, which the model's learned sinks would see")
        attends_per_sequence = True
        if not sizes["single"]:
            resolve(options.kernels)  # raises an error for bad kernels before the model is tried
            attends_per_sequence = attends_separately(
                self.module, self.config.model_type, self.entries, self.dtype
            )
        return reserve(
            self.entries,
            sizes,
            options,
            dtype=next((DTYPES[leaf.dtype] for leaf in attentions), self.dtype),
            absent=self.absent_caches,
            attends_separately=attends_per_sequence,
            **further,
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

    def check_pool(self, pool: Pool) -> None:
        name = "cache" if pool.single else "pool"
        if not isinstance(pool, BridgedPool) or pool.entries != self.entries:
            raise ValueError(
                f"the {name} is for a model with other layers; expected the result of model.make_{name}"
            )

    def _begun(self, inputs: mx.array, cache: PoolBatch) -> BridgedBatch:
        batch = self._batch(cache)
        self.check_pool(batch.pool)
        batch.begin(inputs)
        return cast(BridgedBatch, batch)

    def _logits(self, inputs: mx.array, cache: BridgedBatch | None) -> mx.array:
        if cache is None:
            whole: mx.array = self.module(inputs)
            return whole
        rows = cache.embeddings
        logits: mx.array = self.module(
            inputs, cache=cache.entries, **({} if rows is None else {"input_embeddings": rows})
        )
        # Also compute state that the logits do not need. Otherwise its graph would grow with every step.
        (logits,) = mx.depends([logits], cache.state)
        return logits


def parameters(module: Module) -> dict[str, mx.array]:
    """Return every array of a module and its submodules by name."""
    arrays: Any = tree_flatten(module.parameters())
    return dict(arrays)


def bytes_read(model: Module, experts_used: int | None, names: Collection[str] | None = None) -> int:
    """Return the bytes of mlx-lm's model that a step of one token reads, without an untied embedding.

    Args:
        experts_used: experts per token in a layer; None: all.
        names: names of the arrays to count; None: all.
    """
    arrays = {name: array for name, array in parameters(model).items() if names is None or name in names}
    total = sum(array.nbytes for array in arrays.values())
    has_head = any(name.endswith("lm_head.weight") for name in arrays)
    for path, module in model.named_modules():
        module_bytes = sum(
            array.nbytes for name, array in parameters(module).items() if f"{path}.{name}" in arrays
        )
        if isinstance(module, Embedding | QuantizedEmbedding) and has_head:
            total -= module_bytes
        elif isinstance(module, SwitchLinear | QuantizedSwitchLinear) and experts_used is not None:
            experts = module.weight.shape[0]
            total -= module_bytes * max(0, experts - experts_used) // experts
    return total


def by_layer(module: Module) -> dict[str, dict[str, mx.array]]:
    """Return :func:`parameters` grouped by layer, such as "model.layers.3."; "" is for those in no layer."""
    layers: dict[str, dict[str, mx.array]] = {}
    for name, array in parameters(module).items():
        number = re.search(r"\.\d+\.", name)
        layers.setdefault(name[: number.end()] if number else "", {})[name] = array
    return layers
