"""Render chat templates and run the tokenizer; kvant.text.process starts this program by its path.

A request is a line of JSON and as many bytes as it announces in ``payload``. ``seconds`` limits its processor
time; then a signal ends this process, even if nobody waits for the answer any more. ``do`` is "load" (a
tokenizer), "render" (a template), "check_grammar", or a method of encoding.Encoder; the other keys are its
arguments. The answer is a line of JSON, {"result": ...} or {"error": message}. The very first line says that
the process is ready. It ends when its standard input does.
"""

import json
import os
import resource
import signal
import sys
import types
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The package's __init__ would load MLX, which this process does not need and has no memory for.
    package = types.ModuleType("kvant")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["kvant"] = package

from kvant.text import guidance
from kvant.text.encoding import Encoder
from kvant.text.rendering import render


class Worker:
    """Answer requests with the tokenizer that was loaded last."""

    def __init__(self) -> None:
        self._encoder: Encoder | None = None

    def answer(self, request: dict[str, Any], payload: bytes) -> dict[str, Any]:
        """Return the result, or a line that says why there is none."""
        try:
            return {"result": self._do(request, payload)}
        except MemoryError:
            return {"error": "it needs too much memory"}
        except RecursionError:
            return {"error": "it is nested too deeply"}
        except BaseException as error:  # templates raise anything, and Rust's panics are not Exceptions
            lines = str(error).strip().splitlines()
            return {"error": lines[0] if lines else type(error).__name__}

    def _do(self, request: dict[str, Any], payload: bytes) -> Any:
        do = request.pop("do")
        if do == "render":
            return render(**request)
        if do == "check_grammar":
            return guidance.check(**request)
        if do == "load":
            self._encoder = Encoder(payload, **request)
            return self._encoder.facts()
        if self._encoder is None:
            raise ValueError("no tokenizer is loaded")
        return getattr(self._encoder, do)(**request)


def limit(what: int, value: int) -> None:
    """Lower a limit of this process; never raise one."""
    _, most = resource.getrlimit(what)
    resource.setrlimit(what, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def main(memory_limit: int) -> None:
    """Serve standard input."""
    # The signal must end the process; the parent process may have ignored or blocked the signal.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    limit(resource.RLIMIT_CORE, 0)
    worker = Worker()
    requests = sys.stdin.buffer

    def bound() -> None:
        """Limit memory to what is mapped now plus ``memory_limit``."""
        if memory_limit:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_limit)

    bound()
    answers.write(b"{}\n")
    answers.flush()
    for line in requests:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        signal.setitimer(signal.ITIMER_PROF, request.pop("seconds"))
        payload = requests.read(request.pop("payload"))
        loads = request["do"] == "load"
        answer = worker.answer(request, payload)
        encoded = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(encoded)
        answers.flush()
        if loads:
            bound()  # the tokenizer does not count towards a text's memory


if __name__ == "__main__":
    main(int(sys.argv[1]))
