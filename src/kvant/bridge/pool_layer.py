"""A layer of a pool in one step, as mlx-lm's model sees its cache.

R rows: sequences of the step, B of them real and the others padding. S new tokens each, K kv heads, D head_dim.
"""

from dataclasses import dataclass, field, replace

import mlx.core as mx

from kvant.bridge import hook
from kvant.bridge.layers import Mask, refuse_values, scaled_query
from kvant.cache.paged_layers import PoolLayer
from kvant.operators.attention import attend_tokens
from kvant.operators.paged_attention import PagedRows, attend_rows, stored_rows, write_rows
from kvant.operators.paged_kernel import StepPages, attend_pages
from kvant.operators.stored_tokens import float_tokens

UNKNOWN = -1  # in place of a window


@dataclass(slots=True)
class StepRows:
    """What the layers that share page tables have in common in a step.

    Attributes:
        rows: where the tokens are.
        window: tokens that a query sees; None: all.
        lengths: tokens of each of the R rows before the step.
        new_tokens: S.
        masks: those that were made for several rows, by the window that was asked for.
        masks_of_one: the same for one row, (S, T).
    """

    rows: PagedRows
    window: int | None
    lengths: tuple[int, ...]
    new_tokens: int
    masks: dict[int | None, mx.array] = field(default_factory=dict)
    masks_of_one: dict[int | None, mx.array] = field(default_factory=dict)
    _padded: mx.array | None = None

    @property
    def counts(self) -> list[int]:
        """How many rows of each sequence are read."""
        return [sum(end - first for first, end in runs) for runs in self.rows.runs]

    def padded_rows(self) -> mx.array:
        """The rows that are read, (R * T,) for the longest T: shorter sequences on the right, as mlx-lm pads them."""
        if self._padded is None:
            T = max(self.counts)
            parts = []
            for count, runs in zip(self.counts, self.rows.runs, strict=True):
                # row 0 in place of none; masks leave it out
                parts += [mx.zeros(T - count, mx.int32), *(mx.arange(first, end) for first, end in runs)]
            parts.append(mx.zeros(T * (len(self.lengths) - len(self.rows.runs)), mx.int32))
            self._padded = mx.concatenate(parts)
        return self._padded

    def mask(self, window: int | None) -> mx.array:
        """Which of the padded rows each query sees: boolean (R, 1, S, T).

        A query of padding sees a row that nobody reads the answer of: softmax of nothing would be NaN.
        """
        if window not in self.masks:
            T, S = max(self.counts), self.new_tokens
            length = mx.array(self.lengths)[:, None, None, None]
            first = mx.array([*self.rows.first, *[0] * (len(self.lengths) - len(self.rows.first))])
            query = length + mx.arange(S)[:, None]
            token = length + S - T + mx.arange(T)
            seen = (token >= first[:, None, None, None]) & (token <= query)
            self.masks[window] = seen if window is None else seen & (token > query - window)
        return self.masks[window]

    def mask_of_one(self, window: int | None) -> mx.array:
        """:meth:`mask` where the step has one row: (S, T)."""
        if window not in self.masks_of_one:
            self.masks_of_one[window] = self.mask(window)[0, 0]
        return self.masks_of_one[window]

    def seen(self, mask: Mask) -> PagedRows | None:
        """The rows that a mask shows of each sequence, all up to a query's own; None: not known, or they go with it."""
        window = self._window_of(mask)
        if window == UNKNOWN:
            return None
        if window is None or window == self.window:
            return self.rows
        return self._last(window) if self.new_tokens == 1 else None

    def seen_pages(self, mask: Mask) -> StepPages | None:
        """:meth:`seen` for the fused kernel; None also for a step that it does not take."""
        window, pages = self._window_of(mask), self.rows.pages
        return None if pages is None or window == UNKNOWN else replace(pages, window=window)

    def _window_of(self, mask: Mask) -> int | None:
        """How many tokens a query sees by a mask of what was fetched, its own included; None: all; or UNKNOWN."""
        if mask is None:
            return self.window if self.new_tokens == 1 else UNKNOWN
        if isinstance(mask, str):  # causal: all that was fetched, which may be more than a window
            narrow = self.window is not None and self.window < max(self.counts)
            return UNKNOWN if narrow or len(self.lengths) > 1 else self.window
        longest = max(self.lengths) + self.new_tokens
        for window, made in (*self.masks.items(), *self.masks_of_one.items()):
            if mask is made:
                if window is None or window >= longest:
                    return self.window
                if self.window is None or window <= self.window:
                    return window
                return self.window if self.new_tokens == 1 else UNKNOWN  # no more was fetched
        return UNKNOWN

    def _last(self, count: int) -> PagedRows:
        """The last rows of each sequence: some models show a window of what a layer without one keeps."""
        runs = []
        for own in self.rows.runs:
            left, last = count, []
            for first, end in reversed(own):
                last.append((max(first, end - left), end))
                left -= end - last[-1][0]
            runs.append([run for run in reversed(last) if run[0] < run[1]])
        return replace(self.rows, runs=runs)


class PooledLayer:
    """In place of mlx-lm's ``BatchKVCache``, or of its ``KVCache`` where the step has one row.

    Attributes:
        offset: tokens before the step: an int where it has one row, otherwise (R,).
        attends: whether all of the model's attention to what it fetched was computed here, for each sequence alone.
    """

    def __init__(self, layer: PoolLayer, step: StepRows, offset: int | mx.array) -> None:
        """``layer``: appended to; its arrays are replaced."""
        self.layer = layer
        self.offset = offset
        self.attends: bool | None = None
        self._step = step
        self._alone = isinstance(offset, int)
        self._fetched: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (R, K, S, D) keys and (R, K, S, Dv) values.

        Returns:
            what new queries may see, as lazy arrays (R, K, T, D) and (R, K, T, Dv). :meth:`make_mask` belongs to them.
        """
        if self._fetched is not None:
            raise RuntimeError("a layer is appended to twice in one step")
        own, rows = self.layer.format, self._step.rows
        value_is_key = values is keys
        if not own.value_head_dim:
            values = values[..., :0]
        shape = (len(self._step.lengths), own.num_kv_heads, self._step.new_tokens)
        if keys.shape != (*shape, own.head_dim) or values.shape != (*shape, own.value_head_dim):
            raise ValueError(
                f"keys and values have shapes {tuple(keys.shape)} and {tuple(values.shape)}; the step's are {shape} "
                f"with widths {own.head_dim} and {own.value_head_dim}"
            )
        B = len(rows.runs)
        write_rows(
            keys[:B],
            values[:B],
            self.layer.arrays,
            rows.new,
            quant_bit=own.kv_bits,
            quant_group=own.kv_group_size,
            backend=None if rows.pages is None else self.layer.backend,
        )
        fetched_keys, fetched_values = self._read(keys.dtype)
        self._fetched = fetched_keys, fetched_keys if value_is_key else fetched_values
        self.offset = self.offset + self._step.new_tokens
        hook.remember(self, *self._fetched)
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What was fetched in this step, for layers that share it."""
        if self._fetched is None:
            raise RuntimeError("keys and values are asked for, and none were fetched in this step")
        return self._fetched

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask of N new tokens: (R, 1, N, T), boolean. Where the step has one row, "causal", None or (N, T)."""
        if self._step.new_tokens != N:
            raise ValueError(f"a mask of {N} tokens is asked for; the step has {self._step.new_tokens}")
        window = window_size or self._step.window
        if not self._alone:
            return self._step.mask(window)
        (T,) = self._step.counts
        if (window is not None and window < T) or (return_array and N > 1):
            return self._step.mask_of_one(window)
        return "causal" if N > 1 else None

    def attend_fetched(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """As :meth:`kvant.bridge.layers.BridgedKVCache.attend_fetched`: of several, each to its own rows alone."""
        own, S = self.layer.format, query.shape[2]
        if (backend := self.layer.backend) is not None and self._step.new_tokens == S:
            pages = self._step.seen_pages(mask)
            if pages is not None:
                self.attends = self.attends is not False
                return attend_pages(
                    query,
                    self.layer.arrays,
                    pages,
                    quant_bit=own.kv_bits,
                    quant_group=own.kv_group_size,
                    value_head_dim=own.value_head_dim,
                    score_scale=scale,
                    sinks=sinks,
                    backend=backend,
                )
        scaled = scaled_query(query, scale)
        if not self._alone:
            rows = self._step.seen(mask)
            self.attends = rows is not None and self.attends is not False
            if rows is None:
                return None
            return attend_rows(scaled, self.layer.arrays, rows, quant_bit=own.kv_bits, sinks=sinks)
        causal = isinstance(mask, str)
        if mx.default_device().type == mx.cpu and (S == 1 or causal):
            added = None if isinstance(mask, str) else mask
            return attend_tokens(scaled, key, value, is_causal=causal, mask=added, sinks=sinks)
        return None

    @property
    def keys(self) -> mx.array:
        """The array that keys are in."""
        return self.layer.arrays[0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        """As :attr:`kvant.bridge.layers.BridgedKVCache.keys`: of a model's cache."""

    @property
    def values(self) -> mx.array:
        """An array that is computed when the last append is."""
        return self.layer.arrays[-1]

    @values.setter
    def values(self, array: mx.array) -> None:
        refuse_values(self.layer.format.value_head_dim)

    def size(self) -> int:
        """Tokens of the longest sequence."""
        return max(self._step.lengths) + (0 if self._fetched is None else self._step.new_tokens)

    def empty(self) -> bool:
        """Whether no sequence has a token."""
        return not self.size()

    def _read(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        own, rows = self.layer.format, self._step.rows
        if self._alone:
            stored = [stored_rows(array, rows.runs[0])[None] for array in self.layer.arrays]
        else:
            taken = [mx.take(array, self._step.padded_rows(), axis=2) for array in self.layer.arrays]
            R = len(self._step.lengths)
            # (2, K, R * T, last) -> (R, 2, K, T, last)
            stored = [x.reshape(*x.shape[:2], R, -1, x.shape[3]).transpose(2, 0, 1, 3, 4) for x in taken]
        return float_tokens(stored, quant_bit=own.kv_bits, dtype=dtype, key_dim=own.head_dim)
