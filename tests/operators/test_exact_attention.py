"""Unfused attention to an exact tail, against the oracle."""

import mlx.core as mx
import numpy as np
import pytest
from support import attend_stand_in

from kvant.operators.bias_split import BiasSplit
from kvant.operators.exact_attention import attend_each_exactly
from kvant.operators.exact_rows import TAIL_ROWS, ExactRows, ExactSpan, ExactTail
from kvant.operators.kernels.attend import ExactInput
from kvant.operators.paged_rows import PagedRows

K, D, H = 2, 8, 4


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("new_tokens", [1, 3, 20])
@pytest.mark.parametrize(
    "span", [ExactSpan(0), ExactSpan(0, start=60), ExactSpan(0, sinks=0, start=60), ExactSpan(0, 0, 130)]
)
def test_each_query_reads_its_own_tail(
    span: ExactSpan, new_tokens: int, split: bool, window: int | None
) -> None:
    """The rows of a tail that lacks its first tokens are as many as the quantized ones lack. They were taken
    for all tokens in order.
    """
    length = 130
    end = length + new_tokens
    rng = np.random.default_rng(new_tokens)
    query, rows, exact_rows = (
        mx.array(rng.standard_normal(shape).astype(np.float32))
        for shape in ((1, H, new_tokens, D), (2, K, 2 * TAIL_ROWS, D), (2, K, TAIL_ROWS, D))
    )
    angle = rng.standard_normal((2, end))
    bias = BiasSplit(
        mx.array(rng.standard_normal((K, 2, 2)).astype(np.float32)),
        (0, 3),
        mx.array(np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)),
        mx.array(rng.standard_normal((K, D)).astype(np.float32)),
    )
    start, runs = span.read(length, end)
    exact = ExactRows(None, [runs], [span.sinks], [start], [end], [span.page])
    paged = PagedRows([], [[(0, end)]], [0], window)
    (output,) = attend_each_exactly(
        query,
        [rows],
        paged,
        ExactTail(exact, [exact_rows]),
        (),
        quant_bit=0,
        value_bit=0,
        dtype=mx.float32,
        mask=None,
        bias_split=bias if split else None,
        sinks=None,
    )
    spans = mx.array([[span.sinks, start, end, 0]])
    names = ("key_bias", "pairs", "rotation", "value_bias")
    expected = attend_stand_in.exact(
        query,
        rows,
        None,
        mx.array([length]),
        quant_bit=0,
        quant_group=0,
        pages=mx.array([[0, 1]]),
        first=mx.array([0]),
        window=window,
        tail=ExactInput(exact_rows, mx.array([[0]]), spans),
        backend="metal",
        **({name: getattr(bias, name) for name in names} if split else {}),
    )
    np.testing.assert_allclose(np.array(output), expected, rtol=1e-4, atol=1e-4)
