"""How many launches a token takes: of the fused path, and of a whole step beside mlx-lm's. Counted in
MLX's graph.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_mlx_lm

import kvant
from kvant.cache.exact_tail import place_exact
from kvant.cache.kv_format import KVFormat, LayerChoice
from kvant.models import load_decoder
from kvant.operators import exponential, key_transform
from kvant.operators.exact_rows import TAIL_ROWS, ExactSpan
from kvant.operators.kernels import launch as launch_module
from kvant.operators.paged_attention import multi_head_cache_attention
from kvant.operators.paged_kernel import step_pages
from kvant.operators.paged_rows import PagedRows
from kvant.tools.bench.shapes import Shape, write_random

# Launches of an operation whose arrays are row contiguous, by MLX 0.32's sources under mlx/backend/. In a
# write the old array is donated, which costs none: nothing else holds a cache's arrays. An operation that is
# not here fails the test.
LAUNCHES = {
    "DynamicSliceUpdate": 2,  # gpu/primitives.cpp: compute_dynamic_offset (metal/slicing.cpp), then the copy
    "Concatenate": 2,  # metal/slicing.cpp: a copy of each of two arrays
    **dict.fromkeys(("CustomKernel", "ScatterAxis", "SliceUpdate", "AsType", "Hadamard"), 1),
    **dict.fromkeys(("Add", "Arange", "Gather", "Less", "Remainder", "Select", "Subtract"), 1),
    **dict.fromkeys(("AddMM", "Matmul", "QuantizedMatmul", "Multiply", "Sigmoid", "BitwiseBinary"), 1),
    # They hand on the same bytes (gpu/primitives.cpp, common/common.cpp).
    **dict.fromkeys(
        ("Broadcast", "ExpandDims", "Reshape", "Flatten", "Slice", "Squeeze", "Transpose", "View"), 0
    ),
    **dict.fromkeys(("Split", "Unflatten"), 0),
}
STRIDED = ("rope", "scaled_dot_product_attention", "swiglu")  # these read such arrays as they lie
H, K, D, ROWS = 14, 2, 64, 1024


def _traced(function: Callable[..., Any], *arrays: mx.array) -> list[str]:
    """The launches of the operations traced, by name. "copied": of an array whose elements are in another
    order.

    It is copied for a kernel, and where two axes of more than one element become one.
    """
    records: list[dict[str, Any]] = []
    mx.export_function(records.append, function, *arrays)
    launches: list[str] = []
    apart = set()  # arrays that are not row contiguous
    for record in (record for record in records if record["type"] == "primitive"):
        name, arguments = record["name"], record["arguments"]
        inputs = [(array, shape) for array, shape, _ in record["inputs"]]
        (first, shape), (_, output_shape, _) = inputs[0], record["outputs"][0]
        outputs = [array for array, *_ in record["outputs"]]
        if name == "Transpose":
            moved = [axis for axis in arguments[0] if shape[axis] > 1]
            apart.update(outputs if moved != sorted(moved) else ())
        elif name in ("Slice", "Split"):
            cut = next((axis for axis, size in enumerate(output_shape) if size != shape[axis]), 0)
            apart.update(outputs if math.prod(output_shape[:cut]) > 1 else ())
        elif name == "Broadcast":
            apart.update(outputs if math.prod(output_shape) > math.prod(shape) else ())
        if name == "CustomKernel" and not any(own in arguments[0] for own in STRIDED):
            launches += ["copied" for array, _ in inputs if array in apart]
        if name in ("Flatten", "Reshape") and first in apart:
            merged = shape[arguments[0] : arguments[1] + 1] if name == "Flatten" else shape
            launches += ["copied"] if sum(size > 1 for size in merged) > 1 else []
        elif LAUNCHES[name] == 0 and first in apart:
            apart.update(outputs)
        launches += [name] * LAUNCHES[name]
    return launches


def _tokens(heads: int, tokens: int = 1, batch: int = 1) -> mx.array:
    return mx.random.normal((batch, heads, tokens, D), key=mx.random.key(heads)).astype(mx.bfloat16)


def _arrays() -> list[mx.array]:
    return [mx.zeros((2, K, ROWS, D), mx.int8), mx.zeros((2, K, ROWS, D // 32), mx.float16)]


def _step(rows: PagedRows) -> Callable[..., list[mx.array]]:
    def step(query: mx.array, key: mx.array, value: mx.array, *arrays: mx.array) -> list[mx.array]:
        held = list(arrays)
        output, _ = multi_head_cache_attention(query, key, value, held, rows, **QUANTIZED)
        return [output, *held]

    return step


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations that are chosen for a GPU."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))


APPEND = ["CustomKernel"]
ATTEND = ["CustomKernel", "CustomKernel"]
PUT = ["ScatterAxis", "ScatterAxis"]
CENTER_AND_BALANCE: dict[str, Any] = {"center": ((1.0,) * D,) * K, "balance": ((1,) * D,) * K}
QUANTIZED: dict[str, Any] = {"quant_bit": 8, "quant_group": 32, "backend": "metal"}


@pytest.mark.parametrize("new_tokens", [1, 4])
def test_a_step_is_five_launches_a_layer(new_tokens: int) -> None:
    pages = step_pages([[0]], [0], [7], 7 + new_tokens, None)
    rows = PagedRows([(7, 7 + new_tokens)], [[(0, 7 + new_tokens)]], [0], None, pages)
    traced = _traced(_step(rows), *(_tokens(heads, new_tokens) for heads in (H, K, K)), *_arrays())
    assert traced == [*APPEND, "SliceUpdate", "SliceUpdate", *ATTEND]


@pytest.mark.parametrize("new_tokens", [1, 4])
def test_a_step_of_a_pool_s_sequences_is_five_launches_a_layer(new_tokens: int) -> None:
    """Several new tokens of each take a copy of values and one of scales more: sequences lie outside of
    heads there.
    """
    pages = step_pages([[3], [5, 1]], [0, 0], [9, 140], 256, None)
    runs = [[(384, 393 + new_tokens)], [(640, 768), (128, 140 + new_tokens)]]
    new = mx.array([row for own in runs for row in range(own[-1][1] - new_tokens, own[-1][1])])
    rows = PagedRows(new, runs, [0, 0], None, pages)

    traced = _traced(_step(rows), *(_tokens(heads, new_tokens, 2) for heads in (H, K, K)), *_arrays())
    assert sorted(traced) == sorted([*APPEND, *PUT, *ATTEND, *(["copied"] * 2 if new_tokens > 1 else [])])


@pytest.mark.parametrize("batch", [1, 2])
def test_an_exact_tail_is_one_pass_more_and_its_write(batch: int) -> None:
    """Of a token: its key and value as floats are put side by side, which takes two copies, and written."""
    pages = step_pages([[0], [1]][:batch], [0] * batch, [7] * batch, 8, None)
    ends = [8, 128 + 8][:batch]
    runs = [[(end - 8, end)] for end in ends]
    new = mx.array([end - 1 for end in ends]) if batch > 1 else [(7, 8)]
    spans = [ExactSpan(number) for number in range(batch)]
    exact = place_exact(spans, [7] * batch, 1, fused=True)
    rows = PagedRows(new, runs, [0] * batch, None, pages, exact)

    def step(query: mx.array, key: mx.array, value: mx.array, *arrays: mx.array) -> list[mx.array]:
        held = list(arrays[:2])
        tail = list(arrays[2:])
        output, _ = multi_head_cache_attention(query, key, value, held, rows, **QUANTIZED, exact_arrays=tail)
        return [output, *held, *tail]

    tail = mx.zeros((2, K, 2 * TAIL_ROWS, D), mx.bfloat16)
    traced = _traced(step, *(_tokens(heads, 1, batch) for heads in (H, K, K)), *_arrays(), tail)
    write = ["SliceUpdate"] if batch == 1 else PUT[:1]
    assert sorted(traced) == sorted([*APPEND, *write * 3, "Concatenate", "Concatenate", *ATTEND, ATTEND[0]])


@pytest.mark.parametrize("name", ["attend", "combine", "append"])
def test_mlx_gets_the_text_without_comments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hashes all of it at every launch."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(mx.fast, "metal_kernel", given.update)
    launch_module._kernel.__wrapped__(name, "metal")
    text = given["header"] + given["source"]
    assert "KVANT_UNROLL\nfor (" in text
    assert not any(mark in text for mark in ("//", "/*", "\n\n", "\n "))


# a layer as of 0.5B
SHAPE = Shape("launches", "qwen2", 896, 2, 14, 2, 64, 256, 512, True, large_key_bias=True)


def _one_launch(name: str) -> Callable[..., mx.array]:
    """A function of MLX that is one launch on a GPU, and several operations where there is none."""

    def call(x: mx.array, *others: Any, **_: Any) -> mx.array:
        arrays = [x, *(other for other in others if isinstance(other, mx.array) and name != "rms_norm")]
        names = [f"x{i}" for i in range(len(arrays))]
        kernel = mx.fast.metal_kernel(
            name=name, input_names=names, output_names=["y"], source=f"y[0] = x0[0]; // {name}"
        )
        shape = (*x.shape[:-1], arrays[-1].shape[-1])
        one: dict[str, Any] = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
        return kernel(inputs=arrays, output_shapes=[shape], output_dtypes=[x.dtype], **one)[0]

    return call


@pytest.fixture(scope="module", params=[0, 4], ids=["bfloat16", "4-bit weights"])
def weights(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[Path]]:
    """The bits of the weights, and models of one layer and of two."""
    folders = [tmp_path_factory.mktemp("launches") for _ in range(2)]
    for layers, folder in enumerate(folders, start=1):
        write_random(replace(SHAPE, num_hidden_layers=layers), folder, bits=request.param, group_size=32)
    return request.param, folders


def test_a_layer_takes_fewer_launches_than_mlx_lm_s(
    weights: tuple[int, list[Path]], gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token through kvant's layer, through mlx-lm's with kvant's cache, and with its own, which is not
    quantized.

    Nothing of a token is copied, and nothing is made float32. Of a draft's four tokens the new values and
    attention's output are copied. mlx-lm's attention to 1,024 tokens and more takes one launch more than is
    counted here.
    """
    bits, folders = weights
    found: dict[str, list[Counter[str]]] = {"kvant": [], "a draft": [], "bridged": [], "mlx-lm": []}
    made = [(load_decoder(folder), load_mlx_lm(folder)[0]) for folder in folders]
    caches = [
        (own.make_cache(64), kvant.make_prompt_cache(theirs, 64), make_prompt_cache(theirs))
        for own, theirs in made
    ]
    for (_, theirs), (*_, full) in zip(made, caches, strict=True):
        theirs(mx.arange(9)[None], cache=full)  # its arrays are there
        mx.eval([layer.state for layer in full])
    for name in ("rms_norm", "rope", "scaled_dot_product_attention"):
        monkeypatch.setattr(mx.fast, name, _one_launch(name))
    for module in (exponential, qwen2):  # compiled by both
        monkeypatch.setattr(module, "_swiglu" if module is exponential else "swiglu", _one_launch("swiglu"))
    for (own, theirs), (cache, bridged, full) in zip(made, caches, strict=True):

        def step(tokens: mx.array, own: Any = own, cache: Any = cache) -> mx.array:
            hidden: mx.array = own.hidden_states(tokens, None, cache)
            cache.batch.commit(ids=[[5] * tokens.shape[1]])
            return own.logits(hidden)

        ways = {
            "kvant": step,
            "a draft": partial(step, cache=own.make_cache(64)),
            "bridged": partial(theirs, cache=bridged),
            "mlx-lm": partial(theirs, cache=full),
        }
        for name, way in ways.items():
            found[name].append(Counter(_traced(way, mx.array([[5] * (4 if name == "a draft" else 1)]))))
    a_layer = {name: two - one for name, (one, two) in found.items()}
    assert a_layer["a draft"].pop("copied") == 2
    assert not {"copied", "AsType"} & {name for own in a_layer.values() for name in own}
    # mlx-lm adds the biases of queries, keys and values as it multiplies, if they are floats
    more = 3 if bits else 0
    # A bridged model's queries and keys are rotated, each by itself; Qwen2's own biases forbid it.
    totals = {name: own.total() for name, own in a_layer.items()}
    assert totals == {"kvant": 16, "a draft": 16, "bridged": 21 + more, "mlx-lm": 17 + more}


def test_a_front_takes_no_more_launches_than_two_transforms(
    weights: tuple[int, list[Path]], gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys go through it together: a transform, and a pass before it."""
    monkeypatch.setattr(key_transform, "_compiled", _one_launch("transform"))
    model, changed = load_decoder(weights[1][0]), {}
    for name, choice in {
        "none": {},
        "rotate": {"rotates": True},
        "all": {"rotates": True} | CENTER_AND_BALANCE,
    }.items():
        tuned = KVFormat("", (LayerChoice(8, 32, **choice),))
        cache = model.make_cache(64, kv_format=tuned, bias_split=False)
        layer: Any = next(iter(cache))
        changed[name] = Counter(
            _traced(lambda both, layer=layer: layer.transform.query_key(both, H), _tokens(H + K))
        )
    assert changed == {"none": {}, "rotate": {"Hadamard": 1}, "all": {"CustomKernel": 1, "Hadamard": 1}}
