"""A layer of several sequences in mlx-lm's batches, each in memory of its own.

R sequences, N new tokens each, some of them padding on the right, H query heads, K kv heads, D head_dim. Of what is
fetched, (R, K, T, D), a sequence's tokens are on the right, as in mlx-lm's ``BatchKVCache``.
"""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.bridge import hook
from kvant.bridge.prompt_layer import PromptCacheLayer

Fetched = tuple[mx.array, mx.array]


class BatchLayer:
    """In place of mlx-lm's ``BatchKVCache``: sequences join and leave without a copy of the others.

    Attributes:
        rows: the layer of each sequence.
    """

    def __init__(self, rows: Sequence[PromptCacheLayer]) -> None:
        self.rows = [*rows]
        self._left: list[int] | None = None  # tokens of each row that are still to come; None: there is no padding
        self._fetched: list[Fetched | None] = []  # the last, of each row
        self._joint: Fetched | None = None  # the same, where layers share it

    @classmethod
    def merge(cls, layers: Sequence[PromptCacheLayer]) -> "BatchLayer":
        """Of the layers of several sequences, which keep what they have."""
        return cls([layer.copied() for layer in layers])

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchLayer":
        made = BatchLayer(copy.deepcopy(self.rows, memo))
        made._left = self._left
        return made

    @property
    def offset(self) -> mx.array:
        """Tokens so far, (R,)."""
        return mx.array([row.size() for row in self.rows])

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return sum(row.nbytes for row in self.rows)

    @property
    def state(self) -> list[object]:
        """For mlx-lm, which evaluates it."""
        return [row.state for row in self.rows]

    @property
    def keys(self) -> mx.array:
        """The array that a row's keys are in; see :attr:`PromptCacheLayer.keys`."""
        return self.rows[0].keys

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.rows[0].keys = array

    @property
    def values(self) -> mx.array:
        """An array that is computed when the first sequence's last append is."""
        return self.rows[0].values

    @values.setter
    def values(self, array: mx.array) -> None:
        self.rows[0].values = array

    def size(self) -> int:
        """Tokens of the longest sequence."""
        return max(row.size() for row in self.rows)

    def empty(self) -> bool:
        """Whether there is no token."""
        return not self.size()

    def prepare(self, *, lengths: Sequence[int], right_padding: object = None, left_padding: object = None) -> None:
        """Take so many of the tokens that follow, of each row; the others are padding. Until :meth:`finalize`."""
        if left_padding is not None:
            raise ValueError("left_padding is given; expected right_padding: kvant's rows have no place for padding")
        self._left = [*lengths]

    def finalize(self) -> None:
        """Take all tokens again."""
        self._left = None

    def filter(self, indices: Any) -> None:
        """Keep the rows of these indices, in their order."""
        kept = [int(i) for i in indices]
        self.rows = [self.rows[i] for i in kept]
        self._left = None if self._left is None else [self._left[i] for i in kept]
        self._fetched, self._joint = [], None

    def extend(self, other: "BatchLayer") -> None:
        """Take another batch's rows behind its own."""
        self.rows += other.rows

    def extract(self, index: int) -> PromptCacheLayer:
        """One sequence's layer, which this batch does not change any more."""
        return self.rows[index].copied()

    def is_trimmable(self) -> bool:
        """Whether the last token of every row can be forgotten."""
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens of every row. Returns how many the longest lost."""
        return max(row.trim(num_tokens) for row in self.rows)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Which of the tokens that will be fetched each of N new ones sees: boolean (R, 1, N, T)."""
        counts, lengths = self._counts(N), [row.size() for row in self.rows]
        masks, place = self.rows[0].sequence.joint_masks, (tuple(lengths), tuple(counts), (N,))
        if place not in masks:
            masks.clear()
        # A row that is too short for a window has none, and sees no less through it.
        window = window_size or min((row.part.window for row in self.rows if row.part.window), default=None)
        if window not in masks.setdefault(place, {}):
            read = self._read(counts)
            T = max(read)
            length, count, seen = (mx.array(each)[:, None, None, None] for each in (lengths, counts, read))
            token, query = length + count - T + mx.arange(T), length + mx.arange(N)[:, None]
            shown = (token >= length + count - seen) & (token <= query)
            if window is not None:
                shown &= token > query - window
            masks[place][window] = shown | (query >= length + count)  # padding sees all: softmax of nothing is NaN
        return masks[place][window]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Fetched:
        """Append (R, K, N, D) keys and (R, K, N, Dv) values.

        Returns:
            all tokens that are read, as lazy arrays (R, K, T, D) and (R, K, T, Dv); zeros before them.
        """
        if keys.shape[0] != len(self.rows):
            raise ValueError(f"keys of {keys.shape[0]} sequences; the batch has {len(self.rows)}")
        self._fetched, self._joint = [], None  # or the rows' memory would be copied, to be read and changed
        counts = self._counts(keys.shape[2])
        T = max(self._read(counts))
        for b, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            key = keys[b : b + 1, :, :count]
            value = key if values is keys else values[b : b + 1, :, :count]
            self._fetched.append(row.update_and_fetch(key, value) if count else None)
        if self._left is not None:
            self._left = [left - count for left, count in zip(self._left, counts, strict=True)]
        joint = [_stacked([each and each[n] for each in self._fetched], T) for n in (0, 1)]
        fetched = joint[0], joint[0] if values is keys else joint[1]
        if self.rows[0].layer.format.shared:
            self._joint = fetched
        hook.remember(self, *fetched)
        return fetched

    def keys_and_values(self) -> Fetched:
        """What was fetched in this step, for layers that share it."""
        if self._joint is None:
            raise RuntimeError("keys and values are asked for, and none were fetched in this step")
        return self._joint

    def attend_fetched(
        self, query: mx.array, key: mx.array, value: mx.array, *, mask: Any, **options: Any
    ) -> mx.array | None:
        """Attention of queries (R, H, N, D), each row's to its own tokens; None: of no mask that is known."""
        N, outputs = query.shape[2], []
        made = self.rows[0].sequence.joint_masks.values()
        known = [window for masks in made for window, own in masks.items() if own is mask]
        if not known:
            if not isinstance(mask, mx.array) or mask.ndim < 4:
                return None
            mask = mx.broadcast_to(mask, (len(self.rows), *mask.shape[1:]))
        for b, (row, fetched) in enumerate(zip(self.rows, self._fetched, strict=True)):
            if fetched is None:
                outputs.append(mx.zeros((1, *query.shape[1:3], value.shape[3]), query.dtype))
                continue
            own, T = row.step.new_tokens, fetched[0].shape[2]
            shown = row.mask_of_step(known[0]) if known else mask[b : b + 1, :, :own, mask.shape[3] - T :]
            output = hook.attention(query[b : b + 1, :, :own], *fetched, None, mask=shown, **options)
            outputs.append(mx.pad(output, [(0, 0), (0, 0), (0, N - own), (0, 0)]) if own < N else output)
        return mx.concatenate(outputs)

    def _counts(self, N: int) -> list[int]:
        """How many of N new tokens of each row are no padding."""
        return [N] * len(self.rows) if self._left is None else [min(N, max(0, left)) for left in self._left]

    def _read(self, counts: Sequence[int]) -> list[int]:
        """How many tokens are fetched of each row."""
        return [row.tokens_read(count) if count else 0 for row, count in zip(self.rows, counts, strict=True)]


class MergedLayer(PromptCacheLayer):
    """A layer that mlx-lm's batches take: not of chunks, which a batch has no mask of."""

    merge = BatchLayer.merge


def _stacked(each: Sequence[mx.array | None], T: int) -> mx.array:
    """One array (R, K, T, D) of arrays (1, K, up to T, D), with zeros before them; None is zeros."""
    known = next(array for array in each if array is not None)
    _, K, _, D = known.shape
    empty = mx.zeros((1, K, 0, D), known.dtype)
    full = [empty if array is None else array for array in each]
    return mx.concatenate([mx.pad(x, [(0, 0), (0, 0), (T - x.shape[2], 0), (0, 0)]) for x in full])
