"""What quantizing the cache costs in quality, on held-out text through the embedded model."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from kvant.models import Decoder

MEAN_BOUND, P99_BOUND = 1e-4, 1e-3  # nats


def _divergence(expected: mx.array, given: mx.array) -> tuple[float, float]:
    """Mean and 99th percentile over positions of KL(expected || given), in nats."""
    kld = mx.sort((mx.exp(expected) * (expected - given)).sum(axis=-1))
    return kld.mean().item(), kld[int(0.99 * kld.size)].item()


Logprobs = Callable[..., mx.array]


@pytest.fixture(scope="module")
def logprobs(pocket: tuple[Decoder, Any], heldout_ids: list[int]) -> Logprobs:
    """Log-probabilities (S, vocab) of a text's second half; the first is in a cache of this format."""
    model, half = pocket[0], len(heldout_ids) // 2

    def compute(roll: int = 0, **stored: Any) -> mx.array:
        cache = model.make_cache(len(heldout_ids), **stored)
        mx.eval(model(mx.array([heldout_ids[:half]]), cache=cache))
        for layer in cache:
            layer.layer.arrays[-1] = mx.roll(layer.layer.arrays[-1], roll, axis=-1)
        logits = model(mx.array([heldout_ids[half:]]), cache=cache)[0]
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    return compute


@pytest.fixture(scope="module")
def exact(logprobs: Logprobs) -> mx.array:
    return logprobs(kv_bits=0)


def test_eight_bits_cost_nothing_that_matters_and_smaller_groups_cost_less(
    logprobs: Logprobs, exact: mx.array
) -> None:
    formats = [(8, 8), (8, 32), (8, 64), (4, 8), (4, 64)]
    found = [_divergence(exact, logprobs(kv_bits=bits, kv_group_size=group)) for bits, group in formats]
    for mean, p99 in found[:3]:
        assert 0 < mean < MEAN_BOUND
        assert p99 < P99_BOUND
    assert found == sorted(found)


def test_a_scale_shifted_by_one_group_is_noticed(logprobs: Logprobs, exact: mx.array) -> None:
    mean, p99 = _divergence(exact, logprobs(kv_bits=8, roll=1))
    assert mean > MEAN_BOUND
    assert p99 > P99_BOUND
