"""A thread that computes for all others: any thread may submit requests, and receives their tokens."""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import mlx.core as mx

from kvant.cache.pool import Pool
from kvant.engine.request import Request, Token
from kvant.engine.reused_thread import ReusedThread
from kvant.engine.scheduler import Counts, Scheduler
from kvant.errors import EngineError, one_line
from kvant.models import LanguageModel
from kvant.threads import check_process

Deliver = Callable[[Token], object]
Observe = Callable[[Scheduler, Sequence[Token]], object]


class BatchEngine:
    """A scheduler in a thread of its own, the only one that computes.

    The thread starts at once and sleeps without work. Slow readers do not delay other requests. If the thread
    fails, every request fails with its error at once, and new ones are refused. Close the engine, or use it
    in a ``with`` statement, which cancels running requests.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: Pool,
        *,
        max_batch: int,
        max_queue: int | None = 64,
        deterministic: bool = False,
        stall_after: float | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Start the thread.

        Args:
            model, pool, max_batch, max_queue, deterministic: as in :class:`Scheduler`.
            stall_after: seconds after which a thread that has work and shows no progress has failed. It must
                exceed the longest step and chunk of a prompt. None: no limit.
            observe: called in the engine's thread after every step, with the scheduler and the step's tokens.
                It must not block. If it raises, the engine fails.
        """
        check_process()
        if stall_after is not None and not stall_after > 0:
            raise ValueError(f"stall_after is {stall_after}; expected more than 0 seconds, or None")
        self._scheduler = Scheduler(
            model, pool, max_batch=max_batch, max_queue=max_queue, deterministic=deterministic
        )
        mx.eval(model.arrays)  # a thread cannot evaluate another thread's lazy arrays
        self._observe = observe
        self._changed = threading.Condition()  # protects the following attributes
        # A request's receiver, and the numbers of its answers that have not ended.
        self._clients: dict[Request, tuple[Deliver, set[int]]] = {}
        self._cancelled: deque[tuple[Request, int | None]] = deque()
        self._closing = self._stopping = False
        self._error: BaseException | None = None
        self._last_sign: float | None = None  # time of the last progress; None: the thread sleeps
        self._counts = self._scheduler.counts
        self.drafts = self._scheduler.drafts  # counts up to the last step; any thread may read them
        self._thread = ReusedThread(self._run, "kvant-engine")
        self._thread.start()
        self._watchdog: threading.Thread | None = None
        if stall_after is not None:
            self._watchdog = threading.Thread(
                target=self._watch, args=(stall_after,), name="kvant-watchdog", daemon=True
            )
            self._watchdog.start()
        # A thread that computes while the interpreter shuts down would crash it.
        atexit.register(self.close, drain=False, timeout=10)

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Submit a request.

        ``deliver`` gets its tokens in the engine's thread. It must not block; if it raises, the request is
        cancelled.
        """
        check_process()
        state = self._scheduler.check(request)
        with self._changed:
            if self._error is not None:
                raise self._failure(self._error)
            if self._closing:
                raise EngineError("the engine was closed; it takes no further requests")
            self._scheduler.submit(state)
            self._clients[request] = deliver, set(range(request.answers))
            self._last_sign = self._last_sign or time.monotonic()
            self._changed.notify_all()

    def cancel(self, request: Request, answer: int | None = None) -> None:
        """End a request's answers, or one of them, before the next step. Ended ones are ignored."""
        with self._changed:
            if request in self._clients:
                self._cancelled.append((request, answer))
                self._changed.notify_all()

    @property
    def counts(self) -> Counts:
        """Return the work that was left after the last step; any thread may ask."""
        return self._counts._replace(waiting=self._scheduler.num_waiting)

    @property
    def alive(self) -> bool:
        """Return whether the thread computes, or would if there were work."""
        return self._error is None and self._thread.is_alive()

    @property
    def age(self) -> float:
        """Return the seconds since the thread's last step began; 0.0 without work."""
        last = self._last_sign
        return 0.0 if last is None else time.monotonic() - last

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Refuse new requests, and end the thread after the running ones; return whether it has ended.

        Args:
            drain: let running requests finish; otherwise cancel them. A second call may stop draining.
            timeout: how many seconds to wait; None: no limit.
        """
        with self._changed:
            self._closing = True
            self._stopping = self._stopping or not drain
            self._changed.notify_all()
        if not self._thread.is_current:
            self._thread.join(timeout)
        if ended := not self._thread.is_alive():
            atexit.unregister(self.close)
            if self._watchdog is not None:
                self._watchdog.join(timeout)  # it refers to the model, whose memory is wanted back
        return ended

    def __enter__(self) -> "BatchEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def _run(self) -> None:
        try:
            while self._wait():
                while self._cancelled:
                    self._scheduler.cancel(*self._cancelled.popleft())
                if self._stopping:
                    self._scheduler.close()
                tokens = self._scheduler.step()
                self._counts = self._scheduler.counts
                self.drafts = self._scheduler.drafts
                for token in tokens:
                    self._hand_over(token)
                if self._observe is not None:
                    self._observe(self._scheduler, tokens)
        except BaseException as error:
            self._fail(error)
        finally:
            self._last_sign = None
            self._scheduler.close()
            self._counts = self._scheduler.counts

    def _wait(self) -> bool:
        """Sleep until there is work; return False if the engine must stop."""
        with self._changed:
            while self._scheduler.idle and not (self._cancelled or self._closing):
                self._last_sign = None
                self._changed.wait()
            self._last_sign = time.monotonic()
            return self._error is None and not (self._closing and self._scheduler.idle)

    def _hand_over(self, token: Token) -> None:
        with self._changed:
            if (client := self._clients.get(token.request)) is None:
                self._scheduler.cancel(token.request)  # the submitting thread was interrupted
                return
            deliver, left = client
            if token.finish_reason is not None:
                left.discard(token.answer)
                if not left:
                    del self._clients[token.request]
        try:
            deliver(token)
        except Exception:
            self.cancel(token.request)

    def _watch(self, stall_after: float) -> None:
        looked = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(stall_after / 4)
            before = looked
            looked = time.monotonic()
            if looked - before > stall_after / 2:  # the process itself was suspended, as by Ctrl-Z
                continue
            if (age := self.age) > stall_after:
                self._fail(TimeoutError(f"no sign of life for {age:.1f} seconds"))
                return

    def _fail(self, error: BaseException) -> None:
        """Fail all requests."""
        with self._changed:
            self._error = self._error or error
            clients = self._clients
            self._clients = {}
        for request, (deliver, left) in clients.items():
            for number in sorted(left):
                failed = Token(request, number, None, finish_reason="error", error=self._failure(error))
                with suppress(Exception):
                    deliver(failed)

    @staticmethod
    def _failure(error: BaseException) -> EngineError:
        failure = EngineError(f"the engine's thread failed: {one_line(error)}")
        failure.__cause__ = error
        return failure
