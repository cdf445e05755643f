"""One fixed run of tokens through a model: a prefill in chunks, steps of one token and what follows, or two
in a pool.

The model may be a rank's part of one. Every step is evaluated before the next.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import mlx.core as mx

from kvant.cache import CacheOptions
from kvant.models import LanguageModel

# Of the second logits are read: one process normalizes all its rows, a pipeline one, and more than 8 round
# otherwise.
CHUNKS = (13, 8, 1, 1)


def run_ids(vocabulary: int) -> list[int]:
    return [(37 * i + 11) % vocabulary for i in range(sum(CHUNKS))]


def cached_run(model: LanguageModel, bits: int | None, tuned: Path | None = None) -> mx.array:
    """Logits (N, vocab): of each chunk's last token but the first's; of one that goes back, is forked (of a
    whole model), is emptied.
    """
    cache = model.make_cache(64, kv_bits=bits, kv_format=tuned)
    ids, steps = mx.array([run_ids(model.config.vocab_size)]), []

    def keep(step: mx.array, commits: bool = True, accepted: int | None = None) -> None:
        steps.append(step if step.ndim == 2 else step[0])
        mx.eval(step)
        if commits:
            cache.commit(accepted)

    for start, end in pairwise(accumulate(CHUNKS, initial=0)):
        if start:
            keep(_last(model.next_logits(ids[:, start:end], cache)))
        else:  # of the first chunk nobody reads them
            mx.eval(model.feed(ids[:, :end], cache))
            cache.commit()
    if cache.can_trim_to(sum(CHUNKS) - 4):
        cache.trim_to(sum(CHUNKS) - 4)
    if not model.divided:  # a rank's caches are not forked
        cache = cache.fork()
    keep(model(mx.array([[5, 9]]), cache=cache), commits=False)
    # of a draft
    keep(model.every_logits(mx.array([[5, 9, 2, 7]]), cache), accepted=2 if cache.pool.takes_back else None)
    keep(_last(model.next_logits(mx.array([[3]]), cache)))
    cache.batch.begin(mx.array([[1, 2]]))  # of a step that is given up nothing stays
    cache.reset()
    keep(model(ids[:, :9], cache=cache), commits=False)
    return mx.concatenate(steps)


def pooled_run(model: LanguageModel, bits: int) -> mx.array:
    """Logits (4, vocab) of two steps of two sequences of a pool, one a token longer than the other."""
    pool = model.make_pool(512, sequences=2, options=CacheOptions(kv_bits=bits))
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


def states_run(model: LanguageModel) -> mx.array:
    """Hidden states (20, hidden) of two sequences of a pool, as their vectors are made of."""
    pool = model.make_pool(512, sequences=2, options=CacheOptions(kv_bits=0))
    ids = run_ids(model.config.vocab_size)
    chunk = [ids[:10], ids[3:13]]
    batch = pool.batch([pool.sequence(64) for _ in range(2)])
    states = model.every_hidden_state(mx.array(chunk), batch)
    mx.eval(states)
    batch.commit(ids=chunk)
    return states.reshape(-1, states.shape[-1])


def every_run(
    model: LanguageModel, widths: Sequence[int], pools: bool, tuned: Path | bool = False
) -> dict[str, mx.array]:
    """Logits through a cache of each width, and a pool; and without either, evaluated, as "whole"; and of a
    pool the hidden states.

    ``tuned``: a file of a format, for one more cache.
    """
    runs = {"cache": cached_run} | ({"pool": pooled_run} if pools else {})
    found = {f"{name} {bits}": run(model, bits) for name, run in runs.items() for bits in widths}
    if isinstance(tuned, Path):
        found["cache 0 tuned"] = cached_run(model, None, tuned)
    if pools:
        found["states"] = states_run(model)
    found["whole"] = model(mx.array([run_ids(model.config.vocab_size)]))
    mx.eval(found["whole"])
    return found


def _last(step: mx.array) -> mx.array:
    """Of a pipeline's other ranks, which have hidden states (B, S, hidden), the last."""
    return step if step.ndim == 2 else step[:, -1]
