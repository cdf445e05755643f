"""The hook on mlx-lm's attention: calls with keys and values of a bridged cache are the cache's.

A bridged layer hands its tokens to the model as lazy arrays. Whoever computes with them gets the right
result. The hook knows these arrays again and computes attention without them where that is faster.
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

# By the id of the keys: the keys, the values, their BridgedLayer, and keys and values as they are
# stored. Nothing outlives the keys: lazy arrays that are kept would have the cache's buffers copied at the
# next append.
_fetched: dict[int, Fetched] = {}


def remember(owner: Any, key: mx.array, value: mx.array, stored: Rows | None = None) -> None:
    """Have attention to these very arrays computed by their cache, for as long as they live.

    ``stored``: keys and values as they are stored, if that is otherwise.
    """
    place = id(key)
    _fetched[place] = (
        weakref.ref(key, lambda _: _fetched.pop(place, None)),
        weakref.ref(value),
        weakref.ref(owner),
        stored,
    )


def stored_rows_of(key: mx.array) -> Rows | None:
    """Return keys and values as they are stored, by keys that :func:`remember` was given; None: as they
    are.
    """
    known = _fetched.get(id(key))
    return None if known is None or known[0]() is not key else known[3]


def owner_of(key: mx.array, value: mx.array) -> Any:
    """The layer's cache that these arrays come from, if they are as it handed them out; else None."""
    known = _fetched.get(id(key))
    if known is None or known[0]() is not key or known[1]() is not value:
        return None
    return known[2]()


def install() -> None:
    """Put the hook in place of mlx-lm's attention, in every module of a model that is loaded or will be."""
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
    """mlx-lm's ``scaled_dot_product_attention``, and nothing else for arrays that are not a bridged
    cache's.
    """
    owner = owner_of(keys, values)
    if owner is not None:
        output: mx.array | None = owner.attend_fetched(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
        if output is not None:
            return output
    return mlx_lm_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
