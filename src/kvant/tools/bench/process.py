"""The process of an engine, seen from the one that started it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvant.errors import BenchError
from kvant.tools.bench.lines import shown

# -P: nothing is imported from the current folder, which may be a model's.
WORKER_COMMAND = (sys.executable, "-P", "-m", "kvant.tools.bench.worker")
INTERRUPT_S = 2.0  # a worker that is interrupted gives its latencies within that time
CLOSE_S = 2.0


class Worker:
    """The process of one engine; it ends with the ``with``, and by itself when this process does."""

    def __init__(self, label: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start it; ``environment`` is added to this process's."""
        self._label = label
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C is for this process, which decides
            )
        except OSError as error:
            self._errors.close()
            raise BenchError(f"engine {label}: {error}") from error

    def ask(self, command: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """Send a command and wait for its answer; a BenchError for another than one of this kind, or none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        answer = self._answer()
        if answer.get("kind") == "error":
            raise BenchError(f"engine {self._label}: {answer.get('message')}")
        if answer.get("kind") != kind:
            raise BenchError(f"engine {self._label}: answered {shown(answer)}; expected kind {kind!r}")
        return answer

    def interrupt(self) -> list[float]:
        """End the run at work; the latencies of its tokens so far, in milliseconds."""
        killer = threading.Timer(INTERRUPT_S, self._process.kill)
        killer.start()
        try:
            self._process.send_signal(signal.SIGINT)
            latencies = self._answer().get("latencies_ms")
        except BenchError:  # it was in the middle of a long step
            return []
        finally:
            killer.cancel()
        return latencies if isinstance(latencies, list) else []

    @contextmanager
    def checked(self) -> Iterator[None]:
        """A ``with`` in which an answer that cannot be used is an error that names the engine."""
        try:
            yield
        except KeyError as error:
            raise BenchError(f"engine {self._label}: its answer lacks {error}") from error
        except (ValueError, TypeError) as error:
            raise BenchError(f"engine {self._label}: its answer is wrong: {error}") from error

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        with self._errors, self._process as process:
            assert process.stdin is not None
            try:
                process.stdin.close()  # the end of its input ends it
                process.wait(CLOSE_S)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                pass
            finally:
                process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._died()
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise BenchError(f"engine {self._label}: answered {shown(line)}; expected one JSON object")
        return answer

    def _died(self) -> BenchError:
        """An error of its exit code and the last line it wrote."""
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return BenchError(f"engine {self._label}: its process {how}{': ' + lines[-1][:500] if lines else ''}")
