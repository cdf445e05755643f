"""CPU execution: one MLX stream per core, because MLX computes with one thread per stream."""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import mlx.core as mx

# For up to this many tokens, as in a step that verifies drafts, norms, rotations, products and attention give
# each token bit for bit the numbers of a step of its own, so that drafts do not change the text. Products of
# large float32 matrices do so with OpenBLAS on any processor, others only with AVX-512.
FEW_ROWS = 8
Task = TypeVar("Task")


@cache
def cpu_streams() -> list[mx.ThreadLocalStream]:
    """Return a stream for each core that this process may use. Any thread may use them."""
    return [mx.new_thread_local_stream(mx.cpu) for _ in range(cpu_cores())]


def cpu_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_threads(call: Callable[[Task], None], tasks: Iterable[Task], count: int) -> None:
    """Run ``call`` on each task, in this thread and in ``count`` - 1 others, and wait for all threads.

    If a call raises or is interrupted, the other threads finish their current task and stop. The objects
    that ``call`` refers to stay alive until the last call has ended.
    """
    todo = iter(tasks)

    def run() -> None:
        try:
            for task in todo:
                call(task)
        finally:
            deque(todo, maxlen=0)  # after an error: drop the remaining tasks

    others = [_threads().submit(run) for _ in range(count - 1)]
    try:
        run()
    finally:
        for other in others:
            other.exception()  # waits
    for other in others:
        other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, cpu_cores() - 1), thread_name_prefix="kvant-cpu")
