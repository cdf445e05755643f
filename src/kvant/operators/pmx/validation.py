"""Checks of the operators' arguments. They run before any write, so a failing call changes no cache.

One loop checks arrays and one checks numbers; each row describes an argument and the expected values.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit
from kvant.operators.quantization import FLOAT_DTYPES

MAX_ELEMENTS = 2**31 - 1  # of a result, because MLX counts with 32 bits in places
MASK_DTYPES = (mx.bool_, *FLOAT_DTYPES)

Axis = int | str
ArrayRow = tuple[str, Any, Sequence[Axis], Sequence[mx.Dtype]]
NumberRow = tuple[str, object, int, int | None]


def check_arrays(rows: Iterable[ArrayRow], sizes: dict[str, int]) -> None:
    """Check arrays by rows of name, array, axes and dtypes.

    An axis is a size or a name. ``sizes`` maps names to sizes; missing ones are added from the first array.
    """
    for name, x, axes, dtypes in rows:
        check_is_array(name, x)
        shape = [sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in axes]
        fits = x.ndim == len(axes) and all(
            n == w for n, w in zip(x.shape, shape, strict=True) if isinstance(w, int)
        )
        if not fits or 0 in x.shape:
            least = "" if 0 not in x.shape else ", at least 1 in every dimension"
            raise ValueError(
                f"{name} has shape {x.shape}; expected {len(axes)} dimensions, {_text(shape)}{least}"
            )
        sizes.update((axis, n) for axis, n in zip(axes, x.shape, strict=True) if isinstance(axis, str))
        check_dtype(name, x, dtypes)


def check_is_array(name: str, x: Any) -> None:
    """Raise a ValueError unless ``x`` is an mx.array."""
    if not isinstance(x, mx.array):
        raise ValueError(f"{name} is a {type(x).__name__}; expected an mx.array")


def check_dtype(name: str, x: mx.array, dtypes: Sequence[mx.Dtype]) -> None:
    """Raise a ValueError unless the array has one of these dtypes."""
    if x.dtype not in dtypes:
        names = [str(dtype).removeprefix("mlx.core.") for dtype in (x.dtype, *dtypes)]
        raise ValueError(f"{name} has dtype {names[0]}; expected {' or '.join(names[1:])}")


def check_numbers(rows: Iterable[NumberRow]) -> None:
    """Check ints by rows of name, value, least and most; None for the most means no limit."""
    for name, value, least, most in rows:
        if (number := as_int(value, name)) < least or (most is not None and number > most):
            expected = (
                f"at least {least}" if most is None else f"{least}" if least == most else f"{least} to {most}"
            )
            raise ValueError(f"{name} is {number}; expected {expected}")


def as_int(value: object, name: str) -> int:
    """Return the value as an int; raise a ValueError that names it for a bool, an array or another type."""
    if not isinstance(value, bool | mx.array):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ValueError(f"{name} is {value!r}; expected an int")


def check_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, *, is_causal: bool, is_alibi: bool
) -> dict[str, int]:
    """Check the arguments that only attention has; return the sizes of the axes Hq, H and Dh."""
    for name, flag in (("is_causal", is_causal), ("is_alibi", is_alibi)):
        if type(flag) is not bool:
            raise ValueError(f"{name} is {flag!r}; expected True or False")
    check_numbers(
        [
            ("num_heads", num_heads, 1, None),
            ("head_dim", head_dim, 1, None),
            ("num_kv_heads", num_kv_heads, 0, None),
        ]
    )
    K = num_kv_heads or num_heads
    if num_heads % K:
        raise ValueError(f"num_heads is {num_heads}; expected a multiple of num_kv_heads, {K}")
    return {"Hq": num_heads, "H": K, "Dh": head_dim}


def check_repeat(num_repeat: int, elements: int) -> None:
    """Check KeyValueCache's ``num_repeat`` for keys with this many elements before repetition."""
    check_numbers([("num_repeat", num_repeat, 1, None)])
    if elements * num_repeat > MAX_ELEMENTS:
        raise ValueError(
            f"num_repeat is {num_repeat}; expected at most {MAX_ELEMENTS // elements} for this call"
        )


def check_mask(
    name: str,
    mask: mx.array,
    leads: Sequence[tuple[int, ...]],
    rows: int,
    columns: int,
    *,
    padded: bool = True,
) -> None:
    """Check a mask (*lead, rows, columns) with one of these leads; ``padded`` allows more columns."""
    check_is_array(name, mask)
    fits = mask.ndim >= 2 and mask.shape[:-2] in leads and mask.shape[-2] == rows
    if not fits or mask.shape[-1] < columns or (mask.shape[-1] > columns and not padded):
        shapes = [_text([*lead, rows, f">={columns}" if padded else columns]) for lead in leads]
        raise ValueError(f"{name} has shape {mask.shape}; expected {' or '.join(shapes)}")
    check_dtype(name, mask, MASK_DTYPES)


def check_attn_mask(
    mask: mx.array | None, leads: Sequence[tuple[int, ...]], rows: int, columns: int
) -> mx.array | None:
    """Check PMX's ``attn_mask``; return it, or None if there is none or it is empty."""
    if mask is None or (isinstance(mask, mx.array) and mask.size == 0):
        return None
    check_mask("attn_mask", mask, leads, rows, columns)
    return mask


def check_bias_split(split: BiasSplit | None, K: int, D: int, tokens: int) -> None:
    """Check a bias split's pairs and shapes."""
    if split is None:
        return
    if not isinstance(split, BiasSplit):
        raise ValueError(f"bias_split is a {type(split).__name__}; expected a BiasSplit")
    P = len(split.pairs)
    if D % 2 or len(set(split.pairs)) != P or any(not 0 <= as_int(p, "pair") < D // 2 for p in split.pairs):
        raise ValueError(
            f"bias_split has pairs {split.pairs}; expected different ints from 0 to {D // 2 - 1}"
        )
    for name, x, expected in (
        ("key_bias", split.key_bias, (K, 2, P)),
        ("rotation", split.rotation[..., :tokens], (2, P, tokens)),
        ("value_bias", split.value_bias, (K, D)),
    ):
        if x.shape != expected or x.dtype != mx.float32:
            raise ValueError(f"bias_split's {name} is {x.dtype} {x.shape}; expected float32 {expected}")


def check_tokens(query: mx.array, key: mx.array, value: mx.array, mask: mx.array | None, offset: int) -> None:
    """Check query (B, H, S, D), key and value (B, K, S, D), and a mask with offset + S columns."""
    fits = query.ndim == key.ndim == 4 and key.shape == value.shape
    B, H, S, D = query.shape if fits else (0, 0, 0, 0)
    if not fits or (key.shape[0], *key.shape[2:]) != (B, S, D) or H % key.shape[1]:
        raise ValueError(
            f"query has shape {query.shape}, key {key.shape}, value {value.shape}; "
            "expected (B, H, S, D), (B, K, S, D) and (B, K, S, D), H a multiple of K"
        )
    if mask is not None:
        leads = [(), (1,), (H,), (1, 1), (1, H), (B, 1), (B, H)]
        check_mask("mask", mask, leads, S, offset + S, padded=False)


def _text(axes: Sequence[Axis]) -> str:
    return f"({', '.join(map(str, axes))})"
