"""The oracle against published formulas and an implementation of somebody else's, so that it is not its
own judge.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.oracle import Spec


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize(("new_tokens", "num_keys"), [(1, 9), (4, 9), (9, 9)])
@pytest.mark.parametrize("mask", [None, "causal", "float", "bool", "sinks", "window"])
def test_attention_is_scaled_dot_product_attention(
    num_kv_heads: int, new_tokens: int, num_keys: int, mask: str | None
) -> None:
    rng = np.random.default_rng(3)
    query = rng.standard_normal((2, new_tokens, 6, 16)).astype(np.float32)
    key, value = rng.standard_normal((2, 2, num_keys, num_kv_heads, 16)).astype(np.float32)
    keep = rng.random((6, new_tokens, num_keys)) > 0.4
    keep[..., 0] = True  # no query without a key: there the two differ on purpose
    floats = np.where(keep, rng.standard_normal(keep.shape), -np.inf).astype(np.float32)
    distance = np.arange(num_keys) - np.arange(num_keys - new_tokens, num_keys)[:, None]
    window = (distance <= 0) & (distance > -4)
    given = {"bool": keep, "float": floats, "window": window}.get(mask or "")
    sinks = rng.standard_normal(6).astype(np.float32) if mask == "sinks" else None
    expected = mx.fast.scaled_dot_product_attention(
        *(mx.array(x).swapaxes(1, 2) for x in (query, key, value)),  # (B, T, heads, D) -> (B, heads, T, D)
        scale=16**-0.5,
        mask=mx.array(given) if given is not None else "causal" if mask == "causal" else None,
        sinks=None if sinks is None else mx.array(sinks),
    ).swapaxes(1, 2)
    options: dict[str, Any] = {"is_causal": True, "window": 4} if mask == "window" else {"attn_mask": given}
    output = oracle.attend(query, key, value, **{"is_causal": mask == "causal", "sinks": sinks} | options)
    np.testing.assert_allclose(output, np.array(expected), rtol=1e-5, atol=1e-5)


def test_alibi_slopes_are_the_published_ones() -> None:
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert oracle.alibi_slopes(8) == eight
    # Twelve heads take every other slope of sixteen, whose ratio is 2^-0.5.
    assert oracle.alibi_slopes(12) == pytest.approx([*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    assert oracle.alibi_slopes(1) == [2**-8]
    assert oracle.alibi_slopes(3) == pytest.approx([2**-4, 2**-8, 2**-2])


def test_alibi_by_hand() -> None:
    """Equal keys: the weights are the exponentials of the slope times the distance, and nothing after the
    query.
    """
    query = np.ones((1, 2, 1, 1))
    key, value = np.ones((1, 3, 1, 1)), np.array([1.0, 10.0, 100.0]).reshape(1, 3, 1, 1)
    e = np.exp(-(2.0**-8))
    expected = [(e * 1 + 10) / (e + 1), (e**2 * 1 + e * 10 + 100) / (e**2 + e + 1)]
    output = oracle.attend(query, key, value, is_causal=False, is_alibi=True)
    np.testing.assert_allclose(output.ravel(), expected, rtol=1e-12)


def test_quantization_by_hand() -> None:
    x = np.array([[127.0, -63.5, 0.5, 1.5, 0.0, 0.0, 0.0, 0.0]], np.float32)
    quantized, scale = oracle.quantize(x, Spec(quant_bit=8, quant_group=4))
    assert quantized.tolist() == [[127, -64, 0, 2, 0, 0, 0, 0]]
    assert scale.tolist() == [[1.0, np.float32(1e-5)]]
    assert oracle.pack_nibbles(np.array([1, -1, 7, -7], np.int8)).tolist() == [0xF1, 0x97]
    assert oracle.unpack_nibbles(np.array([0xF1, 0x97], np.uint8)).tolist() == [1, -1, 7, -7]
