"""Tasks that the threads of a CPU share."""

import threading
from collections.abc import Iterator

import pytest

from kvant.operators.streams import run_in_threads


class Tasks:
    """Many tasks, and whether they are used up."""

    def __init__(self) -> None:
        self._numbers = iter(range(1000))
        self.used_up = threading.Event()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        try:
            return next(self._numbers)
        except StopIteration:
            self.used_up.set()
            raise


def test_every_task_is_done_once() -> None:
    done: list[int] = []
    run_in_threads(done.append, range(1000), 2)
    assert sorted(done) == list(range(1000))


@pytest.mark.parametrize("in_caller", [True, False])
def test_no_task_is_begun_after_an_error(in_caller: bool) -> None:
    """An interruption, too, waits only for the task that the other thread has."""
    caller = threading.current_thread()
    both = threading.Barrier(2, timeout=10)
    tasks = Tasks()
    begun: list[int] = []
    dropped: list[bool] = []

    def work(task: int) -> None:
        begun.append(task)
        both.wait()
        if (threading.current_thread() is caller) == in_caller:
            raise KeyboardInterrupt
        dropped.append(tasks.used_up.wait(10))  # while this thread still has its task

    with pytest.raises(KeyboardInterrupt):
        run_in_threads(work, tasks, 2)
    assert sorted(begun) == [0, 1]
    assert dropped == [True]
