"""The fused kernel on the pages of several sequences, all in one call. Unchecked."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernels.launch import Backend

# MLX puts an input of fewer numbers into Metal's constant memory, which is another kernel to compile.
LEAST = 8


@dataclass(frozen=True, slots=True)
class StepPages:
    """The pages of B sequences in one step, made once for all layers that share them.

    Attributes:
        table: (B, N) int32, each one's pages in the order of positions, 0 if it has fewer than N. N is 8 or more.
        first: int32, the position of the first row of each one's first page, B or 8 numbers, whichever is more.
        offset: the same of tokens before the new ones.
        sequences: B.
        rows: from the first page's first row to the last new token, of the sequence that has most.
        window: tokens that a query sees, its own included; None: all up to its own.
    """

    table: mx.array
    first: mx.array
    offset: mx.array
    sequences: int
    rows: int
    window: int | None


def step_pages(
    pages: Sequence[Sequence[int]], first: Sequence[int], offset: Sequence[int], rows: int, window: int | None
) -> StepPages:
    """:class:`StepPages` of lists; ``pages`` has those of each sequence that the step reads or writes."""
    B, N = len(pages), max(LEAST, *map(len, pages))
    table = [[*own, *[0] * (N - len(own))] for own in pages]
    more = [0] * (LEAST - B)
    firsts, offsets = mx.array([*first, *more], mx.int32), mx.array([*offset, *more], mx.int32)
    return StepPages(mx.array(table, mx.int32), firsts, offsets, B, rows, window)


def attend_pages(
    query: mx.array,
    arrays: Sequence[mx.array],
    pages: StepPages,
    *,
    quant_bit: int,
    quant_group: int,
    value_head_dim: int,
    score_scale: float | None = None,
    is_causal: bool = True,
    mask: mx.array | None = None,
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
    backend: Backend,
) -> mx.array:
    """Causal attention of S new tokens of each sequence to its pages, which hold them already.

    Args:
        query: (R, H, S, D), R >= B. Sequences past the B of ``pages`` are padding: their attention is 0.
        arrays: values (2, K, T, D'), and if they are quantized scales (2, K, T, D/G).
        value_head_dim: Dv. If it is not D, both lie side by side: (1, K, T, D + Dv).
        score_scale: the scores are multiplied by it; None: 1/sqrt(D).
        mask: broadcastable to (B, H, S, rows), with a column for each row of a sequence's pages.
        bias_split: position j is at column j of its rotation.
        sinks: (H,).

    Returns:
        (R, H, S, Dv) in the query's dtype.
    """
    R, _, _, D = query.shape
    B = pages.sequences
    output = attend_fused(
        query[:B],
        arrays[0],
        arrays[1] if quant_bit else None,
        pages.offset,
        quant_bit=quant_bit,
        quant_group=quant_group,
        value_dim=None if value_head_dim == D else value_head_dim,
        score_scale=score_scale,
        is_causal=is_causal,
        mask=mask,
        sinks=sinks,
        window=pages.window,
        pages=pages.table,
        first=pages.first,
        rows=pages.rows,
        bias_split=bias_split,
        backend=backend,
    )
    if R == B:
        return output
    return mx.concatenate([output, mx.zeros((R - B, *output.shape[1:]), output.dtype)])
