"""Conversations of random tokens with the server of a tiny model."""

import random
from dataclasses import replace
from typing import Any

from kvant.bridge.model import BridgedModel
from kvant.bridge.pool import BridgedPool
from kvant.cache import CacheOptions
from kvant.cache.disk import DiskCache
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.request import Request, Token
from kvant.engine.scheduler import Scheduler
from kvant.sample_utils import make_logits_processors

STOP = 96  # ends a turn
# A layer of each kind, where it is not about several.
TWO: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_next": {"num_hidden_layers": 2},
    "gpt_oss": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
SIZES: dict[str, Any] = {
    "tokens": 3072,
    "sequences": 2,
    "max_seq_len": 1024,
    "prefill_step_size": 64,
    "options": CacheOptions(kv_bits=8, checkpoints=6),
}


def turn(rng: random.Random, length: int) -> list[int]:
    return [*(rng.randrange(90) for _ in range(length - 1)), STOP]


def run(scheduler: Scheduler, *prompts: list[int], **options: Any) -> list[tuple[list[int], Token]]:
    """The tokens of each prompt's answer, and the first of them as it was told."""
    requests = [Request(prompt, stop_tokens=[STOP], **{"max_tokens": 12} | options) for prompt in prompts]
    given: dict[Request, list[Token]] = {request: [] for request in requests}
    for request in requests:
        scheduler.submit(request)
    while not scheduler.idle:
        for token in scheduler.step():
            assert token.error is None
            given[token.request].append(token)
    return [([token.token for token in each if token.token is not None], each[0]) for each in given.values()]


def server(
    model: BridgedModel, disk: DiskCache | None = None, *, deterministic: bool = False, **changes: Any
) -> tuple[Scheduler, BridgedPool]:
    """Of a pool of SIZES except for changes."""
    stored = {
        name: changes.pop(name) for name in ("kv_bits", "kv_group_size", "checkpoints") if name in changes
    }
    pool = model.make_pool(**SIZES | changes | {"options": replace(SIZES["options"], **stored)})
    if disk is not None:
        pool.use_disk(disk, is_exact=deterministic)
    return Scheduler(model, pool, max_batch=min(2, pool.max_sequences), deterministic=deterministic), pool


def talks(
    scheduler: Scheduler, system: list[int], rng: random.Random, *, count: int = 8, turns: int = 6
) -> list[int]:
    """Conversations with one system prompt that take turns: of each request the tokens that were there
    already.
    """
    texts, cached = [list(system) for _ in range(count)], []
    for _ in range(turns):
        for text in texts:
            text += turn(rng, 30)
            ((answer, first),) = run(scheduler, text)
            cached.append(first.cached_tokens)
            text += answer if answer[-1] == STOP else [*answer, STOP]
    return cached


def grown(scheduler: Scheduler, rng: random.Random) -> tuple[list[int], list[int]]:
    """Turns with answers of 535 tokens: of each prompt what it had in common with the last text, and what
    was there.
    """
    never = make_logits_processors({STOP: -1e9})
    text, common, cached, known = [*turn(rng, 100), *turn(rng, 31)], [], [], 0
    for max_tokens in (535, 535, 1):
        ((answer, first),) = run(scheduler, text, max_tokens=max_tokens, logits_processors=never)
        common.append(known)
        cached.append(first.cached_tokens)
        known = len(text) + len(answer) - 1  # the last token is sampled and not fed
        text = [*text, *answer, STOP, *turn(rng, 31)]
    return common, cached


def changed_heads(scheduler: Scheduler, rng: random.Random) -> list[int]:
    """Prompts whose head of 700 tokens has three others after 500, such as a date: of each the tokens that
    were there.

    The model knows no end of its first turn.
    """
    before, behind = ([rng.randrange(90) for _ in range(length)] for length in (500, 200))
    prompts = [[*before, day, day + 1, day + 2, *behind, *turn(rng, 30)] for day in range(4)]
    return [run(scheduler, prompt)[0][1].cached_tokens for prompt in prompts]


def fresh_answers(
    model: BridgedModel, *prompts: list[int], max_tokens: int = 12, **changes: Any
) -> list[list[int]]:
    """Those of a server that has read nothing before."""
    scheduler, _ = server(model, **changes | {"checkpoints": 0})
    return [answer for answer, _ in run(scheduler, *prompts, max_tokens=max_tokens)]


def ask(model: BridgedModel, cache: Any, prompt: list[int]) -> tuple[int, list[int | None]]:
    """What a conversation's cache had of a prompt, and the tokens of its answer."""
    request = Request(prompt, 8, stop_tokens=[STOP])
    tokens = list(CacheScheduler(model, cache, prefill_step_size=64).answer([request]))
    return tokens[0].cached_tokens, [token.token for token in tokens]
