"""A process that runs a model folder's tokenizer and chat template, bounded in time and memory.

Both are a stranger's programs: a template is one, and a tokenizer's regular expressions and normalizers can
run for ever or take all memory. A library that interprets them cannot be interrupted. A process can be ended.
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

TIME_LIMIT_S = 5.0  # of processor time, a text; templates and tokenizers take milliseconds
WALL_LIMIT_S = 60.0  # for a process that is stopped or never starts; a busy machine does not come near it
MEMORY_LIMIT = 512 * 1024 * 1024  # beside the loaded tokenizer
MAX_ANSWER = 160 * 1024 * 1024  # bytes: the longest text there can be
LOOK_S = 0.1
# macOS counts shared memory too, more than any useful limit. There the memory is looked at from time to time.
ADDRESS_LIMIT = MEMORY_LIMIT if sys.platform == "linux" else 0

PROGRAM = Path(__file__).with_name("worker.py")


class TextError(Exception):
    """Why the process has no answer, as the end of a sentence."""


class _GoneError(TextError):
    """Something else than the request ended the process."""


class TextProcess:
    """A process that renders templates and runs a tokenizer, one request at a time, for threads of this
    process.

    It is started at once. Where it had to be ended it is started again, with the same tokenizer. It ends with
    this object or with Python.
    """

    def __init__(
        self, tokenizer: tuple[dict[str, Any], bytes] | None = None, time_limit_s: float | None = None
    ) -> None:
        """Start the process.

        Args:
            tokenizer: the request that loads a tokenizer, and its payload, as in :meth:`load`.
            time_limit_s: seconds of processor time for a request; None is :data:`TIME_LIMIT_S`.
        """
        self._limit_s = time_limit_s
        self._lock = threading.RLock()  # a thread that was interrupted while it gave the lock back may go on
        self._tokenizer = tokenizer
        self._start()

    def load(self, request: dict[str, Any], payload: bytes) -> Callable[[], dict[str, Any]]:
        """Send the request that loads a tokenizer. It is loaded again after every new start.

        The function that is returned waits for the answer and raises as :meth:`ask`, which may not be called
        before it.
        """
        line = self._encoded(request, payload)
        with self._lock, self._ended_on_error():
            self._send(line, payload)

        def answer() -> dict[str, Any]:
            with self._lock, self._ended_on_error():
                found = self._answer()
            facts: dict[str, Any] = _result(found)
            self._tokenizer = request, payload
            self._resting = resident_bytes(self._process.pid) if not ADDRESS_LIMIT else 0
            return facts

        return answer

    def ask(self, request: dict[str, Any]) -> Any:
        """The worker's result for a request of JSON."""
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
        """End the process, also one that is stopped. A further request starts another one."""
        self._end()

    def __reduce__(self) -> tuple[type["TextProcess"], tuple[Any, ...]]:
        return TextProcess, (self._tokenizer, self._limit_s)  # a copy has a process of its own

    @property
    def _time_limit_s(self) -> float:
        return self._limit_s or TIME_LIMIT_S

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                # -P: modules are not looked for beside the program. A session of its own: Ctrl-C is not for
                # it.
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
        self._ready = False  # whether it has said so
        self._unread = bytearray()
        self._resting = 0
        self._end = weakref.finalize(self, _end, self._process, self._owner)

    def _exchange(self, line: bytes) -> dict[str, Any]:
        # after a fork: the process is the parent's
        if self._owner != os.getpid() or self._process.poll() is not None:
            self._end()
            self._start()
        with self._ended_on_error():
            if not self._ready and self._tokenizer is not None:
                self.load(*self._tokenizer)()
            self._send(line)
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next answer. A process that was started says first that it is ready."""
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
            raise TextError(f"it cannot be given this: {error}") from error

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        """End the process where its answer is not read to the end: it must not be the next one's."""
        try:
            yield
        except BrokenPipeError:
            raise self._died() from None
        except BaseException:
            self._end()
            raise

    def _send(self, *parts: bytes) -> None:
        """Write to the process. It reads all of a request before it does anything."""
        stdin = self._process.stdin
        assert stdin is not None
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[stdin.write(view) :]

    def _read(self) -> bytes:
        """Return the next line. Its own timer ends a process that is slow, this one that needs much
        memory.
        """
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
        found, _, rest = line.partition(b"\n")
        self._unread = rest
        return bytes(found)

    def _died(self) -> TextError:
        code = self._process.wait()
        self._end()
        if code == -signal.SIGABRT:  # an allocation that failed in Rust
            return TextError("it needs too much memory")
        if code == -signal.SIGPROF:
            return TextError(f"it takes longer than {self._time_limit_s:g} s")
        if code in (-signal.SIGSEGV, -signal.SIGBUS):  # macOS may say either of a stack's end
            return TextError("it is nested too deeply")
        return _GoneError(f"its exit code is {code}")


def _result(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise TextError(answer["error"])
    return answer["result"]


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End it and close its pipes; in a fork only the latter, for it is the parent's."""
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
    """Memory of a process; 0 where it is not known."""
    try:
        done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False)
        return int(done.stdout) * 1024
    except (OSError, ValueError):
        return 0
