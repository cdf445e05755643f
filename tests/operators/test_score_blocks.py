"""Where MLX's attention makes a score matrix, and prefill on a GPU without one.

A GPU is simulated: kvant chooses as for one, and a CPU computes. B batch, S new tokens, T tokens in all, H
query heads, K kv heads, D head_dim.
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.bridged import alone
from support.numbers import normal, relative_error
from support.operator_cases import to_numpy

from kvant.bridge import hook
from kvant.operators import attention as attention_module
from kvant.operators.attention import attend_as_mlx, attend_tokens
from kvant.operators.masks import window_mask
from kvant.operators.paged_attention import multi_head_cache_attention
from kvant.operators.paged_rows import PagedRows
from kvant.operators.score_blocks import Device, Mask, makes_scores

READ_VERSION = "0.32.4"
HALF, FLOAT = mx.bfloat16, mx.float32
Call = tuple[int, int, mx.Dtype, Any]
Traced = tuple[str, tuple[int, ...], mx.Dtype]  # an operation, and the shape and dtype of what it makes

# device, S, T, query heads of a kv head, widths of keys and values, mask, dtype: whether scores are made
TABLE: list[tuple[Device, int, int, int, tuple[int, int], Mask, mx.Dtype, bool]] = [
    *[
        ("metal", 512, 4096, 4, (D, D), "causal", HALF, D not in (64, 72, 80, 96, 128))
        for D in range(32, 544, 8)
    ],
    *[
        ("metal", 512, 4096, 4, (128, 128), mask, FLOAT, False)
        for mask in ("none", "causal", "boolean", "added")
    ],
    *[("metal", 9, 4096, 1, (256, 256), mask, HALF, True) for mask in ("none", "causal", "boolean", "added")],
    ("metal", 9, 4096, 64, (80, 80), "causal", HALF, False),
    ("metal", 512, 4096, 4, (96, 64), "causal", HALF, False),
    ("metal", 512, 4096, 4, (192, 128), "causal", HALF, True),
    *[("metal", 8, 4096, 4, (D, D), "causal", HALF, D not in (64, 96, 128, 256)) for D in range(32, 544, 8)],
    *[("metal", 8, 4096, 4, widths, "added", HALF, False) for widths in ((96, 64), (192, 128), (256, 256))],
    *[("metal", 1, 4096, 32 * more, (128, 128), "causal", HALF, more > 1) for more in (1, 2)],
    ("metal", 8, 4096, 5, (128, 128), "causal", HALF, True),
    ("metal", 1, 1024, 8, (512, 512), "causal", HALF, False),
    ("metal", 1, 1023, 8, (512, 512), "causal", HALF, True),
    ("metal", 1, 1024, 4, (512, 512), "causal", HALF, True),
    ("metal", 1, 1024, 8, (512, 512), "boolean", HALF, True),
    *[("cuda", 512, 4096, 4, (D, D), "causal", HALF, D > 128 or D % 8 != 0) for D in range(36, 300, 4)],
    ("cuda", 512, 4096, 4, (128, 64), "added", mx.float16, False),
    ("cuda", 512, 4096, 4, (128, 128), "boolean", HALF, True),
    ("cuda", 512, 4096, 4, (128, 128), "causal", FLOAT, True),
    *[("cuda", S, 4096, 4, (128, 128), "causal", FLOAT, S > 3) for S in (1, 3, 4)],
    ("cuda", 1, 4096, 4, (80, 80), "causal", HALF, True),
    ("cuda", 1, 4096, 4, (64, 64), "added", HALF, True),
    ("cpu", 512, 4096, 4, (128, 128), "causal", FLOAT, True),
]


def test_the_conditions_are_those_of_the_mlx_that_was_read() -> None:
    assert mx.__version__ == READ_VERSION, (
        f"MLX {mx.__version__} is installed; makes_scores has the conditions of {READ_VERSION}. Read "
        f"has_fused_kernel "
        "and use_fallback in mlx/backend/metal/scaled_dot_product_attention.cpp, and supports_sdpa_cudnn and "
        "supports_sdpa_vector in mlx/backend/cuda/, then set makes_scores, this table and READ_VERSION"
    )
    for device, S, T, group, (key_dim, value_dim), mask, dtype, expected in TABLE:
        made = makes_scores(device, (2 * group, S, key_dim), (2, T, value_dim), mask, dtype)
        assert made is expected, (
            f"{device}, {S} queries, {T} tokens, {group=}, {key_dim=}, {value_dim=}, {mask}, {dtype}"
        )


def test_a_cpu_makes_scores() -> None:
    """As MLX itself traces it."""
    query, key = normal(1, 1, 4, 16, 128), normal(2, 1, 2, 48, 128)
    traced = _traced(
        lambda q, k: mx.fast.scaled_dot_product_attention(q, k, k, scale=1.0, mask="causal"), query, key
    )
    assert any(math.prod(shape) == 4 * 16 * 48 for _, shape, _ in traced)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))


@pytest.fixture
def calls(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Of MLX's attention, in whose place nothing is computed; kvant takes as many scores at once as BLOCK
    queries have.

    A call is queries, tokens, the keys' dtype and the mask.
    """
    seen: list[Call] = []
    monkeypatch.setattr(attention_module, "GPU_BLOCK_SCORES", BLOCK * H * ALL)

    def attend(query: mx.array, key: mx.array, value: mx.array, *, mask: Any, **_: Any) -> mx.array:
        seen.append((query.shape[2], key.shape[2], key.dtype, mask))
        return query + key[:, :1, :1] + value[:, :1, :1]

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
    return seen


def _traced(function: Callable[..., Any], *arrays: mx.array) -> list[Traced]:
    """Every array that MLX traces, by the operation that makes it."""
    records: list[dict[str, Any]] = []
    mx.export_function(records.append, function, *arrays)
    return [
        (record["name"], tuple(shape), dtype)
        for record in records
        if record["type"] == "primitive"
        for _, shape, dtype in record["outputs"]
    ]


H, K = 4, 2
QUERIES, TOKENS, WINDOW = 48, 400, 90


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("kind", ["causal", "window", "sinks"])
def test_blocks_on_a_gpu_are_attention(
    kind: str, D: int, dtype: mx.Dtype, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvant's own attention and the hook's, both in blocks of 7 queries, against float64."""
    shapes = ((H, QUERIES), (K, TOKENS), (K, TOKENS))
    query, key, value = (
        normal(i, 1, heads, count, D).astype(dtype) for i, (heads, count) in enumerate(shapes)
    )
    mask = window_mask(QUERIES, TOKENS, WINDOW) if kind == "window" else None
    sinks = normal(5, H).astype(dtype) if kind == "sinks" else None
    exact = oracle.attend(
        *(to_numpy(x).swapaxes(1, 2) for x in (query, key, value)),
        window=None if mask is None else WINDOW,
        sinks=None if sinks is None else to_numpy(sinks),
    )
    expected = mx.array(exact.swapaxes(1, 2).astype(np.float32))
    monkeypatch.setattr(attention_module, "GPU_BLOCK_SCORES", 7 * H * TOKENS)
    lengths: list[int] = []
    plain = mx.fast.scaled_dot_product_attention

    def counted(query: mx.array, *given: Any, **named: Any) -> mx.array:
        lengths.append(query.shape[2])
        return plain(query, *given, **named)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counted)
    in_blocks, tolerance = [7] * 6 + [6], 1e-5 if dtype == mx.float32 else 4e-3
    output = attend_tokens(query, key, value, mask=mask, sinks=sinks)
    assert relative_error(output.astype(mx.float32), expected) < tolerance
    assert lengths == (in_blocks if D == 256 or mask is not None else [QUERIES])
    masks = (
        ["causal"] if mask is None else [mask, mask[None, None], mx.where(mask, 0.0, -math.inf).astype(dtype)]
    )
    for each in masks:
        lengths.clear()
        output = attend_as_mlx(query, key, value, scale=D**-0.5, mask=each, sinks=sinks)
        assert relative_error(output.astype(mx.float32), expected) < tolerance
        assert lengths == (in_blocks if D == 256 else [QUERIES])


CHUNK, PAST, BLOCK = 48, 2000, 16
ALL = PAST + CHUNK


@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_chunk_of_a_decoder_is_read_once(bits: int, D: int, calls: list[Call]) -> None:
    rows = PagedRows([(PAST, ALL)], [[(0, ALL)]], [0], None)
    arrays = [mx.zeros((2, K, ALL, D * bits // 8), mx.int8 if bits == 8 else mx.uint8)]
    arrays.append(mx.zeros((2, K, ALL, D // 32), mx.float16))

    def chunk(query: mx.array, key: mx.array, value: mx.array, *stored: mx.array) -> list[mx.array]:
        held = list(stored)
        output, _ = multi_head_cache_attention(query, key, value, held, rows, quant_bit=bits, quant_group=32)
        return [output, *held]

    # attention that MLX makes scores for is float32: it would round them to bfloat16
    _check_chunk(_traced(chunk, *_new(D), *arrays), D, calls, mx.float32 if D == 256 else HALF)


@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_chunk_of_a_bridged_model_is_read_once(bits: int, D: int, calls: list[Call]) -> None:
    layer = alone(ALL, (D, D), dtype=HALF, kv_bits=bits)
    mx.eval(layer.update_and_fetch(*[mx.zeros((1, K, PAST, D), HALF)] * 2))

    def chunk(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
        mask = layer.make_mask(CHUNK)
        fetched = layer.update_and_fetch(key, value)
        return hook.attention(query, *fetched, cache=layer, scale=D**-0.5, mask=mask)

    _check_chunk(_traced(chunk, *_new(D)), D, calls, HALF)


def _new(D: int) -> list[mx.array]:
    """A chunk's queries, keys and values."""
    return [normal(heads, 1, heads, CHUNK, D).astype(HALF) for heads in (H, K, K)]


def _check_chunk(traced: list[Traced], D: int, calls: list[Call], dtype: mx.Dtype) -> None:
    """Rows become floats once, in half precision: the product in the scale's dtype, then the model's.

    No array is of queries times tokens, and a few queries at a time have scores.
    """
    converted = [
        kind for name, shape, kind in traced if name == "AsType" and math.prod(shape) == 2 * K * ALL * D
    ]
    assert [kind for kind in converted if mx.issubdtype(kind, mx.floating)] == [mx.float16, HALF]
    wide = [kind for _, shape, kind in traced if math.prod(shape) >= K * ALL * D and kind == mx.float32]
    assert len(wide) == (0 if dtype == HALF else 2)  # keys, values
    assert not [shape for _, shape, _ in traced if CHUNK in shape and ALL in shape]
    blocks = 1 if D == 128 else CHUNK // BLOCK
    ends = [(CHUNK // blocks, PAST + CHUNK // blocks * (i + 1)) for i in range(blocks)]
    assert calls == [(count, tokens, dtype, "causal") for count, tokens in ends]
