"""What MLX would hand to Metal for a call: the text it generates and how it launches it.

`mx.export_function` traces a function and reports every primitive of it with its state, and on a machine without
Metal a kernel called with `stream=mx.gpu` can be traced too.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from support.metal_host.errors import NotOneKernel

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the traced graph: its name there, shape and dtype."""

    name: str
    shape: Shape
    dtype: mx.Dtype


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the kernel's function, in order.

    index is the array's place among the call's inputs or outputs; -1 for a thread attribute. type is Metal's name of
    the element; space is device, constant, or nothing for an attribute.
    """

    kind: Literal["input", "shape", "strides", "ndim", "output", "attribute"]
    name: str
    index: int
    type: str
    space: str
    by_reference: bool


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch: function name, MLX's text, template arguments as written (`<float16_t, 4>` or nothing), parameters,
    threads in the grid and in a threadgroup, and the arrays it reads and writes."""

    name: str
    text: str
    template: str
    parameters: tuple[Parameter, ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]


def kernel_call(kernel: Callable[..., Any], inputs: list[mx.array], **launch: Any) -> KernelCall:
    """What `kernel(inputs=inputs, **launch)`, an mx.fast.metal_kernel, would launch. Raises NotOneKernel."""
    records: list[dict[str, Any]] = []
    mx.export_function(records.append, lambda *x: kernel(inputs=list(x), stream=mx.gpu, **launch), *inputs)
    primitives = [record for record in records if record["type"] == "primitive"]
    if [record["name"] for record in primitives] != ["CustomKernel"]:
        raise NotOneKernel(f"the call does {[record['name'] for record in primitives]}; expected one kernel")
    return _call(primitives[0])


def _arrays(triples: list[tuple[str, Shape, mx.Dtype]]) -> tuple[Array, ...]:
    return tuple(Array(name, tuple(shape), dtype) for name, shape, dtype in triples)


def _call(record: dict[str, Any]) -> KernelCall:
    # name, source, grid (3), threadgroup (3), shape_infos, ensure_row_contiguous, scalars, precompiled, ...
    name, text, gx, gy, gz, tx, ty, tz, shape_infos, ensure_row_contiguous, *_ = record["arguments"]
    if not ensure_row_contiguous:
        raise ValueError(f"{name}: with ensure_row_contiguous=False a kernel gets strides that are not traced")
    inputs, outputs = _arrays(record["inputs"]), _arrays(record["outputs"])
    template = re.search(re.escape(f"decltype({name}") + r"(<[^;]*>)\)", text)
    return KernelCall(
        name=name,
        text=text,
        template=template[1] if template else "",
        parameters=_parameters(name, text, inputs, outputs, shape_infos),
        grid=(gx, gy, gz),
        threadgroup=(tx, ty, tz),
        inputs=inputs,
        outputs=outputs,
    )


_BUFFER = re.compile(r"(?:const )?(device|constant) (\w+)([*&]) (\w+) \[\[buffer\(\d+\)\]\]")
_ATTRIBUTE = re.compile(r"(uint3?) (\w+) \[\[(\w+)\]\]")


def _parameters(
    name: str,
    text: str,
    inputs: tuple[Array, ...],
    outputs: tuple[Array, ...],
    shape_infos: list[tuple[bool, bool, bool]],
) -> tuple[Parameter, ...]:
    """Reads the signature and holds it against what the call's arrays let expect."""
    signature = re.search(re.escape(f"[[kernel]] void {name}(") + r"\n(.*?)\) \{\n", text, re.DOTALL)
    if signature is None:
        raise ValueError(f"{name}: no kernel function of this name in the text")
    expected: list[tuple[Any, int]] = []
    for i, (array, (shape, strides, ndim)) in enumerate(zip(inputs, shape_infos, strict=True)):
        expected.append(("input", i))
        if array.shape:
            wanted = (("shape", shape), ("strides", strides), ("ndim", ndim))
            expected += [(kind, i) for kind, asked in wanted if asked]
    expected += [("output", i) for i in range(len(outputs))]
    parameters = []
    for position, line in enumerate(signature[1].split(",\n")):
        buffer, attribute = _BUFFER.fullmatch(line.strip()), _ATTRIBUTE.fullmatch(line.strip())
        if buffer and position < len(expected):
            space, element, pointer, own_name = buffer.groups()
            parameters.append(
                Parameter(*expected[position][:1], own_name, expected[position][1], element, space, pointer == "&")
            )
        elif attribute and attribute[2] == attribute[3] and position >= len(expected):
            parameters.append(Parameter("attribute", attribute[2], -1, attribute[1], "", False))
        else:
            raise ValueError(f"{name}: parameter not understood: {line.strip()}")
    if sum(p.kind != "attribute" for p in parameters) != len(expected):
        raise ValueError(f"{name}: {len(parameters)} parameters; expected {len(expected)} buffers")
    return tuple(parameters)
