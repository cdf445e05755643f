"""Checks of the public operators. They run before anything is written, so a call that fails changes no cache."""

import operator
from dataclasses import dataclass

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit
from kvant.operators.quantization import FLOAT_DTYPES, SCALE_DTYPES, check_quantization, quantized_dtype

KEY_INPUTS = ("current_key", "current_value")
MAX_ELEMENTS = 2**31 - 1  # of a result. MLX counts with 32 bits in places


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
    """Check the inputs both operators share; raise a ValueError that names the first defect."""
    for name, x in (("cache", cache), ("scale", scale), *zip(KEY_INPUTS, (current_key, current_value), strict=True)):
        if not isinstance(x, mx.array) and not (name == "scale" and x is None):
            raise ValueError(f"{name} is a {type(x).__name__}; expected an mx.array")
    for name, x in zip(KEY_INPUTS, (current_key, current_value), strict=True):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected 4 dimensions (B, S, H, Dh)")
    if current_key.shape != current_value.shape:
        raise ValueError(
            f"current_value has shape {tuple(current_value.shape)}, current_key {tuple(current_key.shape)}"
        )
    if current_key.dtype != current_value.dtype:
        raise ValueError(f"current_value is {current_value.dtype}, current_key {current_key.dtype}; expected one dtype")
    B, S, K, D = current_key.shape
    if 0 in (B, S, K, D):
        raise ValueError(f"current_key has shape {tuple(current_key.shape)}; every dimension must be at least 1")
    check_quantization(quant_bit, quant_group, D)
    _check_dtypes(current_key.dtype, cache, scale, quant_bit)
    max_batch, max_tokens = _check_layout(cache, scale, K, D, num_layer, quant_bit, quant_group, cache_layout)
    if not 0 <= _index(layer_idx, "layer_idx") < num_layer:
        raise ValueError(f"layer_idx is {layer_idx}; the cache has layers 0 to {num_layer - 1}")
    if max_batch < B:
        raise ValueError(f"current_key has a batch of {B}; the cache holds {max_batch}")
    start = _start(start_pos)
    if start < 0 or start + S > max_tokens:
        raise ValueError(f"start_pos {start} and {S} new tokens do not fit a cache of {max_tokens} positions")
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


def check_repeat(num_repeat: int, current_key: mx.array, call: CacheCall) -> None:
    """Check KeyValueCache's ``num_repeat``."""
    if isinstance(num_repeat, bool) or not isinstance(num_repeat, int) or num_repeat < 1:
        raise ValueError(f"num_repeat is {num_repeat!r}; expected a positive int")
    B, _, K, D = current_key.shape
    if B * call.end * K * num_repeat * D > MAX_ELEMENTS:
        raise ValueError(
            f"num_repeat is {num_repeat}; expected at most {MAX_ELEMENTS // (B * call.end * K * D)} for this call"
        )


def check_attention_call(
    query: mx.array,
    current_key: mx.array,
    call: CacheCall,
    attn_mask: mx.array | None,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    is_causal: bool,
    is_alibi: bool,
) -> mx.array | None:
    """Check the inputs that only MultiHeadCacheAttention has; return the mask cut to T columns, or None."""
    for name, flag in (("is_causal", is_causal), ("is_alibi", is_alibi)):
        if type(flag) is not bool:
            raise ValueError(f"{name} is {flag!r}; expected True or False")
    for name, array in (("query", query), ("attn_mask", attn_mask)):
        if not isinstance(array, mx.array) and not (name == "attn_mask" and array is None):
            raise ValueError(f"{name} is a {type(array).__name__}; expected an mx.array")
    K = num_heads if _index(num_kv_heads, "num_kv_heads") == 0 else num_kv_heads
    for name, count in (("num_heads", num_heads), ("num_kv_heads", K), ("head_dim", head_dim)):
        if _index(count, name) < 1:
            raise ValueError(f"{name} is {count}; expected a positive int")
    if num_heads % K:
        raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {K}")
    expected = (call.batch, call.new_tokens, num_heads, head_dim)
    if tuple(query.shape) != expected:
        raise ValueError(f"query has shape {tuple(query.shape)}; expected {expected}")
    expected = (call.batch, call.new_tokens, K, head_dim)
    if tuple(current_key.shape) != expected:
        raise ValueError(f"current_key has shape {tuple(current_key.shape)}; expected {expected}")
    if query.dtype not in FLOAT_DTYPES:
        raise ValueError(f"query has dtype {query.dtype}; expected float32, float16 or bfloat16")
    if query.dtype != current_key.dtype:
        raise ValueError(f"query is {query.dtype}, current_key {current_key.dtype}; expected one dtype")
    if attn_mask is None or attn_mask.size == 0:
        return None
    return _check_mask(attn_mask, call, num_heads)


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
    if D % 2 or len(set(split.pairs)) != P or any(not 0 <= _index(p, "pair") < D // 2 for p in split.pairs):
        raise ValueError(f"bias_split has pairs {split.pairs}; expected different ints from 0 to {D // 2 - 1}")
    for name, x, expected in (
        ("key_bias", split.key_bias, (K, 2, P)),
        ("rotation", split.rotation[..., : call.end], (2, P, call.end)),
        ("value_bias", split.value_bias, (K, D)),
    ):
        if tuple(x.shape) != expected or x.dtype != mx.float32:
            raise ValueError(f"bias_split's {name} is {x.dtype} {tuple(x.shape)}; expected float32 {expected}")


def _check_mask(mask: mx.array, call: CacheCall, num_heads: int) -> mx.array:
    S, T = call.new_tokens, call.end
    shapes = f"({S}, >={T}), ({num_heads}, {S}, >={T}) or ({call.batch} or 1, {num_heads}, {S}, >={T})"
    wrong = f"attn_mask has shape {tuple(mask.shape)}; expected {shapes}"
    if mask.ndim not in (2, 3, 4) or mask.shape[-2] != S or mask.shape[-1] < T:
        raise ValueError(wrong)
    if mask.ndim >= 3 and mask.shape[-3] != num_heads:
        raise ValueError(wrong)
    if mask.ndim == 4 and mask.shape[0] not in (1, call.batch):
        raise ValueError(wrong)
    if mask.dtype != mx.bool_ and mask.dtype not in FLOAT_DTYPES:
        raise ValueError(f"attn_mask has dtype {mask.dtype}; expected bool, float32, float16 or bfloat16")
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


def _check_layout(
    cache: mx.array,
    scale: mx.array | None,
    K: int,
    D: int,
    num_layer: int,
    quant_bit: int,
    quant_group: int,
    cache_layout: int,
) -> tuple[int, int]:
    """Check the shapes of cache and scale; return MaxB and MaxS."""
    if type(cache_layout) is not int or cache_layout not in (0, 1):
        raise ValueError(f"cache_layout is {cache_layout!r}; expected 0 or 1")
    names = "(MaxB, L, 2, MaxS, H, Dh)" if cache_layout == 0 else "(L, MaxB, 2, H, MaxS, Dh)"
    if cache.ndim != 6:
        raise ValueError(
            f"cache has shape {tuple(cache.shape)}; cache_layout {cache_layout} needs 6 dimensions {names}"
        )
    if cache_layout == 0:
        max_batch, layers, _, max_tokens = cache.shape[:4]
    else:
        layers, max_batch, _, _, max_tokens = cache.shape[:5]
    stored = D // 2 if quant_bit == 4 else D

    def shape(last: int) -> tuple[int, ...]:
        if cache_layout == 0:
            return (max_batch, num_layer, 2, max_tokens, K, last)
        return (num_layer, max_batch, 2, K, max_tokens, last)

    if _index(num_layer, "num_layer") != layers:
        raise ValueError(f"num_layer is {num_layer}; the cache has {layers} layers")
    if tuple(cache.shape) != shape(stored):
        raise ValueError(f"cache has shape {tuple(cache.shape)}; expected {shape(stored)}, {names}")
    if scale is not None and tuple(scale.shape) != shape(D // quant_group):
        raise ValueError(f"scale has shape {tuple(scale.shape)}; expected {shape(D // quant_group)}")
    return max_batch, max_tokens


def _start(start_pos: int | mx.array) -> int:
    if isinstance(start_pos, mx.array):
        if start_pos.size != 1 or not mx.issubdtype(start_pos.dtype, mx.integer):
            raise ValueError(
                f"start_pos is an array of shape {tuple(start_pos.shape)} and dtype {start_pos.dtype}; "
                "expected one integer element"
            )
        return operator.index(start_pos.item())  # type: ignore[arg-type]
    return _index(start_pos, "start_pos")


def _index(value: object, name: str) -> int:
    """The value as an int. A bool, an array or another type is a ValueError that names it."""
    if not isinstance(value, bool | mx.array):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ValueError(f"{name} is {value!r}; expected an int")
