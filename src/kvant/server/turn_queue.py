"""A fair queue for slow work that is done one at a time: compiling a grammar, decoding a large body."""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import TypeVar, TypeVarTuple

from kvant.errors import QueueFullError

PLACE_SIZE = 256  # so much size delays an entry by one arrival

T = TypeVar("T")
Args = TypeVarTuple("Args")
Entry = tuple[int, int, "asyncio.Future[None]"]  # priority, arrival, and the future that begins its turn


class TurnQueue:
    """Grants turns to the tasks of one event loop, to clients in rotation.

    Among one client's entries, small ones go first, but every entry's turn comes.
    """

    def __init__(self, name: str = "kvant-turns") -> None:
        """``name`` is the thread's. A separate thread leaves the default pool to others."""
        self._thread = ThreadPoolExecutor(1, name)
        self._busy = False
        self._arrivals = count()
        self._waiting: dict[Hashable, list[Entry]] = {}  # by client, next client first

    @property
    def waiting(self) -> int:
        """The number of waiting entries."""
        return sum(map(len, self._waiting.values()))

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the queue's thread. The caller must have a turn."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def run(
        self,
        client: Hashable,
        size: int,
        room: int,
        function: Callable[[*Args], T],
        *arguments: *Args,
    ) -> T:
        """Wait for a turn as in :meth:`slot`, then call a function in the queue's thread."""
        async with self.slot(client, size, room):
            return await self.call(partial(function, *arguments))

    @asynccontextmanager
    async def slot(self, client: Hashable, size: int, room: int) -> AsyncIterator[None]:
        """Wait for a turn and keep it until the context ends.

        Args:
            client: the client that gets the turn.
            size: an estimate of the work, such as the bytes of a grammar or the values of a body.
            room: the maximum number of waiting entries, counting this one.

        Raises:
            QueueFullError: a turn is not free, and ``room`` entries are waiting.
        """
        if self._busy:
            if self.waiting >= room:
                raise QueueFullError("the queue of waiting requests is full; try again later")
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
        """End a turn and begin the next client's."""
        self._busy = False
        while self._waiting and not self._busy:
            client, entries = next(iter(self._waiting.items()))
            entry = min(entries)
            self._take(client, entry)
            if not entry[2].cancelled():
                entry[2].set_result(None)
                self._busy = True

    def _take(self, client: Hashable, entry: Entry) -> None:
        """Remove an entry and move its client behind the other clients."""
        entries = self._waiting.pop(client)
        entries.remove(entry)
        if entries:
            self._waiting[client] = entries
