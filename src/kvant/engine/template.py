"""Chat templates under a time limit and a memory limit: rendered in a process that can be ended."""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from kvant.errors import PromptError

TIME_LIMIT_S = 5.0  # templates take milliseconds
START_LIMIT_S = 60.0  # a tenth of a second where nothing else runs
MEMORY_LIMIT = 512 * 1024 * 1024
MAX_TEMPLATE = 1024 * 1024  # characters; the longest published ones have some 30,000
MAX_ANSWER = 512 * 1024 * 1024  # bytes: the longest text, escaped
LOOK_S = 0.1
# macOS counts what every process shares, more than any limit that would be of use; there the memory is looked at.
ADDRESS_LIMIT = MEMORY_LIMIT if sys.platform == "linux" else 0

PROGRAM = Path(__file__).with_name("template_process.py")


class TemplateProcess:
    """A process that renders templates, one at a time, for threads of this process.

    It is started at once and again whenever it had to be ended, and ends when this object goes or Python does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start()

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """What the template writes for these variables, which are JSON.

        Raises:
            PromptError: a template that fails, or that would take too long or too much memory.
        """
        if len(template) > MAX_TEMPLATE:
            raise PromptError(f"the chat template has {len(template)} characters; expected at most {MAX_TEMPLATE}")
        try:
            request = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        except (ValueError, RecursionError) as error:
            raise PromptError(f"the chat template cannot be given this: {error}") from error
        with self._lock:
            answer = json.loads(self._exchange(request))
        if "error" in answer:
            raise PromptError(f"the chat template failed: {answer['error']}")
        return str(answer["text"])

    def __reduce__(self) -> tuple[type["TemplateProcess"], tuple[()]]:
        return TemplateProcess, ()  # a copy has a process of its own

    def _start(self) -> None:
        limits = [str(TIME_LIMIT_S), str(ADDRESS_LIMIT)]
        try:
            self._process = subprocess.Popen(
                # -P: modules are not looked for beside the program. A session of its own: Ctrl-C is not for it.
                [sys.executable, "-P", str(PROGRAM), *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise PromptError(f"the process for chat templates cannot be started: {error}") from error
        self._owner = os.getpid()
        self._ready = False
        self._end = weakref.finalize(self, _end, self._process)

    def _exchange(self, request: bytes) -> bytes:
        if self._owner != os.getpid():  # after a fork: the process is the parent's
            self._end.detach()
            self._start()
        elif self._process.poll() is not None:
            self._end()
            self._start()
        stdin = self._process.stdin
        assert stdin is not None
        try:
            if not self._ready:
                self._read(START_LIMIT_S)
                self._ready = True
            view = memoryview(request)
            while view:
                view = view[stdin.write(view) :]
            return self._read(TIME_LIMIT_S)
        except BrokenPipeError:
            raise self._died() from None
        except BaseException:  # an answer that nobody reads must not be the next one's
            self._end()
            raise

    def _read(self, limit_s: float) -> bytes:
        """One line, within the time, while the process stays within the memory."""
        stdout = self._process.stdout
        assert stdout is not None
        end = time.monotonic() + limit_s
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if selector.select(LOOK_S):
                    piece = os.read(stdout.fileno(), 1 << 20)
                    if not piece:
                        raise self._died()
                    line += piece
                    if len(line) > MAX_ANSWER:
                        raise PromptError("the chat template failed: it writes too much")
                elif time.monotonic() > end:
                    raise PromptError(f"the chat template failed: it takes longer than {limit_s:g} s")
                elif not ADDRESS_LIMIT and _resident_bytes(self._process.pid) > MEMORY_LIMIT:
                    raise PromptError("the chat template failed: it needs too much memory")
        return bytes(line)

    def _died(self) -> PromptError:
        code = self._process.wait()
        self._end()
        return PromptError(f"the chat template failed: its process ended with exit code {code}")


class BoundedTemplate:
    """transformers' ``apply_chat_template`` of a tokenizer, every template rendered in a :class:`TemplateProcess`.

    The functions are transformers' own, but for the name by which they find what compiles a template.
    """

    def __init__(self, tokenizer: Any, process: TemplateProcess) -> None:
        self._tokenizer = tokenizer
        self._process = process

    def __call__(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers'.

        Raises:
            PromptError: a template that fails, or that would take too long or too much memory.
            ValueError: an option for which transformers compiles the template in this process.
        """
        from transformers import PreTrainedTokenizerBase
        from transformers.utils.chat_template_utils import render_jinja_template

        for name in ("sanitize_control_tokens", "return_assistant_tokens_mask"):
            if kwargs.get(name):
                raise ValueError(f"{name} is {kwargs[name]!r}; it is not supported")
        render = _rebound(render_jinja_template, _compile_jinja_template=partial(_Compiled, self._process))
        apply = _rebound(PreTrainedTokenizerBase.apply_chat_template, render_jinja_template=render)
        return apply(self._tokenizer, conversation, *args, **kwargs)


class _Compiled:
    """What transformers asks for a text: a template that is compiled and rendered elsewhere."""

    def __init__(self, process: TemplateProcess, template: str) -> None:
        self._process = process
        self._template = template

    def render(self, **variables: Any) -> str:
        return self._process.render(self._template, variables)


def _rebound(function: Any, **names: Any) -> Any:
    """A function with other meanings for some of its module's names."""
    unknown = names.keys() - function.__globals__.keys()
    assert not unknown, f"transformers has no {unknown} any more"
    copy = FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _resident_bytes(pid: int) -> int:
    """Memory of a process, 0 where nobody knows."""
    try:
        done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False)
        return int(done.stdout) * 1024
    except (OSError, ValueError):
        return 0
