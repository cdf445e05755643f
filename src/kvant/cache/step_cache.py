"""What steps that are compiled, dropped or verified need of a model's cache."""

import math
from abc import abstractmethod

import mlx.core as mx

from kvant.cache.compiled import CompiledCacheView
from kvant.cache.layer import KVCache
from kvant.cache.quantized import QuantizedKVCache
from kvant.cache.sequences import Sequences


class StepCache:
    """A part of :class:`kvant.cache.ModelCache`, with its layers and sequences."""

    _sequences: Sequences

    @property
    @abstractmethod
    def layers(self) -> tuple[KVCache, ...]:
        """All layers that hold something, in order."""

    @abstractmethod
    def end_step(self) -> None:
        """Drop a step that was begun and is not committed."""

    def resume_step(self, rest: mx.array) -> None:
        """After a commit of the first tokens of a step, begin the step of the others again: nothing is computed anew.

        Args:
            rest: their ids (B, S).

        Raises:
            RuntimeError: a step is begun already; what this one computed may be overwritten.
        """
        if self._sequences.step is not None:
            raise RuntimeError("a step was begun since; expected to resume one whose first tokens were just committed")
        self._sequences.step = rest

    def _wrote_rows(self, num_rows: int) -> None:
        """Note that a compiled step writes so many rows behind each sequence, where a window's ring is full."""
        sequences = self._sequences
        smallest = min((limit.rows for limit in sequences.limits if limit.rows), default=math.inf)
        for b, length in enumerate(sequences.lengths):
            if length + num_rows > smallest:
                sequences.wrote(b, length + num_rows)

    def hold(self) -> list[list[mx.array]]:
        """All layers' arrays before a step, for :meth:`put_back`; see :meth:`KVCache.hold`."""
        return [layer.hold() for layer in self.layers]

    def put_back(self, held: list[list[mx.array]]) -> None:
        """Drop a step that was begun, and not computed: no later one waits for it."""
        self.end_step()
        for layer, arrays in zip(self.layers, held, strict=True):
            layer.put_back(arrays)

    @property
    def compiled_state(self) -> list[list[mx.array]]:
        """The lists of arrays that a compiled step changes."""
        return [layer.arrays for layer in self.layers if isinstance(layer, QuantizedKVCache)]

    def compiled_views(self, offset: mx.array, num_tokens: int) -> list[CompiledCacheView]:
        """The layers of a step that is compiled; arguments as in :class:`CompiledCacheView`."""
        layers = [layer for layer in self.layers if isinstance(layer, QuantizedKVCache)]
        return [CompiledCacheView(layer, offset, num_tokens) for layer in layers]
