"""The pool: sequences in it against caches of their own."""

from typing import Any

import mlx.core as mx
import pytest
from support.counts import count
from support.pools import decode, prefill

from kvant.cache import ModelCache
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
LENGTHS = (3, 128, 25, 300, 129, 1, 256, 77)


def _alone(model: Decoder, ids: list[int], tokens: int, bits: int) -> tuple[list[int], ModelCache, list[mx.array]]:
    """Greedy tokens through a cache of its own, and the logits each was picked from."""
    cache = model.make_cache(len(ids) + tokens, quant_bit=bits)
    logits = [model.next_logits(mx.array([ids]), cache)]
    mx.eval(logits)
    cache.commit()
    picked = [int(logits[-1].argmax().item())]
    for _ in range(tokens - 1):
        logits.append(model.next_logits(mx.array([picked[-1:]]), cache))
        picked.append(int(logits[-1].argmax().item()))
        cache.commit()
    return picked, cache, logits


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_eight_sequences_are_what_each_is_alone(pocket: Pocket, heldout_ids: list[int], bits: int) -> None:
    model, _ = pocket
    prompts = [heldout_ids[50 * i : 50 * i + length] for i, length in enumerate(LENGTHS)]
    tokens = count(12, 48)
    pool = model.make_pool(2048, sequences=8, quant_bit=bits)
    sequences = [pool.sequence(len(ids) + tokens) for ids in prompts]
    logits = mx.concatenate([prefill(model, pool, *both) for both in zip(sequences, prompts, strict=True)])
    batch = pool.batch(sequences, rows=10)
    steps = [logits]
    for _ in range(tokens - 1):
        ids = mx.concatenate([steps[-1].argmax(axis=-1), mx.zeros(2, mx.uint32)])
        steps.append(model.next_logits(ids[:, None], batch)[:8])
        batch.commit(ids=ids[:8, None].tolist())
    for b, ids in enumerate(prompts):
        picked, cache, expected = _alone(model, ids, tokens, bits)
        given = [int(step[b].argmax().item()) for step in steps]
        if bits == 0:
            for step, other in zip(steps, expected, strict=True):
                assert mx.allclose(step[b], other[0], atol=1e-4, rtol=1e-5)
        assert given == picked
        assert sequences[b].ids == cache.ids[0]
        assert sequences[b].length == len(ids) + tokens - 1


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_a_step_changes_a_pool_in_place_whatever_its_size(pocket: Pocket, bits: int) -> None:
    """A step, a chunk and a fork each take the memory they take in a pool of a hundredth."""
    model, _ = pocket
    peaks = []
    for tokens in (1024, 102400):
        pool = model.make_pool(tokens, sequences=8, quant_bit=bits, max_seq_len=512)
        sequences = [pool.sequence(256) for _ in range(3)]
        for ids in (range(100), range(40)):
            for sequence in sequences:
                prefill(model, pool, sequence, list(ids))
        own = []
        work = [
            lambda pool=pool, sequences=sequences: decode(model, pool, sequences, [5, 6, 7]),
            lambda pool=pool, sequences=sequences: prefill(model, pool, sequences[0], list(range(60))),
            lambda sequences=sequences: sequences[0].fork(220).release(),
        ]
        for step in work:
            mx.synchronize()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            step()
            own.append(mx.get_peak_memory() - before)
        peaks.append(own)
    small, large = peaks
    assert max(abs(a - b) for a, b in zip(small, large, strict=True)) < 100_000 < pool.nbytes / 100
