"""The fused kernel, called with the unfused operator's options or on several sequences' pages. Unchecked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit
from kvant.operators.exact_rows import ExactPages, ExactSpan, ExactTail
from kvant.operators.kernels.attend import ExactInput, attend
from kvant.operators.kernels.launch import SMALL
from kvant.operators.masks import alibi_slopes


@dataclass(frozen=True, slots=True)
class StepPages:
    """The pages of B sequences in one step, shared by all layers with the same pages.

    Attributes:
        table: (B, N) int32, N >= 8: each sequence's pages in the order of positions, padded with 0.
        first: (max(B, 8),) int32: the position of the first row of each sequence's first page.
        offset: (max(B, 8),) int32: the tokens before the new ones.
        sequences: B.
        rows: of the longest sequence, from its first page's first row to the last new token.
        window: tokens that a query sees, including its own; None: all up to its own.
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
    """Make :class:`StepPages` from lists; ``pages`` are those that the step reads or writes."""
    B = len(pages)
    N = max(SMALL, *map(len, pages))
    table = [[*numbers, *[0] * (N - len(numbers))] for numbers in pages]
    more = [0] * (SMALL - B)
    firsts = mx.array([*first, *more], mx.int32)
    offsets = mx.array([*offset, *more], mx.int32)
    return StepPages(mx.array(table, mx.int32), firsts, offsets, B, rows, window)


def exact_pages(
    spans: Sequence[ExactSpan], sinks: Sequence[int], starts: Sequence[int], ends: Sequence[int]
) -> ExactPages:
    """Make :class:`ExactPages` for the sequences of a step."""
    B = len(spans)
    table = [[span.page, *[0] * (SMALL - 1)] for span in spans]
    numbers = zip(sinks, starts, ends, strict=True)
    rows = [[*span, 0] for span in numbers]
    rows += [[0, 0, 0, 0]] * max(0, 2 - B)
    return ExactPages(mx.array(table, mx.int32), mx.array(rows, mx.int32))


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
    """Call :func:`kvant.operators.kernels.attend.attend` with ALiBi and the bias split as options."""
    if bias_split is not None:
        names = ("key_bias", "pairs", "rotation", "value_bias")
        options |= {name: getattr(bias_split, name) for name in names}
    slopes = tuple(alibi_slopes(query.shape[1])) if is_alibi else ()
    return attend(query, cache, scale, offset, slopes=slopes, **options)


def attend_pages(
    query: mx.array,
    arrays: Sequence[mx.array],
    pages: StepPages,
    *,
    exact: ExactTail | None = None,
    **options: Any,
) -> mx.array:
    """Compute causal attention of S new tokens of each sequence to its pages, which already contain them.

    Args:
        query: (R, H, S, D), R >= B. Sequences past the B of ``pages`` are padding: their attention is 0.
        arrays: values (2, K, T, D') and, if quantized, scales (2, K, T, D/G).
        exact: the exact tail of the same sequences, with pages for the kernel; it has the new tokens too.
        options: of :func:`attend_fused`.

    Returns:
        (R, H, S, Dv) in the query's dtype.
    """
    options |= {"pages": pages.table, "first": pages.first, "rows": pages.rows, "window": pages.window}
    if exact is not None:
        assert exact.rows.pages is not None
        options["tail"] = ExactInput(exact.arrays[0], exact.rows.pages.table, exact.rows.pages.spans)
    scale = arrays[1] if len(arrays) > 1 else None
    output = attend_fused(query[: pages.sequences], arrays[0], scale, pages.offset, **options)
    if (padding := len(query) - pages.sequences) > 0:
        output = mx.concatenate([output, mx.zeros((padding, *output.shape[1:]), output.dtype)])
    return output
