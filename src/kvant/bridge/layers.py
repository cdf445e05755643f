"""A layer in one step, as mlx-lm's model sees its cache.

R rows: sequences of the step, B of them real and the others padding. S new tokens each, K kv heads, D
head_dim.
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

UNKNOWN = -1  # in place of a window
Mask = mx.array | str | None


@dataclass
class StepRows:
    """What the layers that share page tables have in common in a step."""

    rows: PagedRows  # where the tokens are
    window: int | None  # tokens that a query sees; None: all
    lengths: tuple[int, ...]  # tokens of each of the R rows before the step
    new_tokens: int  # S
    # by the window asked for, and T
    masks: dict[tuple[int | None, int], mx.array] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: PoolBatch, group: LayerGroup, new_tokens: int) -> "StepRows":
        """What the layers of a group have in common in a step that a batch has begun."""
        step = cls(batch.placed(group), group.window, batch.lengths, new_tokens)
        if group.in_chunks:  # all that is read: for the rest there is the model's mask
            step.window = step.longest
        return step

    @cached_property
    def is_single(self) -> bool:
        """Whether the step has one row."""
        return len(self.lengths) == 1

    @cached_property
    def offset(self) -> int | mx.array:
        """Tokens before the step: of one row an int, otherwise (R,)."""
        return self.lengths[0] if self.is_single else mx.array(self.lengths)

    @cached_property
    def counts(self) -> list[int]:
        """How many tokens of each sequence are read, those that wait to be written included."""
        waiting = self.new_tokens if self.rows.new is None else 0
        return [sum(end - first for first, end in runs) + waiting for runs in self.rows.runs]

    @cached_property
    def longest(self) -> int:
        """T."""
        return max(self.counts)

    @cached_property
    def padded_rows(self) -> mx.array:
        """The rows that are read, (R * T,): shorter sequences on the right, as mlx-lm pads them."""
        parts = []
        for count, runs in zip(self.counts, self.rows.runs, strict=True):
            # row 0 in place of none; masks leave it out
            parts += [
                mx.zeros(self.longest - count, mx.int32),
                *(mx.arange(first, end) for first, end in runs),
            ]
        parts.append(mx.zeros(self.longest * (len(self.lengths) - len(self.rows.runs)), mx.int32))
        return mx.concatenate(parts)

    def mask(self, window: int | None) -> mx.array:
        """Which of the tokens that are read each query sees: boolean (R, 1, S, T), and (S, T) of one row."""
        T, S, R = self.longest, self.new_tokens, len(self.lengths)
        if (window, T) not in self.masks:
            first = [*self.rows.first, *[0] * (R - len(self.rows.first))]
            self.masks[window, T] = (
                window_mask(S, T, window or T)
                if self.is_single
                else padded_mask(self.lengths, first, [S] * R, S, T, window)
            )
        return self.masks[window, T]

    def seen(self, mask: Mask) -> PagedRows | None:
        """The rows that a mask shows of each sequence, all up to a query's own; None: not known, or they
        go with it.
        """
        window = self._window_of(mask)
        if window == UNKNOWN:
            return None
        if window is None or window == self.window:
            return self.rows
        if self.new_tokens > 1:
            return None
        # Some models show a window of what a layer without one keeps.
        hidden = [max(0, count - window) for count in self.counts]
        counted = zip(self.rows.runs, hidden, self.counts, strict=True)
        return replace(
            self.rows,
            runs=[cut_runs(own, first, count) for own, first, count in counted],
            first=[first + more for first, more in zip(self.rows.first, hidden, strict=True)],
        )

    def seen_pages(self, mask: Mask) -> StepPages | None:
        """:meth:`seen` for the fused kernel; None also for a step that it does not take."""
        window, pages = self._window_of(mask), self.rows.pages
        return None if pages is None or window == UNKNOWN else replace(pages, window=window)

    def _window_of(self, mask: Mask) -> int | None:
        """How many tokens a query sees by a mask of what was fetched, its own included; None: all; or
        UNKNOWN.
        """
        if mask is None:
            return self.window if self.new_tokens == 1 else UNKNOWN
        if isinstance(mask, str):  # causal: all that was fetched, which may be more than a window
            narrow = self.window is not None and self.window < self.longest
            return self.window if self.is_single and not narrow else UNKNOWN
        for (window, T), made in self.masks.items():
            if mask is made and self.longest == T:
                if window is None or window >= max(self.lengths) + self.new_tokens:
                    return self.window
                if self.window is None or window <= self.window:
                    return window
                return self.window if self.new_tokens == 1 else UNKNOWN  # no more was fetched
        return UNKNOWN


def padded_mask(
    lengths: Sequence[int], first: Sequence[int], counts: Sequence[int], S: int, T: int, window: int | None
) -> mx.array:
    """Which of T tokens, a row's own on the right, each of S new ones sees: boolean (R, 1, S, T).

    Of each row there are the tokens before the step, the first that is read, and how many of the new ones are
    no padding. A query of padding sees something, or softmax would be NaN; so does a row of padding.
    """
    length, start, count = (mx.array([*each])[:, None, None, None] for each in (lengths, first, counts))
    token, query = length + count - T + mx.arange(T), length + mx.arange(S)[:, None]
    seen = (token >= start) & (token <= query)
    if window is not None:
        seen &= token > query - window
    return seen if min(counts) == S else seen | (query >= length + count)


class BridgedLayer:
    """In place of mlx-lm's caches of a layer: of one sequence, or of several as its ``BatchKVCache``.

    The model appends through :meth:`update_and_fetch`, which gives all tokens as lazy arrays: an array that
    nobody reads is not computed. The model's attention to them comes to :meth:`attend_fetched`
    (:mod:`kvant.bridge.hook`).
    """

    def __init__(
        self,
        deferred: DeferredWrites,
        group: LayerGroup,
        layer: PoolLayer,
        step: StepRows,
    ) -> None:
        """``deferred``: the batch's, which holds the layer."""
        # Whether all of the model's attention to what it fetched was computed here, for each sequence alone.
        self.attends: bool | None = None
        self._deferred = deferred
        self.group = group
        self.layer = layer
        self._begin(step)

    def _begin(self, step: StepRows) -> None:
        self.step, self.appended = step, False
        self.offset: Any = step.offset  # tokens so far
        self._fetched: tuple[mx.array, mx.array] | None = None
        self._waiting = NewTokens()
        self._exact: ExactTail | None = None

    @property
    def start_position(self) -> int:
        """The first token that is read, where the step has one row: Llama 4 makes its masks from there."""
        return self.group.first_read(self.offset)

    def skip(self, num_tokens: int) -> None:
        """Count new tokens that are stored elsewhere, by the rank that computes the layer."""
        self.offset = self.offset + num_tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (R, K, S, D) keys and (R, K, S, Dv) values.

        Returns:
            what new queries may see, as lazy arrays (R, K, T, D) and (R, K, T, Dv) in the keys' dtype.
            :meth:`make_mask` belongs to them.
        """
        if self.appended:
            raise RuntimeError("a layer is appended to twice in one step")
        own, rows = self.layer.format, self.step.rows
        value_is_key = values is keys
        if not own.value_head_dim:
            values = values[..., :0]
        shape = (len(self.step.lengths), own.num_kv_heads, self.step.new_tokens)
        if keys.shape != (*shape, own.head_dim) or values.shape != (*shape, own.value_head_dim):
            raise ValueError(
                f"keys and values have shapes {tuple(keys.shape)} and {tuple(values.shape)}; the step's are "
                f"{shape} "
                f"with widths {own.head_dim} and {own.value_head_dim}"
            )
        transform = self.layer.transform
        self._append(transform.keys(keys), transform.values(values), rows)
        stored_keys, stored_values = self._read(keys.dtype)
        fetched_keys = transform.restored(stored_keys)
        if value_is_key:
            stored_values = fetched_keys
            fetched = fetched_keys, fetched_keys
        else:
            fetched = fetched_keys, transform.values(stored_values)
        if own.shared:
            self._fetched = fetched
        self.appended = True
        self.offset = self.offset + self.step.new_tokens
        hook.remember(self, *fetched, (stored_keys, stored_values) if transform.name else None)
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What was fetched in this step, for layers that share it."""
        if self._fetched is None:
            raise RuntimeError("keys and values are asked for, and none were fetched in this step")
        return self._fetched

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask of N new tokens: (R, 1, N, T), boolean. Where the step has one row, "causal", None or
        (N, T).
        """
        if self.step.new_tokens != N:
            raise ValueError(f"a mask of {N} tokens is asked for; the step has {self.step.new_tokens}")
        window = window_size or self.step.window
        narrow = window is not None and window < self.step.longest
        if narrow or not self.step.is_single or (return_array and N > 1):
            return self.step.mask(window)
        return "causal" if N > 1 else None

    def maybe_trim_front(self) -> None:
        """Do nothing: Llama 4 asks for tokens before the chunk to be dropped, and they are not read."""

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
        """Attention of queries (R, H, S, D) to what was fetched last; None: mlx-lm's is faster.

        Args:
            key, value: as they were fetched.
            mask: "causal", None, or an array that is added to the scores (boolean: True keeps), (S, T) or
                more.
        """
        transform = self.layer.transform
        # A sink's share would change with the constant.
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
        """Attend as :meth:`attend_fetched` does, to keys and values as they are stored."""
        own = self.layer.format
        S = query.shape[2]
        if (backend := self.layer.backend) is not None and self.step.new_tokens == S:
            output = self._attend_fused(query, key.shape[2], mask, backend, score_scale=scale, sinks=sinks)
            if output is not None:
                self.attends = self.attends is not False
                return output
        factor = scale * math.sqrt(query.shape[3])  # kvant's attention multiplies the scores by 1/sqrt(D)
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
                **own.bit_operands,
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
        """The array that keys are in."""
        return self.layer.arrays[0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        """Leave it: a model puts it back, made to depend on others. They are computed with the logits
        anyway.
        """

    @property
    def values(self) -> mx.array:
        """An array that is computed when the last append is."""
        return self.layer.arrays[-1]

    @values.setter
    def values(self, array: mx.array) -> None:
        if self.layer.format.value_head_dim:
            raise AttributeError(
                "a model sets the values of its cache; kvant's takes them by update_and_fetch"
            )

    def _append(self, keys: mx.array, values: mx.array, rows: PagedRows) -> None:
        """Write new tokens, or note them where they wait."""
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
        """Return what was appended and what is seen before it, for a model that attends by itself."""
        step, arrays, own = self.step, self.layer.arrays, self.layer.format
        form: dict[str, Any] = own.bit_operands | {"dtype": dtype, "key_dim": own.head_dim}
        if step.is_single:
            copy = own.kv_bits > 0 and step.new_tokens == 1 and mx.default_device().type == mx.cpu
            fetched = read_rows(arrays, step.rows.runs[0], self._waiting.stored, **form, copy=copy)
        else:
            taken = [mx.take(array, step.padded_rows, axis=2) for array in arrays]
            R = len(step.lengths)
            # (2, K, R * T, last) -> (R, 2, K, T, last)
            stored = [x.reshape(*x.shape[:2], R, -1, x.shape[3]).transpose(2, 0, 1, 3, 4) for x in taken]
            fetched = float_tokens(stored, **form)
        if self._exact is None:
            return fetched
        return with_exact_rows(*fetched, self._exact, step.new_tokens)

    def _attend_fused(
        self, query: mx.array, tokens: int, mask: Mask, backend: Backend, **options: Any
    ) -> mx.array | None:
        """Attention by the kernel; None: it does not take the step, or not with this mask."""
        pages = self.step.seen_pages(mask)
        if pages is None:
            if self._exact is not None:  # the kernel takes no mask beside a tail
                return None
            if self.step.rows.pages is None or not self.step.is_single or isinstance(mask, str):
                return None
            pages = replace(self.step.rows.pages, window=None)
            if before := pages.rows - tokens:  # rows that are there and were not fetched
                if mask is None:
                    return None
                hidden = False if mask.dtype == mx.bool_ else -math.inf
                mask = mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(before, 0)], constant_values=hidden)
            options |= {"mask": mask, "is_causal": False}
        own = self.layer.format
        options |= own.operands
        if self._exact is not None:
            options["exact"] = self._exact
        return attend_pages(query, self.layer.arrays, pages, **options, backend=backend)
