"""The queue of requests that wait to compile a grammar. That can take seconds, and one is compiled at a time."""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from itertools import count

from kvant.errors import QueueFullError

PLACE_BYTES = 256  # a grammar lets one later arrival go first for each of these bytes of its size

Entry = tuple[int, int, "asyncio.Future[None]"]  # place, number of the arrival, and a future that its turn ends


class GrammarQueue:
    """Gives requests their turns to compile a grammar, in the thread of one event loop.

    Clients take turns. Among one client's grammars the short ones go first, but a long one does not wait forever.
    """

    def __init__(self) -> None:
        self._busy = False
        self._arrivals = count()
        self._waiting: dict[Hashable, list[Entry]] = {}  # by client, in the order of their turns

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, client: Hashable, size: int, room: int) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context.

        Args:
            client: identifies the client whose grammar it is.
            size: bytes of the grammar.
            room: how many more requests may wait.

        Raises:
            QueueFullError: the request would have to wait, and there is no room.
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
        entry: Entry = (arrival + size // PLACE_BYTES, arrival, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, []).append(entry)
        try:
            await entry[2]
        except asyncio.CancelledError:
            if entry[2].cancelled():
                self._take(client, entry)
            else:  # its turn began before the cancellation arrived
                self._give_on()
            raise

    def _give_on(self) -> None:
        """End a turn, and begin the next client's."""
        self._busy = bool(self._waiting)
        if self._waiting:
            client, entries = next(iter(self._waiting.items()))
            entry = min(entries)
            self._take(client, entry)
            entry[2].set_result(None)

    def _take(self, client: Hashable, entry: Entry) -> None:
        """Remove an entry. Its client goes behind all other clients."""
        entries = self._waiting.pop(client)
        entries.remove(entry)
        if entries:
            self._waiting[client] = entries
