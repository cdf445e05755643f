"""The formats and bytes of a model's caches and pools."""

from collections import Counter
from collections.abc import Sequence
from itertools import repeat

import mlx.core as mx

from kvant.cache.kv_format import LayerChoice
from kvant.cache.layer_format import DTYPE_NAMES, LayerFormat
from kvant.cache.options import CacheOptions
from kvant.errors import ContextError
from kvant.models.config import ModelConfig
from kvant.models.language_model import LanguageModelConfig
from kvant.operators.key_transform import can_rotate
from kvant.sizes import format_bytes, physical_memory

DEFAULT_RESERVATION = 4096  # tokens
MAX_BITS = 32


def check_memory(max_seq_len: int, num_bytes: int) -> None:
    """Raise a ContextError unless this machine has the bytes that a cache of so many tokens needs."""
    if num_bytes > (memory := physical_memory()):
        raise ContextError(
            f"a cache of {max_seq_len} tokens needs {format_bytes(num_bytes)}; this machine has "
            f"{format_bytes(memory)}"
        )


def layer_choice(
    config: ModelConfig, options: CacheOptions, layer: int, pairs: Sequence[int] | None
) -> LayerChoice:
    """Return how a layer stores its tokens; its keys are not rotated if biases of some rotary pairs are
    split off.
    """
    has_blocks = can_rotate(config.head_dim)
    return options.layer(layer, can_rotate=not pairs and has_blocks, can_rotate_values=has_blocks)


def pool_format(
    config: ModelConfig,
    options: CacheOptions,
    *,
    dtype: mx.Dtype,
    max_seq_len: int,
    window: int | None,
    pairs: Sequence[int] | None,
    layer: int = 0,
    balanced: bool = False,
) -> LayerFormat:
    """How a layer, with its number in the whole model, stores tokens in a pool. A window no sequence outgrows
    is none.

    At 0 bits they keep ``dtype``. ``options``: fitted to the heads. ``pairs``: the rotary pairs of its bias
    split; None: there is none. ``balanced``: its norms of queries and keys are
    :func:`kvant.models.key_norms.balance_norms`'.
    """
    choice = layer_choice(config, options, layer, pairs)
    return LayerFormat.of_rows(
        config.num_key_value_heads,
        config.head_dim,
        config.head_dim,
        choice.kv_bits,
        choice.kv_group_size,
        DTYPE_NAMES[dtype],
        window=window,
        max_seq_len=max_seq_len,
        value_bits=choice.value_bits,
        has_tail=options.has_tail(choice),
        split_pairs=None if pairs is None else tuple(pairs),
        transform_name="+".join(filter(None, ("norms" if balanced else "", choice.name))),
    )


def count_formats(
    config: ModelConfig,
    options: CacheOptions,
    max_seq_len: int,
    *,
    dtype: mx.Dtype,
    split_pairs: Sequence[int] | None = None,
) -> Counter[LayerFormat]:
    """How many layers of the pool that :meth:`kvant.models.Decoder.make_pool` makes store tokens in each way.

    ``split_pairs``: how many rotary pairs each layer's bias split has; None: there is none.
    """
    options = options.fitted(config.head_dim)
    tuned, count = options.kv_format, config.num_hidden_layers
    layers: Sequence[int] = [0] * count
    if tuned is not None and len(tuned.layers) > count:  # a stage of a pipeline: each as the widest of all
        widths = [own.kv_bits + own.value_bits or MAX_BITS for own in tuned.layers]
        layers = [widths.index(max(widths))] * count
    elif tuned is not None:
        tuned.check_layers(count)
        layers = range(count)
    found: Counter[LayerFormat] = Counter()
    # Layers of a kind together: a folder may name tens of thousands of them.
    kinds = Counter(zip(layers, config.windows, split_pairs or repeat(None, count), strict=True))
    for (layer, window, pairs), alike in kinds.items():
        own = pool_format(
            config,
            options,
            dtype=dtype,
            max_seq_len=max_seq_len,
            window=window,
            pairs=None if pairs is None else range(pairs),
            layer=layer,
        )
        found[own] += alike
    return found


def longest_sequence(config: LanguageModelConfig, tokens: int, max_seq_len: int | None) -> int:
    """Tokens that a sequence of a pool can have: ``max_seq_len``, or all of the pool's, at most the
    context.
    """
    return min(tokens, config.max_position_embeddings or tokens) if max_seq_len is None else max_seq_len
