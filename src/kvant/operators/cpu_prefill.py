"""Attention of many queries of one sequence on a CPU: a prompt's chunk, and all tokens before it.

A tile is some of the queries and all query heads of a kv head. It reads the tokens that it sees block by
block, as FlashAttention does (arXiv 2205.14135), so that no memory grows with the context: NumPy converts a
block of keys or values to float32, and OpenBLAS multiplies it. NumPy's exp takes 0.3 ns a number, MLX's 6.
The cores share the tiles.

The result is computed at the call, not when MLX evaluates it. Importing NumPy takes 0.1 s, so import this
module only when it is needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import mlx.core as mx
import numpy as np

from kvant.operators.bias_split import BiasSplit, bias_rows
from kvant.operators.cpu_stored import Floats, Stored, join_blocks, multiply, scratch, stored_keys_and_values
from kvant.operators.paged_rows import Run, cut_runs
from kvant.operators.streams import cpu_cores, run_in_threads

TILE_ROWS = 256  # queries times query heads of a kv head
BLOCK_TOKENS = 1024  # a tile's scores are 1 MiB then, and stay in the core's cache
LEAST = float(np.finfo(np.float32).min)  # before there is a score: finite, as a masked one is not


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What queries attend to. Methods count tokens from the first row."""

    keys: Stored
    values: Stored
    runs: Sequence[Run]  # rows in the order of positions
    first: int  # position of the first row
    window: int | None
    key_bias: Floats | None  # (K, 2P, D), as kvant.operators.bias_split.bias_rows returns it
    rotation: Floats | None  # (2, P, positions)

    def keys_of(self, head: int, start: int, stop: int) -> Floats:
        """Return keys of a kv head with their bias: (tokens, D)."""
        floats = self.keys.floats(head, cut_runs(self.runs, start, stop))
        if self.key_bias is None or self.rotation is None:
            return floats
        biased = scratch("biased", floats.shape)
        np.copyto(biased, floats)  # they may be the cache's own memory
        table = self.rotation[..., self.first + start : self.first + stop]
        factors = table.reshape(-1, stop - start).T.copy()  # (2, P, tokens) -> (tokens, 2P)
        multiply(factors, self.key_bias[head], biased, add=True)
        return biased


def attend_tiles(
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
    """Return the causal attention (1, H, S, Dv) of queries (1, H, S, D), evaluated.

    Args:
        query: the last query belongs to the last row.
        arrays, quant_bit, value_bit, bias_split, sinks: as in
            :func:`kvant.operators.paged_attention.multi_head_cache_attention`.
        runs: the rows of the tokens, in the order of positions.
        first: the position of the first row.
        window: how many tokens a query sees, its own included; None: all.
    """
    _, H, S, D = query.shape
    K = arrays[0].shape[1]
    T = sum(stop - start for start, stop in runs)
    # (1, H, S, D) -> (K, H/K, S, D)
    scaled = mx.contiguous((query.astype(mx.float32) * (1 / math.sqrt(D))).reshape(K, H // K, S, D))
    bias = mx.zeros((K, 1)) if bias_split is None else bias_split.value_bias
    sink = mx.array([]) if sinks is None else sinks.astype(mx.float32).reshape(K, H // K, 1, 1)
    split = []
    if bias_split is not None and bias_split.pairs:
        split = [bias_rows(bias_split, D), bias_split.rotation]
    mx.eval(scaled, bias, sink, split, list(arrays))  # NumPy reads their memory below
    keys, values = stored_keys_and_values(arrays, D, quant_bit, value_bit)
    key_bias, rotation = (np.asarray(array) for array in split) if split else (None, None)
    tokens = _Tokens(keys, values, runs, first, window, key_bias, rotation)
    queries = np.asarray(scaled)
    value_bias = np.asarray(bias)
    of_sinks = None if sinks is None else np.asarray(sink)
    output = np.empty((K, H // K, S, values.width), np.float32)
    size = max(1, TILE_ROWS // (H // K))
    starts = range((S - 1) // size * size, -1, -size)  # the last tiles see the most: they begin first

    def attend(tile: tuple[int, int]) -> None:
        start, head = tile
        stop = min(S, start + size)
        sums = _attend_tile(queries[head, :, start:stop], head, T - S + start, tokens)
        sink = None if of_sinks is None else of_sinks[head]
        output[head, :, start:stop] = join_blocks(sums[None], value_bias[head], sink)

    run_in_threads(attend, product(starts, range(K)), cpu_cores())
    return mx.array(output.reshape(1, H, S, -1)).astype(query.dtype)


def _attend_tile(query: Floats, head: int, position: int, tokens: _Tokens) -> Floats:
    """Attend to the tokens that the queries of a tile see, block by block.

    Args:
        query: (N, Q, D), of the query heads of a kv head.
        position: the first query's own token, counted from the first row.

    Returns:
        (N, Q, Dv + 2), one block as ``join_blocks`` takes it.
    """
    N, Q, D = query.shape
    queries = query.reshape(N * Q, D)
    sums = np.zeros((N * Q, tokens.values.width + 2), np.float32)
    weighted = sums[:, :-2]
    total = sums[:, -2:-1]
    largest = sums[:, -1:]
    largest[:] = LEAST
    begin = 0 if tokens.window is None else max(0, position + 1 - tokens.window)
    end = position + Q
    for start in range(begin, end, BLOCK_TOKENS):
        stop = min(end, start + BLOCK_TOKENS)
        scores = scratch("scores", (N * Q, stop - start))
        multiply(queries, tokens.keys_of(head, start, stop), scores, transposed=True)
        _mask(scores.reshape(N, Q, -1), position - start, tokens.window)
        before = largest.copy()
        np.maximum(before, scores.max(axis=-1, keepdims=True), out=largest)
        scores -= largest
        np.exp(scores, out=scores)
        sums[:, :-1] *= np.exp(before - largest)
        total += scores.sum(axis=-1, keepdims=True)
        values = tokens.values.floats(head, cut_runs(tokens.runs, start, stop))
        multiply(scores, values, weighted, add=True)
    return sums.reshape(N, Q, -1)


def _mask(scores: Floats, column: int, window: int | None) -> None:
    """Set scores (N, Q, tokens) to -inf that a query does not see, if the first one's own token is at a
    column.
    """
    _, Q, tokens = scores.shape
    own = column + np.arange(Q)[:, None]
    token = np.arange(tokens)
    if column + 1 < tokens:
        after = max(0, column + 1)
        np.copyto(scores[..., after:], -math.inf, where=token[after:] > own)
    if window is not None and column + Q > window:
        before = min(tokens, column + Q - window)
        np.copyto(scores[..., :before], -math.inf, where=token[:before] <= own - window)
