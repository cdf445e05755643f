"""Requests in any company have the tokens of each alone; of a deterministic scheduler, bit for bit, and
logits too.
"""

import hashlib
import random
from collections.abc import Sequence
from functools import cache as once
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from support.batches import alone, run_all, scheduler_of
from support.checkpoints import (
    mistral_config,
    qwen2_config,
    qwen3_moe_config,
    reference_model,
    save_checkpoint,
)
from support.counts import count
from support.openblas import has_small_products
from support.prefill import prefill

from kvant.engine.load import load_model
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler

ROWS = 8  # where matrices of 1 to 6 rows are multiplied otherwise (measured)
POCKET_SCHEDULES = count(1, 334)  # of each number of bits
SCHEDULES = count(2, 50)
TINY = {
    "qwen2, biases": (8, qwen2_config(num_attention_heads=4, num_key_value_heads=2)),
    "mistral, a window": (4, mistral_config(sliding_window=160)),
    "experts": (0, qwen3_moe_config()),
}


class Kind(NamedTuple):
    """How a request of the schedules is made; what it says is its result alone."""

    length: int  # of the prompt, a beginning of one of two texts
    text: int
    max_tokens: int
    seed: int | None
    penalty: float | None
    records: bool  # a processor of the request's own sees the logits


# Lengths about pages and chunks; 257 and 129 leave a last chunk of one token.
LENGTHS = [1, 30, 127, 128, 129, 256, 257, 390]
KINDS = [
    Kind(length, text, 6 + (5 * i + text) % 9, *options)
    for i, length in enumerate(LENGTHS)
    for text, options in enumerate([(None, None, True), (i, None, True), (i, 1.3, i % 2 == 0)])
]


def _request(kind: Kind, ids: Sequence[int], seen: list[str]) -> Request:
    prompt = ids[: kind.length] if kind.text == 0 else ids[500 : 500 + kind.length]

    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(hashlib.sha256(memoryview(logits)).hexdigest())  # type: ignore[arg-type]
        return logits

    return Request(
        prompt,
        max_tokens=kind.max_tokens,
        sampler=None if kind.seed is None else make_sampler(1.2, 0.95, seed=kind.seed),
        logits_processors=[
            *([record] if kind.records else []),
            *make_logits_processors(repetition_penalty=kind.penalty),
        ],
    )


Told = dict[Request, list[int]]
Result = tuple[list[tuple[int | None, float | None]], list[str]]  # tokens with log-probabilities; logits


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_random_schedules(pocket: tuple[Decoder, Any], heldout_ids: list[int], bits: int) -> None:
    _check(pocket[0], heldout_ids, bits, POCKET_SCHEDULES)


@pytest.mark.parametrize("name", TINY)
def test_random_schedules_of_other_models(tmp_path: Path, name: str) -> None:
    bits, config = TINY[name]
    save_checkpoint(tmp_path / "model", config, reference_model(config))
    ids = [random.Random(i).randrange(3, config["vocab_size"]) for i in range(1024)]
    _check(load_model(tmp_path / "model"), ids, bits, SCHEDULES)


def _check(model: Any, ids: Sequence[int], bits: int, schedules: int) -> None:
    def scheduler() -> Scheduler:
        return scheduler_of(model, bits, max_batch=ROWS, deterministic=True, checkpoints=4)[0]

    @once
    def single(kind: Kind) -> Result:
        request = _request(kind, ids, seen := [])
        return [(token.token, token.logprob) for token in run_all(scheduler(), [request])[request]], seen

    hits = 0
    for number in range(schedules):
        rng = random.Random(f"{bits} {number}")
        engine = scheduler()
        pages = engine.counts[3]
        arrivals = sorted((rng.randrange(12), rng.choice(KINDS)) for _ in range(rng.randint(2, 14)))
        under_way: dict[Request, tuple[Kind, list[Any], list[str]]] = {}
        cancelled = set()
        step = 0
        while arrivals or not engine.idle:
            while arrivals and arrivals[0][0] <= step:
                kind, seen = arrivals.pop(0)[1], []
                request = _request(kind, ids, seen)
                under_way[request] = (kind, [], seen)
                engine.submit(request)
            if under_way and rng.random() < 0.05:
                request = rng.choice(list(under_way))
                engine.cancel(request)
                cancelled.add(request)
            for token in engine.step():
                hits += token.finish_reason is not None and token.cached_tokens > 0
                assert token.error is None
                if token.token is not None:
                    under_way[token.request][1].append((token.token, token.logprob))
            step += 1
        for request, (kind, tokens, seen) in under_way.items():
            expected, logits = single(kind)
            where = f"schedule {number}, {kind}"
            if request not in cancelled:
                assert len(tokens) == len(expected), where
            if has_small_products():
                assert tokens == expected[: len(tokens)], where
                assert seen == logits[: len(seen)], where
            else:  # a row's rounding depends on its place
                for (token, logprob), (same, close) in zip(tokens, expected, strict=False):
                    assert token == same, where
                    assert logprob == close or logprob == pytest.approx(close, abs=1e-3), where
        assert engine.counts == (0, 0, 0, pages)
    assert hits > schedules / 4


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_callers_cache_is_shared_with_nobody(
    pocket: Any, heldout_ids: list[int], deterministic: bool
) -> None:
    """Its rows, and so those behind it, may come from chunks of any length."""
    model, _ = pocket
    cache = model.make_cache(600, kv_bits=0)
    prefill(model, heldout_ids[:150], cache, step_size=70)
    scheduler, _ = scheduler_of(model, deterministic=deterministic)
    first, whole = Request(heldout_ids[150:400], 1, cache=cache), Request(heldout_ids[:420], 1)
    cached = [run_all(scheduler, [request])[request][0].cached_tokens for request in (first, whole)]
    assert cached == ([0, 0] if deterministic else [0, 400])


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_tokens_are_those_of_a_request_alone(pocket: Any, bits: int) -> None:
    """Steps are begun before their tokens are known, beginnings are shared in part, and answers leave at
    any time.
    """
    model = pocket[0]
    rng = random.Random(bits)
    scheduler, pool = scheduler_of(model, bits, 14, max_batch=6, pool={"max_seq_len": 512})
    told: Told = {}
    open_requests: list[Request] = []
    cancelled: set[Request] = set()
    cached = 0
    for _ in range(count(40, 900)):
        if rng.random() < 0.3 and len(open_requests) < 14:
            made = Request(
                _prompt(rng, told), max_tokens=rng.randrange(1, 50), stop_tokens=rng.sample(range(1280), 30)
            )
            scheduler.submit(made)
            open_requests.append(made)
        if open_requests and rng.random() < 0.1:
            cancelled.add(chosen := rng.choice(open_requests))
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
        expected = alone(model, request, bits, reserved=512)
        ended = request not in cancelled and request not in open_requests
        different += tokens != (expected if ended else expected[: len(tokens)])
    # At 8 and 4 bits rounding can flip a value.
    assert different <= (0 if bits == 0 else 1 + len(told) // 100)


def _prompt(rng: random.Random, told: Told) -> list[int]:
    """New ids, behind the beginning of an earlier text or all of it."""
    new = [rng.randrange(5, 1200) for _ in range(rng.randrange(1, 150))]
    if not told or rng.random() < 0.3:
        return new
    request, tokens = rng.choice(list(told.items()))
    before = [*request.prompt, *tokens]
    return [*before[: rng.choice([len(before), rng.randrange(len(before))])][:300], *new]
