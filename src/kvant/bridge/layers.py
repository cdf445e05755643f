"""The cache of a layer in one step, as mlx-lm's model sees it.

R rows: the sequences of the step and padding rows. S new tokens in each, K kv heads, D head_dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from kvant.bridge import hook
from kvant.cache.deferred_writes import DeferredWrites
from kvant.cache.layer_group import LayerGroup, PoolLayer
from kvant.cache.pool_batch import PoolBatch
from kvant.operators.attention import attend_as_mlx, attend_tokens
from kvant.operators.exact_attention import with_exact_rows
from kvant.operators.exact_rows import ExactTail
from kvant.operators.kernels.launch import Backend
from kvant.operators.masks import window_mask
from kvant.operators.paged_attention import NewTokens, append, attend_rows
from kvant.operators.paged_kernel import StepPages, attend_pages
from kvant.operators.paged_rows import PagedRows, read_rows
from kvant.operators.row_runs import cut_runs
from kvant.operators.stored_tokens import float_tokens

UNKNOWN = -1  # stands for a window that a mask does not reveal
Mask = mx.array | str | None


@dataclass
class StepRows:
    """The state of a step that layers with the same page tables share."""

    rows: PagedRows  # locations of the tokens
    window: int | None  # tokens that a query sees; None: all
    lengths: tuple[int, ...]  # tokens before the step in each of the R rows
    new_tokens: int  # S
    # by requested window and T
    masks: dict[tuple[int | None, int], mx.array] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: PoolBatch, group: LayerGroup, new_tokens: int) -> "StepRows":
        """Return the shared state of a group's layers in a step that the batch has begun."""
        step = cls(batch.placed(group), group.window, batch.lengths, new_tokens)
        if group.in_chunks:  # read all of the chunk; the model's mask hides the rest
            step.window = step.longest
        return step

    @cached_property
    def is_single(self) -> bool:
        """True if the step has one row."""
        return len(self.lengths) == 1

    @cached_property
    def offset(self) -> int | mx.array:
        """Tokens before the step: an int for one row, else (R,)."""
        return self.lengths[0] if self.is_single else mx.array(self.lengths)

    @cached_property
    def counts(self) -> list[int]:
        """Tokens read of each sequence, including those that are not written yet."""
        waiting = self.new_tokens if self.rows.new is None else 0
        return [sum(end - first for first, end in runs) + waiting for runs in self.rows.runs]

    @cached_property
    def longest(self) -> int:
        """T, the most tokens read of a sequence."""
        return max(self.counts)

    @cached_property
    def padded_rows(self) -> mx.array:
        """Indices (R * T,) of the rows to read. As in mlx-lm, shorter sequences are padded on the left."""
        pieces = []
        for count, runs in zip(self.counts, self.rows.runs, strict=True):
            # row 0 serves as padding; masks hide it
            pieces += [
                mx.zeros(self.longest - count, mx.int32),
                *(mx.arange(first, end) for first, end in runs),
            ]
        pieces.append(mx.zeros(self.longest * (len(self.lengths) - len(self.rows.runs)), mx.int32))
        return mx.concatenate(pieces)

    def mask(self, window: int | None) -> mx.array:
        """Return the read tokens that each query sees: boolean (R, 1, S, T), or (S, T) for one row."""
        T = self.longest
        S = self.new_tokens
        R = len(self.lengths)
        if (window, T) not in self.masks:
            first = [*self.rows.first, *[0] * (R - len(self.rows.first))]
            self.masks[window, T] = (
                window_mask(S, T, window or T)
                if self.is_single
                else padded_mask(self.lengths, first, [S] * R, S, T, window)
            )
        return self.masks[window, T]

    def seen(self, mask: Mask) -> PagedRows | None:
        """Return the rows that a mask shows, up to each query's own; None if unknown or query-dependent."""
        window = self._window_of(mask)
        if window == UNKNOWN:
            return None
        if window is None or window == self.window:
            return self.rows
        if self.new_tokens > 1:
            return None
        # Some models mask a window in a layer that stores all tokens.
        skipped = [max(0, count - window) for count in self.counts]
        counted = zip(self.rows.runs, skipped, self.counts, strict=True)
        return replace(
            self.rows,
            runs=[cut_runs(row_runs, first, count) for row_runs, first, count in counted],
            first=[first + more for first, more in zip(self.rows.first, skipped, strict=True)],
        )

    def seen_pages(self, mask: Mask) -> StepPages | None:
        """Return :meth:`seen` for the fused kernel, or None if the kernel does not support the step."""
        window = self._window_of(mask)
        pages = self.rows.pages
        return None if pages is None or window == UNKNOWN else replace(pages, window=window)

    def _window_of(self, mask: Mask) -> int | None:
        """Return the tokens, including its own, that a mask shows to a query; None: all; or UNKNOWN."""
        if mask is None:
            return self.window if self.new_tokens == 1 else UNKNOWN
        if isinstance(mask, str):  # causal: all fetched tokens, which may exceed the window
            narrow = self.window is not None and self.window < self.longest
            return self.window if self.is_single and not narrow else UNKNOWN
        for (window, T), made in self.masks.items():
            if mask is made and self.longest == T:
                if window is None or window >= max(self.lengths) + self.new_tokens:
                    return self.window
                if self.window is None or window <= self.window:
                    return window
                return self.window if self.new_tokens == 1 else UNKNOWN  # the window limits what was fetched
        return UNKNOWN


def padded_mask(
    lengths: Sequence[int], first: Sequence[int], counts: Sequence[int], S: int, T: int, window: int | None
) -> mx.array:
    """Return which of T tokens, right-aligned in each row, each of S new ones sees: boolean (R, 1, S, T).

    Each row has the number of tokens before the step, the first token read, and the number of new tokens that
    are not padding. A padding query sees some token, because softmax would be NaN otherwise.
    """
    length, start, count = (mx.array([*each])[:, None, None, None] for each in (lengths, first, counts))
    token = length + count - T + mx.arange(T)
    query = length + mx.arange(S)[:, None]
    seen = (token >= start) & (token <= query)
    if window is not None:
        seen &= token > query - window
    return seen if min(counts) == S else seen | (query >= length + count)


class BridgedLayer:
    """Replaces mlx-lm's cache of a layer, or its ``BatchKVCache`` for several sequences.

    The model appends with :meth:`update_and_fetch`, which returns all tokens as lazy arrays: an unused array
    is never computed. :mod:`kvant.bridge.hook` redirects attention to them to :meth:`attend_fetched`.
    """

    def __init__(
        self,
        deferred: DeferredWrites,
        group: LayerGroup,
        layer: PoolLayer,
        step: StepRows,
    ) -> None:
        """``deferred`` belongs to the batch that has the layer."""
        # True if all attention to fetched tokens was computed here, separately for each sequence.
        self.attends: bool | None = None
        self._deferred = deferred
        self.group = group
        self.layer = layer
        self._begin(step)

    def _begin(self, step: StepRows) -> None:
        self.step = step
        self.appended = False
        self.offset: Any = step.offset  # tokens so far
        self._fetched: tuple[mx.array, mx.array] | None = None
        self._waiting = NewTokens()
        self._exact: ExactTail | None = None

    @property
    def start_position(self) -> int:
        """The first token read, in a step with one row: Llama 4's masks start there."""
        return self.group.first_read(self.offset)

    def skip(self, num_tokens: int) -> None:
        """Count new tokens that another rank stores because it computes the layer."""
        self.offset = self.offset + num_tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (R, K, S, D) keys and (R, K, S, Dv) values.

        Returns:
            the tokens that new queries may see, as lazy arrays (R, K, T, D) and (R, K, T, Dv) in the keys'
            dtype. :meth:`make_mask` applies to them.
        """
        if self.appended:
            raise RuntimeError("update_and_fetch was called twice in one step; expected one call a layer")
        form = self.layer.format
        value_is_key = values is keys
        if not form.value_head_dim:
            values = values[..., :0]
        shape = (len(self.step.lengths), form.num_kv_heads, self.step.new_tokens)
        if keys.shape != (*shape, form.head_dim) or values.shape != (*shape, form.value_head_dim):
            raise ValueError(
                f"keys and values have shapes {tuple(keys.shape)} and {tuple(values.shape)}; the step's are "
                f"{shape} with widths {form.head_dim} and {form.value_head_dim}"
            )
        transform = self.layer.transform
        self._append(transform.keys(keys), transform.values(values), self.step.rows)
        stored_keys, stored_values = self._read(keys.dtype)
        fetched_keys = transform.restored(stored_keys)
        if value_is_key:
            stored_values = fetched_keys
            fetched = fetched_keys, fetched_keys
        else:
            fetched = fetched_keys, transform.values(stored_values)
        if form.shared:
            self._fetched = fetched
        self.appended = True
        self.offset = self.offset + self.step.new_tokens
        hook.remember(self, *fetched, (stored_keys, stored_values) if transform.name else None)
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what was fetched in this step, for layers that share it."""
        if self._fetched is None:
            raise RuntimeError("keys and values are requested before any were fetched in this step")
        return self._fetched

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask of N new tokens: boolean (R, 1, N, T), or "causal", None or (N, T) for one row."""
        if self.step.new_tokens != N:
            raise ValueError(f"a mask of {N} tokens is asked for; the step has {self.step.new_tokens}")
        window = window_size or self.step.window
        narrow = window is not None and window < self.step.longest
        if narrow or not self.step.is_single or (return_array and N > 1):
            return self.step.mask(window)
        return "causal" if N > 1 else None

    def maybe_trim_front(self) -> None:
        """Do nothing: tokens before Llama 4's chunk need not be dropped, as they are never read."""

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
        """Attend from queries (R, H, S, D) to the last fetched tokens. None: mlx-lm's attention is faster.

        Args:
            key, value: the fetched arrays.
            mask: "causal", None, or an array (..., S, T), which is boolean (True: visible) or added to the
                scores.
        """
        transform = self.layer.transform
        # Centering adds a constant to the scores, which would change a sink's share.
        if sinks is not None and transform.center is not None:
            self.attends = False
            return None
        stored = hook.stored_rows_of(key)
        if stored is None:
            return self._attend_stored(query, key, value, scale=scale, mask=mask, sinks=sinks)
        output = self._attend_stored(transform.queries(query), *stored, scale=scale, mask=mask, sinks=sinks)
        return None if output is None else transform.values(output)

    def _attend_stored(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attend like :meth:`attend_fetched`, to keys and values in their stored form."""
        form = self.layer.format
        S = query.shape[2]
        if (backend := self.layer.backend) is not None and self.step.new_tokens == S:
            output = self._attend_fused(query, key.shape[2], mask, backend, score_scale=scale, sinks=sinks)
            if output is not None:
                self.attends = self.attends is not False
                return output
        factor = scale * math.sqrt(query.shape[3])  # kvant's attention scales by 1/sqrt(D)
        scaled = query if math.isclose(factor, 1, rel_tol=1e-6) else query * factor
        if not self.step.is_single or self._exact is not None:
            rows = self.step.seen(mask)
            self.attends = rows is not None and self.attends is not False
            if rows is None:
                return None
            return attend_rows(
                scaled,
                self.layer.arrays,
                rows,
                **form.bit_operands,
                sinks=sinks,
                waiting=self._waiting.stored,
                exact=self._exact,
            )
        if mx.default_device().type != mx.cpu:
            return attend_as_mlx(query, key, value, scale=scale, mask=mask, sinks=sinks)
        causal = isinstance(mask, str)
        if S == 1 or causal:  # fewer products, or no score matrix
            added = None if isinstance(mask, str) else mask
            return attend_tokens(scaled, key, value, is_causal=causal, mask=added, sinks=sinks)
        return None

    @property
    def keys(self) -> mx.array:
        """The array with the keys."""
        return self.layer.arrays[0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        """Ignore an array that the model made to depend on others: they are computed with the logits."""

    @property
    def values(self) -> mx.array:
        """An array whose evaluation evaluates the last append."""
        return self.layer.arrays[-1]

    @values.setter
    def values(self, array: mx.array) -> None:
        if self.layer.format.value_head_dim:
            raise AttributeError("the model assigned its cache's values; expected update_and_fetch")

    def _append(self, keys: mx.array, values: mx.array, rows: PagedRows) -> None:
        """Write new tokens now, or record them for a deferred write."""
        layer = self.layer
        backend = None if rows.pages is None else layer.backend
        waiting = append(
            keys, values, layer.arrays, rows, layer.exact_arrays, **layer.operands, backend=backend
        )
        self._waiting = waiting
        if any(waiting):
            self._deferred.add(self.group, layer, waiting)
        if rows.exact is not None and layer.exact_arrays:
            self._exact = ExactTail(rows.exact, layer.exact_arrays, waiting.exact)

    def _read(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Return the appended tokens and the visible ones before them, for a model that attends by itself."""
        step = self.step
        arrays = self.layer.arrays
        form = self.layer.format
        options: dict[str, Any] = form.bit_operands | {"dtype": dtype, "key_dim": form.head_dim}
        if step.is_single:
            copy = form.kv_bits > 0 and step.new_tokens == 1 and mx.default_device().type == mx.cpu
            fetched = read_rows(arrays, step.rows.runs[0], self._waiting.stored, **options, copy=copy)
        else:
            gathered = [mx.take(array, step.padded_rows, axis=2) for array in arrays]
            R = len(step.lengths)
            # (2, K, R * T, last) -> (R, 2, K, T, last)
            stored = [x.reshape(*x.shape[:2], R, -1, x.shape[3]).transpose(2, 0, 1, 3, 4) for x in gathered]
            fetched = float_tokens(stored, **options)
        if self._exact is None:
            return fetched
        return with_exact_rows(*fetched, self._exact, step.new_tokens)

    def _attend_fused(
        self, query: mx.array, tokens: int, mask: Mask, backend: Backend, **options: Any
    ) -> mx.array | None:
        """Attend with the kernel, or return None if it does not support the step with this mask."""
        pages = self.step.seen_pages(mask)
        if pages is None:
            if self._exact is not None:  # the kernel does not support a mask with a tail
                return None
            if self.step.rows.pages is None or not self.step.is_single or isinstance(mask, str):
                return None
            pages = replace(self.step.rows.pages, window=None)
            if before := pages.rows - tokens:  # stored rows that were not fetched
                if mask is None:
                    return None
                hidden = False if mask.dtype == mx.bool_ else -math.inf
                mask = mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(before, 0)], constant_values=hidden)
            options |= {"mask": mask, "is_causal": False}
        form = self.layer.format
        options |= form.operands
        if self._exact is not None:
            options["exact"] = self._exact
        return attend_pages(query, self.layer.arrays, pages, **options, backend=backend)
