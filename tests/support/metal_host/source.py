"""What MLX would hand to Metal for a call: the text it generates and how it launches it.

`mx.export_function` traces a function and reports every primitive of it with its state, and on a machine
without Metal a kernel called with `stream=mx.gpu` can be traced too.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

Triple = tuple[int, int, int]
Array = tuple[tuple[int, ...], mx.Dtype]  # shape and dtype


class HostError(Exception):
    """A mistake in a kernel; the message names its kind, and kernel, thread and line where they are known."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of the kernel's function. index: among the call's inputs or outputs; -1: a thread's attribute."""

    kind: Literal["input", "shape", "output", "attribute"]
    name: str
    index: int
    type: str
    by_reference: bool


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch: MLX's text, template arguments as written (`<float16_t, 4>` or nothing), and sizes in
    threads.
    """

    name: str
    text: str
    template: str
    parameters: tuple[Parameter, ...]
    grid: Triple
    threadgroup: Triple
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]


def kernel_call(kernel: Callable[..., Any], inputs: list[mx.array], **launch: Any) -> KernelCall:
    """What `kernel(inputs=inputs, **launch)`, an mx.fast.metal_kernel, would launch. Raises a HostError."""
    records: list[dict[str, Any]] = []
    mx.export_function(records.append, lambda *x: kernel(inputs=list(x), stream=mx.gpu, **launch), *inputs)
    primitives = [record for record in records if record["type"] == "primitive"]
    if [record["name"] for record in primitives] != ["CustomKernel"]:
        raise HostError("NotOneKernel", f"the call does {[record['name'] for record in primitives]}")
    record = primitives[0]
    name, text, gx, gy, gz, tx, ty, tz, shape_infos, ensure_row_contiguous, *_ = record["arguments"]
    if not ensure_row_contiguous:
        raise ValueError(
            f"{name}: with ensure_row_contiguous=False a kernel gets strides that are not traced"
        )
    given, outputs = (
        tuple((tuple(shape), dtype) for _, shape, dtype in record[x]) for x in ("inputs", "outputs")
    )
    expected: list[tuple[Any, int]] = []
    for i, ((shape, _), infos) in enumerate(zip(given, shape_infos, strict=True)):
        if any(infos[1:]):
            raise ValueError(
                f"{name}: of an input a kernel gets its shape, no strides and no number of dimensions"
            )
        expected += [("input", i), *([("shape", i)] if infos[0] and shape else [])]
    expected += [("output", i) for i in range(len(outputs))]
    template = re.search(re.escape(f"decltype({name}") + r"(<[^;]*>)\)", text)
    parameters = _parameters(name, text, expected)
    sizes = {"grid": (gx, gy, gz), "threadgroup": (tx, ty, tz), "inputs": given, "outputs": outputs}
    return KernelCall(name, text, template[1] if template else "", parameters, **sizes)


_BUFFER = re.compile(
    r"(?:const )?(?:device|constant) (?P<type>\w+)(?P<mark>[*&]) (?P<name>\w+) \[\[buffer\(\d+\)\]\]"
)
_ATTRIBUTE = re.compile(r"(?P<type>uint3?) (?P<mark>)(?P<name>\w+) \[\[(?P=name)\]\]")


def _parameters(name: str, text: str, expected: list[tuple[Any, int]]) -> tuple[Parameter, ...]:
    """Reads the signature: the expected buffers, then attributes of the thread."""
    signature = re.search(re.escape(f"[[kernel]] void {name}(") + r"\n(.*?)\) \{\n", text, re.DOTALL)
    lines = [line.strip() for line in signature[1].split(",\n")] if signature else []
    if len(lines) < len(expected):
        raise ValueError(f"{name}: {len(lines)} parameters in the text; expected {len(expected)} buffers")
    parameters = []
    for i, line in enumerate(lines):
        kind, index = expected[i] if i < len(expected) else ("attribute", -1)
        found = (_ATTRIBUTE if kind == "attribute" else _BUFFER).fullmatch(line)
        if found is None:
            raise ValueError(f"{name}: parameter not understood: {line}")
        parameters.append(Parameter(kind, found["name"], index, found["type"], found["mark"] == "&"))
    return tuple(parameters)
