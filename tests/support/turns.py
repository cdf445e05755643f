"""Conversations of random tokens with the server of a tiny model."""

import random
from typing import Any

from kvant.engine.request import Request, Token
from kvant.engine.scheduler import Scheduler

STOP = 96  # ends a turn
SIZES: dict[str, Any] = {"tokens": 3072, "sequences": 2, "max_seq_len": 1024, "prefill_step_size": 64, "checkpoints": 6}


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
