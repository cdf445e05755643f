"""What an optimizing compiler makes of a kernel: LLVM's intermediate code, the nearest thing here to Apple's
own.

Apple's compiler is a clang too. An array that stays an `alloca` after optimization lies in thread memory,
which a GPU reads like any other memory: it is no register.
"""

import re
import subprocess
from collections.abc import Sequence

from support.metal_host.compiler import LANGUAGE, find_ziglang
from support.metal_host.rewrite import host_text
from support.metal_host.source import HostError, KernelCall

# 16-bit floats are the processor's own, as on a GPU. A vectorizer would count elements of the host's vectors.
# A GPU has no memset_pattern16 and the like. A product and a sum are one there.
_TARGET = ["-target", "arm64-apple-macos14", "-mcpu=apple-m1", "-fno-vectorize", "-fno-slp-vectorize"]
_TARGET += ["-fno-builtin", "-ffp-contract=on"]
_PRINTED = ["-w", "-S", "-emit-llvm", "-o", "-", "-"]


def allocas(call: KernelCall, flags: Sequence[str] = ("-O2",)) -> list[str]:
    """The types of what a kernel keeps in thread memory once it is optimized: `[4 x [8 x float]]`."""
    command = [find_ziglang().command[0], "clang", *LANGUAGE, *_TARGET, *flags, *_PRINTED]
    done = subprocess.run(command, input=host_text(call, spaces=True), capture_output=True, text=True)
    found = re.search(
        rf"^define [^\n]*@_Z\d+{re.escape(call.name)}\w*\(.*?^}}$", done.stdout, re.DOTALL | re.MULTILINE
    )
    if found is None:
        raise HostError("CompileFailed", f"{call.name}: {done.stderr.strip()}")
    return re.findall(r"^ *%\S+ = alloca (.+?),", found[0], re.MULTILINE)
