"""Decode attention over a long context on a CPU: a few queries of one sequence, many stored tokens.

MLX's operations would expand all stored tokens to float32 arrays, and its exp takes 6 ns a number. This
module works block by block: NumPy converts a block of keys or values to float32 once for all query heads of a
kv head, and OpenBLAS multiplies it while it is still in the processor's cache. Scales are applied to scores
and weights, which are far fewer numbers than keys and values.

Every call into NumPy or BLAS hands over Python's lock, which takes 6 us or more if another thread waits for
it. Blocks are therefore large: with blocks of 2,048 tokens a second thread gained nothing.

The result is computed at the call, not when MLX evaluates it. Every query gets the same bits as in a step of
its own: blocks start at multiples of their size, and a product never mixes the heads of two queries.
Importing NumPy takes 0.1 s, so import this module only when it is needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import mlx.core as mx
import numpy as np

from kvant import blas
from kvant.operators.bias_split import BiasSplit, bias_weights
from kvant.operators.cpu_stored import (
    FLOAT_BYTES,
    Floats,
    Stored,
    address,
    join_blocks,
    stored_keys_and_values,
)
from kvant.operators.exact_rows import ExactRows, ExactTail
from kvant.operators.row_runs import Run, cut_runs
from kvant.operators.streams import cpu_cores, run_in_threads

BLOCK_TOKENS = 4096  # 1 MiB of float32 for a width of 64; blocks of 1,024 took 1.3 to 1.4 times as long
GEMM_ROWS = 4  # sgemm is fastest with multiples of this, and beats one sgemv per row from 3 rows on
PARALLEL_TOKENS = 8192  # times kv heads: from this many on, every core takes blocks (measured)

Seen = tuple[int, int]  # positions: the first token a query sees, and one past the last


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Where the tokens are stored, and which of them each query sees."""

    runs: Sequence[Run]  # rows in the order of positions
    first: int  # position of the first row
    seen: Sequence[Seen]  # one entry per query

    @property
    def end(self) -> int:
        """Return the position past the last row that is seen."""
        return max(end for _, end in self.seen)


def attend_long(
    query: mx.array,
    arrays: Sequence[mx.array],
    runs: Sequence[Run],
    first: int,
    window: int | None,
    *,
    quant_bit: int,
    value_bit: int = 0,
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
    exact: ExactTail | None = None,
) -> mx.array:
    """Return the causal attention (1, H, S, Dv) of queries (1, H, S, D), evaluated.

    Args:
        query: the last query belongs to the last row.
        arrays, quant_bit, value_bit, bias_split, sinks: as in
            :func:`kvant.operators.paged_attention.multi_head_cache_attention`.
        runs: the rows of the tokens, in the order of positions.
        first: the position of the first row.
        window: how many tokens a query sees, its own included; None: all.
        exact: the sequence's exact tail; None: it has none.
    """
    _, H, S, D = query.shape
    K = arrays[0].shape[1]
    end = first + sum(stop - start for start, stop in runs)
    stops = range(end - S + 1, end + 1)
    seen = [(first if window is None else max(first, stop - window), stop) for stop in stops]
    tail: list[mx.array] = []
    quantized = seen
    if exact is not None:
        tail = exact.read(mx.float32)
        sinks_read = exact.rows.sinks[0]
        quantized = [(max(start, sinks_read), exact.rows.tail_start(0, stop - 1)) for start, stop in seen]
    scaled = (query.astype(mx.float32) * (1 / math.sqrt(D))).reshape(K, H // K, S, D)
    queries = mx.contiguous(scaled.transpose(2, 0, 1, 3))  # (K, H/K, S, D) -> (S, K, H/K, D)
    terms: list[mx.array] = []
    if bias_split is not None and bias_split.pairs:
        terms = _bias_terms(query, bias_split, seen)
    bias = mx.zeros((1, 1, 1)) if bias_split is None else bias_split.value_bias[:, None]  # (K, 1, Dv)
    sink = mx.array([]) if sinks is None else sinks.astype(mx.float32).reshape(K, H // K, 1)
    mx.eval(queries, terms, bias, sink, tail, list(arrays))  # NumPy reads their memory below
    keys, values = stored_keys_and_values(arrays, D, quant_bit, value_bit)
    queries_read = np.asarray(queries)
    terms_read = [np.asarray(term) for term in terms]
    parts = [np.empty((0, K, H // K, values.width + 2), np.float32)] * S
    if any(start < stop for start, stop in quantized):
        tokens = _Tokens(runs, first, quantized)
        of_quantized = [
            term[..., begin - start : stop - start]
            for term, (begin, stop), (start, _) in zip(terms_read, quantized, seen, strict=False)
        ]
        parts = _attend_blocks(queries_read, keys, values, tokens, of_quantized)
    if exact is not None:
        (exact_keys, exact_values) = stored_keys_and_values(tail, D, 0, 0)
        blocks = _attend_exact_rows(
            queries_read, exact_keys.numbers, exact_values.numbers, exact.rows, seen, terms_read
        )
        parts = [np.concatenate(both) for both in zip(parts, blocks, strict=True)]
    of_sinks = None if sinks is None else np.asarray(sink)
    outputs = [join_blocks(query_blocks, np.asarray(bias), of_sinks) for query_blocks in parts]
    # S arrays (K, H/K, Dv) -> (K, H/K, S, Dv) -> (1, H, S, Dv)
    return mx.array(np.stack(outputs, axis=2).reshape(1, H, S, -1)).astype(query.dtype)


def _attend_exact_rows(
    queries: Floats,
    keys: Floats,
    values: Floats,
    rows: ExactRows,
    seen: Sequence[Seen],
    terms: Sequence[Floats],
) -> list[Floats]:
    """Attend to the exact rows that each query reads, all kv heads at once: they are few.

    Args:
        queries: (S, K, H/K, D).
        keys, values: (K, rows, D) and (K, rows, Dv).
        terms: the key bias's term in each query's scores: (K, H/K, tokens it sees); empty without a bias.

    Returns:
        (1, K, H/K, Dv + 2) for each query, as ``join_blocks`` takes it.
    """
    blocks = []
    for query, (start, stop) in enumerate(seen):
        tail_start = rows.tail_start(0, stop - 1)
        ranges = [(start, min(rows.sinks[0], tail_start)), (max(start, tail_start), stop)]
        ranges = [(first, last) for first, last in ranges if first < last]
        places = [slice(rows.count_before(0, first), rows.count_before(0, last)) for first, last in ranges]
        own_keys = np.concatenate([keys[:, place] for place in places], axis=1)
        own_values = np.concatenate([values[:, place] for place in places], axis=1)
        scores = queries[query] @ own_keys.swapaxes(1, 2)  # (K, H/K, rows)
        if terms:
            added = [terms[query][..., first - start : last - start] for first, last in ranges]
            scores += np.concatenate(added, axis=-1)
        largest = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - largest)
        sums = weights.sum(axis=-1, keepdims=True)
        blocks.append(np.concatenate([weights @ own_values, sums, largest], axis=-1)[None])
    return blocks


def _bias_terms(query: mx.array, split: BiasSplit, seen: Sequence[Seen]) -> list[mx.array]:
    """Return the key bias's term in each query's scores: (K, H/K, tokens it sees)."""
    factors = bias_weights(query, split)  # (1, K, H/K, S, 2P)
    table = split.rotation.flatten(0, 1)  # (2, P, positions) -> (2P, positions)
    return [factors[0, :, :, i] @ table[:, start:stop] for i, (start, stop) in enumerate(seen)]


def _attend_blocks(
    queries: Floats, keys: Stored, values: Stored, tokens: _Tokens, terms: Sequence[Floats]
) -> list[Floats]:
    """Attend block by block. Returns (blocks, K, H/K, Dv + 2) for each query, as ``join_blocks`` takes it."""
    S, K, N, _ = queries.shape
    blocks = range(tokens.first // BLOCK_TOKENS, -(-tokens.end // BLOCK_TOKENS))
    parts = np.empty((len(blocks), S, K, N, values.width + 2), np.float32)
    first_block = blocks[0]

    def attend(task: tuple[int, int]) -> None:
        block, head = task
        start = max(tokens.first, block * BLOCK_TOKENS)
        stop = min(tokens.end, (block + 1) * BLOCK_TOKENS)
        rows = cut_runs(tokens.runs, start - tokens.first, stop - tokens.first)
        seen = [(query, max(start, begin), min(stop, end)) for query, (begin, end) in enumerate(tokens.seen)]
        seen = [(query, begin, end) for query, begin, end in seen if begin < end]
        floats = keys.unscaled(head, rows)
        scales = keys.scales_of(head, rows)
        weights = []
        for query, begin, end in seen:
            visible = slice(begin - start, end - start)
            sums_of_head = parts[block - first_block, query, head]
            groups = queries[query, head].reshape(N, keys.groups, -1)  # (N, D) -> (N, G, D/G)
            products = _group_products(floats[visible], groups, transposed=False)
            if scales is not None:
                products *= scales[:, visible]
            scores = products.sum(axis=1)  # (N, G, tokens) -> (N, tokens)
            if terms:
                before = tokens.seen[query][0]
                scores += terms[query][head, :, begin - before : end - before]
            scores.max(axis=-1, keepdims=True, out=sums_of_head[:, -1:])
            scores -= sums_of_head[:, -1:]
            np.exp(scores, out=scores)
            scores.sum(axis=-1, keepdims=True, out=sums_of_head[:, -2:-1])
            weights.append(scores)
        floats = values.unscaled(head, rows)
        scales = values.scales_of(head, rows)
        for (query, begin, end), scaled in zip(seen, weights, strict=True):
            visible = slice(begin - start, end - start)
            scaled = scaled[:, None] if scales is None else scaled[:, None] * scales[:, visible]
            sums = _group_products(floats[visible], scaled, transposed=True)  # scaled: (N, G, tokens)
            parts[block - first_block, query, head, :, :-2] = sums.reshape(N, -1)  # (N, G, Dv/G) -> (N, Dv)

    is_large = (tokens.end - tokens.first) * K >= PARALLEL_TOKENS
    run_in_threads(attend, product(blocks, range(K)), cpu_cores() if is_large else 1)
    return [
        parts[begin // BLOCK_TOKENS - first_block : -(-end // BLOCK_TOKENS) - first_block, query]
        if begin < end
        else parts[:0, query]
        for query, (begin, end) in enumerate(tokens.seen)
    ]


def _group_products(matrix: Floats, vectors: Floats, *, transposed: bool) -> Floats:
    """Multiply vectors with a matrix (tokens, G * width), each group of columns by itself.

    Args:
        vectors: (N, G, width), or (N, G, tokens) if ``transposed``.

    Returns:
        (N, G, tokens), or (N, G, width) if ``transposed``.
    """
    N, groups, length = vectors.shape
    tokens, columns = matrix.shape
    width = columns // groups
    size = width if transposed else tokens
    sgemm = blas.sgemm()
    sgemv = blas.sgemv()
    if sgemm is None or sgemv is None:
        grouped = matrix.reshape(tokens, groups, width)
        grouped = grouped.transpose(1, 0, 2) if transposed else grouped.transpose(1, 2, 0)
        return (vectors.swapaxes(0, 1) @ grouped).swapaxes(0, 1)
    rows = N if N < GEMM_ROWS - 1 else -(-N // GEMM_ROWS) * GEMM_ROWS
    if rows > N:
        vectors = np.concatenate([vectors, np.zeros((rows - N, groups, length), np.float32)])
    outputs = np.empty((rows, groups, size), np.float32)
    # slices of arrays would take longer than the arithmetic on addresses
    matrix_at, vectors_at, outputs_at = (address(array) for array in (matrix, vectors, outputs))
    matrix_row = matrix.strides[0] // FLOAT_BYTES
    for group in range(groups):
        own_matrix = matrix_at + FLOAT_BYTES * width * group
        own_vectors = vectors_at + FLOAT_BYTES * length * group
        own_outputs = outputs_at + FLOAT_BYTES * size * group
        if rows % GEMM_ROWS == 0:
            sgemm(
                blas.ROW_MAJOR,
                blas.NOT_TRANSPOSED,
                blas.NOT_TRANSPOSED if transposed else blas.TRANSPOSED,
                rows,
                size,
                length,
                1.0,
                own_vectors,
                groups * length,
                own_matrix,
                matrix_row,
                0.0,
                own_outputs,
                groups * size,
            )
            continue
        for row in range(rows):
            sgemv(
                blas.ROW_MAJOR,
                blas.TRANSPOSED if transposed else blas.NOT_TRANSPOSED,
                tokens,
                width,
                1.0,
                own_matrix,
                matrix_row,
                own_vectors + FLOAT_BYTES * groups * length * row,
                1,
                0.0,
                own_outputs + FLOAT_BYTES * groups * size * row,
                1,
            )
    return outputs[:N]
