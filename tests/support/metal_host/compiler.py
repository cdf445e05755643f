"""Which compiler makes a kernel run here, and the compiled files, kept in the user's cache folder by their
content.

clang     an installed clang that can link AddressSanitizer: kernels run under it
ziglang   the package of that name in this environment: without AddressSanitizer, with the worker's own checks
only

KVANT_HOST_CXX names a clang or is `ziglang`; without it an installed clang is taken before ziglang. Address
spaces are checked by ziglang's compiler in both, because Debian's clang 14 has no bfloat arithmetic.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from kvant.files import user_cache
from support.metal_host.source import HostError

VARIABLE = "KVANT_HOST_CXX"
SOURCES = Path(__file__).parent / "cpp"
COMPILE_LIMIT_S = 300

LANGUAGE = ["-x", "c++", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-math-errno"]
LANGUAGE += ["-iquote", str(SOURCES)]
_KERNEL = ["-Wno-unknown-attributes", "-Wno-ignored-attributes", "-Wno-duplicate-decl-specifier"]
_SINGLE = "-Werror=double-promotion"  # a literal without f is a float in Metal and a double in CUDA
_UNDEFINED = "-fsanitize=bounds,alignment,shift-exponent,integer-divide-by-zero,float-cast-overflow,signed-integer-overflow"
# Every load and store is reported to functions of ours. By AddressSanitizer's instrumentation:
# ThreadSanitizer's leaves out, without a word, what is wider than 16 bytes. same-temp would leave out one of
# the two accesses of `x += 1`.
_REPORTED = ["-asan-instrumentation-with-call-threshold=0", "-asan-memory-access-callback-prefix=metal_host_"]
_REPORTED += ["-asan-opt-same-temp=0"]
_RUNTIME = {
    "clang": ["-asan-use-after-return=never"],
    "ziglang": ["-asan-stack=0", "-asan-globals=0"],  # what only AddressSanitizer's own library can do
}


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: its kind, the command, and its name and version for people."""

    kind: Literal["clang", "ziglang"]
    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        return f"{self.version}, {'AddressSanitizer' if self.kind == 'clang' else 'own checks only'}"


@cache
def find_compiler() -> Compiler:
    """The compiler that makes kernels to run. Raises a HostError."""
    wanted = os.environ.get(VARIABLE, "")
    clang = None if wanted == "ziglang" else shutil.which(wanted or "clang")
    if clang and (found := _clang(clang)):
        return found
    if wanted not in ("", "ziglang"):
        raise HostError(
            "NoCompiler", f"{VARIABLE} is {wanted!r}; expected `ziglang` or a clang with AddressSanitizer"
        )
    return find_ziglang()


def _clang(path: str) -> Compiler | None:
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    if not version or "clang" not in version[0]:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "empty.c"
        program.write_text("int main(void) { return 0; }\n")
        linked = subprocess.run(
            [path, "-fsanitize=address", program, "-o", f"{program}.out"], capture_output=True
        )
    return Compiler("clang", (path,), version[0]) if linked.returncode == 0 else None


@cache
def find_ziglang() -> Compiler:
    spec = find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise HostError(
            "NoCompiler", "Metal kernels need ziglang, of the extra `test`, and clang to run under ASan"
        )
    program = str(Path(spec.origin).with_name("zig"))  # without the Python that `-m ziglang` starts first
    version = subprocess.run([program, "version"], capture_output=True, text=True, check=True).stdout.strip()
    return Compiler("ziglang", (program, "cc"), f"ziglang {version}")  # cc: no C++ library to build


def check_spaces(name: str, text: str) -> None:
    """Compiles the text with real address spaces. Raises a HostError."""
    compiler = find_ziglang()
    path = _cached(compiler, text, ["spaces"], ".checked")
    if not path.exists():
        clang = [compiler.command[0], "clang"]  # a quarter of the time of `zig cc -c`
        _make(path, name, text, [[*clang, *LANGUAGE, *_KERNEL, "-fsyntax-only", "{source}"]])


def kernel_library(compiler: Compiler, name: str, text: str) -> Path:
    """The text compiled to run, as a shared library. Raises a HostError."""
    checks = [part for option in (*_REPORTED, *_RUNTIME[compiler.kind]) for part in ("-mllvm", option)]
    checks = [
        "-fsanitize=address",
        *checks,
        _UNDEFINED,
        "-fno-sanitize-trap=all",
        "-fno-sanitize-recover=all",
    ]
    machine = ["-mf16c"] if platform.machine() == "x86_64" else []
    # Kernels are compiled once and run a few times: any optimization takes longer than it saves.
    flags = [*LANGUAGE, *_KERNEL, _SINGLE, *machine, "-O0", "-gline-tables-only", "-fPIC", *checks]
    path = _cached(compiler, text, flags, ".so")
    if not path.exists():
        # ziglang's clang by itself takes half the time of `zig cc -c`; to link, `zig cc` knows where
        # libraries are
        clang = [compiler.command[0], "clang"] if compiler.kind == "ziglang" else compiler.command
        compile_it = [*clang, *flags, "-c", "{source}", "-o", "{object}"]
        link_it = [*compiler.command, "-O2", "-shared", "{object}", "-o", "{target}", "-lm"]
        _make(path, name, text, [compile_it, link_it])
    return path


def worker_program(compiler: Compiler) -> Path:
    """The program that runs kernel libraries."""
    flags = [
        *LANGUAGE,
        "-O2",
        "-g",
        "-rdynamic",
        *(["-fsanitize=address"] if compiler.kind == "clang" else []),
    ]
    path = _cached(compiler, "worker", flags, ".worker")
    if not path.exists():
        command = [*compiler.command, *flags, str(SOURCES / "worker.cpp"), "-o", "{target}", "-ldl"]
        _make(path, "worker", "", [command])
    return path


@cache
def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))


def _cached(compiler: Compiler, text: str, flags: list[str], suffix: str) -> Path:
    kept = [flag for flag in flags if flag != str(SOURCES)]  # what they say counts, not where they lie
    content = repr([compiler, kept, text]).encode() + _sources()
    return user_cache() / "metal-host" / (hashlib.sha256(content).hexdigest()[:32] + suffix)


def _make(path: Path, name: str, text: str, commands: list[list[str]]) -> None:
    """Runs the commands in a folder of their own; what they made appears whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        files = {"source": "kernel.cpp", "object": "kernel.o", "target": "target"}
        places = {f"{{{key}}}": os.path.join(scratch, file) for key, file in files.items()}
        Path(places["{source}"]).write_text(text)
        for command in commands:
            filled = [places.get(part, part) for part in command]
            done = subprocess.run(filled, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
            if done.returncode:
                lines = done.stderr.splitlines()
                first = next((i for i, line in enumerate(lines) if "error:" in line), 0)
                raise HostError("CompileFailed", "\n".join([f"{name}:", *lines[first : first + 12]]))
        Path(places["{target}"]).touch()  # where nothing but an error was to come
        os.replace(places["{target}"], path)
