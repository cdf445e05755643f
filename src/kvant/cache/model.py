"""The key/value cache of a model: the arrays of all layers, and the sequence they hold."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import mlx.core as mx

from kvant.cache import snapshot
from kvant.cache.identity import Identity
from kvant.cache.layer import KVCache
from kvant.cache.quantized import QuantizedKVCache
from kvant.cache.sequence import CachedSequence, check_number
from kvant.errors import SnapshotError
from kvant.operators.rotary import Rotary
from kvant.threads import Turn, check_process


def _of_sequence(name: str, doc: str) -> Any:
    """A property of a cache that its sequence has."""
    return property(
        lambda cache: getattr(cache._sequence, name), lambda cache, to: setattr(cache._sequence, name, to), doc=doc
    )


class ModelCache(Sequence[KVCache]):
    """One cache for all layers of a model. ``model.make_cache()`` makes it.

    It is a sequence of its layers, as mlx-lm expects of a ``prompt_cache``. All layers have the same length.

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
        first = self._layers[0].sequence
        if not first.shared:
            first = CachedSequence(shared=True, limits={limit for layer in self._layers for limit in layer.limits})
            for number, layer in enumerate(self._layers):
                if layer.sequence.shared or layer.offset:
                    raise ValueError(f"layer {number} of the cache holds {layer.offset} tokens; expected an empty one")
            for number, layer in enumerate(self._layers):
                layer.bind(first, number)
        elif any(layer.sequence is not first for layer in self._layers):
            raise ValueError("the cache has layers of several caches; expected those of one")
        self._sequence = first
        self._smallest = min(self._layers, key=lambda layer: layer.max_seq_len or math.inf)

    @classmethod
    def of(cls, layers: Sequence[KVCache]) -> "ModelCache":
        """The cache itself, or one made of a list of layers; the same list again gives the same length."""
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
        return self._sequence.turn

    @property
    def lengths(self) -> tuple[int, ...]:
        """Its tokens, as a batch has them of each sequence."""
        return (self._sequence.length,)

    @property
    def offset(self) -> int:
        """Tokens so far; the position of the next one."""
        return self._sequence.length

    @property
    def ids(self) -> list[list[int]]:
        """Ids of its tokens, as a batch has them of each sequence."""
        return [self._sequence.ids]

    @property
    def step(self) -> mx.array | None:
        """Token ids (1, S) of a step that was begun and is not committed."""
        return self._sequence.step

    @property
    def max_seq_len(self) -> int | None:
        """The reservation: tokens it can have; None: the cache grows."""
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
        """The sizes of the groups that share a scale, each once; none if nothing is quantized."""
        found = {layer.kv_group_size for layer in self._layers if isinstance(layer, QuantizedKVCache) and layer.kv_bits}
        return sorted(found)

    # They can be set, too.
    identity: Identity | None = _of_sequence("identity", "Of the model whose tokens it holds; None: not known.")
    rotary: Rotary | None = _of_sequence("rotary", "How the model turns keys; None: not known.")
    divided: bool = _of_sequence("divided", "Whether other ranks hold a part: it is not saved, loaded or forked then.")
    made_for: object = _of_sequence("made_for", "The config of the model that made it, which needs no other check.")
    ahead: int = _of_sequence("ahead", "Of its tokens the last ones that are computed and not handed out yet.")

    def check_shape(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise a ValueError unless every layer can hold keys and values (batch, num_kv_heads, S, head_dim)."""
        for layer in self._layers:
            layer.check_shape(batch, num_kv_heads, head_dim)

    def reserve(self, num_tokens: int) -> None:
        """Make sure that there is room for ``num_tokens`` more tokens.

        Raises:
            ContextError: there is no such room.
            RuntimeError: the cache was released.
        """
        self._smallest.reserve(num_tokens)

    def begin(self, inputs: mx.array) -> tuple[int, ...]:
        """Begin a step of token ids (1, S); an earlier one that was not committed is gone.

        Returns:
            the position of the first new token, as a batch has it of each sequence.

        Raises:
            ContextError: no room; nothing was begun.
            ValueError: several sequences.
        """
        batch, num_tokens = inputs.shape
        if batch != 1:
            raise ValueError(
                f"inputs has {batch} sequences; a cache has one, and model.make_pool makes a pool for more"
            )
        self.reserve(num_tokens)
        self._sequence.step = inputs
        self._sequence.values.clear()
        return self.lengths

    def commit(
        self, num_tokens: int | Sequence[int] | None = None, *, ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Count the tokens of the step that was begun.

        Args:
            num_tokens: the first so many of its tokens, an int or a list of it; None: all. The others are gone: so a
                draft's rejected tokens are.
            ids: the step's token ids, (1, S); None: they are read from what the step was begun with.

        Raises:
            RuntimeError: no step was begun, or a trim, a reset or another thread came in between.
            ValueError: more tokens than the step has.
        """
        if (step := self._sequence.step) is None:
            raise RuntimeError("no step to commit: none was begun, or the cache was trimmed or reset since")
        if isinstance(num_tokens, Sequence):
            (num_tokens,) = num_tokens
        count = step.shape[1] if num_tokens is None else num_tokens
        check_number(count)
        if count > step.shape[1]:
            raise ValueError(f"num_tokens is {num_tokens}; the step has {step.shape[1]}")
        given: Sequence[Sequence[int]] = step.tolist() if ids is None else ids  # type: ignore[assignment]
        self._sequence.commit(count, given[0])
        for layer in self._layers:
            layer.settle()

    def end_step(self) -> None:
        """Drop a step that was begun and is not committed."""
        self._sequence.step = None

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens; see :meth:`CachedSequence.trim`."""
        return self._sequence.trim(num_tokens)

    def trim_to(self, num_tokens: int) -> None:
        """Forget what it has past its first ``num_tokens`` tokens."""
        check_number(num_tokens)
        self.trim(max(0, self.offset - num_tokens))

    def can_trim_to(self, num_tokens: int) -> bool:
        """Whether it can go back to its first ``num_tokens`` tokens, exactly."""
        return self._sequence.can_return(min(self.offset, num_tokens))

    def go_back(self, num_tokens: int) -> bool:
        """Forget what it has past ``num_tokens`` tokens; everything, if some layer cannot go back so far.

        Returns:
            whether the tokens up to there are still held.
        """
        if not self.can_trim_to(num_tokens):
            self.reset()
            return False
        self.trim_to(num_tokens)
        return True

    def keep_common(self, ids: Sequence[int]) -> int:
        """Go back to what it has in common with these tokens.

        Returns:
            how many of them it holds now, at least one less than there are: one has to be fed for there to be logits. 0
            if a window or a state cannot go back so far.
        """
        held = self.ids[0]
        length = min(len(held), len(ids) - 1)
        common = next((i for i in range(length) if held[i] != ids[i]), length)
        return common if self.go_back(common) else 0

    def reset(self) -> None:
        """Forget every token; the memory stays reserved."""
        self._sequence.reset()

    def release(self) -> None:
        """Give the memory back. The cache cannot be used after it."""
        with self.turn:
            for layer in self._layers:
                layer.release()

    def fork(self) -> "ModelCache":
        """A cache of its own with the same tokens and the same reservation; what one appends the other never sees.

        Raises:
            RuntimeError: another thread uses the cache, or it was released.
            SnapshotError: it grows, or is divided over ranks.
        """
        with self.turn:
            return ModelCache(self._forked())

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        """Save the committed tokens: one safetensors file, for its owner only, in place of what is at ``path``.

        docs/python.md says what it holds. Only rows in use are stored.

        Args:
            path: its folder is there. What is there is a file, or nothing.
            metadata: what :meth:`load` is to return.

        Raises:
            SnapshotError: it cannot be written, grows or is divided over ranks; what was at ``path`` still is.
            RuntimeError: another thread uses the cache, or it was released.
            ValueError: metadata that is no text.
        """
        with self.turn:
            self._check_whole()
            snapshot.save(Path(path), self.layers, metadata=metadata or {})

    def load(self, path: str | Path) -> dict[str, str]:
        """Take the tokens of a snapshot, in place of those that the cache has.

        The reservation stays as it is. No second copy is held: a layer is read at a time.

        Returns:
            the metadata it was saved with.

        Raises:
            SnapshotError: a file that is no snapshot, is truncated or altered, or is of another model, format or
                version. The message names what differs. The cache is empty then. Or it is divided over ranks.
            RuntimeError: another thread uses the cache, or it was released.
        """
        with self.turn:
            self._check_whole()
            self.reset()
            try:
                return snapshot.restore(Path(path), self.layers)
            except BaseException:
                self.reset()
                raise

    def _check_whole(self) -> None:
        """Raise unless it has all rows, in memory that is reserved."""
        check_process()
        if self.divided:
            raise SnapshotError("the cache is divided over several ranks: it cannot be saved, loaded or forked")
        if self.max_seq_len is None:
            raise SnapshotError("the cache grows: it cannot be saved, loaded or forked")
        self.reserve(0)

    def _forked(self) -> list[KVCache]:
        """Layers with the same tokens, of a cache of their own."""
        self._check_whole()
        sequence, made = self._sequence.fork(), []
        for number, layer in enumerate(self.layers):
            layer.settle_committed()
            made.append(layer.fork())
            made[-1].bind(sequence, number)
        return made
