"""Requests that come, go on from each other and go, in a pool that is always full: tokens as those of each alone."""

from random import Random
from typing import Any

import pytest
from support.batches import scheduler_of
from support.counts import count

from kvant.engine.request import Request
from kvant.engine.run import Run

PAGES = 14
Told = dict[Request, list[int]]


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_tokens_are_those_of_a_request_alone(pocket: Any, bits: int) -> None:
    """Steps are begun before their tokens are known, beginnings are shared in part, and answers leave at any time."""
    model = pocket[0]
    random = Random(bits)
    scheduler, pool = scheduler_of(model, bits, PAGES, max_batch=6, pool={"max_seq_len": 512})
    told: Told = {}
    open_requests: list[Request] = []
    cancelled: set[Request] = set()
    cached = 0
    for _ in range(count(40, 900)):
        if random.random() < 0.3 and len(open_requests) < 14:
            made = Request(
                _prompt(random, told), max_tokens=random.randrange(1, 50), stop_tokens=random.sample(range(1280), 30)
            )
            scheduler.submit(made)
            open_requests.append(made)
        if open_requests and random.random() < 0.1:
            cancelled.add(chosen := random.choice(open_requests))
            scheduler.cancel(chosen)
        for token in scheduler.step():
            cached += token.cached_tokens % 128
            told.setdefault(token.request, []).extend([] if token.token is None else [token.token])
            if token.finish_reason is not None:
                open_requests.remove(token.request)
    scheduler.close()
    assert len(told) > 8
    assert cached, "rows of pages that are alike in part were copied"
    assert pool.num_free == pool.num_pages
    different = 0
    for request, tokens in told.items():
        run = Run(model, request.prompt, model.make_cache(512, kv_bits=bits), max_tokens=request.max_tokens,
                  stop_tokens=request.stop_tokens)  # fmt: skip
        alone = [token for token, _ in run]
        ended = request not in cancelled and request not in open_requests
        different += tokens != (alone if ended else alone[: len(tokens)])
    # At 8 and 4 bits rounding can flip a value.
    assert different <= (0 if bits == 0 else 1 + len(told) // 100)


def _prompt(random: Random, told: Told) -> list[int]:
    """New ids, behind the beginning of an earlier text or all of it."""
    new = [random.randrange(5, 1200) for _ in range(random.randrange(1, 150))]
    if not told or random.random() < 0.3:
        return new
    request, tokens = random.choice(list(told.items()))
    before = [*request.prompt, *tokens]
    return [*before[: random.choice([len(before), random.randrange(len(before))])][:300], *new]
