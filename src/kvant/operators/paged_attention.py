"""Attention of several sequences whose tokens are rows of shared arrays: append, then attend. Unchecked."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from kvant.operators.attention import attend_each
from kvant.operators.bias_split import BiasSplit
from kvant.operators.cpu_paged_attention import attend_rows_on_cpu
from kvant.operators.exact_attention import attend_each_exactly, read_exactly
from kvant.operators.exact_rows import ExactTail
from kvant.operators.kernels.launch import Backend
from kvant.operators.paged_kernel import attend_pages
from kvant.operators.paged_rows import (
    PagedRows,
    float_bytes,
    read_sequences,
    shares,
    tokens_at_once,
    write_rows,
)
from kvant.operators.stored_tokens import fitted_tokens
from kvant.operators.streams import FEW_ROWS


class NewTokens(NamedTuple):
    """New tokens to be written later, in the form of a layer's arrays; empty if there are none."""

    stored: Sequence[mx.array] = ()
    exact: Sequence[mx.array] = ()


def multi_head_cache_attention(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    arrays: list[mx.array],
    rows: PagedRows,
    *,
    quant_bit: int,
    quant_group: int,
    value_bit: int = 0,
    mask: mx.array | None = None,
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
    backend: Backend | None = None,
    exact_arrays: Sequence[mx.array] = (),
) -> tuple[mx.array, NewTokens]:
    """Write S new tokens of each sequence, then compute their causal attention to its rows.

    Changes ``arrays`` and ``exact_arrays`` in place.

    Args:
        query: (R, H, S, D), R >= B. Sequences past the B of ``rows`` are padding: they are not written, and
            their attention is 0.
        key, value: (R, K, S, D) and (R, K, S, Dv).
        value_bit: bits of values; 0 means those of keys.
        mask: for one sequence, which then attends unfused: a mask for
            :func:`kvant.operators.attention.attend_tokens` with a column for every token so far.
        bias_split: the biases that keys and values lack. Position j is at column j of its rotation.
        sinks: as in ``attend_tokens``.
        backend: runs the fused kernel, which must support the layer's tokens
            (:func:`kvant.operators.kernels.attend.unsupported_reason`). None: use the unfused operator.
        exact_arrays: floats of the first and the last tokens, in the rows of ``rows.exact``. Empty: all
            tokens are read quantized.

    Returns:
        (R, H, S, Dv) in the query's dtype, and the new tokens that are still to be written.
    """
    pages = rows.pages if mask is None and backend is not None else None
    bits: dict[str, Any] = {"quant_bit": quant_bit, "value_bit": value_bit}
    form = bits | {"quant_group": quant_group}
    waiting = append(
        key, value, arrays, rows, exact_arrays, **form, backend=None if pages is None else backend
    )
    options: dict[str, Any] = {"bias_split": bias_split, "sinks": sinks}
    exact = ExactTail(rows.exact, exact_arrays, waiting.exact) if rows.exact and exact_arrays else None
    if pages is not None:
        if exact is not None:
            options["exact"] = exact
        return attend_pages(query, arrays, pages, **form, **options, backend=backend), waiting
    options |= bits | {"mask": mask, "waiting": waiting.stored, "exact": exact}
    return attend_rows(query, arrays, rows, **options), waiting


def append(
    key: mx.array,
    value: mx.array,
    arrays: list[mx.array],
    rows: PagedRows,
    exact_arrays: Sequence[mx.array] = (),
    *,
    backend: Backend | None = None,
    **form: Any,
) -> NewTokens:
    """Write new tokens, and return those that are to be written later.

    Arguments are those of :func:`multi_head_cache_attention`; a ``backend`` quantizes the tokens.
    """
    B = len(rows.runs)
    stored: Sequence[mx.array] = ()
    exact: Sequence[mx.array] = ()
    if rows.new is None:
        stored = fitted_tokens(key, value, arrays, **form, unbatched=True)
    else:
        write_rows(key[:B], value[:B], arrays, rows.new, **form, backend=backend)
    if rows.exact is not None and exact_arrays:
        floats: dict[str, Any] = {"quant_bit": 0, "quant_group": 0}
        if rows.exact.new is None:
            (joined,) = fitted_tokens(key[:B], value[:B], exact_arrays, **floats)
            exact = [x.squeeze(0) for x in mx.split(joined, B)]
        else:
            write_rows(key[:B], value[:B], exact_arrays, rows.exact.new, **floats)
    return NewTokens(stored, exact)


def attend_rows(
    query: mx.array,
    arrays: Sequence[mx.array],
    rows: PagedRows,
    *,
    quant_bit: int,
    value_bit: int = 0,
    mask: mx.array | None = None,
    waiting: Sequence[mx.array] = (),
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
    exact: ExactTail | None = None,
) -> mx.array:
    """Compute :func:`multi_head_cache_attention` for tokens already written or still ``waiting``."""
    options: dict[str, Any] = {"quant_bit": quant_bit, "value_bit": value_bit}
    options |= {"mask": mask, "waiting": waiting, "bias_split": bias_split, "sinks": sinks, "exact": exact}
    if mx.default_device().type == mx.cpu:
        output = attend_rows_on_cpu(query, arrays, rows, **options)
    else:
        output = _attend_unfused(query, arrays, rows, **options)
    if (padding := query.shape[0] - len(rows.runs)) > 0:
        output = mx.concatenate([output, mx.zeros((padding, *output.shape[1:]), query.dtype)])
    return output


def _attend_unfused(
    query: mx.array,
    arrays: Sequence[mx.array],
    rows: PagedRows,
    *,
    quant_bit: int,
    value_bit: int,
    mask: mx.array | None,
    waiting: Sequence[mx.array],
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
    exact: ExactTail | None,
) -> mx.array:
    """Compute :func:`attend_rows` on a GPU, without padding."""
    S, D = query.shape[2:]
    bits: dict[str, Any] = {"quant_bit": quant_bit, "value_bit": value_bit}
    form: dict[str, Any] = bits | {
        "key_dim": D,
        "dtype": mx.float32 if bias_split is not None else query.dtype,  # the dtype of attend_tokens
    }
    size = tokens_at_once(float_bytes(arrays[0], D, **bits), S, quant_bit)
    outputs: list[mx.array] = []
    for share in shares(rows.counts, size):
        # Without this dependency MLX reads the tokens of every share before it uses the first.
        readable = mx.depends(arrays, outputs[-1:]) if outputs else arrays
        if exact is not None and S <= FEW_ROWS:
            outputs += attend_each_exactly(
                query[share],
                readable,
                rows.only(share),
                exact.only(share),
                waiting,
                **bits,
                dtype=form["dtype"],
                mask=mask,
                bias_split=bias_split,
                sinks=sinks,
            )
            continue
        if exact is None:
            tokens = read_sequences(readable, rows.only(share), waiting, **form)
        else:
            tokens = read_exactly(readable, rows.only(share), exact.only(share), S, waiting, **form)
        outputs += attend_each(
            query[share], tokens, rows.window, mask=mask, bias_split=bias_split, sinks=sinks
        )
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
