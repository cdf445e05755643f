"""Checks of the public operators. They run before anything is written, so a call that fails changes no cache."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit
from kvant.operators.quantization import FLOAT_DTYPES, SCALE_DTYPES, check_quantization, quantized_dtype

KEY_INPUTS = ("current_key", "current_value")
MAX_ELEMENTS = 2**31 - 1  # of a result. MLX counts with 32 bits in places
LAYOUTS = (("MaxB", "L", "2", "MaxS", "H", "Dh"), ("L", "MaxB", "2", "H", "MaxS", "Dh"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCall:
    """One checked call.

    Attributes:
        arrays: the caller's cache, and scale where there is one.
        batch, new_tokens, head_dim: B, S, D.
        start, end: tokens in the cache before and after the call.
        layer_idx, quant_bit, quant_group, cache_layout: as given.
    """

    arrays: list[mx.array]
    batch: int
    new_tokens: int
    head_dim: int
    start: int
    layer_idx: int
    quant_bit: int
    quant_group: int
    cache_layout: int

    @property
    def end(self) -> int:
        return self.start + self.new_tokens


def check_cache_call(
    current_key: mx.array,
    current_value: mx.array,
    start_pos: int | mx.array,
    cache: mx.array,
    scale: mx.array | None,
    *,
    num_layer: int,
    layer_idx: int,
    quant_bit: int,
    quant_group: int,
    cache_layout: int,
) -> CacheCall:
    """Check the inputs both static operators share; raise a ValueError that names the first defect."""
    check_current(("B", "S", "H", "Dh"), current_key, current_value, cache, scale, quant_bit, quant_group)
    sizes = check_layout(
        LAYOUTS,
        current_key,
        cache,
        scale,
        num_layer=num_layer,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
    )
    B, S, _, D = current_key.shape
    if sizes["MaxB"] < B:
        raise ValueError(f"current_key has a batch of {B}; the cache holds {sizes['MaxB']}")
    start = _start(start_pos)
    if start < 0 or start + S > sizes["MaxS"]:
        raise ValueError(f"start_pos {start} and {S} new tokens do not fit a cache of {sizes['MaxS']} positions")
    return CacheCall(
        arrays=[cache] if scale is None else [cache, scale],
        batch=B,
        new_tokens=S,
        head_dim=D,
        start=start,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
    )


def check_current(
    axes: Sequence[str],
    current_key: mx.array,
    current_value: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    quant_bit: int,
    quant_group: int,
) -> None:
    """Check the new keys and values, which have these axes, the dtypes of cache and scale, and the quantization."""
    for name, x in (("cache", cache), ("scale", scale), *zip(KEY_INPUTS, (current_key, current_value), strict=True)):
        if not isinstance(x, mx.array) and not (name == "scale" and x is None):
            raise ValueError(f"{name} is a {type(x).__name__}; expected an mx.array")
    for name, x in zip(KEY_INPUTS, (current_key, current_value), strict=True):
        if x.ndim != len(axes):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {len(axes)} dimensions ({', '.join(axes)})")
    if current_key.shape != current_value.shape:
        raise ValueError(
            f"current_value has shape {tuple(current_value.shape)}; expected current_key's, {tuple(current_key.shape)}"
        )
    if current_key.dtype != current_value.dtype:
        raise ValueError(f"current_value is {current_value.dtype}, current_key {current_key.dtype}; expected one dtype")
    if 0 in current_key.shape:
        raise ValueError(f"current_key has shape {tuple(current_key.shape)}; expected at least 1 in every dimension")
    check_quantization(quant_bit, quant_group, current_key.shape[-1])
    _check_dtypes(current_key.dtype, cache, scale, quant_bit)


def check_repeat(num_repeat: int, elements: int) -> None:
    """Check KeyValueCache's ``num_repeat``. Keys have so many elements without repetition."""
    if isinstance(num_repeat, bool) or not isinstance(num_repeat, int) or num_repeat < 1:
        raise ValueError(f"num_repeat is {num_repeat!r}; expected a positive int")
    if elements * num_repeat > MAX_ELEMENTS:
        raise ValueError(f"num_repeat is {num_repeat}; expected at most {MAX_ELEMENTS // elements} for this call")


def check_heads(
    query: mx.array,
    current_key: mx.array,
    attn_mask: mx.array | None,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    is_causal: bool,
    is_alibi: bool,
) -> mx.array | None:
    """Check the inputs that only MultiHeadCacheAttention has, but the mask's shape; return the mask, or None.

    Query and key have the same axes, the last two heads and head_dim.
    """
    for name, flag in (("is_causal", is_causal), ("is_alibi", is_alibi)):
        if type(flag) is not bool:
            raise ValueError(f"{name} is {flag!r}; expected True or False")
    for name, array in (("query", query), ("attn_mask", attn_mask)):
        if not isinstance(array, mx.array) and not (name == "attn_mask" and array is None):
            raise ValueError(f"{name} is a {type(array).__name__}; expected an mx.array")
    K = num_heads if as_int(num_kv_heads, "num_kv_heads") == 0 else num_kv_heads
    for name, count in (("num_heads", num_heads), ("num_kv_heads", K), ("head_dim", head_dim)):
        if as_int(count, name) < 1:
            raise ValueError(f"{name} is {count}; expected a positive int")
    if num_heads % K:
        raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {K}")
    lead = tuple(current_key.shape[:-2])
    for name, x, heads in (("query", query, num_heads), ("current_key", current_key, K)):
        if tuple(x.shape) != (*lead, heads, head_dim):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {(*lead, heads, head_dim)}")
    if query.dtype not in FLOAT_DTYPES:
        raise ValueError(f"query has dtype {query.dtype}; expected float32, float16 or bfloat16")
    if query.dtype != current_key.dtype:
        raise ValueError(f"query is {query.dtype}, current_key {current_key.dtype}; expected one dtype")
    if attn_mask is None or attn_mask.size == 0:
        return None
    if attn_mask.dtype != mx.bool_ and attn_mask.dtype not in FLOAT_DTYPES:
        raise ValueError(f"attn_mask has dtype {attn_mask.dtype}; expected bool, float32, float16 or bfloat16")
    return attn_mask


def check_tokens(query: mx.array, key: mx.array, value: mx.array, mask: mx.array | None, offset: int) -> None:
    """Check a cache's inputs: query (B, H, S, D), key and value (B, K, S, D), a mask with offset + S columns."""
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ValueError(
            f"query has shape {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; "
            "expected (B, H, S, D), (B, K, S, D) and (B, K, S, D)"
        )
    B, H, S, D = query.shape
    K = key.shape[1]
    if (key.shape[0], key.shape[2], key.shape[3]) != (B, S, D) or H % K:
        raise ValueError(
            f"query has shape {tuple(query.shape)}, key {tuple(key.shape)}; expected one B, S, D and H % K = 0"
        )
    if mask is None:
        return
    T = offset + S
    lead = mask.shape[:-2]
    allowed = [(), (1,), (H,), (1, 1), (1, H), (B, 1), (B, H)]
    if tuple(mask.shape[-2:]) != (S, T) or tuple(lead) not in allowed:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; expected ({S}, {T}), ({H}, {S}, {T}) or ({B}, {H}, {S}, {T})"
        )
    if mask.dtype != mx.bool_ and mask.dtype not in FLOAT_DTYPES:
        raise ValueError(f"mask has dtype {mask.dtype}; expected bool, float32, float16 or bfloat16")


def check_bias_split(split: BiasSplit | None, call: CacheCall, num_kv_heads: int) -> None:
    """Check a bias split's pairs and shapes."""
    if split is None:
        return
    if not isinstance(split, BiasSplit):
        raise ValueError(f"bias_split is a {type(split).__name__}; expected a BiasSplit")
    K, D, P = num_kv_heads, call.head_dim, len(split.pairs)
    if D % 2 or len(set(split.pairs)) != P or any(not 0 <= as_int(p, "pair") < D // 2 for p in split.pairs):
        raise ValueError(f"bias_split has pairs {split.pairs}; expected different ints from 0 to {D // 2 - 1}")
    for name, x, expected in (
        ("key_bias", split.key_bias, (K, 2, P)),
        ("rotation", split.rotation[..., : call.end], (2, P, call.end)),
        ("value_bias", split.value_bias, (K, D)),
    ):
        if tuple(x.shape) != expected or x.dtype != mx.float32:
            raise ValueError(f"bias_split's {name} is {x.dtype} {tuple(x.shape)}; expected float32 {expected}")


def check_mask(mask: mx.array | None, call: CacheCall, num_heads: int) -> mx.array | None:
    """Check the shape of a static call's mask; return it cut to T columns."""
    if mask is None:
        return None
    S, T = call.new_tokens, call.end
    shapes = f"({S}, >={T}), ({num_heads}, {S}, >={T}) or ({call.batch} or 1, {num_heads}, {S}, >={T})"
    wrong = f"attn_mask has shape {tuple(mask.shape)}; expected {shapes}"
    if mask.ndim not in (2, 3, 4) or mask.shape[-2] != S or mask.shape[-1] < T:
        raise ValueError(wrong)
    if mask.ndim >= 3 and mask.shape[-3] != num_heads:
        raise ValueError(wrong)
    if mask.ndim == 4 and mask.shape[0] not in (1, call.batch):
        raise ValueError(wrong)
    return mask[..., :T]  # further columns are padding


def _check_dtypes(dtype: mx.Dtype, cache: mx.array, scale: mx.array | None, quant_bit: int) -> None:
    if quant_bit:
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"current_key has dtype {dtype}; quant_bit {quant_bit} takes float32, float16 or bfloat16")
        if cache.dtype != quantized_dtype(quant_bit):
            raise ValueError(f"cache has dtype {cache.dtype}; quant_bit {quant_bit} needs {quantized_dtype(quant_bit)}")
        if scale is None:
            raise ValueError(f"scale is missing; quant_bit {quant_bit} needs one")
        if scale.dtype not in SCALE_DTYPES:
            raise ValueError(f"scale has dtype {scale.dtype}; expected float32 or float16")
        return
    if scale is not None:
        raise ValueError("scale is given with quant_bit 0; expected none")
    fits = cache.dtype == mx.int8 if dtype == mx.int8 else dtype in FLOAT_DTYPES and cache.dtype in FLOAT_DTYPES
    if not fits:
        raise ValueError(
            f"cache has dtype {cache.dtype} and current_key {dtype}; quant_bit 0 takes floats, or int8 in both"
        )


def check_layout(
    layouts: Sequence[Sequence[str]],
    current_key: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    *,
    num_layer: int,
    layer_idx: int,
    quant_bit: int,
    quant_group: int,
    cache_layout: int,
) -> dict[str, int]:
    """Check the shapes of cache and scale, and the layer; return the sizes of the cache's axes by their names."""
    if type(cache_layout) is not int or not 0 <= cache_layout < len(layouts):
        raise ValueError(
            f"cache_layout is {cache_layout!r}; expected one of {', '.join(map(str, range(len(layouts))))}"
        )
    axes = layouts[cache_layout]
    names = f"({', '.join(axes)})"
    if cache.ndim != len(axes):
        raise ValueError(
            f"cache has shape {tuple(cache.shape)}; cache_layout {cache_layout} needs {len(axes)} dimensions {names}"
        )
    sizes = dict(zip(axes, cache.shape, strict=True))
    if as_int(num_layer, "num_layer") != sizes["L"]:
        raise ValueError(f"num_layer is {num_layer}; the cache has {sizes['L']} layers")
    K, D = current_key.shape[-2:]

    def shape(last: int) -> tuple[int, ...]:
        expected = sizes | {"2": 2, "H": K, "Dh": last}
        return tuple(expected[axis] for axis in axes)

    stored = shape(D // 2 if quant_bit == 4 else D)
    if tuple(cache.shape) != stored:
        raise ValueError(f"cache has shape {tuple(cache.shape)}; expected {stored}, {names}")
    if scale is not None and tuple(scale.shape) != shape(D // quant_group):
        raise ValueError(f"scale has shape {tuple(scale.shape)}; expected {shape(D // quant_group)}")
    if not 0 <= as_int(layer_idx, "layer_idx") < num_layer:
        raise ValueError(f"layer_idx is {layer_idx}; the cache has layers 0 to {num_layer - 1}")
    return sizes


def _start(start_pos: int | mx.array) -> int:
    if isinstance(start_pos, mx.array):
        if start_pos.size != 1 or not mx.issubdtype(start_pos.dtype, mx.integer):
            raise ValueError(
                f"start_pos is an array of shape {tuple(start_pos.shape)} and dtype {start_pos.dtype}; "
                "expected one integer element"
            )
        return operator.index(start_pos.item())  # type: ignore[arg-type]
    return as_int(start_pos, "start_pos")


def as_int(value: object, name: str) -> int:
    """The value as an int. A bool, an array or another type is a ValueError that names it."""
    if not isinstance(value, bool | mx.array):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ValueError(f"{name} is {value!r}; expected an int")
