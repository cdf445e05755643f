"""The hook on mlx-lm's attention: a bridged cache computes attention to its own keys and values.

A bridged layer returns its tokens to the model as lazy arrays, which are valid for any computation. The hook
recognizes these arrays and lets the cache compute attention without them if that is faster.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

Attention = Callable[..., mx.array]
NAME = "scaled_dot_product_attention"
MODULES = "mlx_lm.models."

mlx_lm_attention: Attention = getattr(base, NAME)


Rows = tuple[mx.array, mx.array]  # keys and values
Fetched = tuple["weakref.ref[mx.array]", "weakref.ref[mx.array]", "weakref.ref[Any]", Rows | None]

# By the id of the keys: the keys, the values, their BridgedLayer, and the stored keys and values. Entries do
# not outlive the keys: a reference to lazy arrays would make the next append copy the cache's buffers.
_fetched: dict[int, Fetched] = {}


def remember(owner: Any, key: mx.array, value: mx.array, stored: Rows | None = None) -> None:
    """Let ``owner`` compute attention to exactly these arrays, for as long as they live.

    ``stored``: the keys and values in their stored form, if it differs.
    """
    place = id(key)
    _fetched[place] = (
        weakref.ref(key, lambda _: _fetched.pop(place, None)),
        weakref.ref(value),
        weakref.ref(owner),
        stored,
    )


def stored_rows_of(key: mx.array) -> Rows | None:
    """Return the stored form of keys and values passed to :func:`remember`, or None if it is the same."""
    known = _fetched.get(id(key))
    return None if known is None or known[0]() is not key else known[3]


def owner_of(key: mx.array, value: mx.array) -> Any:
    """Return the layer's cache that returned exactly these arrays, or None."""
    known = _fetched.get(id(key))
    if known is None or known[0]() is not key or known[1]() is not value:
        return None
    return known[2]()


def install() -> None:
    """Replace mlx-lm's attention by the hook, in every model module that is or will be imported."""
    setattr(base, NAME, attention)
    for name, module in list(sys.modules.items()):
        if name.startswith(MODULES) and getattr(module, NAME, None) is mlx_lm_attention:
            setattr(module, NAME, attention)


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Replace mlx-lm's ``scaled_dot_product_attention``, which still computes all other arrays."""
    owner = owner_of(keys, values)
    if owner is not None:
        output: mx.array | None = owner.attend_fetched(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
        if output is not None:
            return output
    return mlx_lm_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
