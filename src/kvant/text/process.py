"""Run a model folder's tokenizer and chat template in a process, with limits on time and memory.

Both can be a stranger's programs: a template is one, and a tokenizer's regular expressions and normalizers
can run forever or use all memory. A library that interprets them cannot be interrupted, but a process can be
killed.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvant.errors import EngineError, ModelError

TIME_LIMIT_S = 5.0  # processor time per text; templates and tokenizers take milliseconds
WALL_LIMIT_S = 60.0  # for a process that is stopped or never starts; never reached on a busy machine
MEMORY_LIMIT = 512 * 1024 * 1024  # in addition to the loaded tokenizer
MAX_ANSWER = 160 * 1024 * 1024  # bytes of the longest possible text
LOOK_S = 0.1
# macOS would count shared memory, which is more than any useful limit. There we poll the resident memory.
ADDRESS_LIMIT = MEMORY_LIMIT if sys.platform == "linux" else 0

PROGRAM = Path(__file__).with_name("worker.py")


class TextError(Exception):
    """Why the process has no answer, phrased as the end of a sentence."""


class _GoneError(TextError):
    """The process was ended by something other than the request."""


class TextProcess:
    """Render templates and run a tokenizer in another process, one request at a time; safe for threads.

    The process starts with this object. If it had to be killed, the next request starts another with the same
    tokenizer. It ends with this object or with Python.
    """

    def __init__(
        self, tokenizer: tuple[dict[str, Any], bytes] | None = None, time_limit_s: float | None = None
    ) -> None:
        """Start the process.

        Args:
            tokenizer: the request that loads a tokenizer, and its payload, as in :meth:`load`.
            time_limit_s: processor time for a request in seconds; None means :data:`TIME_LIMIT_S`.
        """
        self._limit_s = time_limit_s
        # Reentrant, so that a thread that was interrupted while it released the lock can continue.
        self._lock = threading.RLock()
        self._tokenizer = tokenizer
        self._start()

    def load(self, request: dict[str, Any], payload: bytes) -> Callable[[], dict[str, Any]]:
        """Send the request that loads a tokenizer, which is repeated whenever the process is restarted.

        The returned function waits for the answer and raises like :meth:`ask`. Call it before :meth:`ask`.
        """
        line = self._encoded(request, payload)
        with self._lock, self._ended_on_error():
            self._send(line, payload)

        def answer() -> dict[str, Any]:
            with self._lock, self._ended_on_error():
                reply = self._answer()
            facts: dict[str, Any] = _result(reply)
            self._tokenizer = request, payload
            self._resting = resident_bytes(self._process.pid) if not ADDRESS_LIMIT else 0
            return facts

        return answer

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the worker's result for a JSON request."""
        line = self._encoded(request)
        with self._lock:
            try:
                try:
                    answer = self._exchange(line)
                except _GoneError:
                    answer = self._exchange(line)
            except _GoneError as error:
                raise EngineError(
                    f"the tokenizer's process was ended from outside: {error}; try again"
                ) from None
        return _result(answer)

    def close(self) -> None:
        """End the process, even one that is stopped. A further request starts another."""
        self._end()

    def __reduce__(self) -> tuple[type["TextProcess"], tuple[Any, ...]]:
        return TextProcess, (self._tokenizer, self._limit_s)  # a copy has its own process

    @property
    def _time_limit_s(self) -> float:
        return self._limit_s or TIME_LIMIT_S

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                # -P: do not import from the program's folder. A new session: Ctrl-C must not reach it.
                [sys.executable, "-P", str(PROGRAM), str(ADDRESS_LIMIT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise ModelError(f"the process for the tokenizer cannot be started: {error}") from error
        self._owner = os.getpid()
        self._ready = False  # whether it has sent its first line
        self._unread = bytearray()
        self._resting = 0
        self._end = weakref.finalize(self, _end, self._process, self._owner)

    def _exchange(self, line: bytes) -> dict[str, Any]:
        # after a fork the process is the parent's
        if self._owner != os.getpid() or self._process.poll() is not None:
            self._end()
            self._start()
        with self._ended_on_error():
            if not self._ready and self._tokenizer is not None:
                self.load(*self._tokenizer)()
            self._send(line)
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Return the next answer. A new process first sends a line when it is ready."""
        if not self._ready:
            self._read()
            self._ready = True
        return dict(json.loads(self._read()))

    def _encoded(self, request: dict[str, Any], payload: bytes = b"") -> bytes:
        try:
            added = {"payload": len(payload), "seconds": self._time_limit_s}
            return (
                json.dumps({**request, **added}, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise TextError(f"it cannot take this: {error}") from error

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        """End the process if its answer is not read completely, so that the next request cannot read it."""
        try:
            yield
        except BrokenPipeError:
            raise self._died() from None
        except BaseException:
            self._end()
            raise

    def _send(self, *chunks: bytes) -> None:
        """Write to the process, which reads a whole request before it does anything."""
        stdin = self._process.stdin
        assert stdin is not None
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                view = view[stdin.write(view) :]

    def _read(self) -> bytes:
        """Return the next line. A slow process is ended by its own timer, a large one by this method."""
        stdout = self._process.stdout
        assert stdout is not None
        end = time.monotonic() + WALL_LIMIT_S
        line = self._unread
        self._unread = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in line[-(1 << 20) :]:
                if selector.select(LOOK_S):
                    piece = os.read(stdout.fileno(), 1 << 20)
                    if not piece:
                        raise self._died()
                    line += piece
                    if len(line) > MAX_ANSWER:
                        raise TextError("it writes too much")
                elif time.monotonic() > end:
                    raise TextError(f"its process has not answered within {WALL_LIMIT_S:g} s")
                elif not ADDRESS_LIMIT and resident_bytes(self._process.pid) > self._resting + MEMORY_LIMIT:
                    raise TextError("it needs too much memory")
        first, _, rest = line.partition(b"\n")
        self._unread = rest
        return bytes(first)

    def _died(self) -> TextError:
        code = self._process.wait()
        self._end()
        if code == -signal.SIGABRT:  # a failed allocation in Rust
            return TextError("it needs too much memory")
        if code == -signal.SIGPROF:
            return TextError(f"it takes longer than {self._time_limit_s:g} s")
        if code in (-signal.SIGSEGV, -signal.SIGBUS):  # either may mean a stack overflow on macOS
            return TextError("it is nested too deeply")
        return _GoneError(f"its exit code is {code}")


def _result(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise TextError(answer["error"])
    return answer["result"]


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """Kill the process and close its pipes; a forked child only closes them."""
    is_owner = os.getpid() == owner
    if is_owner:
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    if is_owner:
        process.wait()
    else:
        process.returncode = 0  # so that Popen does not warn that it still runs


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory; 0 if unknown."""
    try:
        done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False)
        return int(done.stdout) * 1024
    except (OSError, ValueError):
        return 0
