"""The state of the pool and the engine for the page that shows it, without any text."""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvant.cache.layer_format import describe_formats
from kvant.cache.layer_group import LayerGroup
from kvant.cache.pages import PAGE_SIZE, runs
from kvant.cache.pool import Pool, PoolSequence
from kvant.engine.request import Request, Token
from kvant.engine.scheduler import Counts, Scheduler
from kvant.server.errors import described, logger

INTERVAL_S = 0.2  # between two snapshots of the pool
WATCHED_S = 2.0  # snapshots go on for this long after a request
MAX_TOKENS = 4096  # with stored times; a client that polls too rarely misses some


class Live:
    """Take snapshots of the scheduler in the engine's thread, a few times a second while clients ask.

    An answer with reserved pages is shown by a number: the smallest from 1 that is free when it starts.
    """

    def __init__(self, pool: Pool) -> None:
        """``pool`` must not be in use yet."""
        self.facts = _facts(pool)
        self._pool = pool
        self._lock = threading.Lock()  # guards the following fields
        self._state: dict[str, Any] = self._look([], Counts(0, 0, 0, pool.num_free))
        self._asked = -math.inf  # time of the last request
        self._tokens: deque[tuple[int, float, float | None]] = deque(maxlen=MAX_TOKENS)
        self._generated = 0
        # Only the engine's thread uses the following fields.
        self._numbers: dict[tuple[Request, int], int] = {}
        self._last: dict[tuple[Request, int], float] = {}
        self._looked = 0.0
        self._failed = False

    def observe(self, scheduler: Scheduler, tokens: Sequence[Token]) -> None:
        """Record a step. :class:`kvant.engine.batch_engine.BatchEngine` calls this.

        An error is logged and ends the recording, not the engine.
        """
        if self._failed:
            return
        try:
            self._observe(scheduler, tokens)
        except Exception as error:
            logger.error("the pool is no longer watched: %s", described(error))
            self._failed = True

    def read(self, known: int | None = None) -> dict[str, Any]:
        """Return constants, the current state, and the times of the tokens after the first ``known``."""
        with self._lock:
            self._asked = time.perf_counter()
            since = self._generated if known is None else known
            count = max(0, min(self._generated - since, len(self._tokens)))
            new = [self._tokens[i] for i in range(len(self._tokens) - count, len(self._tokens))]
            changes = {"pool": self.facts, "time": self._asked, "generated": self._generated, "tokens": new}
            return self._state | changes

    def _observe(self, scheduler: Scheduler, tokens: Sequence[Token]) -> None:
        now = time.perf_counter()
        reserved = {(request, number): sequence for request, number, sequence in scheduler.reserved_answers}
        for key in reserved:
            self._number(key)
        times = []
        for token in tokens:
            if token.token is not None:
                key = (token.request, token.answer)
                before = self._last.get(key)
                times.append((self._number(key), now, None if before is None else 1000 * (now - before)))
                self._last[key] = now
        for key in self._numbers.keys() - reserved.keys():
            del self._numbers[key]
            self._last.pop(key, None)
        state = None
        if scheduler.idle or (now - self._asked < WATCHED_S and now - self._looked >= INTERVAL_S):
            self._looked = now
            sequences = [(self._numbers[key], sequence) for key, sequence in reserved.items()]
            state = self._look(sequences, scheduler.counts)
        with self._lock:
            self._tokens.extend(times)
            self._generated += len(times)
            if state is not None:
                self._state = state

    def _number(self, key: tuple[Request, int]) -> int:
        if key not in self._numbers:
            used = set(self._numbers.values())
            self._numbers[key] = next(number for number in range(1, len(used) + 2) if number not in used)
        return self._numbers[key]

    def _look(self, sequences: Sequence[tuple[int, PoolSequence]], counts: Counts) -> dict[str, Any]:
        """Return the state of the pool's pages and the counts of requests."""
        return {
            "waiting": counts.waiting,
            "prefilling": counts.prefilling,
            "running": counts.running,
            "sequences": [
                {"number": number, "tokens": sequence.length, "reserved": sequence.max_tokens}
                for number, sequence in sequences
            ],
            "parts": [_pages(place, group, sequences) for place, group in enumerate(self._pool.groups)],
        }


def _facts(pool: Pool) -> dict[str, Any]:
    """Return what never changes."""
    return {
        "format": describe_formats(pool.formats) or "states",
        "reserved_bytes": pool.nbytes,
        "page_size": PAGE_SIZE,
        "sequences": pool.max_sequences,
        "sequence_tokens": pool.max_seq_len,
        "parts": [
            {
                "window": group.window,
                "layers": len(group.layers),
                "pages": group.pages.num,
                "page_bytes": sum(layer.nbytes for layer in group.layers) / group.pages.num,
            }
            for group in pool.groups
        ],
    }


def _pages(place: int, group: LayerGroup, sequences: Sequence[tuple[int, PoolSequence]]) -> dict[str, Any]:
    """Return which sequence has which pages, in one layer group."""
    tables = [(number, sequence.tables[place]) for number, sequence in sequences]
    used = {page for _, table in tables for page in table.pages}
    return {
        "kept": _stretches(sorted(set(group.prefix.pages) - used)),  # cached prefixes that no sequence uses
        "sequences": [
            {"number": number, "start": table.start, "pages": _stretches(table.pages)}
            for number, table in tables
        ],
    }


def _stretches(pages: Sequence[int]) -> list[list[int]]:
    """Return runs of adjacent page numbers as [first, count]."""
    stretches = runs(pages, 0, len(pages) * PAGE_SIZE)
    return [[first // PAGE_SIZE, (end - first) // PAGE_SIZE] for first, end in stretches]
