"""Whose turn it is where one thing is done at a time and may take seconds: a grammar, a large body."""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar, TypeVarTuple

from kvant.errors import QueueFullError

PLACE_SIZE = 256  # of an entry's size, for which one that came later may go first

T = TypeVar("T")
Given = TypeVarTuple("Given")
Entry = tuple[int, int, "asyncio.Future[None]"]  # its place, its arrival, and what is waited for


class TurnQueue:
    """Gives turns in the thread of one event loop.

    Clients take turns. Of one client's entries the small ones go first, but none waits for ever.
    """

    def __init__(self, name: str = "kvant-turns") -> None:
        """``name``: of the thread of :meth:`run`, apart from the default pool, which others wait for."""
        self._thread = ThreadPoolExecutor(1, name)
        self._busy = False
        self._arrivals = count()
        self._waiting: dict[Hashable, list[Entry]] = {}  # by client, in the order of their turns

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return sum(map(len, self._waiting.values()))

    async def call(self, work: Callable[[], T]) -> T:
        """Call a function in the queue's thread; the caller has a turn."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def run(
        self, client: Hashable, size: int, room: int, work: Callable[[*Given], T], *given: *Given
    ) -> T:
        """Call a function in the queue's thread, in a turn; the others are as for :meth:`turn`."""
        async with self.turn(client, size, room):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    @asynccontextmanager
    async def turn(self, client: Hashable, size: int, room: int) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context.

        Args:
            client: whose turn it is.
            size: what it takes about, such as the bytes of a grammar or the marks of a body.
            room: how many may wait. A QueueFullError is raised if this one has to, and as many do.
        """
        if self._busy:
            if self.waiting >= room:
                raise QueueFullError("as many requests wait as may; try again later")
            await self._wait(client, size)
        self._busy = True
        try:
            yield
        finally:
            self._give_on()

    async def _wait(self, client: Hashable, size: int) -> None:
        arrival = next(self._arrivals)
        entry: Entry = (arrival + size // PLACE_SIZE, arrival, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, []).append(entry)
        try:
            await entry[2]
        except asyncio.CancelledError:
            if not entry[2].cancelled():  # its turn came at the same moment
                self._give_on()
            elif entry in self._waiting.get(client, ()):  # no turn ended at the same moment
                self._take(client, entry)
            raise

    def _give_on(self) -> None:
        """End a turn, and begin one of the next client."""
        self._busy = False
        while self._waiting and not self._busy:
            client, entries = next(iter(self._waiting.items()))
            entry = min(entries)
            self._take(client, entry)
            if not entry[2].cancelled():
                entry[2].set_result(None)
                self._busy = True

    def _take(self, client: Hashable, entry: Entry) -> None:
        """Take one out. Its client's others go behind those of other clients."""
        entries = self._waiting.pop(client)
        entries.remove(entry)
        if entries:
            self._waiting[client] = entries
