"""Attention of a few queries of a sequence to many stored tokens, on a CPU.

MLX would make float32 arrays of all that is read, and takes 6 ns for each exp. Here NumPy makes a block of tokens
float32, once for all query heads of a kv head, and OpenBLAS multiplies it while it stays in the processor's cache.
The scales of quantized tokens multiply scores and weights in place of keys and values, which are many more numbers.

One thread computes it: a second one made it slower, because each call into NumPy or BLAS hands over Python's lock. With
8,192 tokens it takes 0.42 to 0.49 of the time of MLX's operations, which are on two cores, at 0 bits, and 0.75 to 0.94
at 8.

It is computed when it is called, and not when MLX evaluates it. A query has the numbers that it has alone, to the bit:
blocks lie at multiples of their size, and every product is of the heads of one query. NumPy is imported with this
module, which takes 0.1 s: import it when it is needed.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvant import blas
from kvant.operators.bias_split import BiasSplit, bias_weights
from kvant.operators.paged_rows import Run, cut_runs

BLOCK_TOKENS = 4096  # are float32 at once: of 64 numbers 1 MiB (1,024 at once took 1.3 to 1.4 times as long)
GEMM_ROWS = 4  # OpenBLAS multiplies so many rows, or a multiple, faster than rows one by one
FLOAT_BYTES = 4

Floats = npt.NDArray[np.float32]
Seen = tuple[int, int]  # the positions of the first token that a query sees, and the one behind the last

_local = threading.local()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Which tokens the queries see, and where they are."""

    runs: Sequence[Run]  # the rows, in the order of positions
    first: int  # the position of the first row
    seen: Sequence[Seen]  # by each query

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.seen[-1][1]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Keys or values of all tokens: (K, rows, bytes or floats), and scales (K, rows, G) if they are quantized."""

    numbers: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None
    bits: int

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.numbers.shape[-1] * (2 if self.bits == 4 else 1)

    @property
    def groups(self) -> int:
        """Groups of these that have a scale each."""
        return 1 if self.scales is None else self.scales.shape[-1]

    def floats(self, head: int, runs: Sequence[Run]) -> Floats:
        """Some rows of a kv head (tokens, width), without scales. The next ones of the thread take their place."""
        numbers = _side_by_side(self.numbers[head], runs)
        if self.bits == 4:
            words = numbers.astype(np.uint16)  # as operators.quantization unpacks nibbles
            words |= words << 4
            words &= 0x0F0F
            words ^= 0x0808
            numbers = words.view(np.int8)
            numbers -= 8
        elif self.bits == 8:
            numbers = numbers.view(np.int8)
        elif numbers.dtype == np.float32:
            return numbers
        elif numbers.dtype == np.uint16:  # bfloat16 is the upper half of a float32
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        floats = _buffer(numbers.shape)
        np.copyto(floats, numbers)
        return floats

    def scales_of(self, head: int, runs: Sequence[Run]) -> Floats | None:
        """The scales of some rows of a kv head: (G, tokens)."""
        if self.scales is None:
            return None
        return _side_by_side(self.scales[head], runs).T.astype(np.float32, order="C")


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
) -> mx.array:
    """Causal attention (1, H, S, Dv) of queries (1, H, S, D), the last of which is the last row's. It is evaluated.

    Args:
        runs: the rows of the tokens, in the order of positions.
        first: the position of the first row.
        window: the last tokens that a query sees, its own included; None: it sees all.
        arrays, quant_bit, value_bit, bias_split, sinks: as
            :func:`kvant.operators.paged_attention.append_and_attend_paged` takes them.
    """
    _, H, S, D = query.shape
    K, end = arrays[0].shape[1], first + sum(last - start for start, last in runs)
    stops = range(end - S + 1, end + 1)
    seen = [(first if window is None else max(first, stop - window), stop) for stop in stops]
    scaled = (query.astype(mx.float32) * (1 / math.sqrt(D))).reshape(K, H // K, S, D).transpose(2, 0, 1, 3)
    queries = mx.contiguous(scaled)  # (S, K, H/K, D)
    terms = [] if bias_split is None or not bias_split.pairs else _bias_terms(query, bias_split, seen)
    readable = [mx.view(array, mx.uint16) if array.dtype == mx.bfloat16 else array for array in arrays]
    bias = mx.zeros((1, 1, 1)) if bias_split is None else bias_split.value_bias[:, None]  # (K, 1, Dv)
    sink = mx.array([]) if sinks is None else sinks.astype(mx.float32).reshape(K, H // K, 1)
    mx.eval(queries, terms, readable, bias, sink)
    keys, values = _sides([np.asarray(array) for array in readable], D, quant_bit, value_bit)
    tokens = _Tokens(runs, first, seen)
    parts = _parts_of_each(np.asarray(queries), keys, values, tokens, [np.asarray(term) for term in terms])
    outputs = [_one(own, np.asarray(bias), None if sinks is None else np.asarray(sink)) for own in parts]
    return mx.array(np.stack(outputs, axis=2).reshape(1, H, S, -1)).astype(query.dtype)


def _sides(held: Sequence[npt.NDArray[Any]], key_dim: int, quant_bit: int, value_bit: int) -> tuple[_Stored, _Stored]:
    """Keys and values of a layer's arrays, which have them one behind the other or side by side."""
    scales = held[1] if quant_bit else None
    if held[0].shape[0] == 2:
        key_scales, value_scales = (None, None) if scales is None else scales
        return _Stored(held[0][0], key_scales, quant_bit), _Stored(held[0][1], value_scales, quant_bit)
    end = key_dim * quant_bit // 8 if quant_bit else key_dim
    keys, values = held[0][0, ..., :end], held[0][0, ..., end:]
    if scales is None:
        return _Stored(keys, None, 0), _Stored(values, None, 0)
    value_bits = value_bit or quant_bit
    value_dim = values.shape[-1] * 8 // value_bits
    groups = scales.shape[-1] * key_dim // (key_dim + value_dim)
    return _Stored(keys, scales[0, ..., :groups], quant_bit), _Stored(values, scales[0, ..., groups:], value_bits)


def _bias_terms(query: mx.array, split: BiasSplit, seen: Sequence[Seen]) -> list[mx.array]:
    """What the biases of keys add to the scores of each query: (K, H/K, tokens that it sees)."""
    factors = bias_weights(query, split)  # (1, K, H/K, S, 2P)
    table = split.rotation.flatten(0, 1)  # (2P, positions)
    return [factors[0, :, :, i] @ table[:, start:stop] for i, (start, stop) in enumerate(seen)]


def _parts_of_each(
    queries: Floats, keys: _Stored, values: _Stored, tokens: _Tokens, terms: Sequence[Floats]
) -> list[Floats]:
    """For each query its attention to each block (blocks, K, H/K, Dv + 2): values, their weights' sum, the largest."""
    S, K, N, _ = queries.shape
    blocks = range(tokens.first // BLOCK_TOKENS, -(-tokens.end // BLOCK_TOKENS))
    parts = np.empty((len(blocks), S, K, N, values.width + 2), np.float32)
    for number, block in enumerate(blocks):
        start, stop = max(tokens.first, block * BLOCK_TOKENS), min(tokens.end, (block + 1) * BLOCK_TOKENS)
        rows = cut_runs(tokens.runs, start - tokens.first, stop - tokens.first)
        seen = [(query, max(start, begin), min(stop, end)) for query, (begin, end) in enumerate(tokens.seen)]
        seen = [(query, begin, end) for query, begin, end in seen if begin < end]
        for head in range(K):
            floats, scales = keys.floats(head, rows), keys.scales_of(head, rows)
            weights = []
            for query, begin, end in seen:
                own, part = slice(begin - start, end - start), parts[number, query, head]
                scores = _products(floats[own], queries[query, head].reshape(N, keys.groups, -1), transposed=False)
                if scales is not None:
                    scores *= scales[:, own]
                scores = scores.sum(axis=1)
                if terms:
                    before = tokens.seen[query][0]
                    scores += terms[query][head, :, begin - before : end - before]
                scores.max(axis=-1, keepdims=True, out=part[:, -1:])
                scores -= part[:, -1:]
                np.exp(scores, out=scores)
                scores.sum(axis=-1, keepdims=True, out=part[:, -2:-1])
                weights.append(scores)
            floats, scales = values.floats(head, rows), values.scales_of(head, rows)
            for (query, begin, end), scores in zip(seen, weights, strict=True):
                own = slice(begin - start, end - start)
                scaled = scores[:, None] if scales is None else scores[:, None] * scales[:, own]
                parts[number, query, head, :, :-2] = _products(floats[own], scaled, transposed=True).reshape(N, -1)
    return [
        parts[begin // BLOCK_TOKENS - blocks[0] : -(-end // BLOCK_TOKENS) - blocks[0], query]
        for query, (begin, end) in enumerate(tokens.seen)
    ]


def _products(matrix: Floats, vectors: Floats, *, transposed: bool) -> Floats:
    """Vectors (N, G, any) times a matrix (tokens, G * width), group by group: (N, G, tokens), or (N, G, width)."""
    (N, groups, length), (tokens, columns) = vectors.shape, matrix.shape
    width = columns // groups
    size = width if transposed else tokens
    sgemm, sgemv = blas.sgemm(), blas.sgemv()
    if sgemm is None or sgemv is None:
        of_groups = matrix.reshape(tokens, groups, width).swapaxes(0, 1)  # (G, tokens, width)
        return np.swapaxes(vectors.swapaxes(0, 1) @ (of_groups if transposed else of_groups.swapaxes(1, 2)), 0, 1)
    rows = N if N < GEMM_ROWS else -(-N // GEMM_ROWS) * GEMM_ROWS
    if rows > N:
        vectors = np.concatenate([vectors, np.zeros((rows - N, groups, length), np.float32)])
    outputs = np.empty((rows, groups, size), np.float32)
    matrix_at, vector_at, output_at = (x.__array_interface__["data"][0] for x in (matrix, vectors, outputs))
    row = matrix.strides[0] // FLOAT_BYTES
    form, other = (blas.TRANSPOSED, blas.NOT_TRANSPOSED) if transposed else (blas.NOT_TRANSPOSED, blas.TRANSPOSED)
    for group in range(groups):
        left, right, output = vector_at, matrix_at + FLOAT_BYTES * width * group, output_at
        left += FLOAT_BYTES * length * group
        output += FLOAT_BYTES * size * group
        if rows >= GEMM_ROWS:
            left_form = (1.0, left, groups * length, right, row, 0.0, output, groups * size)
            sgemm(blas.ROW_MAJOR, blas.NOT_TRANSPOSED, other, rows, size, length, *left_form)
            continue
        for _ in range(rows):
            sgemv(blas.ROW_MAJOR, form, tokens, width, 1.0, right, row, left, 1, 0.0, output, 1)
            left += FLOAT_BYTES * groups * length
            output += FLOAT_BYTES * groups * size
    return outputs[:N]


def _one(parts: Floats, bias: Floats, sinks: Floats | None) -> Floats:
    """The parts (spans, K, H/K, Dv + 2) of a query as one: (K, H/K, Dv). ``bias`` is that of values, (K, 1, Dv)."""
    largest = parts[..., -1:].max(axis=0)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    sums = (parts[..., :-1] * np.exp(parts[..., -1:] - largest)).sum(axis=0)
    total: Floats = sums[..., -1:]
    values: Floats = sums[..., :-1] + bias * total
    if sinks is not None:
        total = total + np.exp(sinks - largest)
    return values / total


def _side_by_side(rows: npt.NDArray[Any], runs: Sequence[Run]) -> npt.NDArray[Any]:
    if len(runs) == 1:
        return rows[slice(*runs[0])]
    return np.concatenate([rows[first:end] for first, end in runs])


def _buffer(shape: tuple[int, ...]) -> Floats:
    """Memory of this thread's, which may be written: to get new memory, and give it back, takes longer."""
    size = math.prod(shape)
    held: Floats | None = getattr(_local, "held", None)
    if held is None or held.size < size:
        held = _local.held = np.empty(size, np.float32)
    return held[:size].reshape(shape)
