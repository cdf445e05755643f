"""Instructions of a kernel's inner loop, counted from LLVM's intermediate code.

The classes are those that GPUs run at different rates. A row is one token's key and value of one kv head.
"""

import math
import re
from collections import Counter
from collections.abc import Callable

_INSTRUCTION = re.compile(r"^ +(?:(%\S+) = )?(?:tail |musttail |notail )?([a-z]+) ?(.*)$")
_FLOATS = {"fadd", "fsub", "fmul", "fneg"}
_FREE = {"phi", "getelementptr", "bitcast", "freeze", "icmp", "fcmp", "zext", "sext", "trunc", "fptrunc", "ret"}
_FREE |= {"extractelement", "insertelement", "shufflevector", "ptrtoint", "inttoptr", "addrspacecast", "unreachable"}
_SPACES = {"1": "device", "2": "constant", "3": "shared", None: "thread"}
Blocks = dict[str, list[str]]


def main_loop(code: str) -> tuple[Counter[str], Callable[[], int]]:
    """Instructions and bytes of one pass of a function's largest loop; and how far its counter goes in a pass.

    A loop within it counts as often as it runs, or once where that is no constant: a bias split of up to LANES pairs.
    Of a branch both sides count.
    """
    blocks: Blocks = {}
    name = "entry"
    for line in code.splitlines()[1:-1]:
        if label := re.match(r"([\w.]+):", line):
            name = label[1]
        elif line.strip():
            blocks.setdefault(name, []).append(line)
    loop = max(loops(blocks, set(blocks)), key=lambda names: sum(len(blocks[n]) for n in names))
    return counted(blocks, loop), lambda: counter(blocks, loop)[0]


def loops(blocks: Blocks, names: set[str]) -> list[set[str]]:
    """The outermost loops among these blocks: each a set of blocks that reach each other."""
    reached = {n: reachable(blocks, n, names) for n in names}
    found = {frozenset(m for m in reached[n] if n in reached[m]) for n in names if n in reached[n]}
    return [set(part) for part in found]


def reachable(blocks: Blocks, start: str, names: set[str]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for target in re.findall(r"label %([\w.]+)", blocks[todo.pop()][-1]):
            if target in names and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def header(blocks: Blocks, loop: set[str]) -> str:
    """The block by which a loop is entered."""
    outside = [lines[-1] for n, lines in blocks.items() if n not in loop]
    return next(n for n in loop if any(re.search(rf"label %{n}\b", line) for line in outside))


def counter(blocks: Blocks, loop: set[str]) -> tuple[int, int | None]:
    """How far a loop's counter goes in a pass, and how often it runs where its end is a constant."""
    lines = [line for n in loop for line in blocks[n]]
    phis = {m[1]: m[2] for line in blocks[header(blocks, loop)] if (m := re.match(r" +(%\S+) = phi i\d+ (.*)", line))}
    for line in lines:
        step = re.match(r" +(%\S+) = add[a-z ]* i\d+ (%\S+), (\d+)$", line)
        if not step or f"[ {step[1]}," not in phis.get(step[2], ""):
            continue
        ahead = {step[1], *re.findall(rf"(%\S+) = trunc [a-z0-9 ]+ {re.escape(step[1])} to", "\n".join(lines))}
        for test in lines:
            end = re.search(r"icmp [a-z ]+ i\d+ (%\S+), (\S+)$", test)
            if end and (ahead | {step[2]}) & {end[1], end[2]}:
                if not end[2].isdigit():
                    return int(step[3]), None
                last = int(end[2]) + (0 if end[1] in ahead else int(step[3]))
                return int(step[3]), math.ceil(last / int(step[3]))
    raise RuntimeError(f"no counter found in a loop of {len(lines)} instructions")


def counted(blocks: Blocks, loop: set[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    inner = loops(blocks, loop - {header(blocks, loop)})
    for part in inner:
        _, times = counter(blocks, part)
        found.update({kind: (times or 1) * n for kind, n in counted(blocks, part).items()})
    for name in loop.difference(*inner):
        for line in blocks[name]:
            found.update(classified(line))
    return found


def classified(line: str) -> dict[str, int]:
    """An instruction's class and how many of a GPU's it is, or nothing where it takes none."""
    parts = _INSTRUCTION.match(line)
    if parts is None:
        raise RuntimeError(f"not understood: {line}")
    operation, rest = parts[2], parts[3]
    lanes = int(vector[1]) if (vector := re.match(r"[a-z ]*<(\d+) x", rest)) else 1
    wide = bool(re.match(r"[a-z ]*i64\b", rest))
    if operation in ("load", "store"):
        space = re.search(r"ptr(?: addrspace\((\d)\))? ", rest)
        where = _SPACES[space[1] if space else None]
        if where == "constant":  # the same for all lanes: kept in uniform registers
            return {}
        return {f"{where} {operation}": 1, f"{where} bytes": size_of(rest)}
    if operation in _FLOATS:
        return {"float": lanes}
    if operation == "call":
        return called(rest)
    if wide and re.match(r"disjoint i64 %\S+, \d+$", rest):  # an address's constant part
        return {}
    if operation in ("and", "or", "xor"):
        return {} if " i1 " in f" {rest}" else {"bitwise": lanes * (2 if wide else 1)}
    if operation in ("shl", "lshr", "ashr"):
        return {"shift": lanes}
    if operation in ("add", "sub"):
        return {"integer": lanes * (4 if wide else 1)}
    if operation == "mul":
        return {"multiply": lanes * (4 if wide else 1)}
    if operation in ("sitofp", "uitofp", "fptosi", "fptoui"):
        return {"convert": lanes}
    if operation in ("sdiv", "udiv", "srem", "urem"):
        return divided(rest.rsplit(", ", 1)[1])
    if operation == "fdiv":
        return {"divide": lanes, "float": lanes}
    if operation == "fpext":  # an instruction takes a half as it is; a bfloat has to be moved
        return {"bitwise": lanes} if "bfloat" in rest.split(" to ")[0] else {}
    if operation == "select":
        return {"select": lanes}
    if operation in ("br", "switch"):
        return {"branch": 1} if rest.startswith(("i1", "i32")) else {}
    if operation in _FREE:
        return {}
    raise RuntimeError(f"not understood: {line}")


def divided(by: str) -> dict[str, int]:
    """An integer's division: by a power of two, by another constant, or by a number known only as it runs."""
    if not by.isdigit():
        return {"divide": 1, "convert": 2, "multiply": 4, "integer": 6}
    return {"multiply": 2, "shift": 1} if int(by) & (int(by) - 1) else {"shift": 1, "integer": 1}


def size_of(rest: str) -> int:
    """Bytes of the type that a load or store names first."""
    vector, kind = re.match(r"(?:volatile )?(?:<(\d+) x )?(\w+)", rest).groups()  # type: ignore[union-attr]
    bits = {"half": 16, "bfloat": 16, "float": 32, "ptr": 64}.get(kind) or int(kind[1:])
    return int(vector or 1) * bits // 8


def called(rest: str) -> dict[str, int]:
    name = re.search(r"@([\w.]+)", rest)
    lanes = int(vector[1]) if (vector := re.match(r"[\w ]*<(\d+) x", rest)) else 1
    known = {
        r"llvm\.fmuladd": {"float": lanes},
        r"llvm\.(fma|fabs|copysign|maxnum|minnum)": {"float": lanes},
        r"llvm\.exp": {"exp": lanes, "float": lanes},  # exp2 and a product
        r"tanh": {"exp": 1, "divide": 1, "float": 4},
        r"llvm\.[su](max|min)|llvm\.abs": {"select": lanes},
        r"llvm\.fsh[lr]": {"shift": lanes},
        r"_ZN10metal_host7shuffle": {"shuffle": 1},
        r"_ZN10metal_host6reduce": {"simd_sum": 1},
        r"metal_host_(simdgroup_)?barrier": {"barrier": 1},
        r"llvm\.(assume|lifetime|experimental)": {},
    }
    for pattern, kinds in known.items():
        if name and re.match(pattern, name[1]):
            return kinds
    raise RuntimeError(f"not understood: call {rest}")
