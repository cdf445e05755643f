"""Attention of a few new tokens to a quantized cache, in two launches that read its bytes and write no row."""

from functools import cache as kept
from typing import Any

import mlx.core as mx

from kvant.operators.attention import alibi_slopes
from kvant.operators.bias_split import BiasSplit
from kvant.operators.kernels.launch import launch

HEAD_DIMS = (64, 96, 128, 256)
GROUPS = (8, 16, 32, 64, 128)
MAX_NEW_TOKENS = 8
# Queries a simdgroup has in registers, 16 and more each: Apple's GPUs have 128 a thread, NVIDIA's 255.
QUERIES = {"metal": 4, "cuda": 8}
MAX_CREWS = 8  # 256 threads a threadgroup: of so many registers each Apple's GPUs take no more than 384
ANGLE_BYTES = 8 * 1024  # threadgroup memory for the split-off bias; the stage of rows takes up to 16 KiB of Metal's 32
LEAST_ROWS = 64  # of a split: fewer are not worth a threadgroup
APPEND_THREADS = 64


def attend(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    *,
    quant_bit: int,
    quant_group: int,
    is_causal: bool = True,
    is_alibi: bool = False,
    mask: mx.array | None = None,
    bias_split: BiasSplit | None = None,
    backend: str,
) -> mx.array:
    """Attention of S new tokens whose rows the cache already holds. Unchecked: see :func:`unsupported_reason`.

    Args:
        query: (B, H, S, D).
        cache: (1, B, 2, K, MaxS, D') levels, or rows at 0 bits; a sequence's rows from its offset + S on are not read.
        scale: (1, B, 2, K, MaxS, D/G), or None at 0 bits.
        offset: () or (1,) integers for all sequences, or (B,), one each: rows before the new ones.
        mask: (S, T), (H, S, T) or (B, H, S, T) with 1 for H and B where all share it, T of the longest sequence;
            boolean (True keeps) or added.
        bias_split: what the cached rows lack of their biases.
        backend: metal or cuda.

    Returns:
        (B, H, S, D) in the query's dtype; zeros for a query whose every row is masked.
    """
    B, H, S, D = query.shape
    K, max_rows = cache.shape[3:5]
    splits = num_splits(max_rows, B * K)
    pairs = len(bias_split.pairs) if bias_split is not None else 0
    parts, crews, teams, queries = threadgroup_shape(H // K * S, pairs, backend)
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
            bias_split.key_bias if bias_split is not None and pairs else nothing,
            _constant(bias_split.pairs if bias_split is not None and pairs else (0,), mx.int32),
            bias_split.rotation if bias_split is not None and pairs else _constant((((0.0,),),), mx.float32),
            _constant(tuple(alibi_slopes(H)), mx.float32) if is_alibi else nothing,
        ],
        template={
            "DIM": D,
            "HEADS": H // K,
            "NEW": S,
            "SPLITS": splits,
            "T": query.dtype,
            "C": cache.dtype,
            "BITS": quant_bit,
            "GROUP": quant_group if quant_bit else D,
            "QUERIES": queries,
            "CREWS": crews,
            "TEAMS": teams,
            "PARTS": parts,
            "AHEAD": 2 if queries > 4 else 4,
            "LEAST_ROWS": LEAST_ROWS,
            "PAIRS": pairs,
            "CAUSAL": (is_causal or is_alibi) and S > 1,
            "ALIBI": is_alibi,
            "MASK": mask is not None,
        },
        grid=(K * parts, B, splits),
        threads=32 * teams * crews,
        outputs=[partial, statistic, statistic],
    )
    value_bias = nothing if bias_split is None else bias_split.value_bias
    (output,) = launch(
        "combine",
        backend,
        [*results, value_bias],
        template={"T": query.dtype, "VALUE_BIAS": bias_split is not None},
        grid=(B * H * S, 1, 1),
        threads=D,
        outputs=[((B, H, S, D), query.dtype)],
    )
    return output


def quantize_rows(
    key: mx.array, value: mx.array, *, quant_bit: int, quant_group: int, scale_dtype: mx.Dtype, backend: str
) -> tuple[mx.array, mx.array]:
    """(B, K, S, D) keys and values as the cache stores them, in one launch.

    Returns:
        levels (B, 2, K, S, D') and scales (B, 2, K, S, D/G), 8 or 4 bits.
    """
    B, K, S, D = key.shape
    words = B * 2 * K * S * (D * quant_bit // 32)
    levels, scales = launch(
        "append",
        backend,
        [key, value],
        template={
            "T": key.dtype,
            "SCALE": scale_dtype,
            "BITS": quant_bit,
            "DIM": D,
            "GROUP": quant_group,
        },
        grid=(-(-words // APPEND_THREADS), 1, 1),
        threads=APPEND_THREADS,
        outputs=[((B, 2, K, S, D * quant_bit // 32), mx.uint32), ((B, 2, K, S, D // quant_group), scale_dtype)],
    )
    return levels.view(mx.uint8 if quant_bit == 4 else mx.int8), scales


def unsupported_reason(query_shape: tuple[int, ...], *, quant_bit: int, quant_group: int) -> str | None:
    """Why the kernel does not take such a call; None: it does. Any number of heads, kv heads and rows is taken.

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


def num_splits(max_rows: int, heads: int) -> int:
    """Splits of the rows, a power of two: enough threadgroups for a large GPU, each with rows to read.

    It depends on the cache's size, not on what is in it, so that nothing is compiled again as it fills.
    """
    # 256 rows each until there are 64, then 1,024: what a split writes is read again (docs/bench.md has the bytes).
    wanted = min(max_rows // 256, max(64, max_rows // 1024), 4096 // heads)
    return 1 << max(0, min(wanted, 128).bit_length() - 1)


def threadgroup_shape(queries: int, pairs: int, backend: str) -> tuple[int, int, int, int]:
    """How the queries of a kv head, query heads times new tokens, are dealt out.

    Returns:
        parts: threadgroups that read the same rows, each for a part of the queries; 1 for up to 32 of them on Metal.
        crews: simdgroups of a threadgroup with queries of their own.
        teams: simdgroups with the same queries and every teams-th row.
        queries: of a simdgroup.
    """
    most = QUERIES[backend] * MAX_CREWS
    if pairs:
        most = min(most, ANGLE_BYTES // (8 * pairs))
    part = -(-queries // -(-queries // most))  # parts as equal as can be, and their crews
    crews = -(-part // QUERIES[backend])
    crew = -(-part // crews)
    return -(-queries // (crews * crew)), crews, max(1, 4 // crews), crew


def _added(mask: mx.array) -> mx.array:
    """The mask as (B or 1, H or 1, S, T) float32 that is added to the scores."""
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    return mx.where(mask, 0.0, -mx.inf) if mask.dtype == mx.bool_ else mask.astype(mx.float32)


@kept
def _constant(values: tuple[Any, ...], dtype: mx.Dtype) -> mx.array:
    """Numbers as an array, made once instead of at every token in every layer."""
    return mx.array(values, dtype)
