"""Launches of the fused kernel: attention of a few new tokens to a cache, and the quantization of new tokens.

Attention takes two launches, and with an exact tail three. They read the cache's bytes and write no
dequantized key or value.
"""

from functools import cache as kept
from typing import Any, NamedTuple

import mlx.core as mx

from kvant.operators.kernels.launch import INPUTS, SMALL, Backend, launch

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
GROUPS = (8, 16, 32, 64, 128)
BITS = (0, 8, 4)
MAX_NEW_TOKENS = 8
PAGE_SIZE = 128  # rows of a pool's page
# Of a simdgroup, at most. Each takes 16 registers or more of a thread: Apple's GPUs have 128, NVIDIA's 255.
# With more queries a row is loaded and made floats for more of them at once; with fewer a GPU runs more
# threads at a time.
QUERIES: dict[Backend, int] = {"metal": 4, "cuda": 8}
MAX_QUERY_GROUPS = 8  # 256 threads a threadgroup. At this register count Apple's GPUs run at most 384
BIAS_WEIGHTS = 2048  # floats of threadgroup memory for the split-off bias: 8 KiB of Metal's 32
SPLIT_ROWS = 64  # of a split, at least: fewer are not worth a threadgroup
# wanted: enough for a large GPU. With 32 a GPU took 1/4 of the time of 4 (VeloxQuant#307, M4)
THREADGROUPS = 1024
COMBINE_SIMDGROUPS = 8
TAIL_SPLITS = 2  # of the one page of an exact tail
THREAD_VALUES = 8  # that a thread quantizes


class ExactInput(NamedTuple):
    """The exact rows of B sequences (:mod:`kvant.operators.exact_rows`).

    Attributes:
        rows: floats (2, K, rows, D). Keys and values of different widths lie side by side: 1 in place of 2,
            and D + Dv.
        pages: (B, N) integers, the page of each sequence first.
        spans: (B, 4) integers: how many first tokens are read, the position of the first row behind them, and
            the position behind the last new token. The fourth number is not read, nor are rows past B.
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
    """Attention of S new tokens that the cache already holds. Unchecked: see :func:`unsupported_reason`.

    Args:
        query: (B, H, S, D).
        cache: (1, B, 2, K, MaxS, D') quantized values, or floats at 0 bits; with ``pages`` a pool's (2, K,
            rows, D'). Rows that hold no token of a sequence are not read. Keys and values of different widths
            or bits lie side by side: 1 in place of 2, and D' for both.
        scale: with D/G in place of D', or None at 0 bits.
        value_bit: of values; 0: as of keys.
        offset: integers, the tokens before the new ones: () or (1,) for all sequences, or (B,), one each.
        score_scale: of the scores; None: 1 / sqrt(D).
        softcap: scores become softcap * tanh(score / softcap); 0: they stay.
        slopes: (H,) of ALiBi, which is causal. Empty: no ALiBi.
        mask: (S, T), (H, S, T) or (B, H, S, T), with 1 for B, H or S if they share it and T of the longest
            sequence. A boolean mask keeps True; another is added. Column j is row j of a sequence.
        sinks: (H,) a score of each head that takes its share of the softmax and adds nothing.
        window: positions that a query sees, its own included; None: all.
        pages: (B, N) integers, the numbers of a sequence's pages of 128 rows. Entries past its rows are not
            read.
        first: (B,) integers, with ``pages``: the position of a sequence's first row.
        rows: that the longest sequence has, the new ones included; None: not known, as many as there can be.
        key_bias, pairs, rotation, value_bias: the fields of a :class:`kvant.operators.bias_split.BiasSplit`.
        tail: with ``pages``, and without a mask and ALiBi: the sequences' exact rows, which hold the new
            tokens already. They are read in place of the quantized ones.

    Returns:
        (B, H, S, Dv) in the query's dtype; zeros for a query whose every token is masked. A sequence's
        numbers do not depend on the others.
    """
    B, H, S, D = query.shape
    K, Dv = cache.shape[-3], value_dim_of(cache, D, quant_bit, value_bit)
    most = cache.shape[-2] if pages is None else pages.shape[1] * PAGE_SIZE
    query_tiles, query_groups, simdgroups, queries = threadgroup_shape(
        H // K * S, len(pairs), backend, max(D, Dv)
    )
    wanted = num_splits(K * query_tiles)
    splits = min(wanted, -(-min(most, rows or most) // SPLIT_ROWS))
    # the second pass reads no small array, which is another kernel
    splits = max(splits, -(-SMALL // (B * H * S)))
    causal = is_causal or bool(slopes)
    settings = (int(causal), window or 0, wanted, simdgroups)
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

    With ``fit`` 4 bits are those of :func:`kvant.operators.quantization.quantize_fitted`.

    Returns:
        32-bit words of what the cache stores, (1, B, 2, K, S, D * bits / 32), and scales (1, B, 2, K, S,
        D/G). Keys and values of different widths or bits lie side by side: (1, B, 1, K, S, ...).
    """
    (B, K, S, D), Dv, value_bit = key.shape, value.shape[3], value_bit or quant_bit
    shape, width, bits = (1, B, 2, K, S), D, D * quant_bit
    if (Dv, value_bit) != (D, quant_bit):
        shape, width, bits = (1, B, 1, K, S), D + Dv, bits + Dv * value_bit
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
    """Why the kernel does not take a call; None: it takes it. Any number of heads, kv heads and tokens is
    taken.

    Args:
        query_shape: (B, H, S, D).
        value_dim: the width of values; None: D.
        value_bit: of values; 0: as of keys.
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
    """The width of values in a cache (..., 2, K, T, D'), or beside keys of ``key_dim`` in (..., 1, K, T,
    last).
    """
    if cache.shape[-4] == 2:
        return key_dim
    element = 8 * cache.dtype.size  # bits of what is not quantized
    values = cache.shape[-1] * element - key_dim * (quant_bit or element)
    return values // (value_bit or quant_bit or element)


def num_splits(heads: int) -> int:
    """Splits of a sequence's rows, at most: so many that ``heads`` threadgroups for each make
    ``THREADGROUPS``.

    It depends neither on the number of sequences nor on their tokens. So one's numbers are the same in any
    company, and nothing is compiled again as a cache fills.
    """
    return max(1, THREADGROUPS // heads)


def threadgroup_shape(queries: int, pairs: int, backend: Backend, width: int) -> tuple[int, int, int, int]:
    """How the queries of a kv head (query heads times new tokens) are distributed. ``width``: of a key or
    value.

    Returns:
        query_tiles: threadgroups that read the same tokens, each for its own queries; 1 for up to 32 queries
            on Metal.
        query_groups: of a threadgroup; each has its own queries.
        simdgroups: of a query group; each reads its own tokens.
        queries: of a query group, a power of two.
    """
    each = QUERIES[backend] if width <= 256 else QUERIES[backend] // 2  # a lane has 16 elements of 512
    most = each * MAX_QUERY_GROUPS
    if pairs:
        most = min(most, BIAS_WEIGHTS // (2 * pairs) // each * each)
    tile = -(-queries // -(-queries // most))  # tiles as equal as can be; their query groups too
    query_groups = -(-tile // each)
    of_group = 1 << (-(-tile // query_groups) - 1).bit_length()
    sharers = 2 if of_group * width > 1024 else 4  # by the threadgroup memory in which they add up
    return -(-queries // (query_groups * of_group)), query_groups, max(1, sharers // query_groups), of_group


def _added(mask: mx.array, new_tokens: int) -> mx.array:
    """The mask as (B or 1, H or 1, S, T) float32 that is added to the scores. Each new token gets a row of
    its own.
    """
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    mask = mx.broadcast_to(mask, (*mask.shape[:2], new_tokens, mask.shape[3]))
    return mx.where(mask, 0.0, -mx.inf) if mask.dtype == mx.bool_ else mask.astype(mx.float32)


@kept
def _constant(values: tuple[Any, ...], dtype: mx.Dtype) -> mx.array:
    """Numbers as an array. Made once, not for every token in every layer."""
    return mx.array(values, dtype)
