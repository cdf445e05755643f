"""The fused kernel, called with the options of the unfused operator. Unchecked."""

from typing import Any

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit
from kvant.operators.kernels.attend import attend
from kvant.operators.masks import alibi_slopes


def attend_fused(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    *,
    is_alibi: bool = False,
    bias_split: BiasSplit | None = None,
    **options: Any,
) -> mx.array:
    """:func:`kvant.operators.kernels.attend.attend` with ALiBi and the bias split as the other functions take them."""
    if bias_split is not None:
        names = ("key_bias", "pairs", "rotation", "value_bias")
        options |= {name: getattr(bias_split, name) for name in names}
    slopes = tuple(alibi_slopes(query.shape[1])) if is_alibi else ()
    return attend(query, cache, scale, offset, slopes=slopes, **options)
