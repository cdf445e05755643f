"""What keys and queries go through, against float64: the scores stay, and keys come back."""

import mlx.core as mx
import numpy as np
import pytest
from support.operator_cases import to_mx, to_numpy
from support.oracle import Array

from kvant.operators.bias_split import BiasSplit
from kvant.operators.key_transform import PLAIN, KeyTransform, rotated

K, H, S = 2, 6, 5


def _front(width: int, **parts: bool) -> KeyTransform:
    rng = np.random.default_rng(width)
    center = mx.array(rng.normal(0, 30, (K, 1, width)).astype(np.float32))
    balance = mx.array(2.0 ** rng.integers(-3, 4, (K, 1, width)).astype(np.float32))
    return KeyTransform(
        "drawn",
        center=center if parts.get("center") else None,
        balance=balance if parts.get("balance") else None,
        rotates=parts.get("rotates", False),
    )


@pytest.mark.parametrize("width", [64, 80, 96, 12, 7])
def test_rotation_is_the_orthonormal_hadamard_matrix_in_blocks(width: int) -> None:
    x = np.random.default_rng(0).normal(size=(3, 2, width)).astype(np.float32)
    block = next(size for size in (64, 32, 16, 8, 4, 2, 1) if width % size == 0)
    signs = [[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)]  # Sylvester's order
    matrix = np.kron(np.eye(width // block), np.array(signs) / np.sqrt(block))
    np.testing.assert_allclose(to_numpy(rotated(mx.array(x))), x @ matrix, atol=1e-5)


@pytest.mark.parametrize("width", [64, 80])
@pytest.mark.parametrize("parts", [("center",), ("balance",), ("rotates",), ("center", "balance", "rotates")])
def test_a_query_s_scores_differ_by_a_constant_alone(width: int, parts: tuple[str, ...]) -> None:
    transform, rng = _front(width, **dict.fromkeys(parts, True)), np.random.default_rng(1)
    query, key = (rng.normal(size=(1, heads, S, width)).astype(np.float32) for heads in (H, K))
    changed_query, changed_key = (
        to_numpy(x) for x in (transform.queries(mx.array(query)), transform.keys(mx.array(key)))
    )

    def scores(query: Array, key: Array) -> Array:
        keys = np.repeat(key, H // K, axis=1).astype(np.float64)
        return query.astype(np.float64) @ keys.swapaxes(2, 3)

    difference = scores(changed_query, changed_key) - scores(query, key)
    difference -= difference.mean(axis=-1, keepdims=True)
    assert np.abs(difference).max() < 1e-3 if "center" in parts else 1e-4
    np.testing.assert_allclose(to_numpy(transform.restored(mx.array(changed_key))), key, atol=1e-3)
    if parts == ("balance",):  # by powers of two: nothing is rounded
        np.testing.assert_array_equal(scores(changed_query, changed_key), scores(query, key))


def test_half_precision_keeps_what_differs_from_a_large_constant() -> None:
    """Keys as bfloat16 has them, 16 apart at 3,000: their differences stay exact, whatever the constant
    rounds to.
    """
    transform = KeyTransform(center=mx.full((K, 1, 64), 3000.3))
    key = to_mx(3000 + 16 * np.arange(K * 64).reshape(1, K, 1, 64) % 128, "bfloat16")
    stored = transform.keys(key)
    assert stored.dtype == mx.bfloat16
    changed, given = (to_numpy(x).astype(np.float64) for x in (stored, key))
    np.testing.assert_array_equal(changed - changed[0, 0, 0, 0], given - given[0, 0, 0, 0])
    assert np.abs(changed).max() < 200
    assert mx.array_equal(transform.restored(stored), key)


def test_nothing_is_done_without_parts() -> None:
    x = mx.ones((1, 2, 3, 64))
    assert PLAIN.keys(x) is PLAIN.queries(x) is PLAIN.restored(x) is x
    assert PLAIN.arrays == []


def test_beside_a_bias_split() -> None:
    """The key bias at its pairs is balanced with them; what would turn it into other channels is refused."""
    split = BiasSplit(mx.ones((K, 2, 1)), (3,), mx.ones((2, 1, 9)), mx.zeros((K, 64)))
    with pytest.raises(ValueError, match="cannot be rotated"):
        KeyTransform("rotate", split, rotates=True)
    balance = np.ones((K, 1, 64), np.float32)
    balance[:, :, 3] = 4
    with pytest.raises(ValueError, match="differs within a rotary pair"):
        KeyTransform("balance", split, balance=mx.array(balance))
    balance[:, :, 35] = 4
    made = KeyTransform("balance", split, balance=mx.array(balance))
    assert made.bias_split is not None
    assert (made.bias_split.key_bias == 0.25).all().item()
    values_alone = BiasSplit(mx.ones((K, 2, 0)), (), mx.ones((2, 0, 9)), mx.zeros((K, 64)))
    assert KeyTransform("rotate", values_alone, rotates=True).rotates
