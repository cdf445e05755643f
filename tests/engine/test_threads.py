"""Threads and forks: one thread at a time through a cache, any number with a cache each, and no forked process."""

import _thread
import copy
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import mlx.core as mx
import pytest

from kvant import generate, stream_generate, threads
from kvant.cache import FullKVCache
from kvant.engine.conversation import Conversation
from kvant.models import Decoder
from kvant.threads import Turn

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
print(sorted(outcomes))
"""
USES = {
    "generate": 'kvant.generate(model, tokenizer, "Once", max_tokens=9, prompt_cache=cache)',
    "a call of the model": "mx.eval(model(mx.array([[5, 7]]), cache=cache))",
    "a call and a reset": "mx.eval(model(mx.array([[5]]), cache=cache)); [layer.reset() for layer in cache]",
}


def _run(program: str) -> str:
    """What a new process prints: a crash or a wait without end must not be this one's."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_two_threads_on_one_cache(use: str) -> None:
    """It was a segmentation fault in most runs."""
    printed = _run(f"{LOAD}cache = model.make_cache(1000)\ndef use(): {use}\n{RACE}")
    allowed = ("done", IN_USE, "the run was ended")
    outcomes = eval(printed)
    assert all(outcome.startswith(allowed) for outcome in outcomes), outcomes
    assert any(outcome != "done" for outcome in outcomes), outcomes


def test_two_threads_with_a_cache_each(pocket: Pocket) -> None:
    expected = generate(*pocket, PROMPT, max_tokens=20)
    use = f"assert kvant.generate(model, tokenizer, {PROMPT!r}, max_tokens=20) == {expected!r}"
    printed = _run(f"{LOAD}def use(): {use}\n{RACE}")
    assert printed == "['done', 'done']\n"


def test_threads_that_computed_are_gone_when_the_interpreter_ends() -> None:
    """MLX aborted the process: it freed a thread's random state, a Python object, behind the join."""
    for _ in range(6):  # it was in about half of the runs
        printed = _run("""
import threading
import kvant
import mlx.core as mx
from kvant.threads import Turn
def work():
    with Turn():
        mx.random.state
threads = [threading.Thread(target=work) for _ in range(100)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""")
        assert printed == ""


def test_a_thread_that_may_compute_again_keeps_its_streams() -> None:
    """Python knows a thread that C started only while it is in Python."""
    made = mx.array([1]) + 1
    with Turn():
        assert threads._of_thread.cleared is None
    assert made.item() == 2
    kept, ended = [], Event()

    def work() -> None:
        with Turn():
            kept.append(threads._of_thread.cleared)
        ended.set()

    _thread.start_new_thread(work, ())
    assert ended.wait(10)
    assert kept == [None]


def test_a_run_goes_on_after_its_thread_ended(pocket: Pocket) -> None:
    expected = [r.token for r in stream_generate(*pocket, PROMPT, max_tokens=10)]
    run, tokens = stream_generate(*pocket, PROMPT, max_tokens=10), []
    while len(tokens) < 10:
        thread = Thread(target=lambda: tokens.append(next(run).token))
        thread.start()
        thread.join()
    assert tokens == expected


ATTEMPTS: dict[str, Callable[[Pocket, Any], Any]] = {
    "a run": lambda pocket, cache: stream_generate(*pocket, PROMPT, prompt_cache=cache),
    "a call": lambda pocket, cache: pocket[0](mx.array([[5]]), cache=cache),
    "trim": lambda pocket, cache: cache[0].trim(1),
    "reset": lambda pocket, cache: cache[0].reset(),
}


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_another_thread_during_a_step(
    pocket: Pocket, pool: ThreadPoolExecutor, attempt: Callable[[Pocket, Any], Any], grows: bool
) -> None:
    """Refused, and the run goes on as if nothing had been."""
    cache: Any = [FullKVCache() for _ in pocket[0].layers] if grows else pocket[0].make_cache(100)
    expected = generate(*pocket, PROMPT, max_tokens=10, prompt_cache=copy.deepcopy(cache))
    refused = 0

    def sampler(logprobs: mx.array) -> mx.array:
        nonlocal refused
        with pytest.raises(RuntimeError, match=IN_USE):
            pool.submit(attempt, pocket, cache).result()
        refused += 1
        return mx.argmax(logprobs, axis=-1)

    assert generate(*pocket, PROMPT, max_tokens=10, prompt_cache=cache, sampler=sampler) == expected
    assert refused == 10


def test_a_run_that_another_thread_ended_says_so(pocket: Pocket, pool: ThreadPoolExecutor) -> None:
    """Its text would be cut without a word."""
    cache = pocket[0].make_cache(100)
    run = stream_generate(*pocket, PROMPT, prompt_cache=cache)
    next(run)
    pool.submit(generate, *pocket, PROMPT, max_tokens=3, prompt_cache=cache).result()
    with pytest.raises(RuntimeError, match="the run was ended: another run, a call or a trim changed its cache"):
        next(run)
    assert list(run) == []


def test_one_thread_after_the_other(pocket: Pocket, pool: ThreadPoolExecutor) -> None:
    model, tokenizer = pocket
    expected = [r.token for r in stream_generate(*pocket, PROMPT, max_tokens=10)]
    cache = model.make_cache(100)
    run = stream_generate(*pocket, PROMPT, max_tokens=10, prompt_cache=cache)
    tokens = [(next(run) if i % 2 else pool.submit(next, run).result()).token for i in range(10)]
    assert tokens == expected
    ids = tokenizer.encode(PROMPT)
    other = model.make_cache(100)

    def step(token: int) -> int:
        return int(mx.argmax(model(mx.array([[token]]), cache=other)[0, -1]).item())  # type: ignore[arg-type]

    for token in ids[:-1]:
        pool.submit(step, token).result()
    heard = [ids[-1]]
    for i in range(10):
        heard.append(step(heard[-1]) if i % 2 else pool.submit(step, heard[-1]).result())
    assert heard[1:] == expected


def test_a_conversation_from_one_thread_after_the_other(pocket: Pocket, pool: ThreadPoolExecutor) -> None:
    def say(conversation: Conversation, text: str) -> str:
        return "".join(response.text for response in conversation.send(text, max_tokens=8))

    questions = ["Hello!", "Tell me a story.", "Another one."]
    here, there = (Conversation(*pocket, pocket[0].make_cache(400)) for _ in range(2))
    assert [say(here, q) for q in questions] == [pool.submit(say, there, q).result() for q in questions]


# Forks.


FORK = """
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
FORKED = "this process was forked from one that had loaded a model"


def test_a_fork_of_a_process_with_a_model_is_refused() -> None:
    """It waited for ever."""
    begun = 'run = kvant.stream_generate(model, tokenizer, "Once", max_tokens=2)\nnext(run)\n'
    for use in IN_A_FORK:
        begun += f"def use(): return {use}\n{FORK}"
    lines = _run(LOAD + begun).splitlines()
    assert len(lines) == len(IN_A_FORK)
    for line in lines:
        assert line.startswith(FORKED)
        assert "'spawn'" in line


def test_a_process_of_multiprocessing_that_was_forked_is_refused() -> None:
    printed = _run(f"""{LOAD}
import multiprocessing
context = multiprocessing.get_context("fork")
answer = context.Queue()
def work():
    try:
        kvant.generate(model, tokenizer, "Once")
    except RuntimeError as error:
        answer.put(str(error))
process = context.Process(target=work)
process.start()
print(answer.get(timeout=60))
process.join()
""")
    assert printed.startswith(FORKED)


def test_a_process_forked_before_the_model_was_loaded_works(pocket: Pocket) -> None:
    program = f"""
import os
import kvant
def use(): return kvant.generate(*kvant.load("pocket"), {PROMPT!r}, max_tokens=5)
{FORK}print(use())
"""
    expected = generate(*pocket, PROMPT, max_tokens=5)
    assert _run(program) == f"{expected}\n{expected}\n"
