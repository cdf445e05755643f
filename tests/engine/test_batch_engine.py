"""A thread computes for all others: it answers, refuses, survives slow readers, and tells when it has
failed.
"""

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from support.batches import alone, asked
from support.counts import count
from support.server import SOON, wait

from kvant.cache import CacheOptions
from kvant.engine import batch_engine
from kvant.engine.batch_engine import BatchEngine
from kvant.engine.request import Request, Token
from kvant.engine.scheduler import Scheduler
from kvant.errors import EngineError
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler

Pocket = tuple[Decoder, Any]
PAGES = 32


@pytest.fixture
def make(pocket: Pocket) -> Iterator[Callable[..., BatchEngine]]:
    made = []

    def engine(**options: Any) -> BatchEngine:
        pool = pocket[0].make_pool(128 * PAGES, sequences=8, options=CacheOptions(kv_bits=0))
        made.append(BatchEngine(pocket[0], pool, **{"max_batch": 4} | options))
        return made[-1]

    yield engine
    for each in made:
        assert each.close(drain=False, timeout=SOON)
        if each.alive or each.counts.free_pages != PAGES:
            raise AssertionError(f"{each.counts} are left")


def test_requests_from_many_threads(pocket: Pocket, make: Callable[..., BatchEngine]) -> None:
    engine = make()
    requests = [
        Request(
            [5 + i] * (1 + 30 * i), max_tokens=10, sampler=make_sampler(1.0, seed=i), logits_processors=each
        )
        for i, each in enumerate(
            [(), make_logits_processors({9: 2.0}, 1.2), [lambda tokens, logits: logits * 0.5], ()]
        )
    ]

    def answer(request: Request) -> list[int | None]:
        return [token.token for token in asked(engine, request)]

    with ThreadPoolExecutor(8) as threads:
        asking = threads.submit(lambda: [engine.counts for _ in range(20_000)])
        for request, tokens in zip(requests * 2, threads.map(answer, [*requests]), strict=False):
            assert tokens == alone(pocket[0], request)
    assert all(0 <= counts.free_pages <= PAGES for counts in asking.result())
    assert engine.counts == (0, 0, 0, PAGES)
    assert engine.alive


def test_arrays_that_another_thread_left_undone(pocket: Pocket, make: Callable[..., BatchEngine]) -> None:
    """A cache is computed when it is submitted. A sampler's own array is the request's error, and nobody
    else's.
    """
    model, _ = pocket
    engine = make()
    cache = model.make_cache(200, kv_bits=0)
    model.feed(mx.array([[5, 6, 7]]), cache)
    cache.commit()
    undone = mx.ones((1,)) * mx.array([2.0])
    request = Request([4, 5], max_tokens=40)
    other = asked(engine, request)
    with pytest.raises(RuntimeError, match="Stream"):
        list(asked(engine, Request([5], 4, lambda logprobs: mx.argmax(logprobs * undone, axis=-1))))
    from_cache = [token.token for token in asked(engine, Request([8], cache=cache, max_tokens=5))]
    assert from_cache == alone(pocket[0], Request([5, 6, 7, 8], max_tokens=5))
    assert [token.token for token in other] == alone(pocket[0], request)


def test_cancelling_from_another_thread(pocket: Pocket, make: Callable[..., BatchEngine]) -> None:
    engine = make(max_batch=2)
    requests = [Request([n], max_tokens=900, answers=2) for n in (5, 6)]
    running, waiting = (asked(engine, request) for request in requests)
    tokens = [next(running)]
    engine.cancel(requests[0], 1)
    while tokens[-1].finish_reason is None:
        tokens.append(next(running))
    assert tokens[-1].answer == 1
    tokens.append(next(running))
    engine.cancel(requests[1])
    assert [token.finish_reason for token in waiting] == ["cancelled"] * 2
    threading.Thread(target=engine.cancel, args=requests[:1]).start()
    tokens += running
    assert tokens[-1].finish_reason == "cancelled"
    assert 1 < sum(token.answer == 0 for token in tokens) < 900
    wait(lambda: engine.counts == (0, 0, 0, PAGES))
    engine.cancel(requests[0])


def test_a_callback_that_fails_ends_its_request(pocket: Pocket, make: Callable[..., BatchEngine]) -> None:
    engine, calls, request = make(), list[Token](), Request([5], max_tokens=6)

    def fail(token: Token) -> None:
        calls.append(token)
        raise RuntimeError("the loop is closed")

    engine.submit(Request([6], max_tokens=900), fail)
    assert [token.token for token in asked(engine, request)] == alone(pocket[0], request)
    wait(lambda: engine.counts == (0, 0, 0, PAGES))
    assert len(calls) < 20


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), SystemExit(3), KeyboardInterrupt()])
def test_a_thread_that_fails_tells_everyone_at_once(
    make: Callable[..., BatchEngine], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    broken, real = threading.Event(), Scheduler.step

    def step(self: Scheduler) -> list[Token]:
        if broken.is_set():
            raise error
        return real(self)

    monkeypatch.setattr(Scheduler, "step", step)
    engine = make(max_batch=2)
    answers = [asked(engine, Request([5 + i], max_tokens=900, answers=1 + i % 2)) for i in range(4)]
    next(answers[0])
    broken.set()
    for each in answers:
        with pytest.raises(EngineError, match="the engine's thread failed: ") as caught:
            list(each)
        assert caught.value.__cause__ is error
        assert list(each) == []
    assert not engine.alive
    with pytest.raises(EngineError, match="the engine's thread failed: "):
        asked(engine, Request([5]))
    assert engine.close(timeout=SOON)
    assert engine.counts == (0, 0, 0, PAGES)


def test_the_watchdog(make: Callable[..., BatchEngine]) -> None:
    engine = make(stall_after=0.5)
    assert engine.age == 0.0
    go, busy = threading.Event(), threading.Event()

    def hang(logprobs: mx.array) -> mx.array:
        busy.set()
        go.wait(SOON)
        return mx.argmax(logprobs, axis=-1)

    before = time.process_time()
    time.sleep(0.7)
    assert time.process_time() - before < 0.1
    assert engine.alive  # it sleeps
    answers = asked(engine, Request([5], max_tokens=5, sampler=hang))
    assert busy.wait(SOON)
    wait(lambda: engine.age > 0.01)
    with pytest.raises(EngineError, match="the engine's thread failed: no sign of life for "):
        list(answers)
    assert not engine.alive
    go.set()


def test_closing(pocket: Pocket, make: Callable[..., BatchEngine]) -> None:
    """Its thread has ended then: MLX aborts the process if one ends after the interpreter."""
    before = threading.enumerate()
    drained, stopped = make(stall_after=SOON), make(stall_after=SOON)
    expected = alone(pocket[0], Request([5], max_tokens=30))
    answers = [asked(engine, Request([5], most)) for engine, most in ((drained, 30), (stopped, 900))]
    next(answers[1])
    assert not drained.close(timeout=0)
    with pytest.raises(EngineError, match="the engine was closed; it takes no further requests"):
        asked(drained, Request([5]))
    assert drained.close(timeout=SOON)
    assert [token.token for token in answers[0]] == expected
    assert stopped.close(drain=False, timeout=SOON)
    tokens = list(answers[1])
    assert tokens[-1].finish_reason == "cancelled"
    assert len(tokens) < 899
    for engine in (drained, stopped):
        assert engine.close()
        assert not engine.alive
    names = {each.name for each in threading.enumerate() if each not in before}
    assert not {"kvant-engine", "kvant-watchdog"} & names


def test_many_short_requests_leave_nothing_behind(pocket: Pocket, make: Callable[..., BatchEngine]) -> None:
    engine = make(max_batch=8, max_queue=None)
    rng = random.Random(0)

    def some(number: int) -> None:
        answers: list[Any] = []
        for _ in range(number):
            sampler = make_sampler(1.0, seed=rng.randrange(9)) if rng.random() < 0.5 else None
            prompt = [rng.randrange(5, 1000) for _ in range(rng.randint(1, 20))]
            request = Request(prompt, max_tokens=rng.randint(1, 4), sampler=sampler)
            answers.append((request, asked(engine, request)))
            if rng.random() < 0.1:
                engine.cancel(rng.choice(answers)[0])
            if len(answers) > 20:
                list(answers.pop(0)[1])
        for _, each in answers:
            list(each)
        wait(lambda: engine.age == 0.0)

    def held() -> tuple[int, int]:
        gc.collect()
        mx.synchronize()
        return mx.get_active_memory(), len(gc.get_objects())

    some(30)
    memory, objects = held()
    some(count(100, 10_000))
    now, number = held()
    assert now - memory < 8192
    assert number - objects < 200
    assert engine.counts == (0, 0, 0, PAGES)


def test_a_process_that_was_stopped_has_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-Z and fg its thread is given time to go on; without a sign of life it has failed after
    all.
    """
    now, waits = 0.0, iter([0.25, 100.0, 0.25])
    looks: list[float] = []

    def join(seconds: float) -> None:
        nonlocal now
        now += next(waits)
        looks.append(now)

    failed: list[float] = []
    thread = SimpleNamespace(join=join, is_alive=lambda: True)
    engine: Any = SimpleNamespace(_thread=thread, _fail=lambda error: failed.append(looks[-1]), age=0.0)
    monkeypatch.setattr(
        batch_engine, "time", SimpleNamespace(monotonic=lambda: (setattr(engine, "age", now), now)[1])
    )
    BatchEngine._watch(engine, 1.0)
    assert failed == [100.5]
