"""Attention of a few queries of a sequence to many stored tokens, on a CPU.

MLX reads a key for each query head, makes arrays of float32 as large as what is read, and takes 6 ns for each exp.
Here a block of tokens is made float32 by NumPy while it stays in the processor's cache, once for all query heads of a
kv head. OpenBLAS multiplies it by a vector at a time. The scales of quantized tokens multiply scores and weights in
place of keys and values, which are 32 times as many. Measured on 2 cores: see scripts/results/attention-cpu.json.

NumPy is imported with this module, which takes 0.1 s: import it when it is needed.

A step is computed when it is called, and not when MLX evaluates it. A query has the numbers that it has alone, to the
bit: blocks lie at multiples of their size, and a query sees no number of another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvant import blas
from kvant.operators.bias_split import BiasSplit, bias_weights
from kvant.operators.paged_rows import Run, cut_runs
from kvant.operators.streams import cpu_cores, run_in_threads

BLOCK_TOKENS = 2048  # at once: of 64 numbers 512 KiB as float32 (measured; half as many took 1.2 times as long)

FLOAT_BYTES = 4
PARALLEL_TOKENS = 8192  # times kv heads: from so many on a thread for each core is worth it

Floats = npt.NDArray[np.float32]
Seen = tuple[int, int]  # the positions of the first token that a query sees, and the one behind the last


@dataclass(frozen=True, slots=True)
class _Stored:
    """Keys or values of all tokens: (K, rows, bytes or floats), and scales (K, rows, G) if they are quantized."""

    numbers: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None
    bits: int

    def block(self, head: int, runs: Sequence[Run]) -> tuple[Floats, Floats | None]:
        """Some rows of a kv head as float32 (tokens, D), and the scales (G, tokens) that they are not multiplied by."""
        numbers = _side_by_side(self.numbers[head], runs)
        if self.scales is None:
            if numbers.dtype == np.uint16:  # bfloat16 is the upper half of a float32
                return (numbers.astype(np.uint32) << 16).view(np.float32), None
            return numbers.astype(np.float32, copy=False), None
        if self.bits == 4:
            words = numbers.astype(np.uint16)  # as operators.quantization unpacks nibbles
            words |= words << 4
            words &= 0x0F0F
            words ^= 0x0808
            numbers = words.view(np.int8)
            numbers -= 8
        scales = _side_by_side(self.scales[head], runs)
        return numbers.view(np.int8).astype(np.float32), scales.T.astype(np.float32, order="C")


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
    scaled = (query.astype(mx.float32) * (1 / math.sqrt(D))).reshape(K, H // K, S, D)
    queries = mx.contiguous(scaled.transpose(2, 0, 1, 3))  # (S, K, H/K, D)
    terms = [] if bias_split is None or not bias_split.pairs else _bias_terms(query, bias_split, seen)
    readable = [mx.view(array, mx.uint16) if array.dtype == mx.bfloat16 else array for array in arrays]
    bias = mx.zeros((1, 1, 1)) if bias_split is None else bias_split.value_bias[:, None]  # (K, 1, Dv)
    sink = mx.array([]) if sinks is None else sinks.astype(mx.float32).reshape(K, H // K, 1)
    mx.eval(queries, terms, readable, bias, sink)
    keys, values = _sides([np.asarray(array) for array in readable], D, quant_bit, value_bit)
    parts = _parts_of_each(np.asarray(queries), keys, values, runs, seen, [np.asarray(term) for term in terms])
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
    queries: Floats,
    keys: _Stored,
    values: _Stored,
    runs: Sequence[Run],
    seen: Sequence[Seen],
    terms: Sequence[Floats],
) -> list[Floats]:
    """For each query its attention to each block (blocks, K, H/K, Dv + 2): values, their weights' sum, the largest."""
    S, K, N, _ = queries.shape
    first, end = seen[0][0], seen[-1][1]
    blocks = range(first // BLOCK_TOKENS, -(-end // BLOCK_TOKENS))
    value_dim = values.numbers.shape[-1] * (2 if values.bits == 4 else 1)
    parts = np.empty((len(blocks), S, K, N, value_dim + 2), np.float32)

    def attend(block: int, head: int) -> None:
        start, stop = max(first, block * BLOCK_TOKENS), min(end, (block + 1) * BLOCK_TOKENS)
        rows = cut_runs(runs, start - first, stop - first)
        own = [(i, max(start, begin), min(stop, last)) for i, (begin, last) in enumerate(seen)]
        own = [(i, begin, last) for i, begin, last in own if begin < last]
        key, scales = keys.block(head, rows)
        weights = []
        for i, begin, last in own:
            some = slice(begin - start, last - start)
            term = terms[i][head, :, begin - seen[i][0] : last - seen[i][0]] if terms else None
            weights.append(_weights(queries[i, head], key[some], _cut(scales, some), term))
        value, scales = values.block(head, rows)
        for (i, begin, last), (own_weights, sums, largest) in zip(own, weights, strict=True):
            some, part = slice(begin - start, last - start), parts[block - blocks[0], i, head]
            part[:, :value_dim] = _weighted(own_weights, value[some], _cut(scales, some))
            part[:, -2:-1], part[:, -1:] = sums, largest

    todo = iter([(block, head) for block in blocks for head in range(K)])

    def work() -> None:
        for task in todo:
            attend(*task)

    run_in_threads(work, cpu_cores() if (end - first) * K >= PARALLEL_TOKENS else 1)
    return [
        parts[begin // BLOCK_TOKENS - blocks[0] : -(-last // BLOCK_TOKENS) - blocks[0], i]
        for i, (begin, last) in enumerate(seen)
    ]


def _weights(query: Floats, key: Floats, scales: Floats | None, term: Floats | None) -> tuple[Floats, Floats, Floats]:
    """e^(score - largest) (N, tokens) of queries (N, D) and keys (tokens, D), their sums and the largest (N, 1)."""
    groups = 1 if scales is None else len(scales)
    products = _products(key, query.reshape(len(query), groups, -1), transposed=False)
    if scales is not None:
        products *= scales
    scores: Floats = products[:, 0] if groups == 1 else products.sum(axis=1)
    if term is not None:
        scores += term
    largest = scores.max(axis=-1, keepdims=True)
    scores -= largest
    np.exp(scores, out=scores)
    return scores, scores.sum(axis=-1, keepdims=True), largest


def _weighted(weights: Floats, value: Floats, scales: Floats | None) -> Floats:
    """Values (tokens, Dv) times weights (N, tokens), summed: (N, Dv)."""
    scaled = weights[:, None] if scales is None else weights[:, None] * scales  # (N, G, tokens)
    return _products(value, scaled, transposed=True).reshape(len(weights), -1)


def _products(matrix: Floats, vectors: Floats, *, transposed: bool) -> Floats:
    """Vectors (N, G, any) times a matrix (tokens, G * width), group by group: (N, G, tokens), or (N, G, width)."""
    (N, groups, length), (tokens, columns) = vectors.shape, matrix.shape
    width = columns // groups
    outputs = np.empty((N, groups, width if transposed else tokens), np.float32)
    multiply = blas.sgemv()
    if multiply is None:
        for group in range(groups):
            own = matrix[:, group * width : (group + 1) * width]
            for vector, output in zip(vectors[:, group], outputs[:, group], strict=True):
                np.dot(own.T if transposed else own, vector, out=output)
        return outputs
    form = blas.TRANSPOSED if transposed else blas.NOT_TRANSPOSED
    matrix_at, vector_at, output_at = matrix.ctypes.data, vectors.ctypes.data, outputs.ctypes.data
    for number in range(N * groups):
        multiply(
            blas.ROW_MAJOR,
            form,
            tokens,
            width,
            1.0,
            matrix_at + FLOAT_BYTES * width * (number % groups),
            matrix.strides[0] // FLOAT_BYTES,
            vector_at + FLOAT_BYTES * length * number,
            1,
            0.0,
            output_at + FLOAT_BYTES * outputs.shape[2] * number,
            1,
        )
    return outputs


def _one(parts: Floats, bias: Floats, sinks: Floats | None) -> Floats:
    """The parts (blocks, K, H/K, Dv + 2) of a query as one: (K, H/K, Dv). ``bias`` is that of values, (K, 1, Dv)."""
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


def _cut(scales: Floats | None, some: slice) -> Floats | None:
    return None if scales is None else np.ascontiguousarray(scales[:, some])
