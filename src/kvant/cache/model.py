"""The cache of a conversation: a pool of one sequence, as a sequence of its layers."""

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from kvant.cache import snapshot
from kvant.cache.disk import DiskCache
from kvant.cache.paged_layers import PoolLayer
from kvant.cache.pages import PAGE_SIZE
from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch, PoolLayerView
from kvant.cache.pool_disk import PoolDisk
from kvant.cache.pool_sequence import PoolSequence, check_num_tokens
from kvant.threads import check_process


class NotSaved:
    """What mlx-lm's ``save_prompt_cache`` finds in a cache of kvant's, and refuses by these words."""

    def __str__(self) -> str:
        return "kvant's cache is saved by kvant.save_prompt_cache"


@dataclass(eq=False)
class CachePart:
    """A part of a :class:`ModelCache`. All parts have the same tokens: a trim of each in turn counts once."""

    batch: "ModelCache"
    layer: Any = None  # which tells it from the others

    @property
    def offset(self) -> int:
        """Tokens so far; the position of the next one."""
        return self.batch.offset

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens of all parts, as mlx-lm does layer by layer."""
        return self.batch.trim_layer(id(self.layer), num_tokens)

    def is_trimmable(self) -> bool:
        """Whether the last token can be forgotten."""
        return self.batch.can_trim_to(max(0, self.offset - 1))


class KVCache(PoolLayerView, CachePart):
    """A layer of a :class:`ModelCache`."""

    batch: "ModelCache"
    layer: PoolLayer

    @property
    def nbytes(self) -> int:
        """Bytes it holds, with its bias tables."""
        return self.layer.nbytes

    @property
    def state(self) -> list[object]:
        """For mlx-lm, which evaluates it."""
        return [NotSaved(), *self.layer.arrays]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The same layer of a copy of the cache."""
        made = copy.copy(self)
        made.batch = copy.deepcopy(self.batch, memo)
        made.part, made.layer = made.batch.pool.places[self.batch.pool.places.index((self.part, self.layer))]
        return made


class StateView(CachePart):
    """The states of a cache, of linear and convolution layers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the states now."""
        return self.batch.nbytes - self.batch.keys_values

    @property
    def state(self) -> list[mx.array]:
        """For mlx-lm, which evaluates it."""
        return self.batch.states


class ModelCache(PoolBatch, Sequence[Any]):
    """One cache for all layers of a model. ``model.make_cache()`` makes it.

    It is a sequence of its layers, as mlx-lm expects of a ``prompt_cache``, and of one view of all states
    behind them. All have the same length. A scheduler takes it in the place of a pool, whose attributes it
    has.
    """

    pool: Pool
    # pages that are shared have no windows here
    attends_apart, has_windows, page_size = True, False, PAGE_SIZE
    max_sequences = num_free = 1

    def __init__(self, pool: Pool) -> None:
        """Open the sequence of a pool of one, which is made for it."""
        self.held: PoolSequence = pool.sequence(pool.max_seq_len)
        super().__init__(pool, [self.held])
        # tokens that are reserved, of each layer
        self.max_seq_len, self.formats = pool.max_seq_len, pool.formats
        self.backend, self.num_pages, self.pages_needed = pool.backend, pool.num_pages, pool.pages_needed
        # a step may be committed in part: of up to 17 tokens if there are windows
        self.takes_back = not pool.states
        self.ahead = 0  # of its tokens the last ones that are computed and not handed out yet
        self.prefill_step_size = sys.maxsize  # prompt tokens that a scheduler feeds at a time
        # In place of ids a model takes rows (T, hidden) from a position on.
        self.embeddings: tuple[int, mx.array] | None = None
        self._trimmed: tuple[int, int, set[int]] | None = None
        self._is_torn = False  # pages are being handed out

    @classmethod
    def of(cls, layers: Sequence[Any]) -> "ModelCache":
        """The cache itself, or that of a list of all its layers."""
        if isinstance(layers, ModelCache):
            return layers
        for layer in layers:
            if not isinstance(layer, KVCache):
                raise ValueError(
                    f"the cache holds a {type(layer).__name__}; expected what model.make_cache returns"
                )
        cache: ModelCache | None = layers[0].batch if layers else None
        if cache is None or [layer.layer for layer in layers] != list(cache.pool.layers):
            raise ValueError(f"a list of {len(layers)} layers; expected all layers of one cache, in order")
        return cache

    def __iter__(self) -> Iterator[Any]:
        # Made when they are asked for: a cache that held them would be freed by the garbage collector alone.
        layers = (KVCache(self, part, layer) for part, layer in self.pool.places)
        return chain(layers, [StateView(self)] if self.pool.states else [])

    def __len__(self) -> int:
        return len(self.pool.places) + bool(self.pool.states)

    @property
    def offset(self) -> int:
        """Tokens so far; the position of the next one."""
        return self.held.length

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, of the states now, and of the places that are kept."""
        return self.keys_values + sum(array.nbytes for array in [*self.states, *self.held.kept_arrays])

    @property
    def keys_values(self) -> int:
        """Of these, those of keys and values, which never change: all but the states of linear layers."""
        return sum(layer.nbytes for layer in self.pool.layers)

    def describe(self) -> list[str]:
        """What its layers are, a line for each kind, where mlx-lm's model says it."""
        return []

    @property
    def divided(self) -> bool:
        """Whether other ranks hold a part: it is not saved, loaded or forked then."""
        return self.pool.divided

    @property
    def states(self) -> list[mx.array]:
        """The arrays of all states now."""
        return [array for arrays in self.held.states for array in arrays if array is not None]

    @property
    def arrays(self) -> list[mx.array]:
        """Every array of its layers."""
        return [*(array for layer in self.pool.layers for array in layer.arrays), *self.states]

    @property
    def disk(self) -> Any:
        """Where its pages and states are written, and read from; None: nowhere."""
        return self.pool.disk

    def use_disk(self, disk: DiskCache) -> None:
        """Read beginnings of prompts from a disk cache, and write them there; see :meth:`Pool.use_disk`."""
        self.pool.use_disk(disk)

    def sequence(
        self, max_tokens: int, prompt: Sequence[int] = (), *, salt: bytes = b"", whole_pages: bool = True
    ) -> PoolSequence:
        """The one sequence, which goes back to what it has in common with ``prompt``, less the last token."""
        self.keep_common(prompt)
        if self.pool.disk is not None:
            self._read(self.pool.disk, prompt)
        return self.held

    def _read(self, disk: PoolDisk, prompt: Sequence[int]) -> None:
        """Take what is on disk of the beginning of a prompt, less its last token, if that is more than it
        holds.
        """
        held = self.held
        ids, chain, first = self.pool.on_disk(prompt, held.salt, whole_pages=False)
        if len(ids) <= held.length:
            return
        self.reset()
        lost = {layer: first[part] * PAGE_SIZE for part, layer in self.pool.places}
        with suppress(FileNotFoundError), held.filling(lost, ids):
            for part, table in zip(self.pool.parts, held.tables, strict=True):
                begin = table.start // PAGE_SIZE
                for number, page in enumerate(table.pages[: len(chain) - begin], begin):
                    rows = disk.page(part, chain[number], min(PAGE_SIZE, len(ids) - number * PAGE_SIZE))
                    if rows is None:
                        raise FileNotFoundError("a page that was there")
                    part.put_page(page, rows)
                mx.eval([layer.arrays for layer in part.layers])
            if self.pool.states:
                if (states := disk.states(chain[-1])) is None:
                    raise FileNotFoundError("states that were there")
                held.will_have(len(ids), states)

    def batch(self, sequences: Sequence[PoolSequence], rows: int | None = None) -> "ModelCache":
        return self

    def begin(self, inputs: mx.array) -> tuple[int, ...]:
        self._trimmed = None
        self._hand_out()
        lengths = super().begin(inputs)
        self._is_torn = False
        return lengths

    def commit(
        self, num_tokens: int | Sequence[int] | None = None, *, ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        self._hand_out()
        super().commit(num_tokens, ids=ids)
        self._is_torn = False

    def embeddings_of(self, new_tokens: int) -> mx.array | None:
        """The embeddings (1, S, hidden) of a step of S new tokens; None: those of its ids."""
        if self.embeddings is None:
            return None
        rows = self.embeddings[1][self.offset - self.embeddings[0] :][:new_tokens]
        return rows[None] if rows.size else None

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens, or all there are; see :meth:`PoolSequence.trim`."""
        with self.turn:
            self._hand_out()
            forgotten = self.held.trim(num_tokens)
            self.end_step()
            self._is_torn = False
            self.ahead = 0
            self._trimmed = None
            return forgotten

    def trim_layer(self, layer: int, num_tokens: int) -> int:
        """Trim, for one of the layers: those that follow with the same number have the same answer."""
        if self._trimmed is not None:
            number, forgotten, layers = self._trimmed
            if number == num_tokens and layer not in layers:
                layers.add(layer)
                return forgotten
        forgotten = self.trim(num_tokens)
        self._trimmed = num_tokens, forgotten, {layer}
        return forgotten

    def trim_to(self, num_tokens: int) -> None:
        """Forget what it has past its first ``num_tokens`` tokens."""
        check_num_tokens(num_tokens)
        self.trim(max(0, self.offset - num_tokens))

    def can_trim_to(self, num_tokens: int) -> bool:
        """Whether it can go back to its first ``num_tokens`` tokens, exactly."""
        return self.held.can_trim_to(num_tokens)

    @property
    def checkpoints(self) -> int:
        """Places that are kept to be gone back to, at most; of a cache that is divided over ranks none."""
        return 0 if self.divided else self.pool.checkpoints

    def go_back(self, num_tokens: int) -> int:
        """Forget what it has past ``num_tokens`` tokens; if some layer cannot go back so far, past the last
        place kept.

        Returns how many tokens are still held.
        """
        self.trim_to(self.held.nearest(num_tokens))
        return self.offset

    def keep_common(self, ids: Sequence[int]) -> int:
        """Go back to what it has in common with these tokens. Returns how many of them it holds now.

        At least one less than there are: one has to be fed for there to be logits. Fewer if a window or a
        state cannot go back so far.
        """
        held = self.held.ids
        length = min(len(held), len(ids) - 1)
        common = next((i for i in range(length) if held[i] != ids[i]), length)
        return self.go_back(common)

    def reset(self) -> None:
        """Forget every token; the memory stays reserved."""
        self.trim(self.offset)

    def release(self) -> None:
        """Give the memory back. The cache cannot be used after it."""
        with self.turn:
            self.end_step()
            self.held.close()
            self.pool.release()

    def fork(self) -> Self:
        """A cache of its own with the same tokens and the same reservation; what one appends the other never
        sees.

        Raises:
            RuntimeError: another thread uses the cache, or it was released.
            SnapshotError: it is divided over ranks.
        """
        with self.turn:
            self._check_whole()
            made: Self = self.pool.make_cache(self.max_seq_len)
            made.held.load(self.held)
            return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        """Save the committed tokens: one safetensors file, for its owner only, in place of what is at
        ``path``.

        docs/python.md says what it holds. Only rows in use are stored.

        Args:
            path: its folder is there. What is there is a file, or nothing.
            metadata: what :meth:`load` is to return.

        Raises:
            SnapshotError: it cannot be written, or is divided over ranks; what was at ``path`` still is.
            RuntimeError: another thread uses the cache, or it was released.
            ValueError: metadata that is no text.
        """
        with self.turn:
            self._check_whole()
            snapshot.save(Path(path), self.held, metadata=metadata or {})

    def load(self, path: str | Path) -> dict[str, str]:
        """Take the tokens of a snapshot, in place of those that the cache has.

        The reservation stays as it is. No second copy is held: a layer is read at a time.

        Returns:
            the metadata it was saved with.

        Raises:
            SnapshotError: a file that is no snapshot, is truncated or altered, or is of another model, format
                or version. The message names what differs. The cache is empty then. Or it is divided over
                ranks.
            RuntimeError: another thread uses the cache, or it was released.
        """
        with self.turn:
            self._check_whole()
            self.reset()
            return snapshot.restore(Path(path), self.held)

    def _check_whole(self) -> None:
        """Raise unless it has all rows, and no tokens that wait to be written."""
        check_process()
        self.pool.check_whole()
        self.held.check_open()
        self._hand_out()
        self.settle()
        self._is_torn = False

    def _hand_out(self) -> None:
        """Begin to hand out pages; after an interruption in the middle of it the free ones are found
        again.
        """
        if self._is_torn:
            for part, table in zip(self.pool.parts, self.held.tables, strict=True):
                part.pages.hold_only(table.pages)
        self._is_torn = True
