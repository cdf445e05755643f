"""How many launches the fused path queues for a token, counted in the graph MLX traces."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from kvant.operators.kernels import launch as launch_module
from kvant.operators.paged_attention import PagedRows, append_and_attend_paged
from kvant.operators.paged_kernel import step_pages

# Launches of an operation whose arrays are row contiguous, by MLX 0.32's sources under mlx/backend/. In a write the old
# array is donated, which costs none: nothing else holds a cache's arrays. An operation that is not here fails the test.
LAUNCHES = {
    "DynamicSliceUpdate": 2,  # gpu/primitives.cpp: compute_dynamic_offset (metal/slicing.cpp), then the copy
    "Concatenate": 2,  # metal/slicing.cpp: a copy of each of two arrays
    **dict.fromkeys(("CustomKernel", "ScatterAxis", "SliceUpdate", "AsType"), 1),
    **dict.fromkeys(("Add", "Arange", "Gather", "Less", "Remainder", "Select", "Subtract"), 1),
    # They hand on the same bytes (gpu/primitives.cpp, common/common.cpp).
    **dict.fromkeys(("Broadcast", "ExpandDims", "Reshape", "Flatten", "Slice", "Squeeze", "Transpose", "View"), 0),
}
H, K, D, ROWS = 14, 2, 64, 1024


def _traced(function: Callable[..., Any], *arrays: mx.array) -> list[str]:
    """The launches of the operations traced, by name. "copied": of an array whose elements are in another order.

    It is copied for a kernel, and where two axes of more than one element become one.
    """
    records: list[dict[str, Any]] = []
    mx.export_function(records.append, function, *arrays)
    launches: list[str] = []
    apart = set()  # arrays that are not row contiguous
    for record in (record for record in records if record["type"] == "primitive"):
        name, arguments = record["name"], record["arguments"]
        inputs = [(array, shape) for array, shape, _ in record["inputs"]]
        output, output_shape, _ = record["outputs"][0]
        if name == "Transpose" or (name == "Broadcast" and math.prod(output_shape) > math.prod(inputs[0][1])):
            apart.add(output)
        if name == "CustomKernel":
            launches += ["copied" for array, _ in inputs if array in apart]
        if name == "Flatten" and inputs[0][0] in apart:
            merged = inputs[0][1][arguments[0] : arguments[1] + 1]
            launches += ["copied"] if sum(size > 1 for size in merged) > 1 else []
        elif LAUNCHES[name] == 0 and inputs[0][0] in apart:
            apart.add(output)
        launches += [name] * LAUNCHES[name]
    return launches


def _tokens(heads: int, tokens: int = 1, batch: int = 1) -> mx.array:
    return mx.random.normal((batch, heads, tokens, D), key=mx.random.key(heads)).astype(mx.bfloat16)


def _arrays() -> list[mx.array]:
    return [mx.zeros((2, K, ROWS, D), mx.int8), mx.zeros((2, K, ROWS, D // 32), mx.float16)]


def _step(rows: PagedRows) -> Callable[..., list[mx.array]]:
    def step(query: mx.array, key: mx.array, value: mx.array, *arrays: mx.array) -> list[mx.array]:
        held = list(arrays)
        output, _ = append_and_attend_paged(query, key, value, held, rows, **QUANTIZED)
        return [output, *held]

    return step


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations that are chosen for a GPU."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))


APPEND = ["CustomKernel"]
ATTEND = ["CustomKernel", "CustomKernel"]
PUT = ["ScatterAxis", "ScatterAxis"]
QUANTIZED: dict[str, Any] = {"quant_bit": 8, "quant_group": 32, "backend": "metal"}


@pytest.mark.parametrize("new_tokens", [1, 4])
def test_a_step_is_five_launches_a_layer(new_tokens: int) -> None:
    pages = step_pages([[0]], [0], [7], 7 + new_tokens, None)
    rows = PagedRows([(7, 7 + new_tokens)], [[(0, 7 + new_tokens)]], [0], None, pages)
    traced = _traced(_step(rows), *(_tokens(heads, new_tokens) for heads in (H, K, K)), *_arrays())
    assert traced == [*APPEND, "SliceUpdate", "SliceUpdate", *ATTEND]


@pytest.mark.parametrize("new_tokens", [1, 4])
def test_a_step_of_a_pool_s_sequences_is_five_launches_a_layer(new_tokens: int) -> None:
    """Several new tokens of each take a copy of values and one of scales more: sequences lie outside of heads there."""
    pages = step_pages([[3], [5, 1]], [0, 0], [9, 140], 256, None)
    runs = [[(384, 393 + new_tokens)], [(640, 768), (128, 140 + new_tokens)]]
    new = mx.array([row for own in runs for row in range(own[-1][1] - new_tokens, own[-1][1])])
    rows = PagedRows(new, runs, [0, 0], None, pages)

    traced = _traced(_step(rows), *(_tokens(heads, new_tokens, 2) for heads in (H, K, K)), *_arrays())
    assert sorted(traced) == sorted([*APPEND, *PUT, *ATTEND, *(["copied"] * 2 if new_tokens > 1 else [])])


@pytest.mark.parametrize("name", ["attend", "combine", "append"])
def test_mlx_gets_the_text_without_comments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hashes all of it at every launch."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(mx.fast, "metal_kernel", given.update)
    launch_module._kernel.__wrapped__(name, "metal")
    text = given["header"] + given["source"]
    assert "KVANT_UNROLL\nfor (" in text
    assert not any(mark in text for mark in ("//", "/*", "\n\n", "\n "))
