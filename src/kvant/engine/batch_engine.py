"""A thread that computes for all others: requests come from any thread, and their tokens go back to it."""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import mlx.core as mx

from kvant.cache.pool import Pool
from kvant.engine.request import Request, Token
from kvant.engine.scheduler import Counts, Scheduler
from kvant.errors import EngineError, one_line
from kvant.models import LanguageModel
from kvant.threads import check_process

Deliver = Callable[[Token], object]
Observe = Callable[[Scheduler, Sequence[Token]], object]


class BatchEngine:
    """A scheduler in a thread of its own, which alone computes. It begins when it is made, and sleeps without
    work.

    A reader holds nobody up, however slow it is. If the thread fails, every request fails with its error at
    once, and further ones are refused. Close it, or use it in a ``with`` statement, which cancels what is
    under way.
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
            stall_after: seconds without a sign of life, while there is work, after which the thread has
                failed. The longest step, or chunk of a prompt, must be shorter. None: it may take any time.
            observe: called after every step with the scheduler and the step's tokens, in the engine's thread.
                It must not wait. An error of it is the engine's.
        """
        check_process()
        if stall_after is not None and not stall_after > 0:
            raise ValueError(f"stall_after is {stall_after}; expected more than 0 seconds, or None")
        self._scheduler = Scheduler(
            model, pool, max_batch=max_batch, max_queue=max_queue, deterministic=deterministic
        )
        mx.eval(model.arrays)  # a thread cannot compute what another one left undone
        self._observe = observe
        self._changed = threading.Condition()  # held to read or change what follows
        # Who is told of a request, and the numbers of its answers that have not ended.
        self._clients: dict[Request, tuple[Deliver, set[int]]] = {}
        self._cancelled: deque[tuple[Request, int | None]] = deque()
        self._closing = self._stopping = False
        self._error: BaseException | None = None
        self._last_sign: float | None = None  # of life; None: it sleeps
        self._counts = self._scheduler.counts
        self.drafts = self._scheduler.drafts  # what drafts did up to the last step; any thread may ask
        self._thread = threading.Thread(target=self._run, name="kvant-engine", daemon=True)
        self._thread.start()
        if stall_after is not None:
            threading.Thread(
                target=self._watch, args=(stall_after,), name="kvant-watchdog", daemon=True
            ).start()
        # A thread that computes while the interpreter goes would crash it.
        atexit.register(self.close, drain=False, timeout=10)

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Take a request in; ``deliver`` gets its tokens in the engine's thread: it must not wait; an
        error cancels.
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
        """End the answers of a request, or one of them, before the next step. One that has ended is no
        error.
        """
        with self._changed:
            if request in self._clients:
                self._cancelled.append((request, answer))
                self._changed.notify_all()

    @property
    def counts(self) -> Counts:
        """What there was to do after the last step; any thread may ask."""
        return self._counts._replace(waiting=self._scheduler.num_waiting)

    @property
    def alive(self) -> bool:
        """Whether the thread computes, or would if there were work."""
        return self._error is None and self._thread.is_alive()

    @property
    def age(self) -> float:
        """Seconds since the thread's last sign of life, which it gives every step; 0.0 without work."""
        last = self._last_sign
        return 0.0 if last is None else time.monotonic() - last

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no further requests, and end the thread when those under way have ended. Returns whether it
        has.

        ``drain``: they may go on to their ends; else they are cancelled. ``timeout``: seconds to wait at
        most; None: for ever. It may be closed again, without draining.
        """
        with self._changed:
            self._closing = True
            self._stopping = self._stopping or not drain
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if ended := not self._thread.is_alive():
            atexit.unregister(self.close)
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
                self._counts, self.drafts = self._scheduler.counts, self._scheduler.drafts
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
        """Sleep until there is work. Returns whether there will be more."""
        with self._changed:
            while self._scheduler.idle and not (self._cancelled or self._closing):
                self._last_sign = None
                self._changed.wait()
            self._last_sign = time.monotonic()
            return self._error is None and not (self._closing and self._scheduler.idle)

    def _hand_over(self, token: Token) -> None:
        with self._changed:
            if (client := self._clients.get(token.request)) is None:
                self._scheduler.cancel(token.request)  # its thread was interrupted when it submitted it
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
            looked, before = time.monotonic(), looked
            # the process was stopped, as by Ctrl-Z: no thread had any time
            if looked - before > stall_after / 2:
                continue
            if (age := self.age) > stall_after:
                self._fail(TimeoutError(f"no sign of life for {age:.1f} seconds"))
                return

    def _fail(self, error: BaseException) -> None:
        """Tell everyone."""
        with self._changed:
            self._error = self._error or error
            clients, self._clients = self._clients, {}
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
