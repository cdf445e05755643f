"""Attention of a few tokens, and a chunk's scores.

B batch, T cached tokens, H query heads, K kv heads, D head_dim.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.counts import count
from support.numbers import peak_bytes
from support.operator_cases import FLOATS, check_output, to_mx
from support.oracle import Array

from kvant.cache import QuantizedKVCache
from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.cpu_attention import BLOCK_SCORE_BYTES
from kvant.operators.quantization import quantize
from kvant.operators.rotary import Rotary

THETA = 1e4
HEADS = [(1, 1), (4, 2), (7, 1), (16, 2)]  # H, K: ratios 1, 2, 7 and 8
PAIRS = {"no split": None, "values only": (), "some pairs": (0, 5, 15), "all pairs": tuple(range(16))}
on_a_cpu = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="the newest token is special on a CPU only")


class _Operands:
    """Operands as both are given, (B, heads, T, D), and what is left out of keys and values by a bias split."""

    def __init__(
        self, heads: tuple[int, int], tokens: int, pairs: tuple[int, ...] | None, dtype: str = "float32", D: int = 32
    ) -> None:
        (H, K), B = heads, 3
        rng = np.random.default_rng(H * 1000 + tokens)
        self.dtype = dtype
        self.query = oracle.cast(rng.standard_normal((B, H, 1, D)), dtype)
        self.key, self.value = (oracle.cast(x, dtype) for x in rng.standard_normal((2, B, K, tokens, D)))
        self.split, self.key_bias, self.value_bias = None, np.zeros((K, tokens, D)), np.zeros((K, 1, D))
        if pairs is None:
            return
        self.value_bias = rng.uniform(-3, 3, (K, 1, D)).astype(np.float32)
        bias = rng.uniform(-2, 2, (K, 2, D // 2)).astype(np.float32)
        angle = np.arange(tokens)[:, None] * THETA ** (-2 * np.array(pairs, float) / D)
        self.key_bias = oracle.key_bias(bias[..., list(pairs)], pairs, angle, D).swapaxes(0, 1)
        self.split = BiasSplit(
            key_bias=mx.array(bias[..., list(pairs)]),
            pairs=pairs,
            rotation=rotation_table(Rotary.plain(D, THETA), pairs, tokens + 3),
            value_bias=mx.array(self.value_bias[:, 0]),
        )

    @property
    def arrays(self) -> list[mx.array]:
        return [to_mx(x, self.dtype) for x in (self.query, self.key, self.value)]

    def expected(self, live: Array | slice = slice(None)) -> Array:
        """Over some of the tokens, with the biases where they belong: (B, H, 1, D)."""
        key, value = self.key + self.key_bias, self.value + self.value_bias
        operands = [x.swapaxes(1, 2) for x in (self.query, key[:, :, live], value[:, :, live])]
        return oracle.attend(*operands, is_causal=True).swapaxes(1, 2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("heads", HEADS)
def test_the_newest_token(heads: tuple[int, int], tokens: int, pairs: str, dtype: str) -> None:
    operands = _Operands(heads, tokens, PAIRS[pairs], dtype)
    check_output(attend_tokens(*operands.arrays, bias_split=operands.split), operands.expected(), dtype)


@on_a_cpu
@pytest.mark.parametrize("kind", ["causal", "mask", "float mask of heads", "sinks"])
@pytest.mark.parametrize("pairs", ["no split", "some pairs"])
@pytest.mark.parametrize(("heads", "queries"), [((4, 2), 8), ((7, 1), 8), ((4, 2), 2)])
def test_a_few_tokens_are_as_each_alone(queries: int, heads: tuple[int, int], pairs: str, kind: str) -> None:
    """In the same bits: steps that verify drafts give the numbers of plain ones. Many together differ by rounding."""
    operands, T = _Operands(heads, 41, PAIRS[pairs]), 41
    _, key, value = operands.arrays
    query = mx.random.normal((3, heads[0], queries, 32), key=mx.random.key(7))
    options: dict[str, Any] = {"bias_split": operands.split}
    mask, rest = None, mx.zeros((heads[0], 16, T))
    if kind == "sinks":
        options["sinks"] = mx.random.normal((heads[0],), key=mx.random.key(3))
    elif kind == "mask":
        mask, rest = mx.random.uniform(shape=(queries, T), key=mx.random.key(5)) > 0.4, mx.ones((16, T), mx.bool_)
    elif kind != "causal":
        mask = mx.random.normal((heads[0], queries, T), key=mx.random.key(5))
    output = attend_tokens(query, key, value, mask=mask, **options)
    padded = mx.concatenate([mx.zeros((3, heads[0], 16, 32)), query], axis=2)
    wide = None if mask is None else mx.concatenate([rest, mask], axis=-2)
    together = attend_tokens(padded, key, value, mask=wide, **options)[:, :, 16:]
    np.testing.assert_allclose(np.array(output), np.array(together), rtol=1e-4, atol=1e-4)
    for i in range(queries):
        seen = T - queries + 1 + i
        own_mask = None if mask is None else mask[..., i : i + 1, :seen]
        own = attend_tokens(query[:, :, i : i + 1], key[:, :, :seen], value[:, :, :seen], mask=own_mask, **options)
        assert mx.array_equal(output[:, :, i : i + 1], own)


KV_HEADS, HEAD_DIM, CHUNK = 2, 64, 512
PAST = count(8192, 16384) - CHUNK


@pytest.mark.parametrize("heads", [4, 14])
@on_a_cpu  # a GPU's makes no scores
def test_scores_of_a_chunk_stay_under_the_bound(heads: int) -> None:
    """A chunk's attention to a long past makes no score matrix of queries times context."""
    cache = QuantizedKVCache(PAST + CHUNK, KV_HEADS, HEAD_DIM)
    past = mx.random.normal((1, KV_HEADS, PAST, HEAD_DIM), key=mx.random.key(0))
    cache.attend(past[:, :, :1], past[:, :, :1], past[:, :, :1])
    for array, part in zip(cache.layer.arrays, quantize(past, quant_bit=8, quant_group=32), strict=True):
        array[:, :, :PAST] = part
    mx.eval(cache.layer.arrays)
    cache.batch.held.restore(PAST, [0] * PAST)
    query = mx.random.normal((1, heads, CHUNK, HEAD_DIM), key=mx.random.key(1))
    current = mx.random.normal((1, KV_HEADS, CHUNK, HEAD_DIM), key=mx.random.key(2))
    mx.eval(query, current)
    used = peak_bytes(lambda: mx.eval(cache.attend(query, current, current)))
    floats = 2 * KV_HEADS * (PAST + CHUNK) * HEAD_DIM * 4
    assert used > floats  # or the past was not read
    outputs = 4 * query.nbytes  # the blocks, joined and transposed
    assert used < floats + outputs + 8 * BLOCK_SCORE_BYTES
    assert used < heads * CHUNK * (PAST + CHUNK) * 4  # the bytes of one score matrix
