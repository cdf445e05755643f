"""What a run takes beside the weights: its cache or pool to the byte, and an upper bound of its scratch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvant.cache.layer_format import DTYPES, State
from kvant.cache.pool import single_rows, single_sizes
from kvant.errors import ModelError
from kvant.models.caches import pool_size
from kvant.models.config import ModelConfig
from kvant.models.matrix import DEQUANTIZED_ELEMENTS
from kvant.operators.cpu_attention import BLOCK_SCORE_BYTES
from kvant.operators.cpu_paged_attention import LONG_TOKENS, TILED_SCORES
from kvant.operators.exact_attention import MASKED_QUERIES
from kvant.operators.exact_rows import RING
from kvant.operators.packing import PACKINGS
from kvant.operators.paged_rows import tokens_at_once
from kvant.operators.score_blocks import GPU_BLOCK_SCORES, device_kind, makes_scores
from kvant.operators.streams import FEW_ROWS, cpu_streams
from kvant.plan.bridged import BridgedCheckpoint
from kvant.plan.memory import AnyCheckpoint, MemoryPlan, Settings, page_rows
from kvant.plan.stored import Checkpoint

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

FLOAT32 = 4  # bytes
SCALE_BYTES = 2  # float16
# Copies of the logits in sampling: float32, log-probabilities and what they are made from.
LOGITS_COPIES = 5
# If ranks have a part of each logit row: padded to one width, gathered, put into one row.
GATHERED_COPIES = 3
# Of the stream, what comes from another rank and what goes to one; or the sums of a layer's two products.
SENT_COPIES = 2
# Rotary pairs a layer whose key bias stays out of the cache, if the weights that decide it were not read: 1
# in 16.
GUESSED_PAIRS = 1 / 16
MARGIN = 1.3  # of scratch
QUEUED_BLOCKS = 6  # of scores, held at once; measured on a CPU
# Layers whose keys and values a GPU holds as floats at once. MLX has ten command buffers under way, and a
# layer of a long context takes three; in float32 or with biases more, so it is a layer less. (By its source;
# not measured.)
QUEUED_LAYERS = 3
QUEUED_PARTS = 4  # of a dequantized matrix, beside one a core; measured (1 to 8 streams)
MASK_BYTES = 16  # of a window's mask for each query and token: its terms and their product
# Of an exact tail: bytes of a number, and copies of a layer's: as they wait, joined and as floats.
TAIL_BYTES = 2
TAIL_COPIES = 4
SCORE_COPIES = 3  # that one call of attention may hold: scores, with the mask, and their softmax
# Of a bridged model. Each projection's output: as it came, as it goes on, and sums of it.
OUTPUT_COPIES = 3
# A linear layer goes from token to token. So many of its states are held by what MLX has queued.
QUEUED_STATES = 64
STATES_OF_A_TOKEN = {"jamba": 10}  # it makes those of all tokens of a chunk; measured
MATRIX_TOKENS = 256  # mlx-lm's scans take so many at a time, with a matrix of them for every head
# A layer's keys and values are dequantized to float32 on a CPU, through as much again.
DEQUANTIZED_COPIES = 2


Needs = Callable[[int], MemoryPlan]  # without weights, by tokens reserved, all of them used


def needs(
    checkpoint: AnyCheckpoint, settings: Settings, *, on_cpu: bool, split_pairs: Sequence[int] | None = None
) -> Needs:
    """What a run takes, by tokens reserved; arguments and errors as :func:`kvant.plan.plan` has
    them.
    """
    if isinstance(checkpoint, BridgedCheckpoint):
        return _bridged_needs(checkpoint, settings, on_cpu=on_cpu)
    return _decoder_needs(checkpoint, settings, on_cpu=on_cpu, split_pairs=split_pairs)


def _decoder_needs(
    checkpoint: Checkpoint, settings: Settings, *, on_cpu: bool, split_pairs: Sequence[int] | None
) -> Needs:
    config, count = checkpoint.config, settings.sequences
    settings = replace(settings, cache=settings.cache.fitted(config.head_dim))
    if settings.prefill_step_size < 1:
        raise ValueError(f"prefill_step_size is {settings.prefill_step_size}; expected at least 1")
    itemsize = checkpoint.itemsize(on_cpu=on_cpu)
    pairs = _pairs(config, settings, split_pairs)
    dtype = mx.float32 if itemsize == FLOAT32 else mx.bfloat16  # or float16, of as many bytes

    def reserved(**sizes: Any) -> int:
        return pool_size(config, settings.cache, dtype=dtype, split_pairs=pairs, **sizes)

    def needed(tokens: int) -> MemoryPlan:
        cache = reserved(**single_sizes(tokens))
        prefill = min(settings.prefill_step_size, tokens)
        if count is None:
            scratch = scratch_bytes(checkpoint, settings, on_cpu=on_cpu, new=prefill, tokens=tokens)
            return MemoryPlan(tokens, settings, cache, scratch, caches=settings.caches * cache)
        in_all = settings.in_pool(tokens)
        pool, more = (
            reserved(
                tokens=own, sequences=n, max_seq_len=tokens, prefill_step_size=settings.prefill_step_size
            )
            for own, n in ((in_all, count), (in_all + page_rows(tokens), count + 1))
        )
        each = min(tokens, -(-in_all // count))  # of the sequences of a step, on average
        scratch = max(
            scratch_bytes(checkpoint, settings, on_cpu=on_cpu, new=new, tokens=own, sequences=n, logits=count)
            for new, own, n in ((prefill, tokens, 1), (1, each, count))
        )
        return MemoryPlan(
            tokens, settings, pool, scratch, caches=settings.caches * cache, sequence=more - pool
        )

    return needed


def _pairs(config: ModelConfig, settings: Settings, known: Sequence[int] | None) -> Sequence[int] | None:
    """The rotary pairs that each layer splits off; None: there is no bias to split off, or it is to stay
    in.
    """
    if not config.attention_bias or not settings.cache.bias_split:
        return None
    return known or [max(1, round(config.head_dim / 2 * GUESSED_PAIRS))] * config.num_hidden_layers


def _row_bytes(config: ModelConfig, settings: Settings, itemsize: int) -> int:
    """Bytes of a token's keys and values in one layer's cache."""
    K, D, cache = config.num_key_value_heads, config.head_dim, settings.cache
    layers = [cache.layer(0)] if cache.kv_format is None else cache.kv_format.layers
    each = ((own.kv_bits + own.value_bits, own.kv_group_size) for own in layers)
    return max(
        K * D * bits // 8 + 2 * K * (D // group * SCALE_BYTES if bits else D * itemsize)
        for bits, group in {*each}
    )


def scratch_bytes(
    checkpoint: Checkpoint,
    settings: Settings,
    *,
    on_cpu: bool,
    new: int,
    tokens: int,
    sequences: int | None = None,
    logits: int = 1,
) -> int:
    """The most bytes held beside the weights and the cache in a step. They never fall with more tokens.

    MLX's CPU back end queues about a layer ahead, and frees an array when its last reader has run. So the
    bound is one layer's activations, its keys and values as floats, its blocks of scores and parts of
    weights, and the logits.

    Of each of ``sequences`` in a pool, or of a cache (None), ``new`` tokens are read and ``tokens`` there in
    the end.
    """
    config, part, bits = checkpoint.config, checkpoint.part, settings.cache.kv_bits
    itemsize, experts, paged, sequences = (
        checkpoint.itemsize(on_cpu=on_cpu),
        config.experts,
        sequences,
        sequences or 1,
    )
    hidden, heads, kv_row = config.hidden_size, config.num_attention_heads, 2 * config.num_key_value_heads
    kv_row *= config.head_dim
    # Norms make two arrays, a product its parts, rotation two halves, the cache magnitudes; a GPU may attend
    # in float32, and an adapter adds a product to each.
    copies, inner = (7 if on_cpu else 10), 3
    if settings.cache.kv_format is not None or settings.cache.layer(0).rotates:  # its key transform's
        copies += 2
    if checkpoint.adapter_bytes:
        copies, inner = copies + 3, inner + 2
    numbers = copies * (hidden + heads * config.head_dim + kv_row) + inner * config.intermediate_size
    if experts is not None and any(experts.layers):
        numbers += 4 * experts.count + experts.per_token * ((inner + 3) * hidden + inner * experts.inner_size)
    if part is not None:
        numbers += SENT_COPIES * hidden
    # Of a cached number: as a float, unpacked, copied beside other sequences', and with its bias.
    splits = config.attention_bias and settings.cache.bias_split
    forms = (FLOAT32 if on_cpu or splits else itemsize) + _unpacked_bytes(bits)
    if not bits:
        forms = (0 if paged is None else 2 * itemsize) + (FLOAT32 if splits and not on_cpu else 0)
    if splits:
        forms += FLOAT32 // 2 if on_cpu else FLOAT32
    waiting, seen = 0, 0
    has_tail = settings.cache.any_tail
    if (
        has_tail
    ):  # exact rows are joined to the others, and those of a prompt wait until its chunk is committed
        forms += FLOAT32 if on_cpu else 0
        waiting += TAIL_BYTES * kv_row * (len(config.windows) * RING + TAIL_COPIES * (new + RING))
    most = sequences * tokens  # that are floats at once
    if on_cpu:  # NumPy attends to more of them block by block
        most = max(tokens_at_once(FLOAT32 * kv_row, new, bits), LONG_TOKENS if new <= FEW_ROWS else 0)
    for window in config.windows:
        own, mask, joined = tokens, 0, 0
        if window is not None and window < tokens:  # a ring beside the new tokens, which are put off
            own = min(tokens, single_rows(window, tokens) + new)
            joined = 2 * own * _row_bytes(config, settings, itemsize) if on_cpu else 0
            mask = MASK_BYTES * new * min(own, most)
            waiting += new * _row_bytes(config, settings, itemsize)
        in_float32 = on_cpu or splits or mask > 0
        made = makes_scores(
            device_kind(on_cpu),
            (heads, new, config.head_dim),
            (config.num_key_value_heads, own, config.head_dim),
            mask="added" if mask else "causal",
            dtype=mx.float32 if in_float32 else mx.bfloat16,
        )
        floats = min(sequences * own, most)
        own = min(own, most)
        scores = FLOAT32 * _scores_at_once(new, heads, own, on_cpu=on_cpu) if made else 0
        cast = FLOAT32 if not on_cpu and not splits and (made or mask) else 0
        queued = 1 if on_cpu else QUEUED_LAYERS - (1 if splits or cast else 0)
        if has_tail:
            mask = max(mask, _tail_mask_bytes(new, heads, own, on_cpu=on_cpu))
        seen = max(seen, mask + joined + sequences * scores + kv_row * floats * (forms + cast) * queued)
    is_packed = config.quantization is not None and not (checkpoint.unpacked and config.experts is None)
    weights = _float_weights(config) if on_cpu and is_packed else 0
    rows = 0 if part is not None and part.rank else LOGITS_COPIES
    rows += GATHERED_COPIES if part is not None and part.divided and not checkpoint.tied else 0
    sampled = logits * rows * FLOAT32 * config.vocab_size
    return int(MARGIN * (numbers * new * sequences * itemsize + waiting + seen + weights + sampled))


def _unpacked_bytes(bits: int) -> int:
    """Bytes of a cached number between its packed form and a float."""
    return 2 if bits and PACKINGS[bits].unit > 1 else 0


def _scores_at_once(new: int, heads: int, tokens: int, *, on_cpu: bool) -> int:
    """The most scores that are held where new tokens of a sequence attend in blocks."""
    block = BLOCK_SCORE_BYTES // FLOAT32 if on_cpu else GPU_BLOCK_SCORES
    return min(SCORE_COPIES * new * heads * tokens, QUEUED_BLOCKS * max(block, heads * tokens))


def _tail_mask_bytes(new: int, heads: int, tokens: int, *, on_cpu: bool) -> int:
    """Bytes of the mask that tells exact rows from others: of all queries, and as terms of some of them."""
    # Of many queries a GPU makes none, and a CPU none of many scores.
    new = min(new, TILED_SCORES // (heads * tokens) if on_cpu else FEW_ROWS)
    block = min(new, MASKED_QUERIES, max(1, BLOCK_SCORE_BYTES // FLOAT32 // (heads * tokens)))
    return tokens * (2 * new + MASK_BYTES * block)


def _float_weights(config: ModelConfig) -> int:
    """Bytes of the parts of quantized matrices that are held as floats, and of unpacking them."""
    assert config.quantization is not None
    hidden, experts, cores = config.hidden_size, config.experts, len(cpu_streams())
    heads = config.num_attention_heads + config.num_key_value_heads
    layer = hidden * (2 * heads * config.head_dim + 3 * config.intermediate_size)
    if experts is not None:
        layer = max(layer, cores * 3 * experts.inner_size * hidden)
    held = min(max(layer, config.vocab_size * hidden), (cores + QUEUED_PARTS) * DEQUANTIZED_ELEMENTS)
    bits = config.quantization.bits
    if not config.quantization.has_biases:
        return held * (FLOAT32 + 5)  # small floats, looked up
    return held * (FLOAT32 + (1 if 8 % bits == 0 else FLOAT32 * bits))  # a mask, or a word for every bit


def _bridged_needs(checkpoint: BridgedCheckpoint, settings: Settings, *, on_cpu: bool) -> Needs:
    """Of a model that mlx-lm's class computes: cache and state are exact, scratch is an estimate."""
    from kvant.bridge.pool import CacheBytes, check_entries, pool_needs
    from kvant.bridge.probe import Attention, Leaf, leaves_of

    config, part, sequences = checkpoint.config, checkpoint.part, settings.sequences
    module, entries = checkpoint.module(on_cpu), checkpoint.resident_entries(on_cpu)
    if sequences is not None and part is not None:
        raise ModelError(f"{config.model_type} on several machines takes one sequence at a time")
    if sequences is not None:
        check_entries(entries, module, config.model_type)
    leaves = leaves_of(entries)
    attention = [leaf for leaf in leaves if isinstance(leaf, Attention)]
    widths = [a.num_kv_heads * (a.key_dim + a.value_dim) if isinstance(a, Attention) else 0 for a in leaves]
    state = max((leaf.nbytes for leaf in leaves if isinstance(leaf, State)), default=0)
    outputs, itemsize = _widest_layer(module, config.experts_used), checkpoint.itemsize(on_cpu=on_cpu)
    logits = LOGITS_COPIES * FLOAT32 * config.vocab_size * (part is None or part.rank == 0)

    def read(leaf: Leaf, new: int, tokens: int) -> int:
        """Tokens whose keys and values a layer reads."""
        if not isinstance(leaf, Attention):
            return 0
        seen = leaf.window or leaf.chunk or tokens
        return min(tokens, single_rows(seen, tokens) + new) if seen < tokens else tokens

    def attend(leaf: Attention, new: int, tokens: int) -> int:
        """Bytes of scores and masks in a layer."""
        own, narrow = read(leaf, new, tokens), (leaf.window or leaf.chunk or tokens) < tokens
        mask = MASK_BYTES * new * own if narrow or leaf.takes_array else 0
        heads = leaf.query_heads or checkpoint.heads()
        # A layer with an exact tail attends in kvant's own way, in blocks or tiles.
        if not leaf.query_heads or (on_cpu and mask and new > 1 and not has_tail):
            return mask + FLOAT32 * SCORE_COPIES * heads * new * own
        made = makes_scores(
            device_kind(on_cpu),
            (heads, new, leaf.key_dim),
            (leaf.num_kv_heads, own, leaf.key_dim if leaf.value_is_key else leaf.value_dim),
            mask="boolean" if mask else "causal",
            dtype=DTYPES[leaf.dtype],
        )
        if has_tail:
            mask = max(mask, _tail_mask_bytes(new, heads, own, on_cpu=on_cpu))
        return mask + itemsize * _scores_at_once(new, heads, own, on_cpu=on_cpu) * made

    # Of a cached number: as a float, through as much again on a CPU, and unpacked.
    forms = DEQUANTIZED_COPIES * FLOAT32 if on_cpu else itemsize + _unpacked_bytes(settings.cache.kv_bits)
    has_tail = settings.cache.any_tail

    def chunk(new: int, tokens: int, count: int = 1) -> int:
        scores = max((attend(leaf, new, tokens) for leaf in attention), default=0)
        floats = [width * read(leaf, new, tokens) for width, leaf in zip(widths, leaves, strict=True)]
        queued = 1 if on_cpu else QUEUED_LAYERS
        most = max((sum(floats[first : first + queued]) for first in range(len(floats))), default=0)
        numbers = FLOAT32 * OUTPUT_COPIES * outputs * new + forms * most
        states = max(min(new, QUEUED_STATES), STATES_OF_A_TOKEN.get(config.model_type, 0) * new) * state
        matrices = FLOAT32 * SCORE_COPIES * checkpoint.heads() * new * min(new, MATRIX_TOKENS) if state else 0
        tails = 0
        if has_tail:
            tails = TAIL_BYTES * (sum(widths) * RING + max(widths, default=0) * TAIL_COPIES * (new + RING))
        return int(MARGIN * count * (numbers + max(scores, matrices) + states + tails))

    def pool(tokens: int, in_all: int, count: int) -> CacheBytes:
        sizes = {"tokens": in_all, "sequences": count, "max_seq_len": tokens}
        return pool_needs(entries, sizes | {"prefill_step_size": settings.prefill_step_size}, settings.cache)

    def needed(tokens: int) -> MemoryPlan:
        one = pool_needs(entries, single_sizes(tokens), settings.cache)
        caches = settings.caches * sum(one)
        prefill = chunk(min(settings.prefill_step_size, tokens), tokens)
        if sequences is None:
            scratch = max(prefill, chunk(1, tokens) + logits) + one.state
            return MemoryPlan(tokens, settings, one.keys_values, scratch, one.state, caches)
        in_all = settings.in_pool(tokens)
        cache, states = pool(tokens, in_all, sequences)
        more = sum(pool(tokens, in_all + in_all // sequences, sequences + 1)) - cache - states
        each = min(tokens, -(-in_all // sequences))  # of the sequences of a step, on average
        scratch = max(prefill, chunk(1, each, sequences) + sequences * logits) + states
        return MemoryPlan(tokens, settings, cache, scratch, states, caches, sequence=more)

    return needed


def _widest_layer(module: "Module", experts_used: int | None) -> int:
    """The numbers a token's products have in the layer that has most, of its experts those that are used."""
    from kvant.bridge.model import by_layer

    def outputs(arrays: Mapping[str, mx.array]) -> int:
        matrices = [a.shape for name, a in arrays.items() if name.endswith("weight") and a.ndim > 1]
        return sum(shape[-2] * ((experts_used or shape[0]) if len(shape) == 3 else 1) for shape in matrices)

    # An embedding is in no layer, nor is a head: its products are counted as logits.
    return max((outputs(arrays) for layer, arrays in by_layer(module).items() if layer), default=0)
