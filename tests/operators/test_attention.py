"""Attention of a few tokens.

B batch, T cached tokens, H query heads, K kv heads, D head_dim.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.numbers import normal

from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.rotary import Rotary

on_a_cpu = pytest.mark.skipif(
    mx.default_device().type != mx.cpu, reason="a few tokens are special on a CPU only"
)
B, T, D = 3, 41, 32


@on_a_cpu
@pytest.mark.parametrize("kind", ["causal", "mask", "float mask of heads", "sinks"])
@pytest.mark.parametrize("pairs", [None, (0, 5, 15)])
@pytest.mark.parametrize(("heads", "queries"), [((4, 2), 8), ((7, 1), 8), ((4, 2), 2)])
def test_a_few_tokens_are_as_each_alone(
    queries: int, heads: tuple[int, int], pairs: tuple[int, ...] | None, kind: str
) -> None:
    """In the same bits: steps that verify drafts give the numbers of plain ones. Many together differ by
    rounding.
    """
    H, K = heads
    query, key, value = normal(7, B, H, queries, D), normal(1, B, K, T, D), normal(2, B, K, T, D)
    options: dict[str, Any] = {}
    if pairs is not None:
        rotation = rotation_table(Rotary.plain(D, 1e4), pairs, T + 3)
        options["bias_split"] = BiasSplit(
            2 * normal(4, K, 2, len(pairs)), pairs, rotation, 3 * normal(6, K, D)
        )
    mask, rest = None, mx.zeros((H, 16, T))
    if kind == "sinks":
        options["sinks"] = normal(3, H)
    elif kind == "mask":
        mask, rest = (
            mx.random.uniform(shape=(queries, T), key=mx.random.key(5)) > 0.4,
            mx.ones((16, T), mx.bool_),
        )
    elif kind != "causal":
        mask = normal(5, H, queries, T)
    output = attend_tokens(query, key, value, mask=mask, **options)
    padded = mx.concatenate([mx.zeros((B, H, 16, D)), query], axis=2)
    wide = None if mask is None else mx.concatenate([rest, mask], axis=-2)
    together = attend_tokens(padded, key, value, mask=wide, **options)[:, :, 16:]
    np.testing.assert_allclose(np.array(output), np.array(together), rtol=1e-4, atol=1e-4)
    for i in range(queries):
        seen = T - queries + 1 + i
        own_mask = None if mask is None else mask[..., i : i + 1, :seen]
        own = attend_tokens(
            query[:, :, i : i + 1], key[:, :, :seen], value[:, :, :seen], mask=own_mask, **options
        )
        assert mx.array_equal(output[:, :, i : i + 1], own)
