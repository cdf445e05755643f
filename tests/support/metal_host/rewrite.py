"""MLX's text as a C++ compiler on the host takes it. Lines stay where they are; what is not understood is
refused.

Two changes are made: the attributes of the explicit instantiation go, and a threadgroup array's declaration
becomes a reference to memory that every access to is checked (to run) or a static variable (to check address
spaces).
"""

import re

from support.metal_host.source import HostError, KernelCall

FILE = "kernel.metal"  # the text's name in the compiler's messages
_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_INSTANCE = re.compile(r'^template \[\[host_name\("\w+"\)\]\] \[\[kernel\]\] (?=decltype\()', re.MULTILINE)
_SHARED = re.compile(r"\bthreadgroup\s+(\w+(?:\s*<[\w\s,]*>)?)\s+(\w+)\s*((?:\[[^\[\]]+\]\s*)*);")
_POINTER = re.compile(r"\bthreadgroup\s+(?:const\s+)?\w+(?:\s*<[\w\s,]*>)?(?:\s+const)?\s*[*&]")
_DEFINE = re.compile(r"^[ \t]*#define[ \t]+(\w+)[ \t]+(.*)$", re.MULTILINE)
_SPACES = {"device", "constant", "threadgroup", "thread"}
_SCALARS = {"float", "half", "bfloat", "float16_t", "bfloat16_t", "bool", "char", "short", "int", "long"}
_SCALARS |= {
    "uchar",
    "ushort",
    "uint",
    "ulong",
    *(f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64)),
}


def host_text(call: KernelCall, *, spaces: bool) -> str:
    """The translation unit for one kernel: to check its address spaces, or to run it."""
    text = call.text
    plain = _COMMENT_OR_STRING.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    _check_pointers(call.name, text, plain)
    text = _threadgroup_arrays(call.name, text, plain, spaces)
    text, instances = _INSTANCE.subn("template ", text)
    if instances != bool(call.template):
        raise HostError("CompileFailed", f"{call.name}: {instances} instantiations in the text")
    face = "#define METAL_HOST_SPACES\n" if spaces else ""
    entry = "" if spaces else _entry(call)
    return f'{face}#include "shim.h"\n#line 1 "{FILE}"\n{text}\n{entry}'


def _threadgroup_arrays(name: str, text: str, plain: str, spaces: bool) -> str:
    """`threadgroup float tile[32];` -> a checked reference, or a static array in the address space."""
    parts, done = [], 0
    kernel = plain.index("[[kernel]] void ")
    for word in re.finditer(r"\bthreadgroup\b", plain):
        found = _SHARED.match(plain, word.start())
        if found is None:
            if not _POINTER.match(plain, word.start()):
                raise _refused(name, text, word.start(), "a use of `threadgroup` that is not understood")
            continue
        if found.start() < kernel:
            raise _refused(name, text, found.start(), "a threadgroup array outside of the kernel's function")
        element, array, dims = found.groups()
        if spaces:
            new = f"static threadgroup {element} {array}{dims};"
        else:
            kind = f"metal_host_type_of_{array}"
            new = f'typedef {element} {kind}{dims}; auto& {array} = metal_host::shared<{kind}>("{array}", __LINE__);'
        parts += [text[done : found.start()], new]
        done = found.end()
    return "".join(parts) + text[done:]


def _check_pointers(name: str, text: str, plain: str) -> None:
    """Metal wants an address space on every pointer and reference, but those to a template's own
    parameter.
    """
    own = re.search(r"^template <(.*)>\n\[\[kernel\]\]", plain, re.MULTILINE)
    named = {macro[1] for macro in _DEFINE.finditer(plain) if _SPACES & {*macro[2].split()}}
    types = {*_SCALARS, *re.findall(r"typename (\w+)", own[1] if own else "")}
    pointer = re.compile(
        rf"((?:\b\w+\s+)*)\b(?:{'|'.join(types)})\b((?:\s+\w+)*)\s*[*&]+\s*(?:const\s+)?\w*\s*[,)=;>{{]"
    )
    for found in pointer.finditer(plain):
        if not (_SPACES | named) & {*found[1].split(), *found[2].split()}:
            raise _refused(name, text, found.end() - 1, "a pointer without an address space")


def _refused(name: str, text: str, position: int, what: str) -> HostError:
    line = text.count("\n", 0, position) + 1
    return HostError("CompileFailed", f"{name}, line {line}: {what}: {text.splitlines()[line - 1].strip()}")


def _entry(call: KernelCall) -> str:
    """A function of one signature for all kernels, which calls this one."""
    arguments, buffer = [], 0
    for parameter in call.parameters:
        if parameter.kind == "attribute":
            arguments.append(f"at.{parameter.name}")
        else:
            const = "" if parameter.kind == "output" else "const "
            pointer = f"static_cast<{const}{parameter.type}*>(buffers[{buffer}])"
            arguments.append(f"*{pointer}" if parameter.by_reference else pointer)
            buffer += 1
    return (
        'extern "C" __attribute__((visibility("default")))\n'
        "void metal_host_entry(void* const* buffers, const metal_host::Attributes& at) {\n"
        f"  {call.name}{call.template}({', '.join(arguments)});\n}}\n"
    )
