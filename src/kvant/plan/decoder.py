"""The facts of a decoder, from its config.json."""

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from kvant.cache.layer_format import MAX_NUMBER
from kvant.cache.options import CacheOptions
from kvant.models.caches import count_formats
from kvant.models.config import ModelConfig
from kvant.models.matrix import DEQUANTIZED_ELEMENTS
from kvant.operators.streams import cpu_streams
from kvant.plan.facts import Facts, Layer
from kvant.plan.stored import FLOAT_BYTES, Checkpoint

FLOAT32 = FLOAT_BYTES["float32"]
# Copies of the logits in sampling: float32, log-probabilities and intermediates. (By the code.)
LOGITS_COPIES = 5
# If each rank has a part of the logits: padded to one width, gathered, put into one row. (By the code.)
GATHERED_COPIES = 3
# Copies of hidden states received and sent by a rank, or the sums of a layer's two products. (By the code.)
SENT_COPIES = 2
# Share of rotary pairs whose key bias stays out of the cache, if the weights that decide it were not read.
GUESSED_PAIRS = 1 / 16
# Dequantized pieces of a matrix in memory, in addition to one per core: measured with 1 to 8 streams, and
# with MLX 0.32.4 on 2026-11-29, where 2 would have sufficed.
QUEUED_PARTS = 4


def decoder_facts(
    checkpoint: Checkpoint, cache: CacheOptions, *, on_cpu: bool, split_pairs: Sequence[int] | None
) -> Facts:
    """Return the facts. ``cache``: fitted to its heads. ``split_pairs``: as in :func:`kvant.plan.plan`."""
    config = checkpoint.config
    shard = checkpoint.shard
    itemsize = checkpoint.itemsize(on_cpu=on_cpu)
    dtype = mx.float32 if itemsize == FLOAT32 else mx.bfloat16  # or float16, which has the same size
    pairs: Sequence[int] | None = None
    if config.attention_bias and cache.bias_split:
        guessed = max(1, round(config.head_dim / 2 * GUESSED_PAIRS))
        pairs = split_pairs or [guessed] * config.num_hidden_layers
    formats = partial(count_formats, config, cache, dtype=dtype, split_pairs=pairs)
    heads = config.num_attention_heads
    layers = [Layer(each, heads, dtype) for each in formats(MAX_NUMBER).elements()]
    is_packed = config.quantization is not None and not (checkpoint.unpacked and config.experts is None)
    rows = 0 if shard is not None and shard.rank else LOGITS_COPIES
    rows += GATHERED_COPIES if shard is not None and shard.divided and not checkpoint.tied else 0
    return Facts(
        layers,
        formats,
        token_bytes=itemsize * _activations(checkpoint, cache, on_cpu=on_cpu),
        sampled_bytes=rows * FLOAT32 * config.vocab_size,
        weight_bytes=_float_weights(config) if on_cpu and is_packed else 0,
    )


def _activations(checkpoint: Checkpoint, cache: CacheOptions, *, on_cpu: bool) -> int:
    """Return how many numbers a layer computes for a new token."""
    config = checkpoint.config
    experts = checkpoint.config.experts
    hidden = config.hidden_size
    # Norms make two arrays, a product its pieces, rotation two halves, the cache magnitudes; a GPU may attend
    # in float32, and an adapter adds a product to each.
    copies = 7 if on_cpu else 10
    inner = 3
    if cache.kv_format is not None or cache.layer(0).rotates:  # for the key transform
        copies += 2
    if checkpoint.adapter_bytes:
        copies = copies + 3
        inner = inner + 2
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    numbers = copies * (hidden + heads * config.head_dim) + inner * config.intermediate_size
    if experts is not None and any(experts.layers):
        numbers += 4 * experts.count + experts.per_token * ((inner + 3) * hidden + inner * experts.inner_size)
    return numbers + (0 if checkpoint.shard is None else SENT_COPIES * hidden)


def _float_weights(config: ModelConfig) -> int:
    """Return the bytes of dequantized pieces of matrices, and of unpacking them."""
    assert config.quantization is not None
    hidden = config.hidden_size
    experts = config.experts
    cores = len(cpu_streams())
    heads = config.num_attention_heads + config.num_key_value_heads
    layer = hidden * (2 * heads * config.head_dim + 3 * config.intermediate_size)
    if experts is not None:
        layer = max(layer, cores * 3 * experts.inner_size * hidden)
    floats = min(max(layer, config.vocab_size * hidden), (cores + QUEUED_PARTS) * DEQUANTIZED_ELEMENTS)
    bits = config.quantization.bits
    if not config.quantization.has_biases:
        return floats * (FLOAT32 + 5)  # small floats from a table
    return floats * (FLOAT32 + (1 if 8 % bits == 0 else FLOAT32 * bits))  # a mask, or a word per bit
