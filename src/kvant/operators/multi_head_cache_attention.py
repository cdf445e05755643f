"""PMX MultiHeadCacheAttention: append the current keys and values to a cache, and attend to every row so far."""

import mlx.core as mx

from kvant.operators.attention import attend_live_rows, attend_rows, attend_sequences
from kvant.operators.bias_split import BiasSplit
from kvant.operators.kernels.attend import attend, unsupported_reason
from kvant.operators.kernels.dispatch import Backend, resolve
from kvant.operators.key_value_cache import put_rows, quantized_parts, read_rows, read_sequences, write_rows
from kvant.operators.validation import check_attention_call, check_bias_split, check_cache_call


def multi_head_cache_attention(
    query: mx.array,
    current_key: mx.array,
    current_value: mx.array,
    start_pos: int | mx.array,
    cache: mx.array,
    scale: mx.array | None = None,
    attn_mask: mx.array | None = None,
    *,
    num_heads: int,
    head_dim: int,
    is_causal: bool,
    is_alibi: bool = False,
    num_kv_heads: int = 0,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    cache_layout: int = 0,
    bias_split: BiasSplit | None = None,
    kernels: str | None = None,
) -> mx.array:
    """Multi-head (or grouped-query) attention through a key/value cache.

    ``cache`` and ``scale`` are in-out, as in :func:`kvant.operators.key_value_cache`; the past is read from the
    cache, and so are the current rows, quantized and dequantized.

    Args:
        query: (B, S, H, D) float32, float16 or bfloat16.
        current_key, current_value: (B, S, K, D), the query's dtype; query head h reads kv head h // (H / K).
        start_pos: rows already in the cache, an int or an integer array with one element.
        cache, scale, num_layer, layer_idx, quant_bit, quant_group, cache_layout: as in ``key_value_cache``.
        attn_mask: added to the scores: (S, >=T), (H, S, >=T) or (B or 1, H, S, >=T) with T = start_pos + S; columns
            past T are never read. A boolean mask keeps where True. An empty array means none. A query with every key
            masked gives zeros.
        num_heads: H.
        head_dim: D; scores are divided by its square root, softmax is in float32.
        is_causal: query i sees key j only where j <= start_pos + i.
        is_alibi: add ALiBi biases; causal whatever ``is_causal`` says.
        num_kv_heads: K; 0 means H.
        bias_split: an extension of PMX: what ``current_key``, ``current_value`` and the cached rows lack of their
            projections' biases, keys rotated as their positions, row j at position j. None: the plain operator.
        kernels: "unfused" or "fused" forces one; None: the environment variable KVANT_KERNELS does, or else it is the
            fused kernel on a GPU for calls that it takes: few new tokens, cache_layout 1, one layer. It multiplies
            levels and scales in float32, where the unfused operator rounds products to the scale's dtype.

    Returns:
        (B, S, H, D) in the query's dtype.

    Raises:
        ValueError: any input that does not fit, or a call that a forced kernel does not take; cache and scale are then
            as they were.
        RuntimeError: a forced kernel that failed its self-check on this device.

    Source: OpenPPL PMX, MultiHeadCacheAttention.
    """
    call = check_cache_call(
        current_key,
        current_value,
        start_pos,
        cache,
        scale,
        num_layer=num_layer,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
    )
    mask = check_attention_call(
        query,
        current_key,
        call,
        attn_mask,
        num_heads=num_heads,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        is_causal=is_causal,
        is_alibi=is_alibi,
    )
    check_bias_split(bias_split, call, num_kv_heads or num_heads)
    if cache_layout == 1 and num_layer == 1:
        shape = (call.batch, num_heads, call.new_tokens, head_dim)
        reason = unsupported_reason(shape, quant_bit=quant_bit, quant_group=quant_group)
    else:
        reason = f"cache_layout {cache_layout} with num_layer {num_layer}; it takes layout 1 with one layer"
    backend = resolve(kernels, reason)
    # (B, S, H, D) -> (B, H, S, D)
    query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, current_key, current_value))
    output = append_and_attend(
        query,
        key,
        value,
        call.start,
        cache,
        scale,
        mask=mask,
        is_causal=is_causal,
        is_alibi=is_alibi,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
        bias_split=bias_split,
        backend=backend,
    )
    return output.transpose(0, 2, 1, 3)  # (B, H, S, D) -> (B, S, H, D)


def append_and_attend(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    start: int | tuple[int, ...],
    cache: mx.array,
    scale: mx.array | None,
    *,
    mask: mx.array | None = None,
    is_causal: bool = True,
    is_alibi: bool = False,
    layer_idx: int = 0,
    quant_bit: int,
    quant_group: int,
    cache_layout: int = 1,
    product_dtype: mx.Dtype | None = None,
    bias_split: BiasSplit | None = None,
    backend: Backend | None = None,
) -> mx.array:
    """The operator on (B, heads, S, D) arrays, unchecked: what the engine's caches call. Changes cache and scale.

    ``start`` is an int for all sequences, or B ints, one each: in cache layout 1 with one layer. The mask's columns are
    then those of the longest sequence, and a shorter one's further columns are not read.
    With a ``backend`` the fused kernel computes it; it must support the call
    (``kernels.attend.unsupported_reason``, cache layout 1, one layer). ``product_dtype`` is then float32.

    Returns:
        (B, H, S, D) in the query's dtype.
    """
    write_rows(
        key,
        value,
        start,
        cache,
        scale,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
        backend=backend,
    )
    B, _, S, _ = key.shape
    if backend is not None:
        return attend(
            query,
            cache,
            scale,
            mx.array((start,) * B if isinstance(start, int) else start, mx.int32),
            quant_bit=quant_bit,
            quant_group=quant_group,
            is_causal=is_causal,
            is_alibi=is_alibi,
            mask=mask,
            bias_split=bias_split,
            backend=backend,
        )
    if not isinstance(start, int):
        ends = [offset + S for offset in start]
        sequences = read_sequences(
            ends, cache, scale, quant_bit=quant_bit, dtype=query.dtype, product_dtype=product_dtype
        )
        return attend_sequences(
            query, sequences, is_causal=is_causal, is_alibi=is_alibi, mask=mask, bias_split=bias_split
        )
    all_keys, all_values = read_rows(
        B,
        start + S,
        cache,
        scale,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        cache_layout=cache_layout,
        dtype=query.dtype,
        product_dtype=product_dtype,
    )
    return attend_rows(
        query, all_keys, all_values, is_causal=is_causal, is_alibi=is_alibi, mask=mask, bias_split=bias_split
    )


def append_and_attend_static(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    offset: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    *,
    rows: int,
    quant_bit: int,
    quant_group: int,
    product_dtype: mx.Dtype,
    bias_split: BiasSplit | None,
    backend: Backend | None = None,
) -> tuple[mx.array, ...]:
    """The operator for one new token, in cache layout 1 with one layer, as a function: arrays in, new arrays out.

    Its operations and shapes don't depend on ``offset``, so that it can be part of a compiled step. MLX writes in place
    all the same where nothing else holds the old arrays. Unchecked: an offset past the cache loses the write silently.

    Args:
        query: (B, H, 1, D).
        key, value: (B, K, 1, D).
        offset: integer array: where the new row goes; () for all sequences, or (B,), one each.
        cache, scale: (1, B, 2, K, MaxS, D' or D/G).
        rows: rows to read, more than ``offset``. The fused kernel goes by ``offset`` itself.
        backend: as in :func:`append_and_attend`.

    Returns:
        (B, H, 1, D) in the query's dtype, the new cache, and, where it was given, the new scale.
    """
    stored = [cache] if scale is None else [cache, scale]
    parts = quantized_parts(
        key, value, quant_bit=quant_bit, quant_group=quant_group, dtypes=[x.dtype for x in stored], backend=backend
    )
    if offset.size == 1:
        place = offset.reshape(1)
        updated = [  # (B, 2, K, 1, last) -> (1, B, 2, K, 1, last)
            mx.slice_update(array, part[None], place, axes=(4,)) for array, part in zip(stored, parts, strict=True)
        ]
    else:
        updated = [put_rows(array, part, offset) for array, part in zip(stored, parts, strict=True)]
    new_cache, new_scale = updated[0], updated[1] if len(updated) > 1 else None
    if backend is not None:
        output = attend(
            query,
            new_cache,
            new_scale,
            offset,
            quant_bit=quant_bit,
            quant_group=quant_group,
            bias_split=bias_split,
            backend=backend,
        )
        return output, *updated
    keys, values = read_rows(
        key.shape[0],
        rows,
        new_cache,
        new_scale,
        quant_bit=quant_bit,
        dtype=query.dtype,
        product_dtype=product_dtype,
    )
    live = mx.arange(rows) <= offset.reshape(-1, 1)  # (B or 1, T)
    return attend_live_rows(query, keys, values, live, bias_split=bias_split), *updated
