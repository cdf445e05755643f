"""Prompt caches for mlx-lm's own loops, in kvant's memory."""

from typing import Any

from mlx_lm.models.cache import ArraysCache

from kvant.bridge.batch_layer import MergedLayer
from kvant.bridge.pool import pool_needs, reserve
from kvant.bridge.probe import Attention, Model, caches_of, leaves_of, probe
from kvant.bridge.prompt_layer import PromptCacheLayer, SequenceLayers
from kvant.cache import ModelCache
from kvant.cache.layer_format import DTYPES, State
from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions
from kvant.cache.pool import sizes_alone
from kvant.models.caches import check_memory


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
    states, sequence = leaves_of(found, State), SequenceLayers()

    def one(leaf: Attention | State) -> Any:
        if isinstance(leaf, State):
            return ArraysCache(len(leaf.shapes))

        own = options.of_layer(len(sequence.caches))

        def made(tokens: int) -> ModelCache:
            # Its pool knows the states too: where there are any, nothing but all can be forgotten.
            sizes, dtype = sizes_alone(tokens), DTYPES[leaf.dtype]
            return ModelCache(reserve([leaf, *states], sizes, own, dtype=dtype, make_cache=made))

        kind = MergedLayer if leaf.chunk is None else PromptCacheLayer
        return kind(made(max_kv_size), sequence)

    return caches_of(found, one)
