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
    """Raise a ContextError unless this machine has ``num_bytes`` for a cache of ``max_seq_len`` tokens."""
    if num_bytes > (memory := physical_memory()):
        raise ContextError(
            f"a cache of {max_seq_len} tokens needs {format_bytes(num_bytes)}; this machine has "
            f"{format_bytes(memory)}"
        )


def layer_choice(
    config: ModelConfig, options: CacheOptions, layer: int, pairs: Sequence[int] | None
) -> LayerChoice:
    """Return a layer's options. Keys are not rotated if biases of rotary pairs are split off."""
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
    """Return the format of a pool's layer, without a window if no sequence can outgrow it.

    Args:
        options: fitted to the heads. At 0 bits, tokens are stored in ``dtype``.
        pairs: the rotary pairs of the bias split; None: there is no split.
        layer: the index in the whole model.
        balanced: the query and key norms come from :func:`kvant.models.key_norms.balance_norms`.
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
    """Count the layers of each format in the pool that :meth:`kvant.models.Decoder.make_pool` returns.

    ``split_pairs``: the number of rotary pairs in each layer's bias split; None: there is no split.
    """
    options = options.fitted(config.head_dim)
    tuned = options.kv_format
    count = config.num_hidden_layers
    layers: Sequence[int] = [0] * count
    if tuned is not None and len(tuned.layers) > count:  # a pipeline's stage: each layer as the widest
        widths = [each.kv_bits + each.value_bits or MAX_BITS for each in tuned.layers]
        layers = [widths.index(max(widths))] * count
    elif tuned is not None:
        tuned.check_layers(count)
        layers = range(count)
    formats: Counter[LayerFormat] = Counter()
    # Group equal layers first: a folder may claim tens of thousands of them.
    kinds = Counter(zip(layers, config.windows, split_pairs or repeat(None, count), strict=True))
    for (layer, window, pairs), alike in kinds.items():
        layer_format = pool_format(
            config,
            options,
            dtype=dtype,
            max_seq_len=max_seq_len,
            window=window,
            pairs=None if pairs is None else range(pairs),
            layer=layer,
        )
        formats[layer_format] += alike
    return formats


def longest_sequence(config: LanguageModelConfig, tokens: int, max_seq_len: int | None) -> int:
    """Return the tokens that a sequence may have: ``max_seq_len``, or the pool's within the context."""
    return min(tokens, config.max_position_embeddings or tokens) if max_seq_len is None else max_seq_len
