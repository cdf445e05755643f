"""A deterministic scheduler: the tokens and logits of a request are bit for bit the same in any company."""

import hashlib
import random
from collections.abc import Sequence
from functools import cache as once
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from support.checkpoints import mistral_config, qwen2_config, qwen3_moe_config, reference_model, save_checkpoint
from support.counts import count
from support.openblas import has_small_products

from kvant.engine.load import load_model
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler
from kvant.text.tokenizer import Tokenizer

ROWS = 8  # where matrices of 1 to 6 rows are multiplied otherwise (measured)
PAGES = 40
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
        pool = model.make_pool(128 * PAGES, sequences=ROWS, kv_bits=bits)
        return Scheduler(model, pool, max_batch=ROWS, deterministic=True)

    @once
    def alone(kind: Kind) -> Result:
        seen: list[str] = []
        engine = scheduler()
        engine.submit(_request(kind, ids, seen))
        tokens = []
        while not engine.idle:
            tokens += [(token.token, token.logprob) for token in engine.step()]
        return tokens, seen

    hits = 0
    for number in range(schedules):
        rng = random.Random(f"{bits} {number}")
        engine = scheduler()
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
            expected, logits = alone(kind)
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
        assert engine.counts == (0, 0, 0, PAGES)
    assert hits > schedules / 4


def test_what_follows_a_cache_of_the_callers_is_shared_with_nobody(pocket: tuple[Decoder, Tokenizer]) -> None:
    """Its rows may come from chunks of any length, whatever the chunks behind them have."""
    model, _ = pocket
    cache = model.make_cache(600, kv_bits=0)
    ids = [5 + i % 700 for i in range(420)]
    for first, end in [(0, 50), (50, 128)]:
        mx.eval(model(mx.array([ids[first:end]]), cache=cache))
    pool = model.make_pool(128 * 8, sequences=2, kv_bits=0)
    scheduler = Scheduler(model, pool, max_batch=2, deterministic=True)
    cached = {}
    for request in (Request(ids[128:400], max_tokens=1, cache=cache), Request(ids, max_tokens=1)):
        scheduler.submit(request)
        while not scheduler.idle:
            cached |= {token.request: token.cached_tokens for token in scheduler.step()}
    assert list(cached.values()) == [0, 0]
