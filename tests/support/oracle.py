"""NumPy oracle of PMX's cache operators, static and packed, written from the specification alone, slow and
plain.

B batch, N new tokens and T cached tokens of all sequences, H query heads, K kv heads, D head_dim, G group
size.

T1 is the dtype of the inputs, T2 of the cache, T3 of the scale. All three are given as names ("float16"),
because NumPy has no bfloat16: a bfloat16 array is held here as float32 whose values bfloat16 can represent.
Quantizing and dequantizing happen in the dtypes the specification names, so that quantized values compare
exactly; attention is float64 from end to end. Nothing is changed in place: a cache and a scale go in, new
ones come out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

MIN_SCALE = 1e-5
KEY, VALUE = 0, 1  # the two places of the cache's axis of size 2


class Spec(NamedTuple):
    """What the operators are told about the cache. The scale's dtype means nothing if quant_bit is 0."""

    dtype: str = "float32"  # T1
    cache_dtype: str = "float32"  # T2
    scale_dtype: str = "float32"  # T3
    num_layer: int = 1
    layer_idx: int = 0
    quant_bit: int = 0
    quant_group: int = 8
    cache_layout: int = 0


class Sequences(NamedTuple):
    """The sequences of a call: earlier and new tokens of each, and in a packed cache the row of every
    token.
    """

    earlier: list[int]
    new: list[int]
    rows: list[list[int]] | None = None

    @property
    def tokens(self) -> list[int]:
        return [a + b for a, b in zip(self.earlier, self.new, strict=True)]

    def places(self, only_new: bool) -> list[tuple[int, int]]:
        first = self.earlier if only_new else [0] * len(self.new)
        return [(b, t) for b, end in enumerate(self.tokens) for t in range(first[b], end)]


def cast(x: Array, dtype: str) -> Array:
    """x rounded to the nearest value of a dtype, ties to even."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    # bfloat16 is the upper half of a float32. Adding just under half of the lower half, and one more if the
    # upper half is odd, rounds to nearest even. A NaN would carry over into infinity, so it is put back.
    narrow = x.astype(np.float32)
    word = narrow.view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + ((word >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(narrow), narrow, rounded.view(np.float32))


def max_quantized(quant_bit: int) -> int:
    return int(2 ** (quant_bit - 1) - 1)


def quantized_and_scale(x: Array, dtype: str, quant_bit: int, quant_group: int) -> tuple[Array, Array]:
    """Signed quantized values (..., D) and their scale (..., D/G), every step rounded to T1."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // quant_group, quant_group)  # (..., D) -> (..., D/G, G)
    limit = max_quantized(quant_bit)
    peak = np.abs(groups).max(axis=-1)
    floor = cast(np.array(MIN_SCALE), dtype)
    # A quotient of two half-precision numbers taken in float32 and then rounded is the correctly rounded one.
    scale = np.maximum(cast(peak / peak.dtype.type(limit), dtype), floor)
    quotient = cast(groups / scale[..., None], dtype)
    quantized = np.clip(np.rint(quotient), -limit, limit).astype(np.int8)
    return quantized.reshape(x.shape), scale


def pack_nibbles(quantized: Array) -> Array:
    """Values (..., D) -> bytes (..., D/2): element 2i in the low nibble, 2i+1 in the high one, two's
    complement.
    """
    nibbles = quantized.astype(np.int8).view(np.uint8) & 0x0F
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: Array) -> Array:
    """Bytes (..., D/2) -> quantized values (..., D)."""
    nibbles = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.int16)
    nibbles[..., 0::2] = packed & 0x0F
    nibbles[..., 1::2] = packed >> 4
    return np.where(nibbles >= 8, nibbles - 16, nibbles).astype(np.int8)


def fitted(x: Array, group: int) -> tuple[Array, Array]:
    """4 bits as the engine's caches store them: signed values (..., D) and scales (..., D/G), as float32 has
    them.

    The largest magnitude is -8 times a first scale. The scale is the least squares one for the values.
    """
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, group)
    high, low = groups.max(axis=-1, keepdims=True), groups.min(axis=-1, keepdims=True)
    first = np.where(high > -low, high, low) * np.float32(-0.125) + np.float32(1e-30)
    quotient = groups / first
    levels = np.minimum(np.rint(quotient), 7).astype(np.int64)
    products, squares = (
        (levels * y.astype(np.float64)).sum(axis=-1, keepdims=True) for y in (quotient, levels)
    )
    scale = first * products / np.maximum(squares, 1)
    return levels.reshape(x.shape).astype(np.int8), scale[..., 0].astype(np.float32)


def check_scales(given: Array, expected: Array, *, fit: bool) -> None:
    """Scales are the same to the bit; fitted ones, whose sums have another order, to an ulp or two."""
    if fit:
        np.testing.assert_allclose(given, expected, rtol=1.1e-3 if given.dtype == np.float16 else 1e-5)
    else:
        np.testing.assert_array_equal(given, expected)


def quantize(x: Array, spec: Spec, *, fit: bool = False) -> tuple[Array, Array]:
    """What the cache stores for x: quantized values as T2 holds them, and the scale in T3.

    ``fit``: as the engine's caches do at 4 bits, in place of PMX's formula.
    """
    if fit:
        quantized, scale = fitted(x, spec.quant_group)
    else:
        quantized, scale = quantized_and_scale(x, spec.dtype, spec.quant_bit, spec.quant_group)
    return (pack_nibbles(quantized) if spec.quant_bit == 4 else quantized), cast(scale, spec.scale_dtype)


def dequantize(stored: Array, scale: Array, spec: Spec) -> Array:
    """Quantized values times the stored scale, the product rounded to T3 and then to T1."""
    quantized = unpack_nibbles(stored) if spec.quant_bit == 4 else stored
    groups = quantized.reshape(*scale.shape, spec.quant_group)  # (..., D) -> (..., D/G, G)
    product = cast(groups.astype(scale.dtype) * scale[..., None], spec.scale_dtype)
    return cast(product.reshape(quantized.shape), spec.dtype)


def floats(stored: Array, scale: Array | None, quant_bit: int, quant_group: int) -> Array:
    """Stored tokens in float64: quantized values times the stored scale, nothing rounded."""
    if scale is None:
        return stored.astype(np.float64)
    quantized = unpack_nibbles(stored) if quant_bit == 4 else stored
    return quantized * np.repeat(scale.astype(np.float64), quant_group, axis=-1)


def beside(key: Array, value: Array) -> Array:
    """Stored keys and values (..., last), or their scales, side by side in one array (..., both); bytes
    are bytes.
    """
    parts = [x.view(np.uint8) if x.dtype == np.int8 and value.dtype != key.dtype else x for x in (key, value)]
    return np.concatenate(parts, axis=-1)


def sides(stored: Array, scale: Array | None, key_dim: int, bits: Sequence[int], group: int) -> list[Array]:
    """Keys and values (K, T, D) in float64 of a cache (2, K, T, D'), or (1, K, T, both) where they lie
    side by side.
    """
    if len(stored) == 2:
        return [*floats(stored, scale, bits[0], group)]
    if scale is None:
        return np.split(floats(stored[0], None, 0, 0), [key_dim], axis=-1)
    parts = (
        np.split(stored[0], [key_dim * bits[0] // 8], axis=-1),
        np.split(scale[0], [key_dim // group], axis=-1),
    )
    dtypes = {8: np.int8, 4: np.uint8}
    return [
        floats(x.view(dtypes[own]), own_scale, own, group)
        for x, own_scale, own in zip(*parts, bits, strict=True)
    ]


def token(x: Array, kind: int, b: int, t: int, sequences: Sequences, spec: Spec) -> Array:
    """The writable view (K, last) of a token's key or value in a cache, or of its scale."""
    layer, every = spec.layer_idx, slice(None)
    if sequences.rows is None:  # (MaxB, L, 2, MaxS, K, last) or (L, MaxB, 2, K, MaxS, last)
        return x[((b, layer, kind, t), (layer, b, kind, every, t))[spec.cache_layout]]
    row = sequences.rows[b][t]
    # (MaxT, L, 2, K, last), (L, MaxT, 2, K, last), (L, 2, MaxT, K, last) or (L, 2, K, MaxT, last)
    places = ((row, layer, kind), (layer, row, kind), (layer, kind, row), (layer, kind, every, row))
    return x[places[spec.cache_layout]]


def store(
    key: Array, value: Array, sequences: Sequences, cache: Array, scale: Array | None, spec: Spec
) -> tuple[Array, Array | None]:
    """Copies of cache and scale with new keys and values (N, K, D) written."""
    cache, scale = cache.copy(), None if scale is None else scale.copy()
    for n, place in enumerate(sequences.places(only_new=True)):
        for kind, x in ((KEY, key), (VALUE, value)):
            if scale is None:
                token(cache, kind, *place, sequences, spec)[...] = cast(x[n], spec.cache_dtype)
            else:
                quantized, group_scale = quantize(x[n], spec)
                token(cache, kind, *place, sequences, spec)[...] = quantized
                token(scale, kind, *place, sequences, spec)[...] = group_scale
    return cache, scale


def fetch(sequences: Sequences, cache: Array, scale: Array | None, spec: Spec) -> tuple[Array, Array]:
    """Keys and values (T, K, D) of all tokens in T1."""

    def one(kind: int) -> Array:
        places = sequences.places(only_new=False)
        stored = np.stack([token(cache, kind, *place, sequences, spec) for place in places])
        if scale is None:
            return cast(stored, spec.dtype)
        scales = np.stack([token(scale, kind, *place, sequences, spec) for place in places])
        return dequantize(stored, scales, spec)

    return one(KEY), one(VALUE)


def alibi_slopes(num_heads: int) -> list[float]:
    """One slope per query head, for any number of heads."""
    power = 1
    while power * 2 <= num_heads:
        power *= 2
    regular = [2.0 ** (-8 * n / power) for n in range(1, power + 1)]
    between = [2.0 ** (-4 * n / power) for n in range(1, 2 * (num_heads - power), 2)]
    return regular + between


def added_mask(attn_mask: Array | None, b: int, h: int, num_keys: int) -> Array | float:
    """What a mask of any allowed shape and kind adds to the (S, T) scores of one sequence and query head."""
    if attn_mask is None or attn_mask.size == 0:
        return 0.0
    if attn_mask.ndim == 4:
        attn_mask = attn_mask[b if attn_mask.shape[0] > 1 else 0]
    if attn_mask.ndim == 3:
        attn_mask = attn_mask[h]
    attn_mask = attn_mask[:, :num_keys]  # what lies behind is padding
    if attn_mask.dtype == np.bool_:
        return np.where(attn_mask, 0.0, -np.inf)
    return attn_mask.astype(np.float64)


def softmax(scores: Array) -> Array:
    """Over the last axis; scores of nothing but -inf become zeros."""
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(peak), 0.0, peak))
    total = weights.sum(axis=-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)


def key_bias(bias: Array, pairs: Sequence[int], angle: Array, D: int) -> Array:
    """A bias (K, 2, P) of some rotary pairs, turned by the angles (T, P): what it adds to keys (T, K, D)."""
    return turned_bias(bias, pairs, np.cos(angle), np.sin(angle), D)


def turned_bias(bias: Array, pairs: Sequence[int], cosine: Array, sine: Array, D: int) -> Array:
    """The same of the angles' cosines and sines."""
    cosine, sine = cosine[:, None], sine[:, None]
    b1, b2 = bias.astype(np.float64).swapaxes(0, 1)
    output = np.zeros((len(cosine), len(bias), D))
    output[..., list(pairs)] = b1 * cosine - b2 * sine
    output[..., [p + D // 2 for p in pairs]] = b1 * sine + b2 * cosine
    return output


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool = True,
    is_alibi: bool = False,
    attn_mask: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention in float64. Query (B, S, H, D), key and value (B, T, K, D) -> (B, S, H, D).

    The queries are the last S of the T tokens. A query sees the last ``window`` tokens, its own included. A
    sink (H,) takes part in the softmax.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    position = np.arange(num_keys)
    distance = position - position[num_keys - num_queries :, None]  # (S, T): 0 at the query's own key
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h in np.ndindex(batch, num_heads):
        kv_head = h // (num_heads // num_kv_heads)
        q, k, v = (x.astype(np.float64) for x in (query[b, :, h], key[b, :, kv_head], value[b, :, kv_head]))
        scores = q @ k.T * (head_dim**-0.5 if scale is None else scale)
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores = scores + added_mask(attn_mask, b, h, num_keys)
        if is_alibi:
            scores = scores + alibi_slopes(num_heads)[h] * distance
        if is_alibi or (is_causal and num_queries > 1):
            scores = np.where(distance > 0, -np.inf, scores)
        if window is not None:
            scores = np.where(distance > -window, scores, -np.inf)
        v[np.isneginf(scores).all(axis=0)] = 0  # a token that nobody sees may be unknown: 0 times NaN is NaN
        sink = np.full((num_queries, 1), -np.inf if sinks is None else sinks[h])
        output[b, :, h] = softmax(np.concatenate([scores, sink], axis=-1))[:, :-1] @ v
    return output
