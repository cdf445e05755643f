"""The process in which kernels run: a kernel that goes wrong ends it, and the next run starts another."""

import atexit
import contextlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from support.metal_host import compiler as compilers
from support.metal_host.compiler import Compiler
from support.metal_host.errors import BY_NAME, HostError, OutOfBounds, Undefined
from support.metal_host.rewrite import FILE

HANG_S = 60


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory a kernel sees: bytes are given to an input and to an output that starts with values.

    unreadable is empty, or holds a byte for each byte of an input: not 0 where it must not be read.
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
        self._complaints: IO[bytes] | None = None
        atexit.register(self.close)

    def run(
        self,
        name: str,
        text: str,
        library: Path,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        order: int,
        buffers: list[Buffer],
    ) -> list[bytes]:
        """The writable buffers' bytes afterwards. order: 0 forward, 1 reverse, else a seed. Raises a HostError."""
        process = self._started()
        assert process.stdin
        assert process.stdout
        numbers = [*grid, *threadgroup, order, HANG_S, len(buffers)]
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
        raise self._error(name, text, library, head)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            assert self._process.stdin
            assert self._process.stdout
            assert self._complaints
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdout.close()
            self._complaints.close()
            self._process = self._complaints = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
            self._process = subprocess.Popen(
                [compilers.worker_program(self.compiler)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env={
                    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
                    "PATH": "/usr/local/bin:/usr/bin:/bin",
                },
            )
        return self._process

    def _error(self, name: str, text: str, library: Path, head: bytes) -> HostError:
        assert self._process
        assert self._process.stdout
        assert self._complaints
        if head.startswith(b"error "):
            _, kind, offset, line, size = head.decode().split()
            message = self._process.stdout.read(int(size)).decode()
            self.close()
            at = _line_of(library, int(offset))
            where = _shown(text, at) if at else _shown(text, int(line), "" if offset == "0" else "after ")
            return BY_NAME[kind](f"{name}, {message}{where}")
        self._process.wait()
        self._complaints.seek(0)
        complaints = self._complaints.read().decode(errors="replace")
        status = self._process.returncode
        self.close()
        return _sanitizer_error(name, text, complaints) or HostError(
            f"{name}: the worker ended, {status}: {complaints}"
        )


def _sanitizer_error(name: str, text: str, complaints: str) -> HostError | None:
    """AddressSanitizer's report, or the undefined-behaviour check's, as one of ours."""
    undefined = re.search(re.escape(FILE) + r":(\d+):\d+: runtime error: (.*)", complaints)
    if undefined:
        kind = OutOfBounds if "out of bounds" in undefined[2] else Undefined
        return kind(f"{name}: {undefined[2]}{_shown(text, int(undefined[1]))}")
    found = re.search(r"ERROR: AddressSanitizer: (\S+)", complaints)
    if found is None:
        return None
    thread = re.search(r"metal_host: (.*)", complaints)
    access = re.search(r"^(?:READ|WRITE) of size \d+", complaints, re.MULTILINE)
    place = re.search(r"is located .*", complaints)
    line = re.search(re.escape(FILE) + r":(\d+)", complaints)
    parts = [m[0] for m in (access, place) if m]
    message = f"{name}, {thread[1] if thread else 'outside a thread'}: AddressSanitizer: {found[1]}, {', '.join(parts)}"
    return OutOfBounds(message + (_shown(text, int(line[1])) if line else ""))


def _line_of(library: Path, offset: int) -> int:
    """The line of an address in the library; 0 where no tool on this machine can say."""
    tool = shutil.which("llvm-symbolizer") or shutil.which("addr2line")
    if not offset or tool is None:
        return 0
    done = subprocess.run([tool, "-i", "-e", library, hex(offset)], capture_output=True, text=True)
    found = re.search(re.escape(FILE) + r":(\d+)", done.stdout)
    return int(found[1]) if found else 0


def _shown(text: str, line: int, before: str = "") -> str:
    lines = text.splitlines()
    if not 0 < line <= len(lines):
        return ""
    return f" ({before}line {line}: {lines[line - 1].strip()})"
