"""The fused kernel, called with the options of the unfused operator. Unchecked."""

from typing import Any

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit
from kvant.operators.kernels.attend import attend
from kvant.operators.kernels.launch import Backend
from kvant.operators.masks import alibi_slopes


def attend_fused(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    *,
    quant_bit: int,
    quant_group: int,
    is_alibi: bool = False,
    bias_split: BiasSplit | None = None,
    backend: Backend,
    **options: Any,
) -> mx.array:
    """:func:`kvant.operators.kernels.attend.attend` with ALiBi and the bias split as the other functions take them."""
    split = bias_split
    return attend(
        query,
        cache,
        scale,
        offset,
        quant_bit=quant_bit,
        quant_group=quant_group,
        slopes=tuple(alibi_slopes(query.shape[1])) if is_alibi else (),
        key_bias=None if split is None else split.key_bias,
        pairs=() if split is None else split.pairs,
        rotation=None if split is None else split.rotation,
        value_bias=None if split is None else split.value_bias,
        backend=backend,
        **options,
    )
