"""A model's cache saved to a file, loaded and forked."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from kvant.cache import snapshot
from kvant.cache.identity import Identity
from kvant.cache.layer import KVCache
from kvant.cache.sequences import Sequences
from kvant.errors import SnapshotError
from kvant.operators.rotary import Rotary
from kvant.threads import Turn, check_process


class SavedCache(ABC):
    """What :class:`kvant.cache.ModelCache` has for that."""

    _sequences: Sequences

    @property
    @abstractmethod
    def layers(self) -> tuple[KVCache, ...]:
        """All layers that hold something, in order."""

    @property
    @abstractmethod
    def turn(self) -> Turn:
        """Held by the thread that computes through the cache."""

    @property
    @abstractmethod
    def max_seq_len(self) -> int | None:
        """The reservation: tokens that a sequence can have; None: the cache grows."""

    @abstractmethod
    def reserve(self, num_tokens: int) -> None:
        """Raise an error unless every sequence has room for ``num_tokens`` more tokens."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every token; the memory stays reserved."""

    @property
    def identity(self) -> Identity | None:
        """Of the model whose tokens it holds; None: not known. It can be set."""
        return self._sequences.identity

    @identity.setter
    def identity(self, identity: Identity | None) -> None:
        self._sequences.identity = identity

    @property
    def rotary(self) -> Rotary | None:
        """How the model turns keys; None: not known. It can be set."""
        return self._sequences.rotary

    @rotary.setter
    def rotary(self, rotary: Rotary | None) -> None:
        self._sequences.rotary = rotary

    @property
    def unchecked(self) -> Path | None:
        """The snapshot it was made of without a model, which none has been compared with yet; else None."""
        return self._sequences.unchecked

    @property
    def divided(self) -> bool:
        """Whether other ranks hold a part of it. It cannot be saved, loaded or forked then. It can be set."""
        return self._sequences.divided

    @divided.setter
    def divided(self, divided: bool) -> None:
        self._sequences.divided = divided

    def _check_whole(self) -> None:
        if self.divided:
            raise SnapshotError("the cache is divided over several ranks: it cannot be saved, loaded or forked")

    def check_source(self, identity: Identity | None, reference: "SavedCache | None" = None) -> None:
        """Compare a cache that was made without a model with the first model that uses it.

        Args:
            identity: of the model.
            reference: an empty cache of the model in the same format; None: its layers have been compared.

        Raises:
            SnapshotError: it is another model. The message names the field, and both values.
        """
        own = None if reference is None else reference.layers
        snapshot.check_source(self.layers, identity, own)
        self._sequences.unchecked = None

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        """Save the committed tokens: one safetensors file, for its owner only, in place of what is at ``path``.

        docs/snapshots.md says what it holds. Only rows in use are stored.

        Args:
            path: its folder is there.
            metadata: what :meth:`load` is to return.

        Raises:
            SnapshotError: it cannot be written, or is divided over ranks; what was at ``path`` still is.
            RuntimeError: another thread uses the cache, or it was released.
            ValueError: metadata that is no text.
        """
        self._check_whole()
        with self.turn:
            self.reserve(0)
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
        self._check_whole()
        with self.turn:
            self.reset()
            self.reserve(0)
            try:
                return snapshot.restore(Path(path), self.layers)
            except BaseException:
                self.reset()
                raise

    def _forked(self) -> list[KVCache]:
        """Layers with the same tokens, of a cache of their own."""
        check_process()
        self._check_whole()
        sequences, made = self._sequences.fork(), []
        for number, layer in enumerate(self.layers):
            layer.settle_committed()
            made.append(layer.fork())
            made[-1].bind(sequences, number)
        return made
