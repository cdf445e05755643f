"""What an optimizing compiler makes of a kernel: LLVM's intermediate code, the nearest thing here to Apple's own.

Apple's compiler is a clang too. An array that stays an `alloca` after optimization lies in thread memory, which a GPU
reads like any other memory: it is no register.
"""

import re
import subprocess
from collections.abc import Sequence

from support.metal_host.compiler import LANGUAGE, find_ziglang
from support.metal_host.errors import CompileFailed
from support.metal_host.rewrite import host_text
from support.metal_host.source import KernelCall

# 16-bit floats are the processor's own, as on a GPU. A vectorizer would count elements of the host's vectors.
_TARGET = ["-target", "arm64-apple-macos14", "-mcpu=apple-m1", "-fno-vectorize", "-fno-slp-vectorize"]
_TARGET += ["-fno-builtin"]  # a GPU has no memset_pattern16 and the like


def optimized(text: str, name: str, flags: Sequence[str] = ("-O2",)) -> str:
    """The optimized code of function `name` of a C++ text with real address spaces, from `define` to its end.

    Raises:
        CompileFailed: with the compiler's words.
    """
    command = [
        find_ziglang().command[0],
        "clang",
        *LANGUAGE,
        "-w",
        *_TARGET,
        *flags,
        "-S",
        "-emit-llvm",
        "-o",
        "-",
        "-",
    ]
    command[command.index("-ffp-contract=off")] = "-ffp-contract=on"  # as on a GPU: a product and a sum are one
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileFailed(f"{name}: {done.stderr.strip()}")
    found = re.search(rf"^define [^\n]*@_Z\d+{re.escape(name)}\w*\(.*?^}}$", done.stdout, re.DOTALL | re.MULTILINE)
    if found is None:
        raise CompileFailed(f"{name}: the compiler made no function of this name")
    return found[0]


def optimized_call(call: KernelCall, flags: Sequence[str] = ("-O2",)) -> str:
    """The same for a launch of a Metal kernel."""
    return optimized(host_text(call, spaces=True), call.name, flags)


def allocas(code: str) -> list[str]:
    """The types of what a function keeps in thread memory: `[4 x [8 x float]]`."""
    return re.findall(r"^ *%\S+ = alloca (.+?),", code, re.MULTILINE)
