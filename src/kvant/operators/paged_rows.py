"""Tokens in rows of a layer's shared arrays: which rows a step writes and reads, and how.

The arrays of a layer are values (2, K, T, D') and, if they are quantized, scales (2, K, T, D/G): PMX's
dynamic batching with cache_mode 1, cache_layout 3 and one layer. Keys and values of different widths or bits
lie side by side in (1, K, T, a key and a value).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx

from kvant.operators.exact_rows import ExactRows
from kvant.operators.kernels.attend import value_dim_of
from kvant.operators.paged_kernel import StepPages
from kvant.operators.row_runs import Run, put_rows, stored_rows
from kvant.operators.stored_tokens import fitted_tokens, float_rows, keys_and_values
from kvant.operators.streams import FEW_ROWS

# Bytes of keys and values as float32 that are made at once (measured): 16 MiB for a token of 32k took 1.2 to
# 2.5 times as long, 1 MiB 1.3 times. Of many queries a fourth: a CPU attends to more tokens in tiles.
READ_BYTES = 4 * 1024 * 1024
PARTS_OF_MANY = 4


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where a step's tokens are. Each list has an entry for every sequence.

    Attributes:
        new: the B * S rows that are written, sequence by sequence: those of one sequence as runs, those of
            several as an integer array. None: of one sequence, whose new tokens wait until the step is
            committed, because they would take the place of rows that it, or another step in its place, needs.
        runs: the rows that are read, in the order of positions, the new ones included.
        first: the position of the first row that is read.
        window: the last tokens that a query sees, its own included; None: it sees all.
        pages: the same for the fused kernel; None: it does not take the step.
        exact: the rows of tokens that are also stored as floats; None: there are none.
    """

    new: list[Run] | mx.array | None
    runs: list[list[Run]]
    first: list[int]
    window: int | None
    pages: StepPages | None = None
    exact: ExactRows | None = None

    @property
    def counts(self) -> list[int]:
        """Rows that are read of each sequence."""
        return [sum(end - first for first, end in own) for own in self.runs]

    def ends(self, sequence: int) -> int:
        """Return the position past the last row that is read of a sequence."""
        return self.first[sequence] + sum(end - first for first, end in self.runs[sequence])

    def only(self, share: slice) -> "PagedRows":
        """Return what is read of some of the sequences."""
        if share == slice(0, len(self.runs)):
            return self
        return replace(self, runs=self.runs[share], first=self.first[share])


def read_rows(
    arrays: Sequence[mx.array],
    runs: Sequence[Run],
    waiting: Sequence[mx.array] = (),
    *,
    key_dim: int,
    copy: bool = False,
    **form: Any,
) -> tuple[mx.array, mx.array]:
    """Keys and values (1, K, T, D) of rows, and of tokens behind them that wait to be written.

    ``form``: of :func:`kvant.operators.stored_tokens.float_rows`.

    A single run is read as a slice. With ``copy`` its quantized values are copied to lie side by side: MLX
    converts rows that are apart to float three times as slowly on a CPU (1,500 rows of 8 heads of 64: 225 us;
    a copy and the conversion of it 70 and 76).
    """
    rows = read_float_rows(arrays, runs, waiting, key_dim=key_dim, copy=copy, **form)
    return keys_and_values(rows, key_dim)


def read_float_rows(
    arrays: Sequence[mx.array],
    runs: Sequence[Run],
    waiting: Sequence[mx.array] = (),
    *,
    copy: bool = False,
    **form: Any,
) -> list[mx.array]:
    """As :func:`read_rows`, but in the arrangement in which tokens are stored.

    ``form``: of :func:`kvant.operators.stored_tokens.float_rows`.
    """
    stored = [
        stored_rows(array, runs)
        if len(runs) != 1 or (copy and array is arrays[0])
        else array[:, :, slice(*runs[0])]
        for array in arrays
    ]
    if waiting:
        stored = [mx.concatenate([held, more], axis=2) for held, more in zip(stored, waiting, strict=True)]
    return float_rows(stored, **form)


def read_sequences(
    arrays: Sequence[mx.array], rows: PagedRows, waiting: Sequence[mx.array] = (), **options: Any
) -> list[tuple[mx.array, mx.array, int]]:
    """Read the tokens of all sequences at once.

    Reading the bytes of several sequences side by side and converting them in one multiplication is twice as
    fast as gathering row numbers, and ten times as fast as reading padded pages (measured on a CPU).

    Args:
        options: those of :func:`read_rows`.

    Returns:
        Of each sequence keys, values (1, K, T, D), and the position of the first.
    """
    keys, values = read_rows(arrays, [run for own in rows.runs for run in own], waiting, **options)
    ends = list(accumulate(rows.counts))[:-1]
    return list(zip(mx.split(keys, ends, axis=2), mx.split(values, ends, axis=2), rows.first, strict=True))


def write_rows(
    key: mx.array,
    value: mx.array,
    arrays: Sequence[mx.array],
    rows: list[Run] | mx.array,
    **form: Any,
) -> None:
    """Quantize keys (B, K, S, D) and values (B, K, S, Dv) and write them in place.

    That is one operation an array, or an array and run. ``form``: of
    :func:`kvant.operators.stored_tokens.fitted_tokens`.
    """
    new = fitted_tokens(key, value, arrays, **form, unbatched=not isinstance(rows, mx.array))
    for array, part in zip(arrays, new, strict=True):
        if not isinstance(rows, mx.array):
            put_rows(array, part, rows)
            continue
        # In words of four bytes: Metal writes fewer one by one, with an atomic exchange of all four each.
        words = mx.uint32 if array.shape[-1] * array.dtype.size % 4 == 0 else array.dtype
        # (B, 2, K, S, last) -> (2, K, B * S, last)
        tokens = mx.view(part, words).transpose(1, 2, 0, 3, 4).flatten(2, 3)
        put = mx.put_along_axis(mx.view(array, words), rows[None, None, :, None], tokens, axis=2)
        array[:] = mx.view(put, array.dtype)


def float_bytes(array: mx.array, key_dim: int, quant_bit: int, value_bit: int) -> int:
    """Bytes of a token's keys and values as float32, of a layer's array (2, K, T, D')."""
    return 4 * array.shape[1] * (key_dim + value_dim_of(array, key_dim, quant_bit, value_bit))


def tokens_at_once(row_bytes: int, new_tokens: int, quant_bit: int) -> int:
    """Tokens that are floats at once for so many queries of each sequence, of ``row_bytes`` each.

    Those that are stored as floats, and are only read, are four times as many.
    """
    most = max(READ_BYTES * (1 if quant_bit else 4) // row_bytes, PARTS_OF_MANY * FEW_ROWS)
    return most if new_tokens <= FEW_ROWS else most // PARTS_OF_MANY


def shares(counts: Sequence[int], most: int, long: int | None = None) -> Iterator[slice]:
    """The sequences that are read together: of ``most`` rows at most, or one. With ``long`` rows one is
    by itself.
    """
    start, total = 0, 0
    for b, count in enumerate(counts):
        is_long = long is not None and max(count, counts[b - 1]) >= long
        if b > start and (total + count > most or is_long):
            yield slice(start, b)
            start, total = b, 0
        total += count
    yield slice(start, len(counts))
