"""A bridged cache in a compiled step: one append, in operations that are the same for any offset.

A step is a function of its tokens (S,), the offset and the cache's arrays, which are its results too:

    def step(tokens, offset):
        return model(tokens[None], cache=cache.compiled_views(offset, num_tokens)).squeeze(0)

    compiled = mx.compile(step, inputs=cache.compiled_state, outputs=cache.compiled_state)

Nothing is checked, and lengths stay as they are: begin and commit are the caller's, as in
:class:`kvant.engine.step.CompiledStep`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from kvant.bridge import hook
from kvant.bridge.layers import BridgedKVCache, Mask
from kvant.bridge.window_masks import WindowMask
from kvant.operators.compiled_attention import append_tokens

AGREE = 0.05  # of the largest logit. In half precision steps differ by a hundredth; a wrong one is far off


class TracedLayer:
    """A layer's cache as mlx-lm's model sees it in a compiled step of S tokens.

    Attributes:
        layer: appended to; its arrays are replaced.
        offset: integer array (): tokens so far.
        num_tokens: rows that are read. Those that a token does not see are masked.
    """

    def __init__(
        self, layer: BridgedKVCache, offset: mx.array, num_tokens: int, masks: dict[tuple[WindowMask, int], mx.array]
    ) -> None:
        """``num_tokens``: ``offset`` + S at least, max_seq_len at most. ``masks``: shared by all layers."""
        self.layer = layer
        self.offset = offset
        self.num_tokens = min(num_tokens, layer.num_rows) if layer.window is None else layer.num_rows
        self._position = offset
        self._masks = masks
        self._fetched: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As :meth:`BridgedKVCache.update_and_fetch`; rows that are not live are fetched too."""
        layer, S = self.layer, keys.shape[2]
        layer.arrays[:] = append_tokens(
            keys,
            values if layer.value_head_dim else values[..., :0],
            layer.place(self._position, S),
            layer.arrays,
            quant_bit=layer.kv_bits,
            quant_group=layer.kv_group_size,
            backend=layer.backend_for(keys),
        )
        held = [array[0, :, :, :, : self.num_tokens] for array in layer.arrays]
        fetched_keys, fetched_values = layer.read(held, keys.dtype)
        self._fetched = fetched_keys, fetched_keys if values is keys else fetched_values
        self.offset = self._position + S
        hook.remember(self, *self._fetched)
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What was fetched in this step."""
        assert self._fetched is not None
        return self._fetched

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Which rows the N tokens of the step see: (N, rows)."""
        kind = (self.layer.window_mask(0, N, window_size), self.num_tokens)
        if kind not in self._masks:
            self._masks[kind] = self.layer.live_rows(self._position, N, self.num_tokens, window_size)
        return self._masks[kind]

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
        layer, S = self.layer, query.shape[2]
        seen = self.make_mask(S) if isinstance(mask, str) or (mask is None and S == 1) else mask
        if seen is None:
            raise ValueError(f"{S} tokens attend without a mask; a compiled step's see nothing past their own")
        backend = layer.backend_for(query)
        if backend is None:
            return hook.mlx_lm_attention(query, key, value, cache=None, scale=scale, mask=seen, sinks=sinks)
        options: dict[str, Any] = {"scale": scale, "sinks": sinks, "backend": backend}
        meaning = self._meaning(seen, S)
        if meaning is None:  # any row may be seen: the mask alone decides
            return layer.attend_fused(query, self.num_tokens - S, is_causal=False, mask=seen, **options)
        return layer.attend_fused(query, self._position, window=meaning.window, keep=meaning.keep, **options)

    def _meaning(self, mask: mx.array, new_tokens: int) -> WindowMask | None:
        """What a mask of this step says of this layer's rows; None: it is another one."""
        own = self.layer.window_mask(0, new_tokens)
        for (meaning, rows), known in self._masks.items():
            if known is mask and rows == self.num_tokens and replace(meaning, window=own.window) == own:
                return meaning
        return None

    @property
    def keys(self) -> mx.array:
        return self.layer.keys

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.layer.keys = array

    @property
    def values(self) -> mx.array:
        return self.layer.values

    @values.setter
    def values(self, array: mx.array) -> None:
        self.layer.values = array


def can_trace(model: Callable[..., mx.array], cache: Any, new_tokens: int = 1) -> bool:
    """Whether a step of S new tokens of an mlx-lm model can be compiled. It takes the time of two steps.

    The model is traced, which fails for those that ask for the offset as a Python number. Then a step is computed both
    ways: some models take the position from the number of rows that they fetch, or add a boolean mask to the scores.

    Args:
        model: mlx-lm's.
        cache: its :class:`kvant.bridge.BridgedCache`, with at least one token and room for S. It is as before when this
            returns.
        new_tokens: S.
    """
    if not cache.offset:
        raise ValueError("the cache is empty; expected one that holds a token")
    inputs = mx.arange(new_tokens)[None]
    cache.begin(inputs)

    def step(tokens: mx.array, offset: mx.array) -> mx.array:
        return model(tokens, cache=cache.compiled_views(offset, cache.max_seq_len))

    try:
        expected = model(inputs, cache=cache).astype(mx.float32)
        mx.eval(expected, cache.state)
        cache.begin(inputs)
        held = [list(arrays) for arrays in cache.compiled_state]
        try:
            mx.compile(step, inputs=cache.compiled_state, outputs=cache.compiled_state)(inputs, mx.array(0))
        finally:  # what was traced is dropped, with the placeholders that it left in the cache
            for arrays, before in zip(cache.compiled_state, held, strict=True):
                arrays[:] = before
        del held, before, arrays  # the step below writes in place
        given = step(inputs, mx.array(cache.offset)).astype(mx.float32)
        mx.eval(given, cache.compiled_state)
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
        return False
    finally:
        cache.end_step()
    finite = mx.isfinite(expected)
    difference = mx.abs(mx.where(finite, given - expected, 0)).max()
    return bool((difference <= AGREE * mx.abs(mx.where(finite, expected, 0)).max()).item())
