"""One fixed run of tokens through a model: a prefill in chunks and steps of one token, through a cache or a pool.

The model may be a rank's part of one. Every step is evaluated before the next.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import mlx.core as mx

from kvant.models import Decoder

CHUNKS = (6, 5, 1, 1)
PLACES = [10, 11, 12]  # of the tokens whose logits are computed: the last of each chunk but the first


def run_ids(vocabulary: int) -> list[int]:
    return [(37 * i + 11) % vocabulary for i in range(sum(CHUNKS))]


def cached_run(model: Decoder, bits: int) -> mx.array:
    """Logits (3, vocab) of the tokens at :data:`PLACES`; of the first chunk nobody reads them."""
    cache = model.make_cache(64, kv_bits=bits)
    ids, steps = mx.array([run_ids(model.config.vocab_size)]), []
    for start, end in pairwise(accumulate(CHUNKS, initial=0)):
        chunk = ids[:, start:end]
        step = model.next_logits(chunk, cache) if start else model.feed(chunk, cache)
        mx.eval(step)
        cache.commit()
        if isinstance(step, mx.array):
            steps.append(_last(step))
    return mx.concatenate(steps)


def pooled_run(model: Decoder, bits: int) -> mx.array:
    """Logits (4, vocab) of two steps of two sequences of a pool, one a token longer than the other."""
    pool = model.make_pool(512, sequences=2, kv_bits=bits)
    sequences = [pool.sequence(64) for _ in range(2)]
    ids = run_ids(model.config.vocab_size)
    for number, sequence in enumerate(sequences):
        batch = pool.batch([sequence])
        mx.eval(model.feed(mx.array([ids[number:10]]), batch))
        batch.commit(ids=[ids[number:10]])
    batch, steps = pool.batch(sequences), []
    for token in ids[10:12]:
        steps.append(_last(model.next_logits(mx.array([[token], [token]]), batch)))
        mx.eval(steps[-1])
        batch.commit(ids=[[token], [token]])
    return mx.concatenate(steps)


def every_run(model: Decoder, widths: Sequence[int], pools: bool) -> dict[str, mx.array]:
    """Logits through a cache of each width, and a pool; and without either, evaluated, as "whole"."""
    runs = {"cache": cached_run} | ({"pool": pooled_run} if pools else {})
    found = {f"{name} {bits}": run(model, bits) for name, run in runs.items() for bits in widths}
    found["whole"] = model(mx.array([run_ids(model.config.vocab_size)]))
    mx.eval(found["whole"])
    return found


def _last(step: mx.array) -> mx.array:
    """Of a pipeline's other ranks, which have hidden states (B, S, hidden), the last."""
    return step if step.ndim == 2 else step[:, -1]
