"""Launches of the fused kernel: attention of a few new tokens to a cache, and the quantization of new tokens.

Attention takes two launches. They read the cache's bytes and write no dequantized key or value.
"""

from functools import cache as kept
from typing import Any

import mlx.core as mx

from kvant.operators.kernels.launch import Backend, launch

HEAD_DIMS = (64, 96, 128, 256)
GROUPS = (8, 16, 32, 64, 128)
MAX_NEW_TOKENS = 8
# Queries of a simdgroup. Each takes 16 registers or more; Apple's GPUs have 128 a thread, NVIDIA's 255.
QUERIES = {"metal": 4, "cuda": 8}
MAX_QUERY_GROUPS = 8  # 256 threads a threadgroup. At this register count Apple's GPUs run at most 384
BIAS_WEIGHT_BYTES = 8 * 1024  # threadgroup memory for the split-off bias. Staged tokens take up to 16 KiB of Metal's 32
MIN_SPLIT_TOKENS = 64  # fewer tokens are not worth a threadgroup


def attend(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    *,
    quant_bit: int,
    quant_group: int,
    is_causal: bool = True,
    slopes: tuple[float, ...] = (),
    mask: mx.array | None = None,
    key_bias: mx.array | None = None,
    pairs: tuple[int, ...] = (),
    rotation: mx.array | None = None,
    value_bias: mx.array | None = None,
    backend: Backend,
) -> mx.array:
    """Attention of S new tokens that the cache already holds. Unchecked: see :func:`unsupported_reason`.

    Args:
        query: (B, H, S, D).
        cache: (1, B, 2, K, MaxS, D') quantized values, or floats at 0 bits. Positions from a sequence's offset + S on
            are not read.
        scale: (1, B, 2, K, MaxS, D/G), or None at 0 bits.
        offset: integers, the tokens before the new ones: () or (1,) for all sequences, or (B,), one each.
        slopes: (H,) of ALiBi, which is causal. Empty: no ALiBi.
        mask: (S, T), (H, S, T) or (B, H, S, T), with 1 for H or B where they share it and T of the longest sequence.
            A boolean mask keeps where True; another is added.
        key_bias, pairs, rotation, value_bias: the fields of a :class:`kvant.operators.bias_split.BiasSplit`.

    Returns:
        (B, H, S, D) in the query's dtype; zeros for a query whose every token is masked.
    """
    B, H, S, D = query.shape
    K, max_tokens = cache.shape[3:5]
    splits = num_splits(max_tokens, B * K)
    query_tiles, query_groups, simdgroups, queries = threadgroup_shape(H // K * S, len(pairs), backend)
    nothing = _constant((0.0,), mx.float32)
    partial = ((B, H, S, splits, D), mx.float32)
    statistic = ((B, H, S, splits), mx.float32)
    results = launch(
        "attend",
        backend,
        [
            query,
            cache,
            nothing if scale is None else scale,
            mx.broadcast_to(offset.reshape(-1), (B,)).astype(mx.int32),
            _constant(((((0.0,),),),), mx.float32) if mask is None else _added(mask),
            key_bias if key_bias is not None and pairs else nothing,
            _constant(pairs or (0,), mx.int32),
            rotation if rotation is not None and pairs else _constant((((0.0,),),), mx.float32),
            _constant(slopes, mx.float32) if slopes else nothing,
        ],
        template={
            "DIM": D,
            "HEADS": H // K,
            "NEW_TOKENS": S,
            "SPLITS": splits,
            "T": query.dtype,
            "C": cache.dtype,
            "BITS": quant_bit,
            "GROUP": quant_group if quant_bit else D,
            "QUERIES": queries,
            "QUERY_GROUPS": query_groups,
            "SIMDGROUPS": simdgroups,
            "QUERY_TILES": query_tiles,
            "UNROLL": 2 if queries > 4 else 4,
            "MIN_SPLIT_TOKENS": MIN_SPLIT_TOKENS,
            "PAIRS": len(pairs),
            "CAUSAL": (is_causal or bool(slopes)) and S > 1,
            "ALIBI": bool(slopes),
            "MASK": mask is not None,
        },
        grid=(K * query_tiles, B, splits),
        threads=32 * simdgroups * query_groups,
        outputs=[partial, statistic, statistic],
    )
    (output,) = launch(
        "combine",
        backend,
        [*results, nothing if value_bias is None else value_bias],
        template={"T": query.dtype, "VALUE_BIAS": value_bias is not None},
        grid=(B * H * S, 1, 1),
        threads=D,
        outputs=[((B, H, S, D), query.dtype)],
    )
    return output


def quantize_tokens(
    key: mx.array, value: mx.array, *, quant_bit: int, quant_group: int, scale_dtype: mx.Dtype, backend: Backend
) -> list[mx.array]:
    """Quantize keys (B, K, S, D) and values (B, K, S, Dv) in one launch, to 8 or 4 bits.

    Returns:
        32-bit words of what the cache stores, (1, B, 2, K, S, D * bits / 32), and scales (1, B, 2, K, S, D/G). Keys and
        values of different widths lie side by side: (1, B, 1, K, S, (D + Dv) ...).
    """
    B, K, S, D = key.shape
    widest = max(D, value.shape[3])
    sides, width = (2, D) if value.shape[3] == D else (1, D + value.shape[3])
    shape = (1, B, sides, K, S)
    return launch(
        "append",
        backend,
        [key, value],
        template={"T": key.dtype, "SCALE": scale_dtype, "BITS": quant_bit, "GROUP": quant_group},
        grid=(-(-widest * quant_bit // (32 * 32)), K * S, 2 * B),
        threads=32,
        outputs=[((*shape, width * quant_bit // 32), mx.uint32), ((*shape, width // quant_group), scale_dtype)],
    )


def unsupported_reason(query_shape: tuple[int, ...], *, quant_bit: int, quant_group: int) -> str | None:
    """Why the kernel does not take a call; None: it takes it. Any number of heads, kv heads and tokens is taken.

    Args:
        query_shape: (B, H, S, D).
    """
    _, _, S, D = query_shape
    if D not in HEAD_DIMS:
        return f"head_dim {D}; it takes {', '.join(map(str, HEAD_DIMS))}"
    if S > MAX_NEW_TOKENS:
        return f"{S} new tokens; it takes up to {MAX_NEW_TOKENS}"
    if quant_bit and quant_group not in GROUPS:
        return f"groups of {quant_group}; it takes {', '.join(map(str, GROUPS))}"
    return None


def num_splits(max_tokens: int, heads: int) -> int:
    """How many splits a kv head's tokens are divided into: a power of two.

    Enough threadgroups for a large GPU, each with tokens to read. The number depends on the cache's size, not on the
    tokens it holds, so that nothing is compiled again as it fills.
    """
    # 256 tokens each up to 64 splits, then 1,024: a split's results are read again (docs/bench.md has the bytes).
    wanted = min(max_tokens // 256, max(64, max_tokens // 1024), 4096 // heads)
    return 1 << max(0, min(wanted, 128).bit_length() - 1)


def threadgroup_shape(queries: int, pairs: int, backend: Backend) -> tuple[int, int, int, int]:
    """How the queries of a kv head (query heads times new tokens) are distributed.

    Returns:
        query_tiles: threadgroups that read the same tokens, each for its own queries; 1 for up to 32 queries on Metal.
        query_groups: of a threadgroup; each has its own queries.
        simdgroups: of a query group; each reads its own tokens.
        queries: of a query group.
    """
    most = QUERIES[backend] * MAX_QUERY_GROUPS
    if pairs:
        most = min(most, BIAS_WEIGHT_BYTES // (8 * pairs))
    tile = -(-queries // -(-queries // most))  # tiles as equal as can be; their query groups too
    query_groups = -(-tile // QUERIES[backend])
    of_group = -(-tile // query_groups)
    return -(-queries // (query_groups * of_group)), query_groups, max(1, 4 // query_groups), of_group


def _added(mask: mx.array) -> mx.array:
    """The mask as (B or 1, H or 1, S, T) float32 that is added to the scores."""
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    return mx.where(mask, 0.0, -mx.inf) if mask.dtype == mx.bool_ else mask.astype(mx.float32)


@kept
def _constant(values: tuple[Any, ...], dtype: mx.Dtype) -> mx.array:
    """Numbers as an array. Made once, not for every token in every layer."""
    return mx.array(values, dtype)
