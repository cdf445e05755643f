"""PMX KeyValueCache: append the current keys and values to a cache, and return every row so far."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.operators.kernels.attend import quantize_rows
from kvant.operators.kernels.dispatch import Backend
from kvant.operators.quantization import multiply_levels, quantize
from kvant.operators.validation import check_cache_call, check_repeat


def key_value_cache(
    current_key: mx.array,
    current_value: mx.array,
    start_pos: int | mx.array,
    cache: mx.array,
    scale: mx.array | None = None,
    *,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    num_repeat: int = 1,
    cache_layout: int = 0,
) -> tuple[mx.array, mx.array]:
    """Write S new rows at ``start_pos`` and return rows 0 to ``start_pos + S``, dequantized.

    ``cache`` and ``scale`` are in-out: the caller's arrays change, in rows [:B], ``layer_idx``,
    ``start_pos`` to ``start_pos + S`` and nowhere else. Everything is checked before anything is written.

    Args:
        current_key, current_value: (B, S, K, D) float32, float16, bfloat16; int8 with ``quant_bit`` 0 only.
        start_pos: rows already in the cache, an int or an integer array with one element.
        cache: layout 0 (MaxB, L, 2, MaxS, K, D), layout 1 (L, MaxB, 2, K, MaxS, D); key at index 0 of the axis of 2.
            int8 at 8 bits, uint8 with a last dimension of D/2 at 4 bits, a float dtype at 0.
        scale: as ``cache`` with a last dimension of D/quant_group, float32 or float16; None at 0 bits.
        num_layer, layer_idx: the cache's L, and the layer written.
        quant_bit: 0, 8 or 4.
        quant_group: elements of D that share one scale.
        num_repeat: repeat each head this many times, interleaved.
        cache_layout: 0 or 1.

    Returns:
        key, value: (B, start_pos + S, K * num_repeat, D) in the inputs' dtype; the current rows too have gone
        through the cache.

    Raises:
        ValueError: any input that does not fit; cache and scale are then as they were.

    Source: OpenPPL PMX, KeyValueCache.
    """
    call = check_cache_call(
        current_key,
        current_value,
        start_pos,
        cache,
        scale,
        num_layer=num_layer,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
    )
    check_repeat(num_repeat, current_key, call)
    # (B, S, K, D) -> (B, K, S, D)
    key, value = (x.transpose(0, 2, 1, 3) for x in (current_key, current_value))
    write_rows(
        key,
        value,
        call.start,
        cache,
        scale,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
    )
    rows = read_rows(
        call.batch,
        call.end,
        cache,
        scale,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        cache_layout=cache_layout,
        dtype=current_key.dtype,
    )
    key, value = (
        mx.repeat(x.transpose(0, 2, 1, 3), num_repeat, axis=2) for x in rows
    )  # (B, K, T, D) -> (B, T, K*r, D)
    return key, value


def write_rows(
    key: mx.array,
    value: mx.array,
    start: int | tuple[int, ...],
    cache: mx.array,
    scale: mx.array | None,
    *,
    layer_idx: int = 0,
    quant_bit: int,
    quant_group: int,
    cache_layout: int = 1,
    backend: Backend | None = None,
) -> None:
    """Quantize (B, K, S, D) keys and values in one go and write them at ``start``, in place; unchecked.

    ``start`` may be B ints, one for each sequence: in cache layout 1 with one layer.
    """
    B, S = key.shape[0], key.shape[2]
    stored = [cache] if scale is None else [cache, scale]
    parts = quantized_parts(
        key, value, quant_bit=quant_bit, quant_group=quant_group, dtypes=[x.dtype for x in stored], backend=backend
    )
    if not isinstance(start, int):
        offset = mx.array(start)
        for array, part in zip(stored, parts, strict=True):
            array[:] = put_rows(array, part, offset)  # the caller's array gets the new value
        return
    for array, part in zip(stored, parts, strict=True):
        if cache_layout == 0:  # (B, 2, K, S, last) -> (B, 2, S, K, last)
            array[:B, layer_idx, :, start : start + S] = part.transpose(0, 1, 3, 2, 4)
        else:
            array[layer_idx, :B, :, :, start : start + S] = part


def put_rows(array: mx.array, rows: mx.array, offset: mx.array) -> mx.array:
    """A cache or scale (1, B, 2, K, MaxS, last) with (B, 2, K, S, last) rows written at ``offset`` (B,).

    One operation for all sequences. MLX writes in place where nothing else holds ``array``.
    """
    B, _, _, S, _ = rows.shape
    place = offset[:, None] + mx.arange(S)  # (B, S)
    return mx.put_along_axis(array, place.reshape(1, B, 1, 1, S, 1), rows[None], axis=4)


def quantized_parts(
    key: mx.array,
    value: mx.array,
    *,
    quant_bit: int,
    quant_group: int,
    dtypes: Sequence[mx.Dtype],
    backend: Backend | None = None,
) -> list[mx.array]:
    """(B, K, S, D) keys and values as a cache and its scale, where there is one, store them: (B, 2, K, S, last) each.

    ``dtypes`` are those of the cache and of the scale; with a ``backend`` they are quantized in one launch.
    """
    B, K, S, D = key.shape
    if quant_bit and backend is not None:
        return list(
            quantize_rows(
                key, value, quant_bit=quant_bit, quant_group=quant_group, scale_dtype=dtypes[1], backend=backend
            )
        )
    rows = mx.concatenate([key, value], axis=1).reshape(B, 2, K, S, D)
    if not quant_bit:
        return [rows.astype(dtypes[0])]
    return list(quantize(rows, quant_bit=quant_bit, quant_group=quant_group, scale_dtype=dtypes[1]))


def read_rows(
    batch: int,
    end: int,
    cache: mx.array,
    scale: mx.array | None,
    *,
    layer_idx: int = 0,
    quant_bit: int,
    cache_layout: int = 1,
    dtype: mx.Dtype,
    product_dtype: mx.Dtype | None = None,
) -> tuple[mx.array, mx.array]:
    """Rows 0 to ``end`` of one layer as keys and values (B, K, T, D) in ``dtype``; unchecked.

    ``product_dtype`` is the dtype of level * scale; PMX's is the scale's, the default.
    """
    rows = _stored_rows(cache, layer_idx, batch, end, cache_layout)  # (B, 2, K, T, D')
    if quant_bit and scale is not None:
        scales = _stored_rows(scale, layer_idx, batch, end, cache_layout)
        rows = multiply_levels(rows, scales, quant_bit, product_dtype or scale.dtype)
    rows = rows.astype(dtype)
    return rows[:, 0], rows[:, 1]


def read_sequences(
    ends: Sequence[int],
    cache: mx.array,
    scale: mx.array | None,
    *,
    quant_bit: int,
    dtype: mx.Dtype,
    product_dtype: mx.Dtype | None = None,
) -> list[tuple[mx.array, mx.array]]:
    """:func:`read_rows` of B sequences, each up to its own end: (1, K, T, D) of each. Cache layout 1, one layer."""
    return [
        read_rows(
            1,
            end,
            cache[:, b : b + 1],
            None if scale is None else scale[:, b : b + 1],
            quant_bit=quant_bit,
            dtype=dtype,
            product_dtype=product_dtype,
        )
        for b, end in enumerate(ends)
    ]


def _stored_rows(array: mx.array, layer: int, batch: int, end: int, cache_layout: int) -> mx.array:
    """Rows 0 to ``end`` of one layer of a cache or scale, as they are stored: (B, 2, K, T, last)."""
    if cache_layout == 0:
        return array[:batch, layer, :, :end].transpose(0, 1, 3, 2, 4)  # (B, 2, T, K, D) -> (B, 2, K, T, D)
    return array[layer, :batch, :, :, :end]
