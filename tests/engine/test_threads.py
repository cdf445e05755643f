"""Threads and forks: one thread at a time through a cache, any number with a cache each, and no forked
process.
"""

import _thread
import copy
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import mlx.core as mx
import pytest
from support.counts import count

from kvant import generate, stream_generate, threads
from kvant.cache import ModelCache
from kvant.engine.conversation import Conversation
from kvant.models import Decoder
from kvant.threads import ComputeLock

Pocket = tuple[Decoder, Any]
PROMPT = "Once upon a time"
IN_USE = "the cache is in use by another thread"
LOAD = """
import faulthandler, os, threading
faulthandler.enable()
import kvant
import mlx.core as mx
model, tokenizer = kvant.load("pocket")
"""
RACE = """
def race(use):
    outcomes, start = [], threading.Barrier(2)
    def work():
        start.wait()
        try:
            for _ in range(20):
                use()
            outcomes.append("done")
        except RuntimeError as error:
            outcomes.append(str(error))
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return sorted(outcomes)
"""
# Until both were at it at once, which a busy machine may put off.
SHARED = """
for _ in range(50):
    cache = model.make_cache(1000)
    outcomes = race(lambda: (USE))
    if outcomes != ["done", "done"]: break
print(outcomes)
"""
USES = [
    'kvant.generate(model, tokenizer, "Once", max_tokens=9, prompt_cache=cache)',
    "mx.eval(model(mx.array([[5, 7]]), cache=cache))",
    "mx.eval(model(mx.array([[5]]), cache=cache)), cache.reset()",
]


def _printed(program: str) -> list[str]:
    """What a new process prints: a crash or a wait without end must not be this one's."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def _apart(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work, *arguments, **options).result()


def test_two_threads_at_once(pocket: Pocket) -> None:
    expected = generate(*pocket, PROMPT, max_tokens=8)
    shared = "".join(SHARED.replace("USE", use) for use in USES)
    own = f"def use(): assert kvant.generate(model, tokenizer, {PROMPT!r}, max_tokens=8) == {expected!r}\n"
    own += "print(race(use))\n"
    *lines, last = _printed(f"{LOAD}{RACE}{shared}{own}")
    assert len(lines) == len(USES)
    for line in lines:
        outcomes = eval(line)
        assert all(
            outcome.startswith(("done", IN_USE, "the prompt cache changed")) for outcome in outcomes
        ), outcomes
        assert any(outcome != "done" for outcome in outcomes), outcomes
    assert last == "['done', 'done']"


def test_threads_that_computed_are_gone_when_the_interpreter_ends() -> None:
    """MLX aborted the process: it freed a thread's random state, a Python object, behind the join."""
    for _ in range(count(4, 8)):  # it was in about half of the runs
        assert not _printed("""
import threading
import kvant
import mlx.core as mx
from kvant.threads import ComputeLock
def work():
    with ComputeLock():
        mx.random.state
threads = [threading.Thread(target=work) for _ in range(100)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""")


def test_a_thread_that_may_compute_again_keeps_its_streams() -> None:
    """Python knows a thread that C started only while it is in Python."""
    made = mx.array([1]) + 1
    with ComputeLock():
        assert threads._of_thread.cleared is None
    assert made.item() == 2
    kept, ended = [], Event()

    def work() -> None:
        with ComputeLock():
            kept.append(threads._of_thread.cleared)
        ended.set()

    _thread.start_new_thread(work, ())
    assert ended.wait(60)
    assert kept == [None]


ATTEMPTS: dict[str, Callable[[Pocket, Any], Any]] = {
    "a run": lambda pocket, cache: stream_generate(*pocket, PROMPT, prompt_cache=cache),
    "a call": lambda pocket, cache: pocket[0](mx.array([[5]]), cache=cache),
    "trim": lambda pocket, cache: cache[0].trim(1),
    "reset": lambda pocket, cache: ModelCache.of(cache).reset(),
}


@pytest.mark.parametrize("listed", [False, True])
def test_another_thread_during_a_step(pocket: Pocket, listed: bool) -> None:
    cache: Any = pocket[0].make_cache(100)
    cache = list(cache) if listed else cache
    expected = generate(*pocket, PROMPT, max_tokens=5, prompt_cache=copy.deepcopy(cache))
    refused = []

    def sampler(logprobs: mx.array) -> mx.array:
        for name, attempt in ATTEMPTS.items():
            with pytest.raises(RuntimeError, match=IN_USE):
                _apart(attempt, pocket, cache)
            refused.append(name)
        return mx.argmax(logprobs, axis=-1)

    assert generate(*pocket, PROMPT, max_tokens=5, prompt_cache=cache, sampler=sampler) == expected
    assert refused == [*ATTEMPTS] * 5


def test_one_thread_after_the_other(pocket: Pocket) -> None:
    model, _ = pocket
    expected = [r.token for r in stream_generate(*pocket, PROMPT, max_tokens=10)]
    run = stream_generate(*pocket, PROMPT, max_tokens=10, prompt_cache=model.make_cache(100))
    assert [(next(run) if i % 3 == 2 else _apart(next, run)).token for i in range(10)] == expected

    def say(conversation: Conversation, text: str) -> str:
        return "".join(response.text for response in conversation.send(text, max_tokens=8))

    questions = ["Hello!", "Tell me a story.", "Another one."]
    here, there = (Conversation(*pocket, model.make_cache(400)) for _ in range(2))
    assert [say(here, question) for question in questions] == [
        _apart(say, there, question) for question in questions
    ]


FORK = """
def in_a_fork(use):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = use()
        except RuntimeError as error:
            said = str(error)
        os.write(write, str(said).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        print(pipe.read())
    os.waitpid(pid, 0)
"""
IN_A_FORK = [
    "kvant.load('pocket')",
    "kvant.generate(model, tokenizer, 'Once')",
    "next(run)",
    "model.make_cache(9)",
    "model(mx.array([[5]]))",
]


def test_a_fork_of_a_process_with_a_model_is_refused() -> None:
    """It waited for ever."""
    begun = 'run = kvant.stream_generate(model, tokenizer, "Once", max_tokens=2)\nnext(run)\n'
    forks = "".join(f"in_a_fork(lambda: {use})\n" for use in IN_A_FORK)
    lines = _printed(LOAD + FORK + begun + forks)
    assert len(lines) == len(IN_A_FORK)
    for line in lines:
        assert line.startswith("this process was forked from one that had loaded a model")
        assert "'spawn'" in line


def test_a_process_forked_before_the_model_was_loaded_works(pocket: Pocket) -> None:
    use = f"kvant.generate(*kvant.load('pocket'), {PROMPT!r}, max_tokens=5)"
    program = f"import os\nimport kvant\n{FORK}\nin_a_fork(lambda: {use})\nprint({use})\n"
    expected = generate(*pocket, PROMPT, max_tokens=5)
    assert _printed(program) == [expected, expected]
