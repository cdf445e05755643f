"""What attention moves in a decode step, by path: bytes read, bytes written, launches. Formulas, nothing measured.

Counted is one new token in one layer: its row appended, and attention to all rows. An operation reads each of its
inputs once and writes its outputs once, however often its threads load them and wherever caches hold them; of a slice
or a broadcast array the bytes that are there; of an update in place the new part. Views and one-element constants cost
nothing. Operations are MLX's as they are called: a function that MLX compiles has fewer, because it joins small ones.
"""

from dataclasses import dataclass

import mlx.core as mx

from kvant.operators.kernels.attend import MIN_SPLIT_TOKENS, num_splits

FLOAT32 = 4  # bytes of an element
MLX_LM_STEP = 256  # tokens by which mlx-lm's caches grow


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read and written, and operations launched, in kernels or library calls; fractions where amortized."""

    bytes_read: float = 0
    bytes_written: float = 0
    launches: float = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.launches + other.launches,
        )

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(self.bytes_read * times, self.bytes_written * times, self.launches * times)


Stages = dict[str, Traffic]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """One layer's attention in one decode step.

    Attributes:
        heads, kv_heads, head_dim: H, K, D.
        rows: T, cached tokens attended to, the new one included.
        max_rows: MaxS, tokens reserved; what the splits of the fused path depend on.
        bits, group: of a cached element, and elements that share a scale.
        dtype: of activations, and of cached elements at 0 bits.
        scale_dtype: of kvant's scales; mlx-lm's are in dtype.
        pairs: rotary pairs of the bias split; None without it.
        batch: B.
        on_gpu: whether MLX's own attention is one operation; on a CPU it is four.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    max_rows: int
    bits: int = 0
    group: int = 32
    dtype: mx.Dtype = mx.bfloat16
    scale_dtype: mx.Dtype = mx.float16
    pairs: int | None = None
    batch: int = 1
    on_gpu: bool = False

    @property
    def width(self) -> int:
        """Bytes of an activation's element."""
        return self.dtype.size

    @property
    def row_elements(self) -> int:
        """Elements of one token's key and value, of all kv heads."""
        return self.batch * 2 * self.kv_heads * self.head_dim

    @property
    def query_elements(self) -> int:
        """Elements of the query, and of the output."""
        return self.batch * self.heads * self.head_dim

    @property
    def row_scales(self) -> int:
        """Scales of one token's key and value; 0 at 0 bits."""
        return self.row_elements // self.group if self.bits else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in kvant's cache: levels and scales, or elements."""
        if not self.bits:
            return self.row_elements * self.width
        return self.row_elements * self.bits // 8 + self.row_scales * self.scale_dtype.size

    @property
    def mlx_lm_row_bytes(self) -> int:
        """Bytes of one token in mlx-lm's cache: levels, scales and biases in the activations' dtype, or elements."""
        if not self.bits:
            return self.row_elements * self.width
        return self.row_elements * self.bits // 8 + 2 * self.row_scales * self.width


def total(stages: Stages) -> Traffic:
    """All stages together."""
    return sum(stages.values(), Traffic())


def fused(step: AttentionStep) -> Stages:
    """kvant's kernels (operators/kernels): quantized rows are read once, and no row is written but the new one.

    Levels and scales of T rows are read. What is written beside the output are partial sums: an output of D floats of
    every query and split that has rows, a maximum and a sum of every split. The new row's levels and scales are written
    by one kernel and put into the cache by an update each.
    """
    split = num_splits(step.max_rows, step.batch * step.kv_heads)
    share = max(-(-step.rows // split), MIN_SPLIT_TOKENS)
    used = -(-step.rows // share)  # splits that have rows
    queries = step.batch * step.heads
    partial = queries * used * step.head_dim * FLOAT32
    statistics = 2 * queries * split * FLOAT32
    query = step.query_elements * step.width
    pairs = step.pairs or 0
    angles = 2 * pairs * step.rows * FLOAT32 + 2 * pairs * step.kv_heads * FLOAT32
    pair_numbers = pairs * 4 if pairs > 1 else 0
    value_bias = 0 if step.pairs is None else step.kv_heads * step.head_dim * FLOAT32
    return _append_fused(step) | {
        "attend": Traffic(query + step.rows * step.row_bytes + angles + pair_numbers, partial + statistics, 1),
        "combine": Traffic(partial + statistics + value_bias, query, 1),
    }


def _append_fused(step: AttentionStep) -> Stages:
    new = step.row_elements * step.width
    if not step.bits:
        return _append(step)
    return {"quantize": Traffic(new, step.row_bytes, 1), "write": Traffic(step.row_bytes, step.row_bytes, 2)}


def unfused(step: AttentionStep) -> Stages:
    """kvant's path in MLX operations as a CPU runs it: rows are dequantized to floats, which attention reads again.

    8 bits: levels to float32, scales to float32, their product; 4 bits: first six operations that unpack the nibbles,
    each as many bytes as elements. A product that is not in the activations' dtype is cast to it, and attention casts
    what is not float32 back. Attention itself is two products of matrices with a softmax between them.
    """
    return _append(step) | _dequantize(step) | _attend_newest(step)


def concatenated(step: AttentionStep) -> Stages:
    """kvant's FullKVCache: every row is copied for the new one, then read."""
    rows = step.rows * step.row_elements * step.width
    return {"copy": Traffic(rows, rows, 2)} | (_one_attention(step) if step.on_gpu else _attend_newest(step))


def mlx_rows(step: AttentionStep) -> Stages:
    """MLX's attention over mlx-lm's default cache: rows in the activations' dtype, grown by 256 tokens at a time.

    On a GPU attention is counted as one operation; the partial results some of its kernels write are not.
    """
    rows = step.row_elements * step.width
    attention = _one_attention(step) if step.on_gpu else _mlx_products(step, rows)
    return {"write": Traffic(rows, rows, 2)} | _growth(step, rows, 2) | attention


def mlx_lm_quantized(step: AttentionStep) -> Stages:
    """mlx-lm's quantized cache: levels, scales and biases of keys and of values, read by two quantized products.

    The scores between them are in the activations' dtype, written by one operation and read by the next.
    """
    new, row = step.row_elements * step.width, step.mlx_lm_row_bytes
    append = {"quantize": Traffic(new, row, 2), "write": Traffic(row, row, 6)}
    return append | _growth(step, row, 6) | _mlx_products(step, row)


def _append(step: AttentionStep) -> Stages:
    """The new row in MLX operations: key and value joined, quantized, and written in place."""
    row, wide = step.row_elements, step.row_elements * step.width
    join = Traffic(wide, wide, 1)
    if not step.bits:
        return {"join": join, "write": Traffic(wide, wide, 1)}
    scales = step.row_scales * step.width
    steps = [
        (wide, wide),  # abs
        (wide, scales),  # max
        (scales, scales),  # by the top level
        (scales, scales),  # not below the least scale
        (wide + scales, wide),  # elements by scale
        (wide, wide),  # round
        (wide, row),  # to int8
    ]
    if step.dtype != mx.float32:
        steps += [(wide, wide)] * 2  # clip
    if step.scale_dtype != step.dtype:
        steps += [(scales, step.row_scales * step.scale_dtype.size)]
    if step.bits == 4:  # to unsigned; low and high nibbles; joined
        steps += [(row, row), (row // 2, row // 2), (row // 2, row // 2), (row, row // 2)]
    return {"join": join, "quantize": _operations(steps), "write": Traffic(step.row_bytes, step.row_bytes, 2)}


def _dequantize(step: AttentionStep) -> Stages:
    if not step.bits:
        return {}
    elements, scales = step.rows * step.row_elements, step.rows * step.row_scales
    steps = []
    if step.bits == 4:  # to 16 bits; shifted; joined; masked; sign bits flipped; 8 less
        steps = [(elements // 2, elements), (elements, elements), (2 * elements, elements), *[(elements, elements)] * 3]
    steps += [(elements, elements * FLOAT32)]
    if step.scale_dtype != mx.float32:
        steps += [(scales * step.scale_dtype.size, scales * FLOAT32)]
    steps += [((elements + scales) * FLOAT32, elements * FLOAT32)]
    if step.dtype != mx.float32:
        steps += [(elements * FLOAT32, elements * step.width)]
    return {"dequantize": _operations(steps)}


def _attend_newest(step: AttentionStep) -> Stages:
    """operators/attention.py's attention of the newest token, in float32: one product for the queries of a kv head."""
    query, rows = step.query_elements, step.rows * step.row_elements
    scores = step.batch * step.heads * step.rows * FLOAT32
    steps = []
    if step.dtype != mx.float32:  # query, keys, values, and the output back
        steps += [(query * step.width, query * FLOAT32), *[(rows // 2 * step.width, rows // 2 * FLOAT32)] * 2]
        steps += [(query * FLOAT32, query * step.width)]
    query, rows = query * FLOAT32, rows * FLOAT32
    steps += [(query, query), (query + rows // 2, scores), (scores, scores), (scores + rows // 2, query)]
    stages = {"attend": _operations(steps)}
    if step.pairs is not None:
        stages["bias split"] = _bias_split(step, scores)
    return stages


def _bias_split(step: AttentionStep, scores: int) -> Traffic:
    """What the split adds to the unfused path: a product of few pairs with the table, added to the scores."""
    query = step.query_elements * FLOAT32
    steps = [(query + step.kv_heads * step.head_dim * FLOAT32, query)]  # value bias
    if step.pairs:
        some = step.batch * step.heads * step.pairs * FLOAT32  # of the query, one element a pair
        bias = step.kv_heads * step.pairs * FLOAT32
        index = step.pairs * 4 if step.pairs > 1 else 0
        steps += [(2 * some + index, 2 * some)]  # the pairs' elements
        steps += [(some + bias, some)] * 4 + [(2 * some, some)] * 2  # four products, sum and difference
        steps += [(2 * some, 2 * some)] * 2  # joined; by sqrt(D)
        steps += [(2 * some + 2 * step.pairs * step.rows * FLOAT32, scores), (2 * scores, scores)]
    return _operations(steps)


def _one_attention(step: AttentionStep) -> Stages:
    query = step.query_elements * step.width
    return {"attend": Traffic(query + step.rows * step.row_elements * step.width, query, 1)}


def _mlx_products(step: AttentionStep, row_bytes: int) -> Stages:
    """Query scaled, a product with the keys, softmax, a product with the values; all in the activations' dtype."""
    query = step.query_elements * step.width
    scores = step.batch * step.heads * step.rows * step.width
    half = step.rows * row_bytes // 2
    return {"attend": _operations([(query, query), (query + half, scores), (scores, scores), (scores + half, query)])}


def _growth(step: AttentionStep, row_bytes: int, arrays: int) -> Stages:
    """A cache's arrays copied into longer ones every 256 tokens, by token: the copy that made them as long as now."""
    before = (step.rows - 1) // MLX_LM_STEP * MLX_LM_STEP
    new = MLX_LM_STEP * row_bytes  # zeros
    once = Traffic(0, new, arrays)
    if before:
        once += Traffic(before * row_bytes + new, before * row_bytes + new, arrays)
    return {"grow": once * (1 / MLX_LM_STEP)}


def _operations(steps: list[tuple[int, int]]) -> Traffic:
    """Operations of so many bytes read and written."""
    return Traffic(sum(read for read, _ in steps), sum(written for _, written in steps), len(steps))
