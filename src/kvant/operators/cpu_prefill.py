"""Prefill attention on a CPU: a chunk of one sequence's prompt attends to itself and all tokens before it.

A tile is some of the queries and all query heads of a kv head. It reads its tokens block by block, as
FlashAttention does (arXiv 2205.14135), so that memory does not grow with the context: NumPy converts a block
of keys or values to float32, and OpenBLAS multiplies it. NumPy's exp takes 0.3 ns per number, MLX's 6. The
cores share the tiles.

The result is computed at the call, not when MLX evaluates it. Importing NumPy takes 0.1 s, so import this
module only when it is needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx
import numpy as np

from kvant.operators.bias_split import BiasSplit, bias_rows
from kvant.operators.cpu_stored import Floats, Stored, join_blocks, multiply, scratch, stored_keys_and_values
from kvant.operators.exact_rows import TAIL_WINDOW, ExactRows, ExactTail
from kvant.operators.row_runs import Run, cut_runs
from kvant.operators.streams import cpu_cores, run_in_threads

TILE_ROWS = 256  # queries times query heads of a kv head
BLOCK_TOKENS = 1024  # so a tile's scores are 1 MiB and stay in the core's cache
LEAST = float(np.finfo(np.float32).min)  # the initial maximum: finite, unlike a masked score


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Rows of a layer, and which of them the query at position p sees.

    Attributes:
        keys, values: in stored form.
        runs: the rows, in the order of positions.
        first: position of the first row.
        stop: position past the last row.
        window: the query sees tokens from p + 1 - ``window`` on; None: from the first.
        lag: the query sees tokens up to p - ``lag``.
        least: the query always sees tokens before this position, up to its own.
        key_bias: (K, 2P, D) from kvant.operators.bias_split.bias_rows; None: keys include their bias.
        rotation: (2, P, positions).
    """

    keys: Stored
    values: Stored
    runs: Sequence[Run]
    first: int
    stop: int
    window: int | None
    key_bias: Floats | None
    rotation: Floats | None
    lag: int = 0
    least: int = 0

    def seen(self, position: int, queries: int) -> tuple[int, int]:
        """Return the range of positions seen by ``queries`` queries from ``position`` on."""
        begin = self.first if self.window is None else max(self.first, position + 1 - self.window)
        return begin, min(self.stop, max(position + queries - self.lag, self.least))

    def keys_of(self, head: int, start: int, stop: int) -> Floats:
        """Return keys of a kv head from position ``start`` to ``stop`` with their bias: (tokens, D)."""
        floats = self.keys.floats(head, cut_runs(self.runs, start - self.first, stop - self.first))
        if self.key_bias is None or self.rotation is None:
            return floats
        biased = scratch("biased", floats.shape)
        np.copyto(biased, floats)  # floats may be the cache's memory
        table = self.rotation[..., start:stop]
        factors = table.reshape(-1, stop - start).T.copy()  # (2, P, tokens) -> (tokens, 2P)
        multiply(factors, self.key_bias[head], biased, add=True)
        return biased

    def values_of(self, head: int, start: int, stop: int) -> Floats:
        """Return values of a kv head from position ``start`` to ``stop``: (tokens, Dv)."""
        return self.values.floats(head, cut_runs(self.runs, start - self.first, stop - self.first))

    def hide(self, scores: Floats, position: int, start: int) -> None:
        """Set scores (N, Q, tokens) of unseen tokens to -inf, for queries from ``position`` on.

        ``start`` is the first token's position.
        """
        _, Q, tokens = scores.shape
        query = np.arange(position, position + Q)[:, None]
        token = np.arange(start, start + tokens)
        after = max(0, min(max(position + 1 - self.lag, self.least), position + 1) - start)
        if after < tokens:
            stop = np.minimum(np.maximum(query + 1 - self.lag, self.least), query + 1)
            np.copyto(scores[..., after:], -math.inf, where=token[after:] >= stop)
        if self.window is not None and position + Q - self.window > start:
            before = min(tokens, position + Q - self.window - start)
            np.copyto(scores[..., :before], -math.inf, where=token[:before] <= query - self.window)


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
    tail = [] if exact is None else exact.read(mx.float32)
    # (1, H, S, D) -> (K, H/K, S, D)
    scaled = mx.contiguous((query.astype(mx.float32) * (1 / math.sqrt(D))).reshape(K, H // K, S, D))
    bias = mx.zeros((K, 1)) if bias_split is None else bias_split.value_bias
    sink = mx.array([]) if sinks is None else sinks.astype(mx.float32).reshape(K, H // K, 1, 1)
    split = []
    if bias_split is not None and bias_split.pairs:
        split = [bias_rows(bias_split, D), bias_split.rotation]
    mx.eval(scaled, bias, sink, split, tail, list(arrays))  # NumPy reads their memory below
    keys, values = stored_keys_and_values(arrays, D, quant_bit, value_bit)
    key_bias, rotation = (np.asarray(array) for array in split) if split else (None, None)
    tokens = [_Tokens(keys, values, runs, first, end, window, key_bias, rotation)]
    if exact is not None:
        tokens = _tokens_with_tail(tokens[0], exact.rows, *stored_keys_and_values(tail, D, 0, 0))
    queries = np.asarray(scaled)
    value_bias = np.asarray(bias)
    of_sinks = None if sinks is None else np.asarray(sink)
    output = np.empty((K, H // K, S, values.width), np.float32)
    size = max(1, TILE_ROWS // (H // K))
    starts = range((S - 1) // size * size, -1, -size)  # the last tiles see the most: they begin first

    def attend(tile: tuple[int, int]) -> None:
        start, head = tile
        stop = min(S, start + size)
        sums = _attend_tile(queries[head, :, start:stop], head, end - S + start, tokens)
        sink = None if of_sinks is None else of_sinks[head]
        output[head, :, start:stop] = join_blocks(sums[None], value_bias[head], sink)

    run_in_threads(attend, product(starts, range(K)), cpu_cores())
    return mx.array(output.reshape(1, H, S, -1)).astype(query.dtype)


def _tokens_with_tail(tokens: _Tokens, rows: ExactRows, keys: Stored, values: Stored) -> list[_Tokens]:
    """Return the quantized tokens and the exact first and last ones, so that a query reads each token once.

    ``keys`` and ``values`` are the exact rows.
    """
    sinks = rows.sinks[0]
    start = rows.starts[0]
    count = rows.count_before(0, tokens.stop)
    quantized_runs = cut_runs(tokens.runs, max(0, sinks - tokens.first), tokens.stop - tokens.first)
    window = TAIL_WINDOW if tokens.window is None else min(TAIL_WINDOW, tokens.window)
    return [
        replace(tokens, runs=quantized_runs, first=max(tokens.first, sinks), lag=TAIL_WINDOW, least=start),
        replace(tokens, keys=keys, values=values, runs=[(0, sinks)], first=0, stop=sinks),
        replace(tokens, keys=keys, values=values, runs=[(sinks, count)], first=start, window=window),
    ]


def _attend_tile(query: Floats, head: int, position: int, tokens: Sequence[_Tokens]) -> Floats:
    """Attend to the tokens that the queries of a tile see, block by block.

    Args:
        query: (N, Q, D) for the query heads of a kv head.
        position: the first query's.

    Returns:
        (N, Q, Dv + 2), one block as ``join_blocks`` takes it.
    """
    N, Q, D = query.shape
    queries = query.reshape(N * Q, D)
    sums = np.zeros((N * Q, tokens[0].values.width + 2), np.float32)
    weighted = sums[:, :-2]
    total = sums[:, -2:-1]
    largest = sums[:, -1:]
    largest[:] = LEAST
    ranges = [(source, *source.seen(position, Q)) for source in tokens]
    blocks = [
        (source, start, min(end, start + BLOCK_TOKENS))
        for source, begin, end in ranges
        for start in range(begin, end, BLOCK_TOKENS)
    ]
    for source, start, stop in blocks:
        scores = scratch("scores", (N * Q, stop - start))
        multiply(queries, source.keys_of(head, start, stop), scores, transposed=True)
        source.hide(scores.reshape(N, Q, -1), position, start)
        before = largest.copy()
        np.maximum(before, scores.max(axis=-1, keepdims=True), out=largest)
        scores -= largest
        np.exp(scores, out=scores)
        sums[:, :-1] *= np.exp(before - largest)
        total += scores.sum(axis=-1, keepdims=True)
        multiply(scores, source.values_of(head, start, stop), weighted, add=True)
    return sums.reshape(N, Q, -1)
