"""What the pool and the engine are doing, for a page that shows it: nothing of any text."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from kvant.cache.paged_layers import PagedLayers
from kvant.cache.pages import PAGE_SIZE, runs
from kvant.cache.pool import Pool, PoolSequence
from kvant.engine.request import Request, Token
from kvant.engine.scheduler import Scheduler
from kvant.server.body import sse
from kvant.server.errors import ApiError, described

INTERVAL_S = 0.2  # between two looks at the pool, and two events of a listener
STILL_S = 5.0  # after which a listener is told that nothing has changed
KEPT_TOKENS = 4096  # whose times are kept: a listener that is slower than that misses some
MOST_LISTENERS = 16

Stretch = list[int]  # a page and how many follow one another from it on


class Live:
    """Looks at the scheduler in the engine's thread, a few times a second, and tells listeners in the event loop.

    An answer has a number from 1 while it holds pages. The smallest that is free is given to the next one.

    Attributes:
        listeners: that are being told.
    """

    def __init__(self, pool: Pool) -> None:
        """``pool``: nobody uses it yet."""
        self.listeners = 0
        self.facts = _facts(pool)
        self._pool = pool
        self._lock = threading.Lock()  # held to read or change what follows
        self._state: dict[str, Any] = self._look([], 0, 0, 0)
        self._version = 0
        self._tokens: deque[tuple[int, float, float | None]] = deque(maxlen=KEPT_TOKENS)
        self._generated = 0
        self._closed = False
        # Only the engine's thread knows what follows.
        self._numbers: dict[tuple[Request, int], int] = {}
        self._last: dict[tuple[Request, int], float] = {}
        self._looked = 0.0
        self._failed = False

    def observe(self, scheduler: Scheduler, tokens: Sequence[Token]) -> None:
        """Take note of a step: :class:`kvant.engine.batch_engine.BatchEngine` calls it.

        An error ends the watching and not the engine. It is logged.
        """
        if self._failed:
            return
        try:
            self._observe(scheduler, tokens)
        except Exception as error:
            logging.getLogger(__name__).error("the pool is no longer watched: %s", described(error))
            self._failed = self._closed = True

    def close(self) -> None:
        """End the streams of all listeners."""
        self._closed = True

    def read(self, known: int) -> tuple[int, int, dict[str, Any]]:
        """The state, for a listener that knows the times of the first ``known`` tokens.

        Returns:
            the number of the state's version, how many tokens there have been, and the state.
        """
        with self._lock:
            count = min(self._generated - known, len(self._tokens))
            new = [self._tokens[i] for i in range(len(self._tokens) - count, len(self._tokens))]
            return self._version, self._generated, self._state | {"generated": self._generated, "tokens": new}

    async def events(self, alive: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Server-sent events: "pool" once, with what never changes, and "state" whenever something has changed.

        They end when it is closed, or the engine is no longer ``alive``.
        """
        self.listeners += 1
        try:
            yield sse(self.facts, "pool")
            known, told, told_at = self.read(0)[1], -1, 0.0
            while not self._closed and alive():
                version, generated, state = self.read(known)
                now = time.monotonic()
                if version != told or generated != known or now - told_at >= STILL_S:
                    yield sse(state, "state")
                    told, known, told_at = version, generated, now
                await asyncio.sleep(INTERVAL_S)
        finally:
            self.listeners -= 1

    def _observe(self, scheduler: Scheduler, tokens: Sequence[Token]) -> None:
        now = time.perf_counter()
        held = {(request, number): sequence for request, number, sequence in scheduler.held}
        for key in held:
            self._number(key)
        times = []
        for token in tokens:
            if token.token is not None:
                key = (token.request, token.answer)
                before = self._last.get(key)
                times.append((self._number(key), now, None if before is None else 1000 * (now - before)))
                self._last[key] = now
        for key in self._numbers.keys() - held.keys():
            del self._numbers[key]
            self._last.pop(key, None)
        state = None
        if scheduler.idle or (self.listeners and now - self._looked >= INTERVAL_S):
            counts, self._looked = scheduler.counts, now
            sequences = [(self._numbers[key], sequence) for key, sequence in held.items()]
            state = self._look(sequences, counts.waiting, counts.prefilling, counts.running)
        with self._lock:
            self._tokens.extend(times)
            self._generated += len(times)
            if state is not None:
                self._state = state
                self._version += 1

    def _number(self, key: tuple[Request, int]) -> int:
        if key not in self._numbers:
            taken = set(self._numbers.values())
            self._numbers[key] = next(number for number in range(1, len(taken) + 2) if number not in taken)
        return self._numbers[key]

    def _look(
        self, sequences: Sequence[tuple[int, PoolSequence]], waiting: int, prefilling: int, running: int
    ) -> dict[str, Any]:
        """The state of the pool's pages, and what there is to do."""
        return {
            "time": time.perf_counter(),
            "waiting": waiting,
            "prefilling": prefilling,
            "running": running,
            "sequences": [
                {"number": number, "tokens": sequence.length, "reserved": sequence.max_tokens}
                for number, sequence in sequences
            ],
            "parts": [_pages(place, part, sequences) for place, part in enumerate(self._pool.parts)],
        }


def _facts(pool: Pool) -> dict[str, Any]:
    """What never changes."""
    formats = [layer.format for layer in pool.layers[:1]]  # none where all layers keep states
    return {
        "format": next((f"{own.quant_bit} bits" if own.quant_bit else own.dtype for own in formats), "states"),
        "reserved_bytes": pool.nbytes,
        "page_size": PAGE_SIZE,
        "sequences": pool.max_sequences,
        "sequence_tokens": pool.max_seq_len,
        "parts": [
            {
                "window": part.window,
                "layers": len(part.layers),
                "pages": part.pages.num,
                "page_bytes": sum(layer.nbytes for layer in part.layers) / part.pages.num,
            }
            for part in pool.parts
        ],
    }


def _pages(place: int, part: PagedLayers, sequences: Sequence[tuple[int, PoolSequence]]) -> dict[str, Any]:
    """Whose pages they are, in the layers of one part."""
    tables = [(number, sequence.tables[place]) for number, sequence in sequences]
    held = {page for _, table in tables for page in table.pages}
    return {
        "kept": _stretches(sorted(set(part.prefix.pages) - held)),  # beginnings that nobody reads now
        "sequences": [
            {"number": number, "start": table.start, "pages": _stretches(table.pages)} for number, table in tables
        ],
    }


def _stretches(pages: Sequence[int]) -> list[Stretch]:
    """Pages with neighbours joined, in their order."""
    found = runs(pages, 0, len(pages) * PAGE_SIZE)
    return [[first // PAGE_SIZE, (end - first) // PAGE_SIZE] for first, end in found]


async def live(request: HttpRequest) -> Response:
    """GET /live: what the service's :class:`Live` tells, as server-sent events."""
    service = request.app.state.service
    source: Live = service.live
    if not service.alive:
        raise ApiError("the engine has failed", status=503, code="engine_failed", headers={"Retry-After": "10"})
    if source.listeners >= MOST_LISTENERS:
        raise ApiError(f"{source.listeners} listen, which is all that may", status=503, headers={"Retry-After": "10"})
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(source.events(lambda: service.alive), headers=headers, media_type="text/event-stream")
