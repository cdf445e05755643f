"""Reading and writing tokens in the rows of a layer's shared arrays.

The arrays of a layer are values (2, K, T, D') and, if quantized, scales (2, K, T, D/G): PMX's dynamic
batching with cache_mode 1, cache_layout 3 and one layer. Keys and values of different widths or bits share
rows: (1, K, T, key and value).
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

# Bytes of float32 keys and values to convert at once (measured): for a token at 32k, 16 MiB took 1.2 to 2.5
# times as long and 1 MiB 1.3 times. Many queries take a quarter; for more tokens a CPU attends in tiles.
READ_BYTES = 4 * 1024 * 1024
PARTS_OF_MANY = 4


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a step's tokens. Each list has an entry per sequence.

    Attributes:
        new: the B * S rows to write, sequence by sequence: as runs for one sequence, as an integer array for
            several. None: the new tokens of the single sequence are written when the step is committed,
            because they would overwrite rows that this step, or a replacement for it, needs.
        runs: the rows to read, in the order of positions, including the new ones.
        first: the position of the first row to read.
        window: how many tokens a query sees, including its own; None: all.
        pages: the same for the fused kernel; None: the kernel does not support the step.
        exact: the rows of tokens that are also stored as floats, if any.
    """

    new: list[Run] | mx.array | None
    runs: list[list[Run]]
    first: list[int]
    window: int | None
    pages: StepPages | None = None
    exact: ExactRows | None = None

    @property
    def counts(self) -> list[int]:
        """Return the number of rows read for each sequence."""
        return [sum(end - first for first, end in sequence_runs) for sequence_runs in self.runs]

    def ends(self, sequence: int) -> int:
        """Return the position past the last row read for a sequence."""
        return self.first[sequence] + sum(end - first for first, end in self.runs[sequence])

    def only(self, share: slice) -> "PagedRows":
        """Return the rows of some of the sequences."""
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
    """Read keys and values (1, K, T, D) of rows, followed by the tokens that are still to be written.

    ``form``: arguments of :func:`kvant.operators.stored_tokens.float_rows`.

    A single run is read as a slice. With ``copy`` its quantized values are made contiguous first, because on
    a CPU MLX converts strided rows to float three times as slowly (1,500 rows of 8 heads of 64: 225 us; the
    copy and its conversion take 70 and 76).
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
    """Read rows as :func:`read_rows`, but keep the arrangement of stored tokens."""
    stored = [
        stored_rows(array, runs)
        if len(runs) != 1 or (copy and array is arrays[0])
        else array[:, :, slice(*runs[0])]
        for array in arrays
    ]
    if waiting:
        stored = [mx.concatenate([*both], axis=2) for both in zip(stored, waiting, strict=True)]
    return float_rows(stored, **form)


def read_sequences(
    arrays: Sequence[mx.array], rows: PagedRows, waiting: Sequence[mx.array] = (), **options: Any
) -> list[tuple[mx.array, mx.array, int]]:
    """Read the tokens of all sequences at once.

    Joining the bytes of several sequences and converting them in one multiplication is twice as fast as
    gathering row numbers, and ten times as fast as reading padded pages (measured on a CPU).

    Args:
        options: those of :func:`read_rows`.

    Returns:
        keys and values (1, K, T, D) of each sequence, and the position of its first token.
    """
    keys, values = read_rows(arrays, [run for runs in rows.runs for run in runs], waiting, **options)
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

    ``form``: arguments of :func:`kvant.operators.stored_tokens.fitted_tokens`.
    """
    new = fitted_tokens(key, value, arrays, **form, unbatched=not isinstance(rows, mx.array))
    for array, stored in zip(arrays, new, strict=True):
        if not isinstance(rows, mx.array):
            put_rows(array, stored, rows)
            continue
        # Write words of four bytes: Metal writes smaller elements singly, each with an atomic four-byte swap.
        words = mx.uint32 if array.shape[-1] * array.dtype.size % 4 == 0 else array.dtype
        # (B, 2, K, S, last) -> (2, K, B * S, last)
        tokens = mx.view(stored, words).transpose(1, 2, 0, 3, 4).flatten(2, 3)
        put = mx.put_along_axis(mx.view(array, words), rows[None, None, :, None], tokens, axis=2)
        array[:] = mx.view(put, array.dtype)


def float_bytes(array: mx.array, key_dim: int, quant_bit: int, value_bit: int) -> int:
    """Return the bytes of one token's keys and values as float32, for a layer's array (2, K, T, D')."""
    return 4 * array.shape[1] * (key_dim + value_dim_of(array, key_dim, quant_bit, value_bit))


def tokens_at_once(row_bytes: int, new_tokens: int, quant_bit: int) -> int:
    """Return how many tokens of ``row_bytes`` to convert to float at once for this many new tokens.

    It is four times as many if tokens are stored as floats, which are only read.
    """
    most = max(READ_BYTES * (1 if quant_bit else 4) // row_bytes, PARTS_OF_MANY * FEW_ROWS)
    return most if new_tokens <= FEW_ROWS else most // PARTS_OF_MANY


def shares(counts: Sequence[int], most: int, long: int | None = None) -> Iterator[slice]:
    """Yield slices of sequences to read together, with at most ``most`` rows or one sequence each.

    A sequence with at least ``long`` rows gets a slice of its own.
    """
    start = 0
    total = 0
    for b, count in enumerate(counts):
        is_long = long is not None and max(count, counts[b - 1]) >= long
        if b > start and (total + count > most or is_long):
            yield slice(start, b)
            start = b
            total = 0
        total += count
    yield slice(start, len(counts))
