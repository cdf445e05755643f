"""The ways to attend that bench_attention.py compares: one set of keys and values, and a float64 reference."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from kvant.cache import QuantizedKVCache
from kvant.operators.attention import attend_tokens
from kvant.operators.cached_attention import read_tokens, write_tokens
from kvant.operators.kernels.attend import PAGE_SIZE, attend

SHAPES = {  # query heads, kv heads, head_dim, layers
    "qwen2.5-0.5b": (14, 2, 64, 24),
    "qwen2.5-7b": (28, 4, 128, 28),
    "qwen3-4b": (32, 8, 128, 36),
}
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
PATHS = ("unfused", "fused")
SPARE = 256  # tokens reserved past the context, as every cache has some
CHUNK = 8192  # tokens made at a time
# Relative error, root mean square: to the same cache in float64, by dtype; to one that is not quantized, by bits.
EXACT = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
MLX_LM_FACTOR = 5  # its scores are in the activations' dtype, on a CPU its sums too
QUANTIZED = {0: 0.0, 8: 0.02, 4: 0.25}

Arrays = list[mx.array]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to attend.

    Attributes:
        path: unfused, fused, mlx or mlx-lm.
        detail: how it differs from another of the same path; empty: it does not.
        layers: the arrays of each.
        attend: (query (1, H, 1, D), a layer's arrays) -> (1, H, 1, D).
        stored: a layer's arrays -> keys and values (1, K, T, D) as they are stored, float32.
    """

    name: str
    path: str
    bits: int
    group: int | None
    layers: list[Arrays]
    attend: Callable[[mx.array, Arrays], mx.array]
    stored: Callable[[Arrays], Sequence[mx.array]]
    detail: str = ""

    @property
    def token_bytes(self) -> int:
        """Bytes of one cached token in one layer, keys and values."""
        arrays = self.layers[0]
        return sum(array.nbytes for array in arrays) // arrays[0].shape[-2]

    @property
    def label(self) -> str:
        """The name, with the path where there are two."""
        named = f"{self.name} {self.path}" if self.path in PATHS else self.name
        return f"{named}, {self.detail}" if self.detail else named


def make_variants(shape: str, context: int, layers: int, plan: dict[str, Any]) -> list[Variant]:
    """All variants of a case over the same random keys and values, the baseline first."""
    _, kv_heads, head_dim, _ = SHAPES[shape]
    dtype = DTYPES[plan["dtype"]]
    room, scale = context + SPARE, head_dim**-0.5

    def sliced(arrays: Arrays) -> Arrays:  # as mlx-lm's caches hand them out
        return [array[..., :context, :] for array in arrays]

    variants = [
        Variant(
            name=f"MLX {plan['dtype']}",
            path="mlx",
            bits=0,
            group=None,
            layers=[[mx.zeros((1, kv_heads, room, head_dim), dtype) for _ in "kv"] for _ in range(layers)],
            attend=lambda query, arrays: mx.fast.scaled_dot_product_attention(query, *sliced(arrays), scale=scale),
            stored=sliced,
        )
    ]
    for bits in [bits for bits in plan["bits"] if bits]:
        group = plan["mlx_lm_group"]

        def pair(query: mx.array, arrays: Arrays, bits: int = bits, group: int = group) -> mx.array:
            keys, values = tuple(sliced(arrays[:3])), tuple(sliced(arrays[3:]))
            query = query.reshape(query.shape)  # another object of the same array: mlx-lm scales it with *=
            return quantized_scaled_dot_product_attention(query, keys, values, scale, None, group, bits)

        def dequantized(arrays: Arrays, bits: int = bits, group: int = group) -> list[mx.array]:
            return [mx.dequantize(*sliced(half), group_size=group, bits=bits) for half in (arrays[:3], arrays[3:])]

        widths = [(head_dim * bits // 32, mx.uint32), (head_dim // group, dtype), (head_dim // group, dtype)] * 2
        variants.append(
            Variant(
                name=f"mlx-lm {bits}-bit",
                path="mlx-lm",
                bits=bits,
                group=group,
                layers=[[mx.zeros((1, kv_heads, room, w), kind) for w, kind in widths] for _ in range(layers)],
                attend=pair,
                stored=dequantized,
            )
        )
    offset = mx.array(context - 1)  # the new token is in the cache already
    for bits in plan["bits"]:
        group = plan["group"] if bits else 1

        form = {"quant_bit": bits, "quant_group": group, "backend": plan["backend"]}

        def fused(query: mx.array, arrays: Arrays, form: dict[str, Any] = form, **options: Any) -> mx.array:
            cache, *scales = arrays
            return attend(query, cache, scales[0] if scales else None, offset, **form, **options)

        def stored(arrays: Arrays, bits: int = bits, kind: mx.Dtype = dtype) -> tuple[mx.array, mx.array]:
            cache, *scales = arrays
            scale = scales[0] if scales else None
            return read_tokens(context, cache, scale, quant_bit=bits, dtype=kind)

        def unfused(query: mx.array, arrays: Arrays, stored: Callable[..., Any] = stored) -> mx.array:
            return attend_tokens(query, *stored(arrays))

        def exact(arrays: Arrays, stored: Callable[..., Any] = stored) -> Sequence[mx.array]:
            return stored(arrays, kind=mx.float32)  # type: ignore[no-any-return]

        caches = [
            QuantizedKVCache(room, kv_heads, head_dim, quant_bit=bits, quant_group=group, dtype=dtype)
            for _ in range(layers)
        ]
        ways = [(path, "", fused if path == "fused" else unfused) for path in plan["paths"]]
        if "fused" in plan["paths"]:
            ways += [("fused", f"{n} queries", partial(fused, queries=n)) for n in plan["queries"]]
        variants += [
            Variant(
                name=f"kvant {bits}-bit",
                path=path,
                bits=bits,
                group=group if bits else None,
                layers=[cache.arrays for cache in caches],
                attend=attend_one,
                stored=exact,
                detail=detail,
            )
            for path, detail, attend_one in ways
        ]
    for layer in range(layers):
        _fill(variants, layer, room, kv_heads, head_dim, dtype, plan["seed"])
    if plan["paged"] and "fused" in plan["paths"]:
        plain = [variant for variant in variants if (variant.path, variant.detail) == ("fused", "")]
        variants += [_paged(variant, room // PAGE_SIZE, plan["seed"]) for variant in plain]
    return variants


def _paged(variant: Variant, pages: int, seed: int) -> Variant:
    """The fused kernel over the same keys and values in a pool, whose pages lie in no order."""
    order = mx.random.permutation(pages, key=mx.random.key(seed))  # page i of the pool is page order[i] of the sequence
    table = mx.argsort(order).astype(mx.int32)[None]
    first = mx.zeros(1, mx.int32)

    def moved(array: mx.array, numbers: mx.array) -> mx.array:
        """The pages of (..., rows, last) in another order."""
        rows = pages * PAGE_SIZE
        parts = mx.unflatten(array[..., :rows, :], -2, (pages, PAGE_SIZE))
        return mx.contiguous(mx.take(parts, numbers, axis=-3).flatten(-3, -2))

    def stored(arrays: Arrays) -> Sequence[mx.array]:
        return variant.stored([moved(array, table[0])[None, None] for array in arrays])

    # (1, 1, 2, K, MaxS, last) -> (2, K, rows, last)
    layers = [[moved(array[0, 0], order) for array in arrays] for arrays in variant.layers]
    mx.eval(layers, table, first)
    attend_pages = partial(variant.attend, pages=table, first=first)
    return replace(variant, layers=layers, attend=attend_pages, stored=stored, detail="pages")


def _fill(
    variants: list[Variant], layer: int, room: int, kv_heads: int, head_dim: int, dtype: mx.Dtype, seed: int
) -> None:
    """The same keys and values into the layer of every variant, all reserved tokens."""
    for start in range(0, room, CHUNK):
        shape = (1, kv_heads, min(CHUNK, room - start), head_dim)
        seeds = mx.random.split(mx.random.key(seed + 2 + layer * 1000 + start // CHUNK))
        pair = [mx.random.normal(shape, key=key).astype(dtype) for key in seeds]
        filled: list[int] = []
        for variant in variants:
            arrays = variant.layers[layer]
            if id(arrays) in filled:  # the two paths share a cache
                continue
            filled.append(id(arrays))
            end = start + shape[2]
            if variant.path == "mlx":
                parts = pair
            elif variant.path == "mlx-lm":
                parts = [part for x in pair for part in mx.quantize(x, variant.group, variant.bits)]
            else:
                group = variant.group or 1
                scale = arrays[1] if variant.bits else None
                write_tokens(*pair, start, arrays[0], scale, quant_bit=variant.bits, quant_group=group)
                parts = []
            for array, part in zip(arrays, parts, strict=False):
                array[..., start:end, :] = part
            mx.eval(arrays)


def check(variants: Sequence[Variant], query: mx.array, dtype: str) -> dict[str, dict[str, float]]:
    """Every variant's relative error in the first layer, to its own cache and to the one that is not quantized.

    Raises:
        ArithmeticError: one is wrong.
    """
    wanted = reference(query, variants[0].stored(variants[0].layers[0]))
    errors = {}
    for variant in variants:
        got = np.array(variant.attend(query, variant.layers[0]).astype(mx.float32), np.float64)
        own = reference(query, variant.stored(variant.layers[0]))
        error = {"own_cache": _relative(got, own), "unquantized": _relative(got, wanted)}
        exact = EXACT[dtype] * (MLX_LM_FACTOR if variant.path == "mlx-lm" else 1)
        bounds = {"own_cache": exact, "unquantized": exact + QUANTIZED[variant.bits]}
        errors[variant.label] = error
        for name, bound in bounds.items():
            if not error[name] <= bound:
                raise ArithmeticError(
                    f"{variant.label} is wrong: its error to {name} is {error[name]:.2g}, over {bound}"
                )
    return errors


def reference(query: mx.array, stored: Sequence[mx.array]) -> "np.ndarray[Any, Any]":
    """Attention in NumPy, float64, a kv head at a time: (1, H, 1, D)."""
    H, D = query.shape[1], query.shape[3]
    K = stored[0].shape[1]
    queries = np.array(query.astype(mx.float32), np.float64).reshape(K, H // K, D)
    outputs = []
    for head in range(K):
        key, value = (np.array(x[0, head].astype(mx.float32), np.float64) for x in stored)
        scores = queries[head] @ key.T / math.sqrt(D)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(weights @ value / weights.sum(axis=-1, keepdims=True))
    return np.concatenate(outputs).reshape(1, H, 1, D)


def _relative(got: "np.ndarray[Any, Any]", wanted: "np.ndarray[Any, Any]") -> float:
    return float(np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)))
