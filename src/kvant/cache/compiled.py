"""What a compiled decode step sees of a layer's cache."""

from dataclasses import dataclass

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
        offset: integer array, () for all sequences or (B,): where the new token goes, below the cache's max_seq_len.
        num_tokens: tokens to read, more than any ``offset`` and at most max_seq_len. Those past a sequence's new one
            are ignored. The fused kernel reads up to the new one in any case. Of a window all rows are read.
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
        """As :meth:`QuantizedKVCache.attend` for S = 1, without a mask or sinks."""
        assert mask is None
        assert sinks is None
        ring, tokens = None, self.num_tokens
        if isinstance(self.cache, WindowKVCache):
            ring, tokens = (self.cache.place(self.offset), self.cache.live(self.offset)), self.cache.num_rows
        output, *self.cache.arrays[:] = append_and_attend_static(
            query,
            key,
            value,
            self.offset,
            self.cache.cache,
            self.cache.scale,
            tokens=tokens,
            quant_bit=self.cache.quant_bit,
            quant_group=self.cache.quant_group,
            bias_split=self.bias_split,
            backend=self.cache.backend_for(query),
            ring=ring,
        )
        return output
