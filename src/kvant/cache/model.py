"""The key/value cache of a model: the arrays of all layers, and the sequences they hold."""

import math
from collections.abc import Sequence
from typing import overload

import mlx.core as mx

from kvant.cache.layer import KVCache
from kvant.cache.quantized import QuantizedKVCache
from kvant.cache.saved_cache import SavedCache
from kvant.cache.sequences import Sequences
from kvant.cache.step_cache import StepCache
from kvant.threads import Turn


class ModelCache(SavedCache, StepCache, Sequence[KVCache]):
    """One cache for all layers of a model. ``model.make_cache()`` makes it.

    It is a sequence of its layers, as mlx-lm expects of a ``prompt_cache``. All layers have the same lengths.

    A step has three parts: :meth:`begin`, the computation, in which every layer attends through ``cache[i].attend``,
    and :meth:`commit`. Only a committed step counts.
    """

    def __init__(self, layers: Sequence[KVCache]) -> None:
        """Make one cache of layers, which must be empty or belong together already.

        Raises:
            ValueError: an object that is no layer's cache, a layer given twice, layers of several caches, or layers
                that hold tokens of their own.
        """
        self._layers = tuple(layers)
        for layer in self._layers:
            if not isinstance(layer, KVCache):
                raise ValueError(f"the cache holds a {type(layer).__name__}; expected what model.make_cache returns")
        if len({id(layer) for layer in self._layers}) != len(self._layers) or not self._layers:
            raise ValueError(f"the cache has {len(self._layers)} layers; expected at least one, none twice")
        first = self._layers[0].sequences
        if not first.shared:
            batch = None if self._layers[0].max_seq_len is None else len(first.lengths)
            limits = {limit for layer in self._layers for limit in layer.limits}
            first = Sequences(batch, shared=True, limits=limits)
            for number, layer in enumerate(self._layers):
                if layer.sequences.shared or layer.offset:
                    raise ValueError(f"layer {number} of the cache holds {layer.offset} tokens; expected an empty one")
            for number, layer in enumerate(self._layers):
                layer.bind(first, number)
        elif any(layer.sequences is not first for layer in self._layers):
            raise ValueError("the cache has layers of several caches; expected those of one")
        self._sequences = first
        self._smallest = min(self._layers, key=lambda layer: layer.max_seq_len or math.inf)

    @classmethod
    def of(cls, layers: Sequence[KVCache]) -> "ModelCache":
        """The cache itself, or one made of a list of layers; the same list again gives the same lengths."""
        return layers if isinstance(layers, ModelCache) else cls(layers)

    @overload
    def __getitem__(self, index: int) -> KVCache: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KVCache]: ...
    def __getitem__(self, index: int | slice) -> KVCache | Sequence[KVCache]:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def turn(self) -> Turn:
        """Held by the thread that computes through the cache."""
        return self._sequences.turn

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence; the position of its next one."""
        return self._sequences.lengths

    @property
    def offset(self) -> int:
        """Tokens of the longest sequence."""
        return self._sequences.offset

    @property
    def ids(self) -> list[list[int]]:
        """Ids of the tokens of each sequence."""
        return self._sequences.ids

    @property
    def step(self) -> mx.array | None:
        """Token ids (B, S) of a step that was begun and is not committed."""
        return self._sequences.step

    @property
    def max_seq_len(self) -> int | None:
        """The reservation: tokens that a sequence can have; None: the cache grows."""
        return self._smallest.max_seq_len

    @property
    def layers(self) -> tuple[KVCache, ...]:
        """All layers that hold something, in order."""
        return self._layers

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def groups(self) -> list[int]:
        """The sizes of the groups that share a scale, each once; none where nothing is quantized."""
        found = {layer.quant_group for layer in self._layers if isinstance(layer, QuantizedKVCache) and layer.quant_bit}
        return sorted(found)

    def check_shape(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise a ValueError unless every layer can hold keys and values (batch, num_kv_heads, S, head_dim)."""
        for layer in self._layers:
            layer.check_shape(batch, num_kv_heads, head_dim)

    def reserve(self, num_tokens: int) -> None:
        """Make sure that every sequence has room for ``num_tokens`` more tokens.

        Raises:
            ContextError: there is no such room.
            RuntimeError: the cache was released.
        """
        self._smallest.reserve(num_tokens)

    def begin(self, inputs: mx.array, num_rows: int | None = None) -> tuple[int, ...]:
        """Begin a step of token ids (B, S); an earlier one that was not committed is gone.

        ``num_rows``: rows a sequence that a compiled step writes, S and its padding; its layers do not note them.

        Returns:
            the position of each sequence's first new token.

        Raises:
            ContextError: no room; nothing was begun.
            ValueError: another number of sequences.
        """
        batch, num_tokens = inputs.shape
        self._sequences.take_batch(batch)
        if len(self.lengths) != batch:
            raise ValueError(f"the cache is for a batch of {len(self.lengths)}; given {batch}")
        self.reserve(num_rows or num_tokens)
        if num_rows:
            self._wrote_rows(num_rows)
        self._sequences.step = inputs
        self._sequences.values.clear()
        return self.lengths

    def commit(
        self, num_tokens: int | Sequence[int] | None = None, *, ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Count the tokens of the step that was begun.

        Args:
            num_tokens: the first so many of its tokens, an int or one for each sequence; None: all. The others are
                gone: so a draft's rejected tokens are.
            ids: the step's token ids, (B, S); None: they are read from what the step was begun with.

        Raises:
            RuntimeError: no step was begun, or a trim, a reset or another thread came in between.
            ValueError: more tokens than the step has.
        """
        if (step := self._sequences.step) is None:
            raise RuntimeError("no step to commit: none was begun, or the cache was trimmed or reset since")
        count = step.shape[1] if num_tokens is None else num_tokens
        if (max(count) if isinstance(count, Sequence) else count) > step.shape[1]:
            raise ValueError(f"num_tokens is {num_tokens}; the step has {step.shape[1]}")
        given: Sequence[Sequence[int]] = step.tolist() if ids is None else ids  # type: ignore[assignment]
        self._sequences.commit(count, given)
        for layer in self._layers:
            layer.settle()

    def trim(self, num_tokens: int | Sequence[int]) -> int:
        """Forget the last tokens of every sequence; see :meth:`Sequences.trim`."""
        return self._sequences.trim(num_tokens)

    def trim_to(self, num_tokens: int | Sequence[int]) -> None:
        """Forget what sequences have past their first ``num_tokens`` tokens, an int for all or one each."""
        each = num_tokens if isinstance(num_tokens, Sequence) else [num_tokens] * len(self.lengths)
        if any(type(kept) is not int or kept < 0 for kept in each):
            raise ValueError(f"num_tokens is {num_tokens}; expected an int, 0 or more")
        self.trim([max(0, length - kept) for length, kept in zip(self.lengths, each, strict=True)])

    def can_trim_to(self, num_tokens: int) -> bool:
        """Whether every sequence can go back to its first ``num_tokens`` tokens, exactly."""
        return all(self._sequences.can_return(b, min(length, num_tokens)) for b, length in enumerate(self.lengths))

    def fork(self) -> "ModelCache":
        """A cache of its own with the same tokens and the same reservation; what one appends the other never sees.

        Raises:
            RuntimeError: another thread uses the cache, or it was released.
        """
        with self.turn:
            self.reserve(0)
            return ModelCache(self._forked())

    def end_step(self) -> None:
        """Drop a step that was begun and is not committed."""
        self._sequences.step = None

    def reset(self) -> None:
        """Forget every token; the memory stays reserved."""
        self._sequences.reset()

    def release(self) -> None:
        """Give the memory back. The cache cannot be used after it."""
        with self.turn:
            for layer in self._layers:
                layer.release()
