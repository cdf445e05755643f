"""Whose turn it is where one thing is done at a time and may take seconds: a grammar, a large body."""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from itertools import count

from kvant.errors import QueueFullError

PLACE_SIZE = 256  # of an entry's size, for which one that came later may go first

Entry = tuple[int, int, "asyncio.Future[None]"]  # its place, its arrival, and what is waited for


class TurnQueue:
    """Gives turns in the thread of one event loop.

    Clients take turns. Of one client's entries the small ones go first, but none waits for ever.
    """

    def __init__(self) -> None:
        self._busy = False
        self._arrivals = count()
        self._waiting: dict[Hashable, list[Entry]] = {}  # by client, in the order of their turns

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, client: Hashable, size: int, room: int) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context.

        Args:
            client: whose turn it is.
            size: what it takes about, such as the bytes of a grammar or the marks of a body.
            room: how many more may wait. A QueueFullError is raised if this one has to, and there is none.
        """
        if self._busy:
            if room < 1:
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
