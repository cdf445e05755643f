"""A rank's layers of a model that mlx-lm's class computes. B batch, S new tokens, N ranks.

mlx-lm's module stays whole, and its own loop over its layers runs on every rank with the same ids. A layer of
another rank gives back the hidden states that it is given. A rank's first layer receives them from the rank
before, its last one sends them to the next, and rank N - 1 back to rank 0, where the loop goes on to the
logits:

    rank 0: embedding, own layers, send -> 1     receive <- N - 1, norm, head
    rank 1:       receive <- 0, own layers, send -> 2
    ...

Nothing depends on what an absent layer, or a follower's embedding and head, would compute. MLX never
evaluates them, so their weights are not read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Never

import mlx.core as mx
from mlx.nn.layers.base import Module

from kvant.bridge.config import BridgedConfig
from kvant.bridge.folder import Progress, check_bridged, evaluate, main_dtype, refuse_adapter
from kvant.bridge.layers import BridgedLayer
from kvant.bridge.model import BridgedModel, bytes_read, parameters
from kvant.bridge.pool import BridgedBatch
from kvant.cache.pool_batch import PoolBatch
from kvant.errors import CheckpointError, ModelError
from kvant.ranks.group import Ranks
from kvant.ranks.layer_list import LayerList, Own, list_layers, redirect
from kvant.sizes import format_bytes, physical_memory
from kvant.threads import check_process


def load_bridged_stage(
    folder: Path, ranks: Ranks, layers: range, progress: Progress | None = None, adapter: Path | None = None
) -> "BridgedStageModel":
    """Load a rank's layers of a bridged model; rank 0 has the embedding, the final norm and the head too.

    ``layers``: their numbers, which follow those of the rank before. ``progress`` counts them. An ``adapter``
    is refused.
    """
    check_process()
    refuse_adapter(adapter)
    module, config = check_bridged(folder, in_float32=mx.default_device().type == mx.cpu, whole=False)
    try:
        found = list_layers(module, config.model_type)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    _check_range(folder, ranks, layers, len(found.paths))
    model = BridgedStageModel(module, config, main_dtype(module), ranks, layers, found)
    if model.nbytes > physical_memory():
        raise CheckpointError(
            f"{folder}: layers {layers.start} to {layers.stop - 1} have {format_bytes(model.nbytes)}; "
            f"this machine has {format_bytes(physical_memory())}"
        )
    evaluate(module, folder, progress, model.weight_names)
    return model


class BridgedStageModel(BridgedModel):
    """The part of a bridged model that one rank computes.

    Every rank calls its methods with the same ids, and with caches that hold the same tokens, and evaluates
    what it is returned before the next call. Rank 0 is returned logits; the others what they sent, which
    nobody reads.
    """

    divided = True  # other ranks hold a part of its caches

    def __init__(
        self,
        module: Module,
        config: BridgedConfig,
        dtype: mx.Dtype,
        ranks: Ranks,
        layers: range,
        found: LayerList,
    ) -> None:
        """``module``: its weights may be lazy. ``layers``: this rank's numbers. ``found``: all of its
        layers.
        """
        super().__init__(module, config, dtype)
        self.ranks, self.layers, self._found = ranks, layers, found
        leads = ranks.rank == 0
        own = {name for n in layers for name in _below(module, found.paths[n])}
        others = {
            name for n, path in enumerate(found.paths) if n not in layers for name in _below(module, path)
        }
        # no other weight is read
        self.weight_names = frozenset(parameters(module).keys() - others if leads else own)
        caches = {cache for n in layers for cache in found.caches[n]}
        elsewhere = {cache for n, each in enumerate(found.caches) if n not in layers for cache in each}
        self.absent_caches = frozenset(elsewhere if leads else set(range(len(self.entries))) - caches)
        self._cache: BridgedBatch | None = None
        self._computes = self._returns = False
        self._sent: list[mx.array] = []
        modules = dict(module.named_modules())
        for number, path in enumerate(found.paths):
            redirect(modules[path], partial(self._call_layer, number))

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        # The last rank sends nothing back.
        begun = self._begun(inputs, cache)
        with self._step(begun, returns=False):
            self.module(inputs, cache=begun.entries)
            return [*begun.state, *self._sent]

    def make_pool(self, *arguments: Any, **options: Any) -> Never:
        raise ModelError(
            f"{self.config.model_type} on several machines takes one sequence at a time: mlx-lm's class "
            f"computes it"
        )

    @property
    def nbytes_read(self) -> int:
        return bytes_read(self.module, self.config.experts_used, self.weight_names)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for name, array in parameters(self.module).items() if name in self.weight_names]

    def _logits(self, inputs: mx.array, cache: BridgedBatch | None) -> mx.array:
        """Compute the logits on rank 0; elsewhere the hidden states that are sent, (B, S, hidden)."""
        with self._step(cache, returns=True):
            result: mx.array = (
                self.module(inputs) if cache is None else self.module(inputs, cache=cache.entries)
            )
            if self.ranks.rank:
                (result,) = self._sent
        if cache is not None:
            (result,) = mx.depends([result], cache.state)
        return result

    @contextmanager
    def _step(self, cache: BridgedBatch | None, *, returns: bool) -> Iterator[None]:
        """Mark the calls of layers in it as a step's; if it ``returns``, hidden states come back to rank
        0.
        """
        self._computes, self._returns, self._cache, self._sent = True, returns, cache, []
        try:
            yield
        finally:
            self._computes, self._cache, self._sent = False, None, []

    def _call_layer(self, number: int, own: Own, hidden: mx.array, others: Sequence[Any]) -> mx.array:
        """A layer's call by the module. Outside of a step it is a probe's, which nobody evaluates."""
        if not self._computes:
            traced: mx.array = own(hidden)
            return traced
        rank, size = self.ranks.rank, self.ranks.size
        if number in self.layers:
            if rank and number == self.layers.start:
                hidden = self.ranks.receive(hidden.shape, hidden.dtype, rank - 1)
            hidden = own(hidden)
            if number == self.layers.stop - 1 and size > 1:
                hidden = self._send(hidden)
        elif self._cache is not None:
            for cache in self._found.caches[number]:  # they count as they do there
                entry = self._cache.entries[cache]
                for part in getattr(entry, "caches", [entry]):
                    if isinstance(part, BridgedLayer):
                        part.skip(hidden.shape[1])
        if number == len(self._found.paths) - 1 and rank == 0 and size > 1 and self._returns:
            hidden = self.ranks.receive(hidden.shape, hidden.dtype, size - 1)
            mx.eval(hidden)  # a step that is given up from here on leaves no message behind for the next one
        return hidden

    def _send(self, hidden: mx.array) -> mx.array:
        rank, size = self.ranks.rank, self.ranks.size
        if rank == size - 1 and not self._returns:
            return hidden
        sent = self.ranks.send(hidden, (rank + 1) % size)
        self._sent.append(sent)
        if rank == 0:  # MLX may begin with the receiving, which no array leads to, and wait for ever
            mx.eval(sent)
        return sent


def _check_range(folder: Path, ranks: Ranks, layers: range, total: int) -> None:
    """Refuse layers that are not there, none at all, or a first or last rank without the first or last
    layer.
    """
    first, last = ranks.rank == 0, ranks.rank == ranks.size - 1
    starts = layers.start == 0 if first else layers.start > 0
    ends = layers.stop == total if last else layers.stop < total
    if layers.step != 1 or not layers or not starts or not ends:
        raise ModelError(
            f"{folder}: rank {ranks.rank} of {ranks.size} is to have the layers from {layers.start} up to "
            f"{layers.stop}, of {total} in all; expected one or more, rank 0's from 0 and the last rank's up "
            f"to {total}"
        )


def _below(module: Module, path: str) -> list[str]:
    """The names of the weights in a part of a module."""
    return [name for name in parameters(module) if name.startswith(f"{path}.")]
