"""What quantizing the cache costs in quality, on held-out text through the embedded model."""

from typing import Any

import mlx.core as mx
import pytest

from kvant.cache import ModelCache
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
MEAN_BOUND, P99_BOUND = 1e-4, 1e-3  # nats


def _half_way(model: Decoder, ids: list[int], **cache_format: Any) -> ModelCache:
    """A cache that holds the first half of the text."""
    cache = model.make_cache(len(ids), **cache_format)
    mx.eval(model(mx.array([ids[: len(ids) // 2]]), cache=cache))
    return cache


def _logprobs(model: Decoder, ids: list[int], cache: ModelCache) -> mx.array:
    """Log-probabilities over the second half, (S, vocab)."""
    logits = model(mx.array([ids[len(ids) // 2 :]]), cache=cache)[0]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _divergence(expected: mx.array, given: mx.array) -> tuple[float, float]:
    """Mean and 99th percentile over positions of KL(expected || given), in nats."""
    kld = mx.sort((mx.exp(expected) * (expected - given)).sum(axis=-1))
    return kld.mean().item(), kld[int(0.99 * kld.size)].item()


@pytest.fixture(scope="module")
def exact(pocket: Pocket, heldout_ids: list[int]) -> mx.array:
    model, _ = pocket
    return _logprobs(model, heldout_ids, _half_way(model, heldout_ids, kv_bits=0))


@pytest.mark.parametrize("kv_group_size", [8, 32, 64])
def test_eight_bits_cost_nothing_that_matters(
    pocket: Pocket, heldout_ids: list[int], exact: mx.array, kv_group_size: int
) -> None:
    model, _ = pocket
    cache = _half_way(model, heldout_ids, kv_bits=8, kv_group_size=kv_group_size)
    mean, p99 = _divergence(exact, _logprobs(model, heldout_ids, cache))
    assert 0 < mean < MEAN_BOUND
    assert p99 < P99_BOUND


def test_a_scale_shifted_by_one_group_is_noticed(pocket: Pocket, heldout_ids: list[int], exact: mx.array) -> None:
    model, _ = pocket
    cache = _half_way(model, heldout_ids, kv_bits=8)
    for layer in cache:
        layer.arrays[1] = mx.roll(layer.scale, 1, axis=-1)
    mean, p99 = _divergence(exact, _logprobs(model, heldout_ids, cache))
    assert mean > MEAN_BOUND
    assert p99 > P99_BOUND


def test_more_bits_and_smaller_groups_are_better(pocket: Pocket, heldout_ids: list[int], exact: mx.array) -> None:
    model, _ = pocket
    formats = [(8, 32), (4, 8), (4, 64)]
    means = [
        _divergence(exact, _logprobs(model, heldout_ids, _half_way(model, heldout_ids, kv_bits=b, kv_group_size=g)))[0]
        for b, g in formats
    ]
    assert means == sorted(means)
