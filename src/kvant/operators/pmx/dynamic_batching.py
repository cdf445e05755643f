"""PMX's dynamic operators: KeyValueCache and MultiHeadCacheAttention over packed sequences.

The sequences may differ in length; their new tokens are concatenated along one axis. N counts the new tokens
of all sequences, T all tokens including the new ones, MaxT the rows of the cache. The arithmetic is that of
the static operators.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.operators.attention import attend_tokens
from kvant.operators.dispatch import resolve
from kvant.operators.pmx.cache_call import PACKED_LAYOUTS, CacheCall, check_call
from kvant.operators.pmx.packed_sequences import PackedSequence, Run, check_sequences
from kvant.operators.pmx.validation import (
    MAX_ELEMENTS,
    check_attn_mask,
    check_heads,
    check_numbers,
    check_repeat,
)
from kvant.operators.stored_tokens import float_tokens

Ints = mx.array | Sequence[int]


def key_value_cache(
    current_key: mx.array,
    current_value: mx.array,
    seqstarts: Ints,
    kvstarts: Ints,
    cachestarts: Ints | Sequence[Sequence[int]],
    start_pos: Ints,
    max_seqlen: int,
    max_kvlen: int,
    cache: mx.array,
    scale: mx.array | None = None,
    *,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    num_repeat: int = 1,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
) -> tuple[mx.array, mx.array]:
    """Append new tokens of B sequences to a cache and return all tokens of these sequences, dequantized.

    ``cache`` and ``scale`` are in-out. The call changes the new tokens' rows of layer ``layer_idx``, nothing
    else. Everything is checked before anything is written. Index arguments are integer arrays or sequences of
    ints.

    Args:
        current_key, current_value: (N, K, D) float32, float16 or bfloat16; int8 too with ``quant_bit`` 0.
        seqstarts: (B + 1,): sequence b has the new tokens seqstarts[b] to seqstarts[b + 1] - 1 of the N. A
            sequence may have none.
        kvstarts: (B + 1,): its tokens are kvstarts[b] to kvstarts[b + 1] - 1 of the T returned.
        cachestarts: cache_mode 0: (B,), the row of each sequence's first token. cache_mode 1: (B, pages), the
            first row of each page, not its number. Entries past ceil(tokens / page_size) are ignored.
        start_pos: (B,): tokens that each sequence has in the cache.
        max_seqlen, max_kvlen: the largest number of new tokens, and of all tokens, of a sequence.
        cache: layout 0 (MaxT, L, 2, K, D), 1 (L, MaxT, 2, K, D), 2 (L, 2, MaxT, K, D), 3 (L, 2, K, MaxT, D);
            otherwise as in :func:`kvant.operators.pmx.static_batching.key_value_cache`.
        scale, num_layer, layer_idx, quant_bit, quant_group, num_repeat: as there.
        cache_mode: 0: a sequence's rows are contiguous. 1: its rows are in pages.
        cache_layout: 0 to 3.
        page_size: rows of a page, in cache_mode 1.

    Returns:
        key, value: (T, K * num_repeat, D) in the inputs' dtype, new tokens included as the cache stores them.

    Raises:
        ValueError: an input does not fit, rows are outside the cache, or a row to write also holds another
            token of the call's sequences. Rows that are only read may be shared. Cache and scale are then
            unchanged.

    Source: OpenPPL PMX, dynamic batching, KeyValueCache.
    """
    form = (num_layer, layer_idx, quant_bit, quant_group, cache_layout)
    indices = (seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen, cache_mode, page_size)
    call, sequences = _checked({}, indices, form, None, current_key, current_value, cache, scale)
    _, K, D = current_key.shape
    check_repeat(num_repeat, sequences[-1].keys.stop * K * D)
    _write(call, sequences, current_key, current_value)
    runs = [run for sequence in sequences for run in sequence.runs]
    # (1, K, T, D) -> (T, K * num_repeat, D)
    key, value = (
        mx.repeat(x[0].transpose(1, 0, 2), num_repeat, axis=1) for x in _read(call, runs, current_key.dtype)
    )
    return key, value


def multi_head_cache_attention(
    query: mx.array,
    current_key: mx.array,
    current_value: mx.array,
    seqstarts: Ints,
    kvstarts: Ints,
    cachestarts: Ints | Sequence[Sequence[int]],
    start_pos: Ints,
    decoding_batches: int,
    max_seqlen: int,
    max_kvlen: int,
    cache: mx.array,
    scale: mx.array | None = None,
    attn_mask: mx.array | None = None,
    *,
    num_heads: int,
    head_dim: int,
    is_causal: bool = True,
    is_alibi: bool = False,
    num_kv_heads: int = 0,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
) -> mx.array:
    """Append new tokens of B sequences to a cache; each attends to all tokens of its own sequence.

    ``cache`` and ``scale`` are in-out, as in :func:`key_value_cache`. All keys and values are read from the
    cache, so new ones are quantized and dequantized too. The fused kernel does not support packed sequences.

    Args:
        query: (N, H, D) float32, float16 or bfloat16.
        current_key, current_value: (N, K, D) in the query's dtype. Query head h reads kv head h // (H / K).
        seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen: as in ``key_value_cache``.
        decoding_batches: the number of leading sequences without a causal mask. It only matters for those
            with several new tokens.
        cache, scale, num_layer, layer_idx, quant_bit, quant_group: as in ``key_value_cache``.
        attn_mask: added to the scores: (N, >=T) or (H, N, >=T). Sequence b reads only rows seqstarts[b] :
            seqstarts[b + 1] and columns kvstarts[b] : kvstarts[b + 1]. A boolean mask keeps True. An empty
            array means no mask. A query with every key masked gives zeros.
        num_heads, head_dim, num_kv_heads: as in
            :func:`kvant.operators.pmx.static_batching.multi_head_cache_attention`.
        is_causal: query i of a sequence sees its token j only if j <= start_pos + i.
        is_alibi: add ALiBi biases. The call is then causal whatever ``is_causal`` and ``decoding_batches``
            are.
        cache_mode, cache_layout, page_size: as in ``key_value_cache``.

    Returns:
        (N, H, D) in the query's dtype.

    Raises:
        ValueError: as in ``key_value_cache``, and if KVANT_KERNELS forces the fused kernel.

    Source: OpenPPL PMX, dynamic batching, MultiHeadCacheAttention.
    """
    form = (num_layer, layer_idx, quant_bit, quant_group, cache_layout)
    indices = (seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen, cache_mode, page_size)
    sizes = check_heads(num_heads, num_kv_heads, head_dim, is_causal=is_causal, is_alibi=is_alibi)
    call, sequences = _checked(sizes, indices, form, query, current_key, current_value, cache, scale)
    check_numbers(
        [
            ("decoding_batches", decoding_batches, 0, len(sequences)),
            ("max_kvlen", max_kvlen, 1, MAX_ELEMENTS // ((num_kv_heads or num_heads) * head_dim)),
        ]
    )
    mask = check_attn_mask(attn_mask, [(), (num_heads,)], len(query), sequences[-1].keys.stop)
    resolve(unsupported_reason="packed sequences")
    _write(call, sequences, current_key, current_value)
    outputs: list[mx.array] = []
    for b, sequence in enumerate(sequences):
        if not sequence.new_runs:
            continue
        output = attend_tokens(
            query[sequence.queries].transpose(1, 0, 2)[None],  # (S, H, D) -> (1, H, S, D)
            *_read(call, sequence.runs, query.dtype, after=outputs[-1:]),
            is_causal=is_causal and b >= decoding_batches,
            is_alibi=is_alibi,
            mask=None if mask is None else mask[..., sequence.queries, sequence.keys],
        )
        outputs.append(output[0].transpose(1, 0, 2))  # (1, H, S, D) -> (S, H, D)
    return mx.concatenate(outputs)


def _checked(
    sizes: dict[str, int], indices: Any, form: tuple[int, ...], *arrays: Any
) -> tuple[CacheCall, list[PackedSequence]]:
    call = check_call(PACKED_LAYOUTS, ("N",), sizes, form, *arrays)
    return call, check_sequences(sizes["N"], sizes["MaxT"], *indices)


def _write(call: CacheCall, sequences: Sequence[PackedSequence], key: mx.array, value: mx.array) -> None:
    """Write new keys and values (N, K, D) in place, with one operation per array."""
    rows = [row for sequence in sequences for run in sequence.new_runs for row in range(*run)]
    # (N, K, D) -> (1, K, N, D)
    key, value = (x.transpose(1, 0, 2)[None] for x in (key, value))
    call.write(key, value, {"MaxT": mx.array(rows, mx.int32)})


def _read(
    call: CacheCall, runs: Sequence[Run], dtype: mx.Dtype, after: Sequence[mx.array] = ()
) -> tuple[mx.array, mx.array]:
    """Return the tokens in these rows as keys and values (1, K, rows, D).

    ``after``: arrays to compute first. Without them MLX dequantizes many sequences before it uses the first.
    """
    parts = zip(*(call.read({"MaxT": slice(*run)}) for run in runs), strict=True)  # (2, K, rows, last) each
    stored = [mx.concatenate(list(pieces), axis=2)[None] for pieces in parts]
    if after:
        stored = mx.depends(stored, list(after))
    return float_tokens(stored, quant_bit=call.quant_bit, dtype=dtype, product_dtype=stored[-1].dtype)
