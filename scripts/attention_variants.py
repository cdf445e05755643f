"""The ways to attend that bench_attention.py compares: one set of keys and values, and a float64
reference.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from kvant.operators.attention import attend_tokens
from kvant.operators.kernels.attend import PAGE_SIZE, attend
from kvant.operators.quantization import quantized_dtype
from kvant.operators.stored_tokens import float_tokens, stored_tokens

SHAPES = {  # query heads, kv heads, head_dim, layers
    "qwen2.5-0.5b": (14, 2, 64, 24),
    "qwen2.5-7b": (28, 4, 128, 28),
    "qwen3-4b": (32, 8, 128, 36),
}
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
SPARE = 256  # tokens reserved past the context, as every cache has some
GROUP, MLX_LM_GROUP = 32, 64  # the defaults
# Relative error, root mean square: to the same cache in float64, by dtype; to one that is not quantized, by
# bits.
EXACT = {"float32": 1e-4, "bfloat16": 2e-2}
MLX_LM_FACTOR = 5  # its scores are in the activations' dtype, on a CPU its sums too
QUANTIZED = {0: 0.0, 8: 0.02, 4: 0.25}

Arrays = list[mx.array]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to attend."""

    label: str
    path: str  # unfused, fused, pages (the fused kernel over a pool's pages), mlx or mlx-lm
    bits: int
    layers: list[Arrays]
    attend: Callable[[mx.array, Arrays], mx.array]  # (query (1, H, 1, D), a layer's arrays) -> (1, H, 1, D)
    stored: Callable[[Arrays], Sequence[mx.array]]  # keys and values (1, K, T, D) as they are stored, float32

    @property
    def token_bytes(self) -> int:
        """Bytes of one cached token in one layer, keys and values."""
        arrays = self.layers[0]
        return sum(array.nbytes for array in arrays) // arrays[0].shape[-2]


def make_variants(shape: str, context: int, layers: int, plan: dict[str, Any]) -> list[Variant]:
    """All variants of a case over the same random keys and values, the baseline first."""
    _, kv_heads, head_dim, _ = SHAPES[shape]
    dtype, room = DTYPES[plan["dtype"]], context + SPARE
    pairs = []
    for layer in range(layers):
        keys = mx.random.split(mx.random.key(layer))
        pairs.append([mx.random.normal((1, kv_heads, room, head_dim), key=key).astype(dtype) for key in keys])
    mx.eval(pairs)
    variants = [_mlx(pairs, context, plan["dtype"])]
    variants += [_mlx_lm(pairs, context, bits) for bits in plan["bits"] if bits]
    for bits in plan["bits"]:
        variants += _kvant(pairs, context, bits, plan)
    mx.eval([variant.layers for variant in variants])
    return variants


def _sliced(arrays: Arrays, context: int) -> Arrays:  # as mlx-lm's caches hand them out
    return [array[..., :context, :] for array in arrays]


def _mlx(pairs: list[Arrays], context: int, dtype: str) -> Variant:
    def attend_one(query: mx.array, arrays: Arrays) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            query, *_sliced(arrays, context), scale=query.shape[-1] ** -0.5
        )

    return Variant(f"MLX {dtype}", "mlx", 0, pairs, attend_one, partial(_sliced, context=context))


def _mlx_lm(pairs: list[Arrays], context: int, bits: int) -> Variant:
    def attend_one(query: mx.array, arrays: Arrays) -> mx.array:
        keys, values = tuple(_sliced(arrays[:3], context)), tuple(_sliced(arrays[3:], context))
        # another object: mlx-lm scales it with *=
        scale, query = query.shape[-1] ** -0.5, query.reshape(query.shape)
        return quantized_scaled_dot_product_attention(query, keys, values, scale, None, MLX_LM_GROUP, bits)

    def stored(arrays: Arrays) -> Arrays:
        halves = (arrays[:3], arrays[3:])
        return [mx.dequantize(*_sliced(half, context), group_size=MLX_LM_GROUP, bits=bits) for half in halves]

    layers = [[part for x in pair for part in mx.quantize(x, MLX_LM_GROUP, bits)] for pair in pairs]
    return Variant(f"mlx-lm {bits}-bit", "mlx-lm", bits, layers, attend_one, stored)


def _kvant(pairs: list[Arrays], context: int, bits: int, plan: dict[str, Any]) -> list[Variant]:
    """One for each path, over the same caches."""
    group, offset = GROUP if bits else 1, mx.array(context - 1)  # the new token is in the cache already
    dtype, room = pairs[0][0].dtype, pairs[0][0].shape[2]

    def fused(query: mx.array, arrays: Arrays, **options: Any) -> mx.array:
        cache, scale = [*arrays, None][:2]
        form = {"quant_bit": bits, "quant_group": group, "backend": plan["backend"]}
        return attend(query, cache, scale, offset, **form, **options)  # type: ignore[arg-type]

    def read(arrays: Arrays, kind: mx.Dtype) -> tuple[mx.array, mx.array]:
        return float_tokens([array[0, ..., :context, :] for array in arrays], quant_bit=bits, dtype=kind)

    def unfused(query: mx.array, arrays: Arrays) -> mx.array:
        return attend_tokens(query, *read(arrays, dtype))

    like = [mx.zeros(0, kind) for kind in ([quantized_dtype(bits), mx.float16] if bits else [dtype])]
    stored = (stored_tokens(*pair, like, quant_bit=bits, quant_group=group) for pair in pairs)
    layers = [[part[None] for part in parts] for parts in stored]  # (1, 1, 2, K, MaxS, last)
    ways = {"fused": fused, "unfused": unfused}
    found = [
        Variant(f"kvant {bits}-bit {path}", path, bits, layers, ways[path], partial(read, kind=mx.float32))
        for path in plan["paths"]
    ]
    if plan["paged"]:
        found += [_paged(variant, room // PAGE_SIZE) for variant in found if variant.path == "fused"]
    return found


def _paged(variant: Variant, pages: int) -> Variant:
    """The fused kernel over the same keys and values in a pool, whose pages lie in no order."""
    # page i of the pool is page order[i] of the sequence
    order = mx.random.permutation(pages, key=mx.random.key(0))
    table = mx.argsort(order).astype(mx.int32)[None]
    first = mx.zeros(1, mx.int32)

    def moved(array: mx.array, numbers: mx.array) -> mx.array:
        """The pages of (..., rows, last) in another order."""
        parts = mx.unflatten(array[..., : pages * PAGE_SIZE, :], -2, (pages, PAGE_SIZE))
        return mx.contiguous(mx.take(parts, numbers, axis=-3).flatten(-3, -2))

    def stored(arrays: Arrays) -> Sequence[mx.array]:
        return variant.stored([moved(array, table[0])[None, None] for array in arrays])

    # (1, 1, 2, K, MaxS, last) -> (2, K, rows, last)
    layers = [[moved(array[0, 0], order) for array in arrays] for arrays in variant.layers]
    attend_pages = partial(variant.attend, pages=table, first=first)
    label = f"{variant.label}, pages"
    return replace(variant, label=label, path="pages", layers=layers, attend=attend_pages, stored=stored)


def check(variants: Sequence[Variant], query: mx.array, dtype: str) -> dict[str, dict[str, float]]:
    """Every variant's relative error in the first layer, to its own cache and to the one that is not
    quantized.

    An ArithmeticError if one is wrong.
    """
    wanted = reference(query, variants[0].stored(variants[0].layers[0]))
    errors = {}
    for variant in variants:
        got = np.array(variant.attend(query, variant.layers[0]).astype(mx.float32), np.float64)
        own = reference(query, variant.stored(variant.layers[0]))
        error = errors[variant.label] = {
            "own_cache": _relative(got, own),
            "unquantized": _relative(got, wanted),
        }
        exact = EXACT[dtype] * (MLX_LM_FACTOR if variant.path == "mlx-lm" else 1)
        for name, bound in (("own_cache", exact), ("unquantized", exact + QUANTIZED[variant.bits])):
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
