"""The process in which kernels run: a kernel that goes wrong ends it, and the next run starts another."""

import atexit
import contextlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from support.metal_host import compiler as compilers
from support.metal_host.compiler import Compiler
from support.metal_host.rewrite import FILE
from support.metal_host.source import HostError, KernelCall

HANG_S = 60
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory a kernel sees. unreadable: for each byte of an input another, not 0 where it must not be
    read.
    """

    name: str
    writable: bool
    num_bytes: int
    given: bytes
    unreadable: bytes = b""


class Worker:
    """The running process of one compiler, started when first needed."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self.num_runs = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes]
        atexit.register(self.close)

    def run(self, call: KernelCall, library: Path, order: int, buffers: list[Buffer]) -> list[bytes]:
        """The writable buffers' bytes afterwards. order: 0 forward, 1 reverse, else a seed. Raises a
        HostError.
        """
        if self._process is None:
            self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": self._complaints,
            }
            self._process = subprocess.Popen(
                [compilers.worker_program(self.compiler)], **pipes, env=ENVIRONMENT
            )
        process = self._process
        numbers = [*call.grid, *call.threadgroup, order, HANG_S, len(buffers)]
        request = [f"run {library} {' '.join(map(str, numbers))}\n".encode()]
        for b in buffers:
            sizes = f"{b.num_bytes} {len(b.given)} {len(b.unreadable)}"
            request += [f"{b.name} {int(b.writable)} {sizes}\n".encode(), b.given, b.unreadable]
        try:
            process.stdin.write(b"".join(request))
            process.stdin.flush()
            head = process.stdout.readline()
        except BrokenPipeError:
            head = b""
        self.num_runs += 1
        if head == b"ok\n":
            return [process.stdout.read(b.num_bytes) for b in buffers if b.writable]
        try:
            if not head.startswith(b"error "):
                process.wait()
                self._complaints.seek(0)
                complaints = self._complaints.read().decode(errors="replace")
                raise _sanitizer_error(call, complaints, process.returncode)
            _, kind, offset, line, size = head.decode().split()
            message = process.stdout.read(int(size)).decode()
            at = _line_of(library, int(offset))
            shown = _shown(call, at) if at else _shown(call, int(line), "" if offset == "0" else "after ")
            raise HostError(kind, f"{call.name}, {message}{shown}")
        finally:
            self.close()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError):  # of what was not written yet
                process.communicate()
            self._complaints.close()


def _sanitizer_error(call: KernelCall, complaints: str, status: int) -> HostError:
    """AddressSanitizer's report, or the undefined-behaviour check's, as one of ours."""
    line = re.search(re.escape(FILE) + r":(\d+)", complaints)
    shown = _shown(call, int(line[1])) if line else ""
    undefined = re.search(re.escape(FILE) + r":\d+:\d+: runtime error: (.*)", complaints)
    if undefined:
        outside = "out of bounds" in undefined[1]
        return HostError("OutOfBounds" if outside else "Undefined", f"{call.name}: {undefined[1]}{shown}")
    found = re.search(r"ERROR: (AddressSanitizer: \S+)", complaints)
    if found is None:
        return HostError("WorkerEnded", f"{call.name}: {status}: {complaints}")
    thread = re.search(r"metal_host: (.*)", complaints)
    access = re.search(r"^(?:READ|WRITE) of size \d+", complaints, re.MULTILINE)
    place = re.search(r"is located .*", complaints)
    parts = [thread[1] if thread else "outside a thread", found[1], *(m[0] for m in (access, place) if m)]
    return HostError("OutOfBounds", f"{call.name}, {', '.join(parts)}{shown}")


def _line_of(library: Path, offset: int) -> int:
    tool = shutil.which("llvm-symbolizer") or shutil.which("addr2line")
    if not offset or tool is None:
        return 0
    done = subprocess.run([tool, "-i", "-e", library, hex(offset)], capture_output=True, text=True)
    found = re.search(re.escape(FILE) + r":(\d+)", done.stdout)
    return int(found[1]) if found else 0


def _shown(call: KernelCall, line: int, before: str = "") -> str:
    lines = call.text.splitlines()
    return f" ({before}line {line}: {lines[line - 1].strip()})" if 0 < line <= len(lines) else ""
