"""Launches of the fused kernels: attention of a few new tokens to a cache, and quantization of new tokens.

Attention takes two launches, or three with an exact tail. They read the cache's bytes and never write
dequantized keys or values.
"""

import functools
from typing import Any, NamedTuple

import mlx.core as mx

from kvant.operators.kernels.launch import INPUTS, SMALL, Backend, launch

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
GROUPS = (8, 16, 32, 64, 128)
BITS = (0, 8, 4)
MAX_NEW_TOKENS = 8
PAGE_SIZE = 128  # rows of a pool's page
# Maximum per simdgroup. Each takes at least 16 registers of a thread: Apple's GPUs have 128, NVIDIA's 255.
# With more queries a row is loaded and converted for more of them at once; with fewer a GPU runs more threads
# at a time.
QUERIES: dict[Backend, int] = {"metal": 4, "cuda": 8}
MAX_QUERY_GROUPS = 8  # 256 threads per threadgroup; with so many registers Apple's GPUs run at most 384
BIAS_WEIGHTS = 2048  # floats of threadgroup memory for the split-off bias: 8 KiB of Metal's 32
SPLIT_ROWS = 64  # minimum per split: fewer are not worth a threadgroup
# The target, enough for a large GPU. With 32 a GPU took 1/4 of the time of 4 (VeloxQuant#307, M4).
THREADGROUPS = 1024
COMBINE_SIMDGROUPS = 8
TAIL_SPLITS = 2  # of an exact tail's one page
THREAD_VALUES = 8  # values that a thread quantizes


class ExactInput(NamedTuple):
    """The exact rows of B sequences (:mod:`kvant.operators.exact_rows`).

    Attributes:
        rows: floats (2, K, rows, D), or (1, K, rows, D + Dv) if keys and values differ in width.
        pages: (B, N) integers; column 0 is each sequence's page.
        spans: (B, 4) integers: how many first tokens are read, the position of the first row after them, and
            the position after the last new token. The fourth number is not read, nor are rows past B.
    """

    rows: mx.array
    pages: mx.array
    spans: mx.array


def attend(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    *,
    quant_bit: int,
    quant_group: int,
    value_bit: int = 0,
    is_causal: bool = True,
    score_scale: float | None = None,
    softcap: float = 0.0,
    slopes: tuple[float, ...] = (),
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    pages: mx.array | None = None,
    first: mx.array | None = None,
    rows: int | None = None,
    key_bias: mx.array | None = None,
    pairs: tuple[int, ...] = (),
    rotation: mx.array | None = None,
    value_bias: mx.array | None = None,
    tail: ExactInput | None = None,
    backend: Backend,
) -> mx.array:
    """Compute attention of S new tokens that are in the cache already. Unchecked.

    :func:`unsupported_reason` tells which calls the kernel supports.

    Args:
        query: (B, H, S, D).
        cache: (1, B, 2, K, MaxS, D') quantized values, or floats at 0 bits; with ``pages`` a pool's (2, K,
            rows, D'). Rows without a token of a sequence are not read. If keys and values differ in width or
            bits, the axis of 2 is 1 and D' covers both.
        scale: the same shape with D/G in place of D', or None at 0 bits.
        value_bit: bits of values; 0 means those of keys.
        offset: integers, the tokens before the new ones: () or (1,) for all sequences, or (B,).
        score_scale: factor of the scores; None: 1 / sqrt(D).
        softcap: scores become softcap * tanh(score / softcap); 0: no cap.
        slopes: (H,) ALiBi slopes, which make the call causal. Empty: no ALiBi.
        mask: (S, T), (H, S, T) or (B, H, S, T), with 1 for B, H or S if they share it, and T of the longest
            sequence. A boolean mask keeps True; others are added. Column j is row j of a sequence.
        sinks: (H,) scores, which take a share of each head's softmax and contribute no value.
        window: positions that a query sees, including its own; None: all.
        pages: (B, N) integers, the numbers of a sequence's pages of 128 rows. Entries past its rows are not
            read.
        first: (B,) integers, with ``pages``: the position of a sequence's first row.
        rows: number of rows of the longest sequence, including the new ones; None: unknown.
        key_bias, pairs, rotation, value_bias: the fields of a :class:`kvant.operators.bias_split.BiasSplit`.
        tail: the sequences' exact rows, which include the new tokens and are read in place of quantized ones.
            Requires ``pages``, without a mask or ALiBi.

    Returns:
        (B, H, S, Dv) in the query's dtype; zeros for a query whose tokens are all masked. A sequence's
        numbers do not depend on other sequences.
    """
    B, H, S, D = query.shape
    K = cache.shape[-3]
    Dv = value_dim_of(cache, D, quant_bit, value_bit)
    most = cache.shape[-2] if pages is None else pages.shape[1] * PAGE_SIZE
    query_tiles, query_groups, simdgroups, queries = threadgroup_shape(
        H // K * S, len(pairs), backend, max(D, Dv)
    )
    most_splits = num_splits(K * query_tiles)
    splits = min(most_splits, -(-min(most, rows or most) // SPLIT_ROWS))
    # keep the second pass's inputs from being small, which would be another kernel
    splits = max(splits, -(-SMALL // (B * H * S)))
    causal = is_causal or bool(slopes)
    settings = (int(causal), window or 0, most_splits, simdgroups)
    offset = offset.reshape(-1).astype(mx.int32)
    nothing = _constant((0.0,), mx.float32)
    no_index = _constant((0,), mx.int32)
    first = no_index if first is None else first
    empty = _constant(((((0.0,),),),), mx.float32)
    inputs = {
        "query": query,
        "cache": cache,
        "scale": nothing if scale is None else scale,
        "offset": offset,
        "pages": _constant(((0,),), mx.int32) if pages is None else pages,
        "first": first,
        "settings": _constant(settings, mx.int32),
        "numbers": _constant((D**-0.5 if score_scale is None else score_scale, softcap), mx.float32),
        "mask": empty if mask is None else _added(mask, S),
        "key_bias": key_bias if key_bias is not None and pairs else nothing,
        "pairs": _constant(pairs or (0,), mx.int32),
        "rotation": rotation if rotation is not None and pairs else _constant((((0.0,),),), mx.float32),
        "slopes": _constant(slopes, mx.float32) if slopes else nothing,
        "spans": no_index if tail is None else tail.spans,
    }
    template = {
        "DIM": D,
        "VALUE_DIM": Dv,
        "T": query.dtype,
        "C": cache.dtype,
        "BITS": quant_bit,
        "VALUE_BITS": value_bit or quant_bit,
        "GROUP": quant_group if quant_bit else 8,
        "QUERIES": queries,
        "PAGE": 0 if pages is None else PAGE_SIZE,
        "BIAS": BIAS_WEIGHTS if pairs else 0,
        "ALIBI": bool(slopes),
        "MASK": mask is not None,
        "WINDOW": window is not None,
        "SOFTCAP": softcap != 0.0,
        "TAIL": 0 if tail is None else 1,
    }

    def first_pass(changed: dict[str, mx.array], constants: dict[str, Any], splits: int) -> list[mx.array]:
        statistic = ((B, H, S, splits), mx.float32)
        return launch(
            "attend",
            backend,
            [(inputs | changed)[name] for name in INPUTS["attend"]],
            template=template | constants,
            grid=(K * query_tiles, B, splits),
            threads=32 * simdgroups * query_groups,
            outputs=[((B, H, S, splits, Dv), mx.float32), statistic, statistic],
        )

    results = first_pass({}, {}, splits)
    tail_results = [empty, nothing, nothing]
    if tail is not None:
        of_tail = {"cache": tail.rows, "scale": nothing, "pages": tail.pages}
        floats = {"C": tail.rows.dtype, "BITS": 0, "VALUE_BITS": 0, "GROUP": 8, "TAIL": 2}
        tail_results = first_pass(of_tail, floats, max(TAIL_SPLITS, -(-SMALL // (B * H * S))))
        splits += TAIL_SPLITS
    (output,) = launch(
        "combine",
        backend,
        [
            *results,
            offset,
            first,
            _constant(settings, mx.int32),
            _constant((float("-inf"),) * SMALL, mx.float32) if sinks is None else sinks,
            _constant(((0.0,) * SMALL,), mx.float32) if value_bias is None else value_bias,
            *tail_results,
            inputs["spans"],
        ],
        template={
            "T": query.dtype,
            "DIM": Dv,
            "MAX_SIMDGROUPS": COMBINE_SIMDGROUPS,
            "TAIL": tail is not None,
        },
        grid=(B * H * S, 1, 1),
        threads=32 * min(splits, COMBINE_SIMDGROUPS),
        outputs=[((B, H, S, Dv), query.dtype)],
    )
    return output


def quantize_tokens(
    key: mx.array,
    value: mx.array,
    *,
    quant_bit: int,
    quant_group: int,
    value_bit: int = 0,
    scale_dtype: mx.Dtype,
    backend: Backend,
    fit: bool = False,
) -> list[mx.array]:
    """Quantize keys (B, K, S, D) and values (B, K, S, Dv) in one launch, to 8 or 4 bits.

    With ``fit``, 4 bits are quantized as by :func:`kvant.operators.quantization.quantize_fitted`.

    Returns:
        the stored values as 32-bit words (1, B, 2, K, S, D * bits / 32), and scales (1, B, 2, K, S, D/G). If
        keys and values differ in width or bits, they share rows: (1, B, 1, K, S, ...).
    """
    B, K, S, D = key.shape
    Dv = value.shape[3]
    value_bit = value_bit or quant_bit
    shape = (1, B, 2, K, S)
    width = D
    bits = D * quant_bit
    if (Dv, value_bit) != (D, quant_bit):
        shape = (1, B, 1, K, S)
        width = D + Dv
        bits = bits + Dv * value_bit
    form = {"BITS": quant_bit, "VALUE_BITS": value_bit, "GROUP": quant_group, "FIT": fit}
    return launch(
        "append",
        backend,
        [key, value],
        template={"T": key.dtype, "SCALE": scale_dtype, **form},
        grid=(-(-max(D, Dv) // (32 * THREAD_VALUES)), K * S, 2 * B),
        threads=32,
        outputs=[((*shape, bits // 32), mx.uint32), ((*shape, width // quant_group), scale_dtype)],
    )


def unsupported_reason(
    query_shape: tuple[int, ...],
    *,
    quant_bit: int,
    quant_group: int,
    value_dim: int | None = None,
    value_bit: int = 0,
) -> str | None:
    """Return why the kernel does not support a call, or None. Any number of heads and tokens is supported.

    Args:
        query_shape: (B, H, S, D).
        value_dim: the width of values; None: D.
        value_bit: bits of values; 0 means those of keys.
    """
    _, _, S, D = query_shape
    for name, width in (("head_dim", D), ("values of", D if value_dim is None else value_dim)):
        if width not in HEAD_DIMS:
            return f"{name} {width}; it takes {', '.join(map(str, HEAD_DIMS))}"
    if S > MAX_NEW_TOKENS:
        return f"{S} new tokens; it takes up to {MAX_NEW_TOKENS}"
    for bits in (quant_bit, value_bit):
        if bits not in BITS:
            return f"{bits} bits; it takes {', '.join(map(str, BITS))}"
    if quant_bit and quant_group not in GROUPS:
        return f"groups of {quant_group}; it takes {', '.join(map(str, GROUPS))}"
    return None


def value_dim_of(cache: mx.array, key_dim: int, quant_bit: int, value_bit: int) -> int:
    """Return the width of values in a cache (..., 2, K, T, D') or, in shared rows, (..., 1, K, T, last)."""
    if cache.shape[-4] == 2:
        return key_dim
    element = 8 * cache.dtype.size  # bits of an element without quantization
    values = cache.shape[-1] * element - key_dim * (quant_bit or element)
    return values // (value_bit or quant_bit or element)


def num_splits(heads: int) -> int:
    """Return the maximum number of splits, such that ``heads`` threadgroups per split make ``THREADGROUPS``.

    It does not depend on the number of sequences or tokens. So a sequence's numbers are the same in any
    batch, and nothing is compiled again as a cache fills.
    """
    return max(1, THREADGROUPS // heads)


def threadgroup_shape(queries: int, pairs: int, backend: Backend, width: int) -> tuple[int, int, int, int]:
    """Distribute the queries of a kv head (query heads times new tokens).

    Args:
        width: the larger one of a key and a value.

    Returns:
        query_tiles: threadgroups that read the same tokens for different queries; 1 for up to 32 queries on
            Metal.
        query_groups: per threadgroup, with different queries.
        simdgroups: per query group, with different tokens.
        queries: per query group, a power of two.
    """
    each = QUERIES[backend] if width <= 256 else QUERIES[backend] // 2  # a lane has 16 elements of 512
    most = each * MAX_QUERY_GROUPS
    if pairs:
        most = min(most, BIAS_WEIGHTS // (2 * pairs) // each * each)
    tile = -(-queries // -(-queries // most))  # tiles, and their query groups, as equal as possible
    query_groups = -(-tile // each)
    of_group = 1 << (-(-tile // query_groups) - 1).bit_length()
    sharers = 2 if of_group * width > 1024 else 4  # limited by the threadgroup memory for their sums
    return -(-queries // (query_groups * of_group)), query_groups, max(1, sharers // query_groups), of_group


def _added(mask: mx.array, new_tokens: int) -> mx.array:
    """Convert a mask to float32 terms (B or 1, H or 1, S, T), with a row for each new token."""
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    mask = mx.broadcast_to(mask, (*mask.shape[:2], new_tokens, mask.shape[3]))
    return mx.where(mask, 0.0, -mx.inf) if mask.dtype == mx.bool_ else mask.astype(mx.float32)


@functools.cache
def _constant(values: tuple[Any, ...], dtype: mx.Dtype) -> mx.array:
    """Return numbers as an array, cached because every layer needs them for every token."""
    return mx.array(values, dtype)
