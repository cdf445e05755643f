"""What a compiled decode step sees of a layer's cache."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvant.cache.quantized import QuantizedKVCache
from kvant.cache.window import WindowKVCache
from kvant.operators.bias_split import BiasSplit
from kvant.operators.compiled_attention import append_and_attend_static


@dataclass(frozen=True, slots=True)
class CompiledCacheView:
    """A layer's cache in a compiled step: one append, in operations that are the same for any offset.

    Nothing is checked. The lengths stay as they are. The arrays are replaced, not changed.

    Attributes:
        cache: appended to.
        offset: integer array (): where the first of the S new tokens goes. All are below the cache's max_seq_len; in a
            window's ring they are slack + 1 at most.
        num_tokens: tokens to read, any ``offset`` + S at least and max_seq_len at most. Those past the new
            ones are ignored. The fused kernel reads up to the new ones in any case. Of a window any row may be read.
    """

    cache: QuantizedKVCache
    offset: mx.array
    num_tokens: int

    @property
    def bias_split(self) -> BiasSplit | None:
        """The cache's."""
        return self.cache.bias_split

    def attend(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As :meth:`QuantizedKVCache.attend`, without a mask."""
        assert mask is None
        cache, tokens = self.cache, self.num_tokens
        ring: dict[str, Any] = {}
        if isinstance(cache, WindowKVCache):
            tokens = cache.num_rows
            S = query.shape[2]
            ring = {"row": cache.place(self.offset, S), "window": cache.window, "keep": cache.keep}
            ring["live"] = cache.live(self.offset, S)
        output, *cache.arrays[:] = append_and_attend_static(
            query,
            key,
            value,
            self.offset,
            cache.cache,
            cache.scale,
            tokens=tokens,
            quant_bit=cache.kv_bits,
            quant_group=cache.kv_group_size,
            bias_split=self.bias_split,
            sinks=sinks,
            backend=cache.backend_for(query),
            **ring,
        )
        return output
