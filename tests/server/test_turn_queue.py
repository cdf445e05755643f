"""Whose turn it is: in turns by client, short ones first, none forgotten, and a bound."""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvant.errors import QueueFullError
from kvant.server.turn_queue import PLACE_SIZE, TurnQueue

ROOM = 1000  # enough


class Line:
    """Requests that are compiled one after the other, each when the test says so."""

    def __init__(self) -> None:
        self.queue = TurnQueue()
        self.begun: list[str] = []
        self._end = asyncio.Semaphore(0)

    async def ask(self, name: str, client: str = "a", size: int = 1, room: int = ROOM) -> None:
        async with self.queue.slot(client, size, room):
            self.begun.append(name)
            await self._end.acquire()

    async def add(self, name: str, *given: Any) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(self.ask(name, *given))
        await settle()
        return task

    async def end_all(self, *tasks: "asyncio.Task[None]") -> list[str]:
        for _ in tasks:
            self._end.release()
        await asyncio.gather(*tasks)
        assert self.queue.waiting == 0
        return self.begun


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@in_a_loop
async def test_clients_take_turns() -> None:
    line = Line()
    tasks = [await line.add(f"a{number}") for number in range(4)]
    tasks += [await line.add("b0", "b"), await line.add("c0", "c"), await line.add("b1", "b")]
    assert line.queue.waiting == 6
    assert await line.end_all(*tasks) == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


@in_a_loop
async def test_short_ones_go_first_and_long_ones_not_last_for_ever() -> None:
    line = Line()
    tasks = [await line.add("first", "a", 9 * PLACE_SIZE)]
    tasks += [await line.add(f"long {number}", "a", 9 * PLACE_SIZE) for number in range(2)]
    tasks += [await line.add(f"short {number}") for number in range(20)]
    begun = await line.end_all(*tasks)
    assert begun[:3] == ["first", "short 0", "short 1"]
    assert begun.index("long 0") < begun.index("long 1") < 13
    assert [name for name in begun if name.startswith("short")] == [f"short {number}" for number in range(20)]


@in_a_loop
async def test_no_more_may_wait_than_there_is_room_for() -> None:
    line = Line()
    tasks = [await line.add("first", "a", 1, 0)]  # it does not wait
    with pytest.raises(QueueFullError):
        await line.ask("second", "b", 1, 0)
    tasks.append(await line.add("third", "b", 1, 1))
    assert await line.end_all(*tasks) == ["first", "third"]
    await line.end_all(await line.add("fourth", "a", 1, 0))


@in_a_loop
async def test_those_that_leave() -> None:
    line = Line()
    first, leaves, stays, last = [await line.add(name) for name in ("first", "leaves", "stays", "last")]
    leaves.cancel()
    await settle()
    assert line.queue.waiting == 2
    first.cancel()  # while it compiles
    await settle()
    assert line.begun == ["first", "stays"]
    again = await line.add("again")
    stays.cancel()
    await asyncio.sleep(0)
    last.cancel()  # while its turn comes
    await settle()
    assert line.begun == ["first", "stays", "again"]
    await line.end_all(again)


@in_a_loop
async def test_one_that_leaves_as_a_turn_ends() -> None:
    """The turn was lost, and nobody had another one."""
    for first_leaves in (True, False):
        line = Line()
        first, leaves, last = [await line.add(name) for name in ("first", "leaves", "last")]
        for task in (first, leaves) if first_leaves else (leaves, first):
            task.cancel()
        await settle()
        assert line.begun == ["first", "last"]
        await line.end_all(last)
        await line.end_all(await line.add("again"))


@in_a_loop
async def test_clients_that_leave_at_random() -> None:
    rng = random.Random(1)
    line = Line()
    for _ in range(300):
        tasks = [
            asyncio.ensure_future(line.ask("x", rng.choice("abc"), rng.randrange(999))) for _ in range(9)
        ]
        for _ in range(30):
            await asyncio.sleep(0)
            for task in rng.sample(tasks, rng.randrange(3)):
                task.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert line.queue.waiting == 0
        await line.end_all(await line.add("again", "a", 1, 0))  # nobody has the turn


@in_a_loop
async def test_work_is_done_in_one_thread_apart() -> None:
    queue = TurnQueue("apart")
    places = await asyncio.gather(*(queue.run(client, 1, ROOM, _place, client) for client in "abc"))
    assert [client for client, _ in places] == ["a", "b", "c"]
    assert len({thread for _, thread in places}) == 1
    assert places[0][1].name.startswith("apart")
    assert not queue.waiting


def _place(client: str) -> tuple[str, threading.Thread]:
    return client, threading.current_thread()
