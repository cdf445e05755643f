"""PMX's static operators, KeyValueCache and MultiHeadCacheAttention: sequences of one length in a cache."""

from typing import Any

import mlx.core as mx

from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit
from kvant.operators.dispatch import resolve
from kvant.operators.kernels.attend import unsupported_reason
from kvant.operators.paged_kernel import attend_fused
from kvant.operators.pmx.cache_call import STATIC_LAYOUTS, At, CacheCall, check_call
from kvant.operators.pmx.validation import (
    check_attn_mask,
    check_bias_split,
    check_heads,
    check_numbers,
    check_repeat,
)
from kvant.operators.probe import KernelUse
from kvant.operators.stored_tokens import float_tokens


def key_value_cache(
    current_key: mx.array,
    current_value: mx.array,
    start_pos: int | mx.array,
    cache: mx.array,
    scale: mx.array | None = None,
    *,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    num_repeat: int = 1,
    cache_layout: int = 0,
) -> tuple[mx.array, mx.array]:
    """Append S new tokens to a cache and return all its tokens, dequantized.

    ``cache`` and ``scale`` are in-out. The call changes sequences [:B], layer ``layer_idx`` and positions
    [start_pos : start_pos + S] of the caller's arrays, nothing else. Everything is checked before anything is
    written.

    Args:
        current_key, current_value: (B, S, K, D) float32, float16 or bfloat16; int8 too with ``quant_bit`` 0.
        start_pos: tokens already in the cache: an int, or an integer array with one element.
        cache: layout 0 (MaxB, L, 2, MaxS, K, D), layout 1 (L, MaxB, 2, K, MaxS, D); keys at index 0 of the
            axis of 2. int8 at 8 bits, uint8 with a last dimension of D/2 at 4 bits, a float dtype at 0.
        scale: as ``cache`` with a last dimension of D/quant_group, float32 or float16; None at 0 bits.
        num_layer, layer_idx: the cache's L, and the layer to write.
        quant_bit: 0, 8 or 4.
        quant_group: elements of D that share one scale.
        num_repeat: repeat each head this many times, interleaved.
        cache_layout: 0 or 1.

    Returns:
        key, value: (B, start_pos + S, K * num_repeat, D) in the inputs' dtype, new tokens included as the
            cache stores them.

    Raises:
        ValueError: an input does not fit. Cache and scale are then unchanged.

    Source: OpenPPL PMX, KeyValueCache.
    """
    form = (num_layer, layer_idx, quant_bit, quant_group, cache_layout)
    call, start, end = _checked({}, start_pos, form, None, current_key, current_value, cache, scale)
    B, _, K, D = current_key.shape
    check_repeat(num_repeat, B * end * K * D)
    call.write(current_key.transpose(0, 2, 1, 3), current_value.transpose(0, 2, 1, 3), _at(B, start, end))
    # (B, K, T, D) -> (B, T, K * num_repeat, D)
    key, value = (
        mx.repeat(x.transpose(0, 2, 1, 3), num_repeat, axis=2)
        for x in _tokens(call, B, end, current_key.dtype)
    )
    return key, value


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
    """Append S new tokens to a cache and attend to all its tokens.

    ``cache`` and ``scale`` are in-out, as in :func:`key_value_cache`. All keys and values are read from the
    cache, so new ones are quantized and dequantized too.

    Args:
        query: (B, S, H, D) float32, float16 or bfloat16.
        current_key, current_value: (B, S, K, D) in the query's dtype. Query head h reads kv head h // (H /
            K).
        start_pos: tokens already in the cache: an int, or an integer array with one element.
        cache, scale, num_layer, layer_idx, quant_bit, quant_group, cache_layout: as in ``key_value_cache``.
        attn_mask: added to the scores: (S, >=T), (H, S, >=T) or (B or 1, H, S, >=T) with T = start_pos + S.
            Columns past T are never read. A boolean mask keeps True. An empty array means no mask. A query
            with every key masked gives zeros.
        num_heads: H.
        head_dim: D. Scores are divided by its square root; softmax is in float32.
        is_causal: query i sees key j only if j <= start_pos + i.
        is_alibi: add ALiBi biases. The call is then causal whatever ``is_causal`` is.
        num_kv_heads: K; 0 means H.
        bias_split: an extension of PMX: the projections' biases that ``current_key``, ``current_value`` and
            the cache lack. Keys are rotated by their positions. None: PMX's operator.
        kernels: "unfused" or "fused" forces one. None: the environment variable KVANT_KERNELS decides, or
            else the fused kernel runs on a GPU if it supports the call (few new tokens, cache_layout 1, one
            layer). The fused kernel multiplies quantized values by scales in float32; the unfused operator
            rounds to the scale's dtype.

    Returns:
        (B, S, H, D) in the query's dtype.

    Raises:
        ValueError: an input does not fit, or a forced kernel does not support the call. Cache and scale are
            then unchanged.
        RuntimeError: a forced kernel fails on this device when it is tried.

    Source: OpenPPL PMX, MultiHeadCacheAttention.
    """
    form = (num_layer, layer_idx, quant_bit, quant_group, cache_layout)
    sizes = check_heads(num_heads, num_kv_heads, head_dim, is_causal=is_causal, is_alibi=is_alibi)
    call, start, end = _checked(sizes, start_pos, form, query, current_key, current_value, cache, scale)
    B, S, H, D = query.shape
    K = current_key.shape[2]
    mask = check_attn_mask(attn_mask, [(), (H,), (1, H), (B, H)], S, end)
    mask = None if mask is None else mask[..., :end]  # further columns are padding
    check_bias_split(bias_split, K, D, end)
    # (B, S, H, D) -> (B, H, S, D)
    query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, current_key, current_value))
    if cache_layout == 1 and num_layer == 1:
        reason = unsupported_reason(query.shape, quant_bit=quant_bit, quant_group=quant_group)
    else:
        reason = f"cache_layout {cache_layout} with num_layer {num_layer}; it takes layout 1 with one layer"
    pairs = None if bias_split is None else len(bias_split.pairs)
    use = KernelUse(
        *(D, D, query.dtype, quant_bit, quant_group, call.arrays[-1].dtype, H // K, pairs),
        cache_dtype=cache.dtype,
        mask=mask is not None,
        paged=False,
        is_alibi=is_alibi,
    )
    backend = resolve(kernels, reason, [use])
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "is_alibi": is_alibi,
        "mask": mask,
        "bias_split": bias_split,
    }
    call.write(key, value, _at(B, start, end), backend)
    if backend is None:
        output = attend_tokens(query, *_tokens(call, B, end, query.dtype), **options)
    else:
        options |= {"quant_bit": quant_bit, "quant_group": quant_group, "backend": backend}
        output = attend_fused(query, cache, scale, mx.array(start), **options)
    return output.transpose(0, 2, 1, 3)  # (B, H, S, D) -> (B, S, H, D)


def _checked(
    sizes: dict[str, int], start_pos: int | mx.array, form: tuple[int, ...], *arrays: Any
) -> tuple[CacheCall, int, int]:
    """Return the checked call, and the number of tokens in the cache before and after it."""
    call = check_call(STATIC_LAYOUTS, ("B", "S"), sizes, form, *arrays)
    if isinstance(start_pos, mx.array):
        if start_pos.size != 1 or not mx.issubdtype(start_pos.dtype, mx.integer):
            kind = f"{start_pos.dtype} {start_pos.shape}"
            raise ValueError(f"start_pos is an array, {kind}; expected one integer element")
        start_pos = int(start_pos.item())  # type: ignore[arg-type]
    S = sizes["S"]
    most = sizes["MaxS"]
    check_numbers(
        [
            ("the batch of current_key", sizes["B"], 1, sizes["MaxB"]),
            (f"start_pos, before {S} new tokens in a cache of {most},", start_pos, 0, most - S),
        ]
    )
    return call, int(start_pos), int(start_pos) + S


def _at(batch: int, start: int, end: int) -> At:
    return {"MaxB": slice(0, batch), "MaxS": slice(start, end)}


def _tokens(call: CacheCall, batch: int, end: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return all tokens in the cache as keys and values (B, K, T, D)."""
    stored = call.read(_at(batch, 0, end))
    return float_tokens(stored, quant_bit=call.quant_bit, dtype=dtype, product_dtype=stored[-1].dtype)
