"""The memory of a run without weights: its exact cache or pool, and an upper bound of its scratch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx

from kvant.cache.pool import pool_bytes, single_rows, single_sizes
from kvant.operators.cpu_attention import BLOCK_SCORE_BYTES
from kvant.operators.cpu_paged_attention import LONG_TOKENS, TILED_SCORES
from kvant.operators.exact_attention import MASKED_QUERIES
from kvant.operators.exact_rows import RING
from kvant.operators.packing import PACKINGS
from kvant.operators.paged_rows import tokens_at_once
from kvant.operators.score_blocks import GPU_BLOCK_SCORES, device_kind, makes_scores
from kvant.operators.streams import FEW_ROWS
from kvant.plan.bridged import BridgedCheckpoint, bridged_facts
from kvant.plan.decoder import FLOAT32, decoder_facts
from kvant.plan.facts import Facts, Layer
from kvant.plan.memory import AnyCheckpoint, MemoryPlan, Settings, page_rows

# Measured with MLX 0.32.4 on a CPU of 2 cores, 2026-11-29: 638 runs of tiny models, kvant's own and 59
# architectures of mlx-lm's, in processes, with chunks of 8 to 512 tokens, caches of 0, 4 and 8 bits,
# windows, exact tails and pools. No peak was above its plan. Figures below are the lowest ratio of plan to
# peak with another value.
MARGIN = 1.3  # of scratch; at 1.2: 0.998
QUEUED_BLOCKS = 5  # blocks of scores that exist at once; at 4: 0.985
# Copies of scores outside of blocks, with the mask and their softmax, and in attention to latents, which adds
# two products; at 2: 0.91. Other attention with a whole matrix, including mlx-lm's with an array as its mask,
# had 1.1 to 1.9 alive.
SCORE_COPIES = 3
MATRIX_COPIES = 2
# Bytes per query and token of a window's mask that becomes terms of the scores, with their product. (By the
# code.)
MASK_BYTES = 16
# Bytes of a number of an exact tail, and copies of a layer's: waiting, joined and as floats; at 4: 1.01, on a
# busy machine less than 1.
TAIL_BYTES = 2
TAIL_COPIES = 6
# A linear layer proceeds token by token, and MLX's queue keeps this many of its states alive; at 1: 1.008.
QUEUED_STATES = 10
MATRIX_TOKENS = 256  # mlx-lm's scans take this many at a time, with a matrix for every head; at 128: 0.85
# Layers whose keys and values are floats on a GPU at once. MLX has ten command buffers in flight, and a layer
# of a long context takes three; in float32 or with biases more, so it is one layer less. (Read from its
# source; not measured.)
QUEUED_LAYERS = 3

Needs = Callable[[int], MemoryPlan]  # takes reserved tokens, all of them used; leaves out weights


@dataclass(frozen=True, slots=True)
class Step:
    """One step of some sequences of a cache or a pool."""

    new: int  # new tokens of each sequence
    tokens: int  # tokens of each sequence after the step
    sequences: int
    logits: int  # rows of logits
    in_pool: bool


def needs(
    checkpoint: AnyCheckpoint, settings: Settings, *, on_cpu: bool, split_pairs: Sequence[int] | None = None
) -> Needs:
    """Return the needs of a run by reserved tokens; arguments and errors as in :func:`kvant.plan.plan`."""
    if settings.prefill_step_size < 1:
        raise ValueError(f"prefill_step_size is {settings.prefill_step_size}; expected at least 1")
    count = settings.sequences
    if isinstance(checkpoint, BridgedCheckpoint):
        facts = bridged_facts(checkpoint, settings.cache, on_cpu=on_cpu, in_pool=count is not None)
    else:
        settings = replace(settings, cache=settings.cache.fitted(checkpoint.config.head_dim))
        facts = decoder_facts(checkpoint, settings.cache, on_cpu=on_cpu, split_pairs=split_pairs)
    stored = settings.cache
    state = sum(each.nbytes for each in facts.states)

    def reserved(**sizes: Any) -> tuple[int, int]:
        """Return the bytes of keys and values, and of states."""
        formats = facts.formats(sizes["max_seq_len"])
        states = (sizes["sequences"] + stored.checkpoints) * state
        return pool_bytes(formats, **sizes, checkpoints=stored.checkpoints), states

    def pool(tokens: int, in_all: int, sequences: int) -> tuple[int, int]:
        return reserved(
            tokens=in_all,
            sequences=sequences,
            max_seq_len=tokens,
            prefill_step_size=settings.prefill_step_size,
        )

    def needed(tokens: int) -> MemoryPlan:
        one = cache_bytes, states = reserved(**single_sizes(tokens))
        each = tokens
        more = 0
        if count is not None:
            in_all = settings.in_pool(tokens)
            cache_bytes, states = pool(tokens, in_all, count)
            more = sum(pool(tokens, in_all + page_rows(tokens), count + 1)) - cache_bytes - states
            each = min(tokens, -(-in_all // count))  # average length of a step's sequences
        rows = count or 1
        prefill = Step(min(settings.prefill_step_size, tokens), tokens, 1, rows, count is not None)
        decode = Step(1, each, rows, rows, count is not None)
        scratch = states + max(step_bytes(facts, step, on_cpu=on_cpu) for step in (prefill, decode))
        conversations = settings.caches * sum(one)
        return MemoryPlan(tokens, settings, cache_bytes, scratch, states, conversations, sequence=more)

    return needed


def step_bytes(facts: Facts, step: Step, *, on_cpu: bool) -> int:
    """Return an upper bound of a step's bytes without weights and cache. It never falls with more tokens.

    MLX's CPU backend queues about a layer ahead, and frees an array when its last reader has run. So the
    bound is one layer's activations, its keys and values as floats, its blocks of scores and dequantized
    pieces of weights, and the logits.
    """
    attention = cache(lambda layer: _attention(layer, step, on_cpu=on_cpu))
    each = [NO_ATTENTION if layer is None else attention(layer) for layer in facts.layers]
    state = max((one.nbytes for one in facts.states), default=0)
    matrices = step.sequences * SCORE_COPIES * step.new * min(step.new, MATRIX_TOKENS) * facts.scan_heads
    matrices *= FLOAT32
    seen = matrices
    for first in range(len(each)):
        queued = each[first : first + each[first].queued]
        seen = max(seen, max(matrices, *(one.scores for one in queued)) + sum(one.floats for one in queued))
    waiting = sum(one.waiting for one in each)
    # Exact rows of a prompt are written when its chunk is committed.
    widths = [layer.width for layer in facts.layers if layer is not None and layer.format.tail_dtype]
    copied = step.sequences * TAIL_COPIES * (step.new + RING)
    waiting += TAIL_BYTES * (sum(widths) * RING + max(widths, default=0) * copied)
    states = max(min(step.new, QUEUED_STATES), facts.states_of_a_token * step.new) * state
    numbers = step.sequences * (step.new * facts.token_bytes + states)
    sampled = step.logits * facts.sampled_bytes
    return int(MARGIN * (numbers + waiting + seen + facts.weight_bytes + sampled))


@dataclass(frozen=True, slots=True)
class _Attention:
    """Bytes of a layer's attention."""

    scores: int  # including masks and joined rows
    floats: int  # of keys and values
    queued: int  # number of layers that have these at once
    waiting: int = 0  # of deferred new tokens


NO_ATTENTION = _Attention(0, 0, 1)


def _attention(layer: Layer, step: Step, *, on_cpu: bool) -> _Attention:
    stored = layer.format
    heads = layer.query_heads
    new = step.new
    tokens = step.tokens
    narrow = stored.window is not None and stored.window < tokens
    read = tokens
    if narrow:  # the window's rows, and the deferred new tokens
        read = min(tokens, single_rows(stored.window, tokens) + new)
    most = step.sequences * tokens  # tokens that are floats at once
    if on_cpu and layer.by_rows:  # NumPy attends to more of them block by block
        most = max(
            tokens_at_once(FLOAT32 * layer.width, new, stored.kv_bits), LONG_TOKENS if new <= FEW_ROWS else 0
        )
    floats = min(step.sequences * read, most)
    joined = 2 * read * layer.row_bytes if narrow and on_cpu else 0
    if step.sequences > 1 and not layer.by_rows:  # gathered, and put in order
        joined += 2 * step.sequences * read * layer.row_bytes
    mask = (MASK_BYTES if layer.by_rows else 1) * new * min(read, most) if narrow or layer.takes_mask else 0
    in_float32 = on_cpu or (layer.by_rows and (layer.splits or mask > 0))
    made = layer.makes_scores or makes_scores(
        device_kind(on_cpu),
        (heads, new, stored.head_dim),
        (stored.num_kv_heads, read, stored.value_head_dim or stored.head_dim),
        mask="causal" if not mask else "added" if layer.by_rows else "boolean",
        dtype=mx.float32 if in_float32 else layer.dtype,
    )
    cast = FLOAT32 if not on_cpu and layer.by_rows and not layer.splits and (made or mask) else 0
    read = min(read, most)
    if layer.makes_scores or (on_cpu and mask and new > 1 and not layer.by_rows):
        # Attention to latents, which all heads share, adds two products.
        is_latent = layer.makes_scores and stored.num_kv_heads == 1
        copies = SCORE_COPIES if is_latent else MATRIX_COPIES
        scores = FLOAT32 * copies * heads * new * read
    else:
        number = FLOAT32 if layer.by_rows else layer.dtype.size
        scores = number * _scores_at_once(new, heads, read, on_cpu=on_cpu) if made else 0
    if stored.tail_dtype:
        mask = max(mask, _tail_mask_bytes(new, heads, read, on_cpu=on_cpu))
    return _Attention(
        mask + joined + step.sequences * scores,
        layer.width * floats * (_float_bytes(layer, on_cpu=on_cpu, in_pool=step.in_pool) + cast),
        1 if on_cpu else QUEUED_LAYERS - (1 if layer.splits or cast else 0),
        new * layer.row_bytes if narrow else 0,
    )


def _float_bytes(layer: Layer, *, on_cpu: bool, in_pool: bool) -> int:
    """Return the bytes of a cached number as floats: unpacked, joined with other sequences, and biased."""
    stored = layer.format
    itemsize = layer.dtype.size
    if stored.kv_bits:
        size = FLOAT32 if on_cpu or layer.splits else itemsize
        size += 2 if PACKINGS[stored.kv_bits].unit > 1 or PACKINGS[stored.value_bits].unit > 1 else 0
    else:
        size = (2 * itemsize if in_pool else 0) + (FLOAT32 if layer.splits and not on_cpu else 0)
    if layer.splits:
        size += FLOAT32 // 2 if on_cpu else FLOAT32
    if layer.makes_scores:  # a model may repeat kv heads for each query head; latents have one head
        size += FLOAT32 * (layer.query_heads // stored.num_kv_heads if stored.num_kv_heads > 1 else 1)
    elif stored.value_head_dim and (stored.value_head_dim, stored.value_bits) != (
        stored.head_dim,
        stored.kv_bits,
    ):
        size += FLOAT32  # keys and values share rows, and a product copies each
    return size + (FLOAT32 if stored.tail_dtype and on_cpu else 0)  # exact rows are joined to the others


def _scores_at_once(new: int, heads: int, tokens: int, *, on_cpu: bool) -> int:
    """Return the most scores at once if new tokens of a sequence attend in blocks."""
    block = BLOCK_SCORE_BYTES // FLOAT32 if on_cpu else GPU_BLOCK_SCORES
    return min(SCORE_COPIES * new * heads * tokens, QUEUED_BLOCKS * max(block, heads * tokens))


def _tail_mask_bytes(new: int, heads: int, tokens: int, *, on_cpu: bool) -> int:
    """Return the bytes of the mask for exact rows: of all queries, and as score terms of some of them."""
    # A GPU makes none for many queries, and a CPU none for many scores.
    new = min(new, TILED_SCORES // (heads * tokens) if on_cpu else FEW_ROWS)
    block = min(new, MASKED_QUERIES, max(1, BLOCK_SCORE_BYTES // FLOAT32 // (heads * tokens)))
    return tokens * (2 * new + MASK_BYTES * block)
