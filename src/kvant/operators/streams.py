"""How a CPU computes: a stream for each core, and a few tokens as each alone.

MLX computes with one thread for each stream, so work for several cores has to be divided.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import mlx.core as mx

# Of so many tokens, as in a step that verifies drafts, norms, rotations, products and attention give each the
# numbers that it has alone, to the bit: text with drafts is text without. Products of large float32 matrices
# do with OpenBLAS on any processor, others with AVX-512 only.
FEW_ROWS = 8
Task = TypeVar("Task")


@cache
def cpu_streams() -> list[mx.ThreadLocalStream]:
    """A stream for each core that this process may use. Any thread may use them."""
    return [mx.new_thread_local_stream(mx.cpu) for _ in range(cpu_cores())]


def cpu_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_threads(work: Callable[[Task], None], tasks: Iterable[Task], count: int) -> None:
    """Call ``work`` with each task, in this thread and in ``count`` - 1 others, and wait for all threads.

    If a call raises, or is interrupted, the other threads finish the task that they have and take no more.
    What ``work`` refers to stays alive until the last call has ended.
    """
    todo = iter(tasks)

    def run() -> None:
        try:
            for task in todo:
                work(task)
        finally:
            deque(todo, maxlen=0)  # none are left, except after an error

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
