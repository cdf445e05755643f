"""A sliding window in a preallocated, quantized key/value cache of one layer: its rows are a ring."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import mlx.core as mx

from kvant.cache.layer import copied
from kvant.cache.layer_format import LayerFormat
from kvant.cache.quantized import QuantizedKVCache
from kvant.cache.sequence import TrimLimit
from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.cached_attention import stored_tokens
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernels.launch import Backend
from kvant.operators.masks import both_masks
from kvant.operators.probe import KernelUse
from kvant.operators.rotary import Rotary
from kvant.operators.validation import check_tokens

SLACK = 16  # tokens past the window that stay readable: what can be trimmed, and appended in one write


class WindowKVCache(QuantizedKVCache):
    """Every query sees the first ``keep`` tokens and the last ``window``, its own included.

    It has keep + window + slack rows, or as many as the reservation where that is less. Position p is at row p below
    ``keep``, and at keep + (p - keep) mod (window + slack) from there on. Which position a row holds follows from the
    number of tokens; masks and the bias split go by positions.

    Up to slack + 1 new tokens are written, then read: whatever they overwrite is outside of the window already. More
    new tokens attend to the rows held and to themselves; where they would overwrite rows, they are written when the
    step is committed. So a step that is not committed leaves nothing behind, and the last slack + 1 tokens can be
    forgotten exactly. More cannot be, except all.

    Attributes:
        window, keep, slack: in tokens.
    """

    def __init__(
        self,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: int,
        keep: int = 0,
        slack: int = SLACK,
        bias_split: BiasSplit | None = None,
        rotary: Rotary | None = None,
        **options: Any,
    ) -> None:
        """Allocate the cache.

        Args:
            max_seq_len: tokens it can have in all, most of them forgotten.
            num_kv_heads, head_dim, options: as in :class:`QuantizedKVCache`.
            window: the last tokens a query sees, its own included.
            keep: the first tokens, which every query sees.
            slack: tokens past the window that are kept.
            bias_split: the biases that keys and values come without. Its rotation is not used.
            rotary: turns the keys; needed with a bias split.

        Raises:
            ValueError: a size out of range, or what :class:`QuantizedKVCache` refuses.
        """
        for name, number, least in (("window", window, 1), ("keep", keep, 0), ("slack", slack, 0)):
            if type(number) is not int or number < least:
                raise ValueError(f"{name} is {number!r}; expected an int, {least} or more")
        if bias_split is not None and rotary is None:
            raise ValueError("rotary is None; a bias split needs to know how keys turn")
        self.window: int = window
        self.keep, self.slack = keep, slack
        super().__init__(max_seq_len, num_kv_heads, head_dim, bias_split=bias_split, **options)
        self._rotary = rotary
        self._pending: tuple[int, list[mx.array]] | None = None  # the start of tokens that wait, as stored
        # In the order of the rows.
        pairs = 0 if bias_split is None else len(bias_split.pairs)
        self._rotation = mx.zeros((2, pairs, self.num_rows))
        if bias_split is not None:
            mx.eval(self._rotation, bias_split.key_bias, bias_split.value_bias)

    @property
    def num_rows(self) -> int:
        """Rows of its arrays."""
        return min(self.max_seq_len, self.keep + self.window + self.slack)

    @property
    def limits(self) -> tuple[TrimLimit, ...]:
        """How far it can go back."""
        return (TrimLimit(self.num_rows, self.slack + 1),)

    @property
    def nbytes(self) -> int:
        """Bytes the cache holds now, with its bias tables."""
        split = self.bias_split
        shared = [] if split is None else [split.key_bias, split.value_bias]
        return sum(array.nbytes for array in (*self.arrays, *shared, self._rotation))

    def attend(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append keys and values and attend to the window; see :class:`kvant.cache.KVCache`.

        ``mask`` has a column for every token so far, forgotten or not.

        Raises:
            ContextError: more tokens than there is room for; nothing was written.
            ValueError: shapes that do not fit the cache.
        """
        if not self.sequence.shared:
            check_tokens(query, key, value, mask, self.sequence.length)
            self._check_new(key)
        S = key.shape[2]
        self.settle()
        backend = self.backend_for(query)
        new = self._stored(key, value, backend)
        if backend is not None and not self._waits(self.sequence.length, S):
            output = self._attend_fused(query, new, mask, sinks, backend)
        else:
            output = self._attend(query, new, mask, sinks)
        if not self.sequence.shared:
            self.sequence.commit(S)
            self.settle()
        return output

    def append(self, key: mx.array, value: mx.array) -> list[mx.array]:
        """As :meth:`QuantizedKVCache.append`. Rows are in the order of the ring.

        :meth:`mask` says which of them a query sees. :meth:`settle` is due once the tokens count.
        """
        if not self.sequence.shared:
            self._check_new(key)
        self.settle()
        return self._append(self._stored(key, value, self.backend_for(key)))

    def mask(self, new_tokens: int, window: int | None = None) -> mx.array | None:
        """Which of the rows that :meth:`append` returns the queries of S new tokens see: (S, rows), boolean.

        Args:
            new_tokens: S. Asked for before they are appended.
            window: a narrower window, or one that is wider by what the slack has; default: the cache's.

        Returns:
            None where every query sees all tokens up to its own: the rows are in order then.
        """
        return self._mask(self.offset, new_tokens, window or self.window)

    @property
    def format(self) -> LayerFormat:
        """How it stores tokens."""
        return replace(super().format, window=self.window, keep=self.keep, slack=self.slack)

    def stored(self) -> list[mx.array]:
        """See :class:`kvant.cache.KVCache`: in the order of positions, whatever the ring's size is."""
        length = self.sequence.length
        first = self.format.first(length, self.sequence.written)
        spans = [*self._runs(0, min(self.keep, length)), *self._runs(first, length)]
        if not spans:
            return [array[0, 0, :, :, :0] for array in self.arrays]
        return [
            mx.concatenate([array[0, 0, :, :, row : row + n] for row, _, n in spans], axis=2) for array in self.arrays
        ]

    def restore(self, tokens: list[mx.array], first: int, length: int) -> None:
        kept = min(self.keep, length)
        self._write([x[None, :, :, :kept] for x in tokens], 0, kept)
        self._write([x[None, :, :, kept:] for x in tokens], first, length - first)

    def fork(self) -> Self:
        made = super().fork()
        made._pending = None
        made._rotation = copied(self._rotation)
        return made

    def settle(self) -> None:
        """Write the committed part of the tokens that wait; drop the rest."""
        if self._pending is not None:
            start, new = self._pending
            self._write(new, start, min(max(0, self.sequence.length - start), new[0].shape[3]))
            self._pending = None

    def release(self) -> None:
        """Give the memory back. The cache cannot be used after it."""
        super().release()
        self._pending = None
        self._rotation = mx.zeros((0,))

    def _as_used(self, use: KernelUse) -> KernelUse:
        return replace(use, options=(("window", self.window), ("keep", self.keep)))

    @property
    def _ring(self) -> int:
        """Rows that are used again and again."""
        return max(1, self.num_rows - self.keep)

    def _waits(self, start: int, new_tokens: int) -> bool:
        """Whether new tokens would overwrite rows that they, or a step in their place, need."""
        return new_tokens > self.slack + 1 and start + new_tokens > self.num_rows

    def _stored(self, key: mx.array, value: mx.array, backend: Backend | None = None) -> list[mx.array]:
        return stored_tokens(
            key, value, self.arrays, quant_bit=self.kv_bits, quant_group=self.kv_group_size, backend=backend
        )

    def _append(self, new: list[mx.array]) -> list[mx.array]:
        """Append. Returns what new queries may see, as it is stored."""
        start, S = self.sequence.length, new[0].shape[3]
        if self._waits(start, S):
            self._pending = start, new
            held = [array[0, :, :, :, : min(start, self.num_rows)] for array in self.arrays]
            return [mx.concatenate([a, b], axis=3) for a, b in zip(held, new, strict=True)]
        self._write_at_once(new)
        return [array[0, :, :, :, : min(start + S, self.num_rows)] for array in self.arrays]

    def _write_at_once(self, new: list[mx.array]) -> None:
        """Write new tokens before their step is committed."""
        start, S = self.sequence.length, new[0].shape[3]
        self._note_written(start + S)
        self._write(new, start, S)

    def _note_written(self, end: int) -> None:
        """Note that rows hold tokens up to a position ``end``, whose step is not committed."""
        if end > self.num_rows:
            self.sequence.wrote(end)

    def _write(self, new: Sequence[mx.array], start: int, count: int) -> None:
        """Write the first ``count`` tokens, the first at position ``start``; those that later ones replace are left."""
        for row, first, n in self._runs(start, start + count):
            for array, tokens in zip(self.arrays, new, strict=True):
                array[0, :, :, :, row : row + n] = tokens[:, :, :, first : first + n]
            if self._rotation.size:  # what nobody reads would be a chain of arrays, one a token
                self._rotation[..., row : row + n] = self._turns(start + first, start + first + n)

    def _runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Row, first token and number of the tokens that lie side by side, of those at positions start to end."""
        position = start
        while position < end:
            if position < self.keep:
                row, room = position, self.keep - position
            else:
                position = max(position, end - self._ring)
                row = self.keep + (position - self.keep) % self._ring
                room = self.num_rows - row
            n = min(room, end - position)
            yield row, position - start, n
            position += n

    def _attend_fused(
        self, query: mx.array, new: list[mx.array], mask: mx.array | None, sinks: mx.array | None, backend: Backend
    ) -> mx.array:
        """Append and attend in one launch: the kernel finds a position's row by the ring's rule."""
        S = query.shape[2]
        self._write_at_once(new)
        split = self.bias_split
        return attend_fused(
            query,
            self.cache,
            self.scale,
            mx.array(self.sequence.length, mx.int32),
            quant_bit=self.kv_bits,
            quant_group=self.kv_group_size,
            mask=None if mask is None else self._by_row(mask, S),
            window=self.window,
            keep=self.keep,
            rows=min(self.sequence.length + S, self.num_rows),
            sinks=sinks,
            bias_split=None if split is None else replace(split, rotation=self._rotation),
            backend=backend,
        )

    def _by_row(self, mask: mx.array, new_tokens: int) -> mx.array:
        """A mask of all tokens with a column for each row."""
        end = self.sequence.length + new_tokens
        return mx.take(mask, mx.maximum(self._positions(end, min(end, self.num_rows)), 0), axis=-1)

    def _attend(self, query: mx.array, new: list[mx.array], mask: mx.array | None, sinks: mx.array | None) -> mx.array:
        """Append and attend without the kernel."""
        start, S = self.sequence.length, query.shape[2]
        seen = self._mask(start, S, self.window)
        if mask is not None:
            positions = self._row_positions(start, S)
            mask = mx.take(mask, mx.maximum(positions, 0), axis=-1)
            seen = both_masks(self._visible(start, S, self.window), mask)
        stored = self._append(new)
        split = self.bias_split
        if split is not None:
            rotation = self._rotation
            if self._waits(start, S):
                held = rotation[..., : min(start, self.num_rows)]
                rotation = mx.concatenate([held, self._turns(start, start + S)], axis=2)
            split = replace(split, rotation=rotation)
        keys, values = self.read(stored, query.dtype)
        return attend_tokens(query, keys, values, is_causal=seen is None, mask=seen, bias_split=split, sinks=sinks)

    def _turns(self, start: int, end: int) -> mx.array:
        """The columns of a rotation for positions start to end."""
        assert self._rotary is not None
        assert self.bias_split is not None
        return rotation_table(self._rotary, self.bias_split.pairs, end, start)

    def _mask(self, start: int, new_tokens: int, window: int) -> mx.array | None:
        end = start + new_tokens
        ordered = end <= self.num_rows and end <= self.keep + window
        return None if ordered else self._visible(start, new_tokens, window)

    def _visible(self, start: int, new_tokens: int, window: int) -> mx.array:
        """Which rows the queries at positions ``start`` on see; the same for all layers of this shape."""
        key = (start, new_tokens, window, self.keep, self.num_rows)
        if key not in self.sequence.values:
            query = mx.arange(start, start + new_tokens)[:, None]
            self.sequence.values[key] = self._seen(self._row_positions(start, new_tokens), query, window)
        return self.sequence.values[key]

    def _seen(self, positions: mx.array, query: mx.array, window: int) -> mx.array:
        return (positions >= 0) & (positions <= query) & ((positions > query - window) | (positions < self.keep))

    def _row_positions(self, start: int, new_tokens: int) -> mx.array:
        """The position of each row that an append returns; below 0: there is none."""
        end = start + new_tokens
        if not self._waits(start, new_tokens):
            return self._positions(end, min(end, self.num_rows))
        held = self._positions(start, min(start, self.num_rows))
        return mx.concatenate([held, mx.arange(start, end)])

    def _positions(self, end: int, rows: int) -> mx.array:
        """The position of each of the first rows when positions below ``end`` are written; below 0: there is none."""
        row = mx.arange(rows)
        last = end - 1
        ring = last - (last - row) % self._ring  # keep cancels out
        return mx.where(row < self.keep, mx.where(row < end, row, -1), mx.where(ring < self.keep, -1, ring))
