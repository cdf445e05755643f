"""kvant's caches of one layer, as mlx-lm's models use a cache."""

import math
from dataclasses import replace
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import create_attention_mask

from kvant.bridge import hook
from kvant.bridge.window_masks import WindowMask, meaning_of, remember
from kvant.cache import QuantizedKVCache, WindowKVCache
from kvant.cache.layer_format import LayerFormat
from kvant.operators.attention import attend_tokens
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernels.launch import Backend
from kvant.operators.probe import KernelUse
from kvant.operators.stored_tokens import first_rows

Mask = mx.array | str | None


def scaled_query(query: mx.array, scale: float) -> mx.array:
    """A query for attention that multiplies the scores by 1/sqrt(D), so that they are multiplied by ``scale``."""
    factor = scale * math.sqrt(query.shape[3])
    return query if math.isclose(factor, 1, rel_tol=1e-6) else query * factor


def refuse_values(value_head_dim: int) -> None:
    """Raise an AttributeError where a model sets the values of its cache, and values are kept."""
    if value_head_dim:
        raise AttributeError("a model sets the values of its cache; kvant's takes them by update_and_fetch")


class BridgedKVCache(QuantizedKVCache):
    """Keys and values of one layer of mlx-lm's model.

    The model appends through :meth:`update_and_fetch`, which gives all tokens as lazy arrays: an array that nobody
    reads is not computed. The model's attention to them comes to :meth:`attend_fetched` (:mod:`kvant.bridge.hook`).

    Attributes:
        shared: whether other layers of the model ask for what this one fetched.
        absent: another process computes the layer. It has no kv heads here.
    """

    def __init__(self, *arguments: Any, shared: bool = False, **options: Any) -> None:
        """As the class of kvant's that it is; ``value_head_dim`` is 0 where only keys are kept."""
        super().__init__(*arguments, **options)
        self.shared = shared
        self.absent = not self.arrays[0].shape[3]
        self._appended = 0  # tokens of a step that is not committed
        self._fetched: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> int:
        """Tokens so far, with those that a step appended before it is committed."""
        return self.sequence.length + (self._appended if self.sequence.step is not None else 0)

    @property
    def format(self) -> LayerFormat:
        """How it stores tokens."""
        return replace(super().format, shared=self.shared)

    def fork(self) -> Self:
        made = super().fork()
        made.begin()
        return made

    def _as_used(self, use: KernelUse) -> KernelUse:
        return replace(super()._as_used(use), sinks=True)  # as gpt-oss has them; which models do is not known here

    def begin(self) -> None:
        """Forget what a step appended that was not committed."""
        self._appended = 0
        self._fetched = None

    def settle(self) -> None:
        """Do what waited for the step to be committed."""
        self.begin()
        super().settle()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, K, S, D) keys and (B, K, S, Dv) values.

        Returns:
            what new queries may see: keys (B, K, T, D) and values (B, K, T, Dv), dequantized lazily, in the keys'
            dtype. :meth:`make_mask` belongs to them.
        """
        in_step = self.sequence.shared
        if in_step and (self.sequence.step is None or self._appended):
            raise RuntimeError("a layer is appended to and no step was begun; expected cache.begin(inputs) before it")
        value_is_key = values is keys
        if not self.value_head_dim:
            values = values[..., :0]
        if values.shape != (*keys.shape[:3], self.value_head_dim):
            raise ValueError(
                f"values have shape {tuple(values.shape)} with keys {tuple(keys.shape)}; the cache is for values of "
                f"{self.value_head_dim}"
            )
        self._fetched = None  # or its buffers would be copied
        fetched_keys, fetched_values = self._read_in_order(self.append(keys, values), keys)
        fetched = fetched_keys, fetched_keys if value_is_key else fetched_values
        if in_step:
            self._appended = keys.shape[2]
        else:
            self.sequence.commit(keys.shape[2])
        if self.shared:
            self._fetched = fetched
        hook.remember(self, *fetched)
        return fetched

    def pass_by(self, num_tokens: int) -> None:
        """Note that another process appends so many tokens in this step: offset and limits are as if this one did."""
        self._appended = num_tokens

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What was fetched last, for layers that share it."""
        if self._fetched is None:
            raise RuntimeError("keys and values are asked for, and none were fetched in this step")
        return self._fetched

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
        """Attention to what was fetched last, where that is faster than mlx-lm's; None: it is not.

        Args:
            query: (B, H, S, D).
            key, value: as they were fetched.
            scale: the scores are multiplied by it.
            mask: "causal", None, or an array that is added to the scores (boolean: True keeps), (S, T) or more.
            sinks: (H,) learned sinks.
        """
        S = query.shape[2]
        causal = isinstance(mask, str)
        added = None if isinstance(mask, str) else mask
        backend = self.backend_for(query)
        seen = None if backend is None else self._seen_rows(S, key.shape[2], mask)
        if backend is not None and seen is not None:
            return self.attend_fused(query, scale=scale, sinks=sinks, backend=backend, **seen)
        on_cpu = mx.default_device().type == mx.cpu
        if on_cpu and (S == 1 or causal):  # fewer products for one token, no score matrix for many
            return attend_tokens(scaled_query(query, scale), key, value, is_causal=causal, mask=added, sinks=sinks)
        return None

    def attend_fused(
        self,
        query: mx.array,
        offset: mx.array | int,
        *,
        scale: float,
        sinks: mx.array | None,
        backend: Backend,
        **seen: Any,
    ) -> mx.array:
        """Attention by the fused kernel to its arrays, which hold the new tokens.

        Args:
            query: (B, H, S, D).
            offset: tokens before the new ones.
            scale, sinks: as in :meth:`attend_fetched`.
            seen: which rows the queries see, as :func:`kvant.operators.fused_attention.attend_fused` takes it.
        """
        return attend_fused(
            query,
            self.cache,
            self.scale,
            offset if isinstance(offset, mx.array) else mx.array(offset, mx.int32),
            quant_bit=self.kv_bits,
            quant_group=self.kv_group_size,
            value_dim=None if self.value_head_dim == self.head_dim else self.value_head_dim,
            score_scale=scale,
            sinks=sinks,
            backend=backend,
            **seen,
        )

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask of N new tokens: "causal", None or a boolean array."""
        mask: Mask = create_attention_mask(N, self.offset, return_array, window_size)
        if isinstance(mask, mx.array):
            remember(mask, self.window_mask(self.offset, N, window_size))
        return mask

    def window_mask(self, start: int, new_tokens: int, window: int | None = None) -> WindowMask:
        """What a mask of this layer's says, of a window that a model asks for or the layer's own."""
        return WindowMask(start, new_tokens, window)

    @property
    def keys(self) -> mx.array:
        """The array that keys are in.

        A model may put it back, made to depend on others that are to be computed. MLX then copies all of it at the next
        append. So a layer of a model's cache does not take it: there all arrays are computed with the logits.
        """
        return self.arrays[0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        if not self.sequence.shared:
            self.arrays[0] = array

    @property
    def values(self) -> mx.array:
        """An array that is computed when the last append is."""
        return self.arrays[-1]

    @values.setter
    def values(self, array: mx.array) -> None:
        refuse_values(self.value_head_dim)

    def size(self) -> int:
        """Tokens so far."""
        return self.offset

    def empty(self) -> bool:
        """Whether it has no token."""
        return not self.offset

    def is_trimmable(self) -> bool:
        """Whether the last token can be forgotten, by all layers."""
        return self.sequence.can_return(max(0, self.sequence.length - 1))

    def _read_in_order(self, stored: list[mx.array], keys: mx.array) -> tuple[mx.array, mx.array]:
        """What was appended to, dequantized in the keys' dtype, in the order of the model's masks."""
        if keys.shape[2] == 1 and self.kv_bits and stored[0].shape[3] < self.num_rows:
            stored = [first_rows(self.cache, stored[0].shape[3]), *stored[1:]]
        return self.read(stored, keys.dtype)

    def _seen_rows(self, new_tokens: int, rows: int, mask: Mask) -> dict[str, Any] | None:
        """Which of the fetched rows the new tokens see, for :meth:`attend_fused`; None: its arrays lack some of them.

        The last row is taken for the last token's. Where it is not, the mask alone decides.
        """
        offset = rows - new_tokens
        meaning = meaning_of(mask)
        if meaning is not None and meaning == WindowMask(offset, new_tokens, meaning.window):  # of no ring
            return {"offset": offset, "rows": rows, "window": meaning.window}
        causal = isinstance(mask, str)
        return {"offset": offset, "rows": rows, "is_causal": causal, "mask": None if causal else mask}


class BridgedWindowCache(BridgedKVCache, WindowKVCache):
    """A sliding window: in place of mlx-lm's rotating cache. Tokens are fetched in the order of the ring."""

    def pass_by(self, num_tokens: int) -> None:
        super().pass_by(num_tokens)
        if not self._waits(self.sequence.length, num_tokens):
            self._note_written(self.sequence.length + num_tokens)

    @property
    def buffers(self) -> list[mx.array]:
        """Its arrays, and the tokens that wait to be written."""
        return [*self.arrays, *(self._pending[1] if self._pending else [])]

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return sum(array.nbytes for array in self.arrays)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask of N new tokens over what :meth:`update_and_fetch` will give."""
        mask = self.mask(N, window_size)
        if mask is not None:
            remember(mask, self.window_mask(self.offset, N, window_size))
        elif N > 1:
            return create_causal_mask(N, self.offset) if return_array else "causal"
        return mask

    def window_mask(self, start: int, new_tokens: int, window: int | None = None) -> WindowMask:
        return WindowMask(start, new_tokens, window or self.window, self.keep, self.num_rows)

    def _seen_rows(self, new_tokens: int, rows: int, mask: Mask) -> dict[str, Any] | None:
        if self._pending:
            return None
        end = self.offset
        ring = self.window_mask(end - new_tokens, new_tokens)
        meaning = meaning_of(mask)
        all_before = isinstance(mask, str) or (mask is None and new_tokens == 1)
        if all_before and end <= min(self.keep + self.window, self.num_rows):
            meaning = ring  # the same
        if meaning is None or replace(meaning, window=self.window) != ring:
            return super()._seen_rows(new_tokens, rows, mask)
        return {"offset": ring.start, "rows": rows, "window": meaning.window, "keep": self.keep}


class BridgedChunkCache(BridgedWindowCache):
    """Llama 4's chunks, where a query sees its own chunk only. Tokens are fetched in order, from the chunk's first.

    It is a window as long as a chunk. The model makes the mask, from :attr:`start_position`.
    """

    @property
    def format(self) -> LayerFormat:
        """How it stores tokens."""
        return replace(super().format, kind="chunks")

    @property
    def start_position(self) -> int:
        """The first token that the next step's queries may see: of the chunk that its first one is in."""
        return self.sequence.length // self.window * self.window

    def _as_used(self, use: KernelUse) -> KernelUse:
        return replace(use, mask=True)

    def maybe_trim_front(self) -> None:
        """Llama 4 asks for tokens before the chunk to be dropped: there is nothing to do."""

    def _read_in_order(self, stored: list[mx.array], keys: mx.array) -> tuple[mx.array, mx.array]:
        end, S = self.sequence.length, keys.shape[2]
        held = min(end, self.num_rows)  # rows before the new ones, where those wait
        spans = [*self._spans(self.start_position, end), (held, held + S)]
        if not self._pending:
            spans = self._spans(self.start_position, end + S)
        parts = [[array[:, :, :, first:last] for first, last in spans] for array in stored]
        return self.read([part[0] if len(part) == 1 else mx.concatenate(part, axis=3) for part in parts], keys.dtype)

    def _spans(self, start: int, end: int) -> list[tuple[int, int]]:
        """The rows of positions start to end, in one piece or two."""
        row, count = start % self.num_rows, end - start
        rest = row + count - self.num_rows
        return [(row, row + count)] if rest <= 0 else [(row, self.num_rows), (0, rest)]

    def _seen_rows(self, new_tokens: int, rows: int, mask: Mask) -> dict[str, Any] | None:
        if self._pending or not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
            return None
        end = self.offset
        start, held = end - rows, min(end, self.num_rows)
        positions = self._positions(end, held)
        seen = mx.take(mask, mx.maximum(positions - start, 0), axis=-1) & (positions >= start)
        return {"offset": held - new_tokens, "rows": held, "is_causal": False, "mask": seen}
